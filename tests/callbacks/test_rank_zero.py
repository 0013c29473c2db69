"""RankZero in one process: the callback itself, in its place; arguments; what costs nothing."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf
from stack import keras

from keras_mirror import LinearScalingWarmup, MirroredFitter, RankZero
from keras_mirror.seams import callbacks as seams

HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")


class Notes(keras.callbacks.Callback):
    """Notes every hook that is called, in a list that several may share."""

    def __init__(self, notes, name):
        super().__init__()
        self.notes, self.name = notes, name

    def on_train_begin(self, logs=None):
        self.notes.append((self.name, "train begin", self.model.name, self.params["epochs"]))

    def on_epoch_end(self, epoch, logs=None):
        self.notes.append((self.name, "epoch end", epoch, sorted(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.notes.append((self.name, "test batch end", batch, sorted(logs)))


class Old(keras.callbacks.Callback):
    """A callback in the style of old Keras, whose batch hook isn't named after training."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_batch_end(self, batch, logs=None):
        self.batches.append((batch, logs["loss"]))


@pytest.fixture(scope="module")
def model():
    made = MirroredFitter(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="m"), devices="cpu:2", seed=1)
    made.compile("sgd", "mse")
    return made


def test_it_is_the_callback_itself_in_its_place(model):
    def fit(wrap):
        notes, old = [], Old()
        given = [Notes(notes, "a"), wrap(Notes(notes, "b")), wrap(old), Notes(notes, "c")]
        model.fit(X, X[:, :1], batch_size=8, epochs=2, validation_data=(X, X[:, :1]), verbose=0, callbacks=given)
        return notes, [batch for batch, _ in old.batches]

    plain, wrapped = fit(lambda callback: callback), fit(RankZero)
    assert wrapped == plain
    assert plain[0][:3] == [(name, "train begin", "m", 2) for name in "abc"]
    assert plain[1] == [0, 1, 2] * 2


def test_decisions_hold(model):
    stopping = RankZero(keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9, restore_best_weights=True))
    rates = RankZero(keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1)))
    history = model.fit(X, X[:, :1], epochs=5, verbose=0, callbacks=[rates, stopping])
    assert history.epoch == [0, 1]
    assert stopping.stopped_epoch == 1
    assert float(tf.convert_to_tensor(model.optimizer.learning_rate)) == pytest.approx(0.005)


def test_attributes_are_the_callbacks():
    inner = keras.callbacks.EarlyStopping(patience=3)
    wrapped = RankZero(inner)
    assert (wrapped.patience, wrapped.callback, getattr(wrapped, "params", None)) == (3, inner, None)
    wrapped.patience = 5
    assert (inner.patience, "patience" in vars(wrapped)) == (5, False)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wrapped.nothing
    assert copy.deepcopy(wrapped).patience == 5
    assert pickle.loads(pickle.dumps(wrapped)).patience == 5
    assert isinstance(wrapped, keras.callbacks.Callback)
    assert "EarlyStopping" in repr(wrapped)


@pytest.mark.parametrize("inner", [keras.callbacks.CSVLogger("x"), Notes([], ""), Old(), keras.callbacks.Callback()])
def test_a_batch_hook_that_the_callback_leaves_out_stays_keras_empty_one(inner):
    wrapped = RankZero(inner)
    for name in HOOKS:
        if "batch" in name and not (isinstance(inner, Old) and name == "on_train_batch_end"):
            assert seams.is_default(getattr(wrapped, name)) == seams.is_default(getattr(inner, name)), name


def test_a_failure_alone_is_the_callbacks_own(model):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        model.fit(X, X[:, :1], verbose=0, callbacks=[RankZero(Fails())])


def test_elsewhere_it_is_silent_before_anything_is_known(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    notes = []
    wrapped = RankZero(Notes(notes, "a"))
    wrapped.set_params({"epochs": 1})
    wrapped.on_epoch_end(0, {})
    assert notes == []
    assert getattr(wrapped.callback, "params", None) is None  # Keras 2 has none before it sets them


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"the class.*\n?.*Pass an instance"):
        RankZero(keras.callbacks.EarlyStopping)
    with pytest.raises(TypeError, match=r"got 3 .int., expected a Keras callback"):
        RankZero(3)
    with pytest.raises(TypeError, match="got a LinearScalingWarmup, which knows the workers by itself"):
        RankZero(LinearScalingWarmup())
    with pytest.raises(ValueError, match='decides=\'step\', expected "auto", "epoch" or "batch"'):
        RankZero(keras.callbacks.EarlyStopping(), decides="step")
