"""What checkpoints and resuming use of Keras and TensorFlow that isn't public is there, and does what they count on."""

import inspect
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.callbacks.callback_list import CallbackList
from keras.src.optimizers import base_optimizer
from keras.src.saving import saving_lib

from keras_mirror.checkpoint import formats
from keras_mirror.seams import checkpoint3, position3, running

X, Y = tf.ones((10, 3)), tf.ones((10, 1))
CALLED = [
    (saving_lib, "_serialize_model_as_json", (None,), {}),
    (saving_lib, "_save_state", (None,), {"weights_store": 1, "assets_store": 1, "inner_path": "", "visited_saveables": 1}),
    (saving_lib.H5IOStore, "make", (None, "path"), {"metadata": None}),
    (saving_lib.DiskIOStore, "make", (None, "path"), {}),
    (base_optimizer.BaseOptimizer, "save_own_variables", (None, None), {}),
    (global_state, "get_global_attribute", ("name",), {}),
    (keras.Model, "_get_metrics_result_or_logs", (None, None), {}),
    (keras.callbacks.EarlyStopping, "_set_monitor_op", (None,), {}),
    (tf_trainer.TFEpochIterator, "_get_iterator", (None,), {}),
    (tf_trainer.TFEpochIterator, "_enumerate_iterator", (None,), {}),
    (tf.data.Dataset, "_inputs", (None,), {}),
    (tf.data.Dataset, "_functions", (None,), {}),
]


@pytest.mark.parametrize("row", CALLED, ids=lambda row: f"{row[0].__name__}.{row[1]}")
def test_what_is_called_takes_the_arguments_of_the_call(row):
    owner, name, args, kwargs = row
    function = getattr(owner, name, None)
    assert function is not None, f"{owner.__name__}.{name} is gone from Keras {keras.__version__}, TensorFlow {tf.__version__}"
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise AssertionError(f"{owner.__name__}.{name} can't be called as the seam does: {error}") from None


def text_model():
    words = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    inputs = keras.Input((2,), dtype="string")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Embedding(4, 3)(words(inputs))))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def dense_model():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(400), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2, use_ema=True)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0), "mse")
    model.fit(X, Y, verbose=0)
    return model


def bfloat16_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(700, dtype="bfloat16"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def tree_of(path):
    """The HDF5 groups, attributes, types and values in a .keras file."""
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file, h5py.File(file) as weights:
        found = {}

        def note(name, item):
            value = item[()].tobytes() if isinstance(item, h5py.Dataset) else None
            kind = (str(item.dtype), item.shape) if isinstance(item, h5py.Dataset) else None
            found[name] = (dict(item.attrs), kind, value)

        weights.visititems(note)
        return found


@pytest.mark.parametrize("make", [text_model, dense_model, bfloat16_model])
def test_what_is_recorded_is_what_keras_writes(make, tmp_path):
    model = make()
    record = checkpoint3.record_model(model, lambda value: np.array(keras.ops.convert_to_numpy(value)))
    with open(tmp_path / "ours.keras", "wb", buffering=0) as file:
        formats.write_keras(file, record)
    model.save(tmp_path / "theirs.keras")
    assert tree_of(tmp_path / "ours.keras") == tree_of(tmp_path / "theirs.keras")
    with zipfile.ZipFile(tmp_path / "ours.keras") as ours, zipfile.ZipFile(tmp_path / "theirs.keras") as theirs:
        assert set(ours.namelist()) == set(theirs.namelist())
        assert ours.read("config.json") == theirs.read("config.json")
        assert ours.testzip() is None
    loaded = keras.models.load_model(tmp_path / "ours.keras")
    for mine, wanted in zip(loaded.variables, model.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(wanted))
    for mine, wanted in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(wanted))


class Looks(keras.callbacks.Callback):
    """Notes what the seam finds from inside fit."""

    def __init__(self):
        super().__init__()
        self.early = self.fit = None

    def set_params(self, params):
        super().set_params(params)
        self.early = self.early or running.running_fit()

    def on_train_begin(self, logs=None):
        self.fit = running.running_fit()
        assert running.is_in_fit(self.fit.callbacks)


