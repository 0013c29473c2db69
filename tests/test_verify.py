"""`MirroredFitter.verify`: passes for a right engine, fails for a wrong one, and changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_mirror import MirroredFitter
from keras_mirror.engine import step as step_module

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 5)).astype("float32")
Y = RNG.integers(0, 3, size=30)


def build():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, "tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3, "softmax"),
        ]
    )


@pytest.fixture
def fitter():
    fitter = MirroredFitter(build, devices=["CPU:0", "CPU:1", "CPU:2"])
    fitter.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitter


def test_a_right_engine_passes_and_the_report_says_so(fitter):
    report = fitter.verify(X, Y, batch_size=7, steps=4)
    assert report.passed
    assert report
    assert report.largest <= report.tolerance < 1e-4
    assert [c.name for c in report.logs] == ["loss", "accuracy"]
    assert len(report.variables) >= 6
    text = str(report)
    assert text.startswith("PASSED: one device and 3 replicas, 4 steps at global batch 7")
    assert "dropout" in text
    assert "synchronized=True" in text


def test_a_wrong_weight_of_a_share_fails(fitter, monkeypatch):
    monkeypatch.setattr(step_module.Step, "weight", lambda self, dtype: tf.cast(1 / self.replicas, dtype))
    report = fitter.verify(X, Y, batch_size=7, steps=4)
    assert not report.passed
    assert str(report).startswith("FAILED")
    assert report.largest > 100 * report.tolerance


def test_it_changes_nothing_in_the_model_nor_in_what_is_drawn_next(fitter):
    fitter.fit(X, Y, batch_size=10, epochs=1, verbose=0)
    weights = [w.copy() for w in fitter.get_weights()]
    state = [v.numpy() for v in fitter.optimizer.variables]
    metrics = [v.numpy() for v in fitter.metrics_variables]
    rates = [layer.rate for layer in fitter.layers if hasattr(layer, "rate")]
    numpy_state = np.random.get_state()[1].copy()
    assert fitter.verify(X, Y, batch_size=7, steps=2).passed
    for before, now in zip(weights, fitter.get_weights(), strict=True):
        np.testing.assert_array_equal(before, now)
    for before, now in zip(state, fitter.optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, now.numpy())
    for before, now in zip(metrics, fitter.metrics_variables, strict=True):
        np.testing.assert_array_equal(before, now.numpy())
    assert [layer.rate for layer in fitter.layers if hasattr(layer, "rate")] == rates
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)


def test_a_model_that_was_trained_is_compared_from_where_it_stands(fitter):
    fitter.fit(X, Y, batch_size=10, epochs=3, verbose=0)
    loss = fitter.evaluate(X, Y, batch_size=30, verbose=0)[0]
    report = fitter.verify(X, Y, batch_size=30, steps=1)
    assert report.passed
    assert abs(report.logs[0].one_device - loss) < 1.0
    fresh = MirroredFitter(build, devices=["CPU:0"], seed=1)
    fresh.compile("adam", "sparse_categorical_crossentropy")
    assert report.logs[0].one_device < fresh.verify(X, Y, batch_size=30, steps=1).logs[0].one_device


def test_what_draws_and_cannot_be_switched_off_is_named():
    def noisy():
        return keras.Sequential([keras.Input((5,)), Noise(name="my_noise"), keras.layers.Dense(3, "softmax")])

    fitter = MirroredFitter(noisy, devices=["CPU:0", "CPU:1"])
    fitter.compile("sgd", "sparse_categorical_crossentropy")
    assert any("my_noise" in note for note in fitter.verify(X, Y, batch_size=8, steps=1).notes)


class Noise(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)


def test_a_comparison_in_which_no_weight_moved_says_so():
    still = MirroredFitter(lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")]), devices=["CPU:0"])
    still.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    assert any("no weight moved" in note for note in still.verify(X, Y, batch_size=64, steps=1).notes)
    assert still.verify(X, Y, batch_size=64, steps=1).batch_size == len(X)


def test_before_compile_it_says_to_compile():
    with pytest.raises(RuntimeError, match="compile"):
        MirroredFitter(build, devices=["CPU:0"]).verify(X, Y)


def test_a_factory_that_returns_one_model_again_is_named():
    made = []

    def once():
        if not made:
            made.append(build())
        return made[0]

    fitter = MirroredFitter(once, devices=["CPU:0"])
    fitter.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="same model again"):
        fitter.verify(X, Y)


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"batch_size": 0}])
def test_sizes_below_one_are_refused(fitter, arguments):
    with pytest.raises(ValueError, match="at least 1"):
        fitter.verify(X, Y, **arguments)
