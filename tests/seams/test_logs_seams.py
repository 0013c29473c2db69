"""The seams of logging name what upstream has; a failure here says what Keras has renamed."""

import inspect

import keras
from keras.src.callbacks.callback_list import CallbackList
from keras.src.utils import python_utils

from keras_mirror.seams import callbacks as seams
from keras_mirror.seams import logs3, running


class Notes(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs)


class Raw(Notes):
    keras_mirror_takes_raw_logs = True


def test_keras_marks_the_hooks_that_nobody_has_written():
    assert seams.is_default(keras.callbacks.Callback().on_train_batch_end), "Keras no longer marks hooks with _is_default"
    assert not seams.is_default(Notes().on_train_batch_end)


def test_keras_still_converts_every_batchs_logs():
    source = inspect.getsource(CallbackList._on_train_batch_end)
    assert "pythonify_logs" in source, "Keras converts logs elsewhere now: is logs3.make_lean still needed?"
    assert callable(python_utils.pythonify_logs)


def test_a_lean_list_calls_and_converts_only_where_it_is_read():
    notes, raw, bare = Notes(), Raw(), keras.callbacks.Callback()
    made = CallbackList([notes, raw, bare], model=None)
    logs3.make_lean(made)
    value = keras.ops.convert_to_tensor(0.5)
    made.on_train_batch_end(0, {"loss": value})
    assert notes.seen == [{"loss": 0.5}]
    assert raw.seen[0]["loss"] is value
    late = Notes()
    made.callbacks.append(late)
    made.on_train_batch_end(1, {"loss": value})
    made.on_train_batch_begin(2)
    assert late.seen == [{"loss": 0.5}]
    assert len(notes.seen) == 2


def test_only_a_bar_that_keras_added_is_taken_away():
    for verbose, mine, left in (("auto", False, 0), (1, False, 1), ("auto", True, 1)):
        given = [keras.callbacks.ProgbarLogger()] if mine else []
        made = CallbackList(given, add_history=True, add_progbar=True, verbose=verbose, epochs=1, steps=1)
        running.silence(running.RunningFit(made, verbose=verbose))
        assert sum(isinstance(each, keras.callbacks.ProgbarLogger) for each in made.callbacks) == left