@pytest.mark.parametrize("validation", [None, (X, Y)])
def test_the_running_fit_is_found_in_the_frames(validation):
    looks, model = Looks(), dense_model()
    model.fit(X, Y, verbose=0, callbacks=[looks], validation_data=validation)
    for found in (looks.early, looks.fit):
        assert isinstance(found.callbacks, CallbackList), "Keras's fit no longer keeps its callbacks in a CallbackList"
        assert isinstance(found.epoch_iterator, tf_trainer.TFEpochIterator), "fit's epoch_iterator has another name"
        assert found.has_validation == (validation is not None)
    assert looks.early.callbacks is looks.fit.callbacks
    assert not running.is_in_fit(looks.fit.callbacks)
    assert running.history_of(looks.fit.callbacks) is model.history


def test_a_callback_that_is_appended_in_on_train_begin_gets_every_hook_after_the_others():
    called = []

    class Added(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            called.append("added")

        def on_epoch_end(self, epoch, logs=None):
            called.append(("epoch", list(self.model.history.epoch)))

    class Adds(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            added = Added()
            added.set_model(self.model)
            running.running_fit().callbacks.callbacks.append(added)

    class After(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            called.append("after")

    dense_model().fit(X, Y, verbose=0, callbacks=[Adds(), After()])
    assert called == ["after", "added", ("epoch", [0])], "CallbackList no longer goes through its own list, in order"


def test_fit_starts_at_the_epoch_that_it_is_told():
    model, epochs = dense_model(), []
    checkpoint3.start_at_epoch(model, 3)
    model.fit(
        X, Y, epochs=5, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, logs: epochs.append(e))]
    )
    assert epochs == [3, 4], "fit no longer reads _initial_epoch"


class Logs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.logs = logs


def test_an_epoch_without_a_step_has_the_logs_that_it_is_given():
    class Passes(Logs):
        def on_train_begin(self, logs=None):
            position3.pass_epoch(running.running_fit().epoch_iterator, 0)
            checkpoint3.use_logs_where_no_step_ran(self.model, {"loss": 5.0, "other": 7.0})

    passes, model = Passes(), dense_model()
    model.fit(X, Y, verbose=0, callbacks=[passes])
    assert passes.logs == {"loss": 5.0, "other": 7.0}
    assert "_get_metrics_result_or_logs" not in vars(model)


@pytest.mark.parametrize(("done", "first"), [(0, 0), (4, 4), (9, 9)])
def test_an_epoch_begins_after_the_batches_that_are_done(done, first):
    batches, opened = [], []

    class Begins(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            iterator = running.running_fit().epoch_iterator
            position3.on_opening(iterator, lambda original: (opened.append(1), original())[1])
            position3.start_inside_epoch(iterator, done, 0, lambda steps: None)

        def on_train_batch_begin(self, batch, logs=None):
            batches.append(batch)

    dense_model().fit(X, Y, batch_size=1, epochs=2, verbose=0, callbacks=[Begins()])
    assert batches == [*range(first, 10), *range(10)]
    assert opened


def test_what_draws_without_a_seed_is_seen():
    data = tf.data.Dataset.range(10)
    assert position3.draws_without_seed(data.shuffle(5, seed=3).batch(2).prefetch(1)) is None
    keras.utils.set_random_seed(1)
    assert position3.draws_without_seed(data.shuffle(5)) is None
    tf.random.set_seed(None)
    assert position3.draws_without_seed(data.shuffle(5).batch(2).prefetch(1)) == "shuffle() without a seed"
    found = position3.draws_without_seed(data.map(lambda x: tf.random.uniform(())).batch(2))
    assert found is not None
    assert "RandomUniform" in found


@pytest.mark.parametrize(
    ("monitor", "wanted"), [("loss", "min"), ("val_loss", "min"), ("accuracy", "max"), ("val_accuracy", "max")]
)
def test_what_is_better_is_keras_own_opinion(monitor, wanted):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["accuracy"])
    model.fit(X, Y, verbose=0)
    assert checkpoint3.better(model, monitor) == wanted
    with pytest.raises(ValueError, match="Pass mode="):
        checkpoint3.better(model, "f1")


def test_keras_keeps_one_global_seed_generator():
    keras.utils.set_random_seed(3)
    keras.random.uniform((2,))
    state = checkpoint3.global_seed_state()
    before = state.numpy().tolist()
    keras.random.uniform((2,))
    assert checkpoint3.global_seed_state() is state
    assert state.numpy().tolist() != before
