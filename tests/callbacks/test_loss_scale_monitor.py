"""LossScaleMonitor: loss scale and skipped steps in the epoch's log, counted by hand."""

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers import SGD, LossScaleOptimizer

from keras_mirror import LossScaleMonitor, MirroredFitter


def data():
    """Eight rows; row 5 overflows float16."""
    x = np.ones((8, 3), "float32")
    x[5] = 1e6
    return x, np.ones((8, 1), "float32")


def half():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1, dtype="float32")])


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_each_epoch_tells_its_own_skipped_steps(steps_per_execution):
    model = MirroredFitter(half, devices="cpu:2", precision="mixed_float16", seed=1)
    model.compile(SGD(1e-3), "mse", steps_per_execution=steps_per_execution)
    seen = []
    later = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    history = model.fit(*data(), batch_size=2, epochs=3, shuffle=False, verbose=0, callbacks=[LossScaleMonitor(), later]).history
    assert history["loss_scale"] == [2.0**14, 2.0**13, 2.0**12]
    assert history["skipped_steps"] == [1, 1, 1]
    assert history["skipped_share"] == [0.25] * 3
    assert [logs["loss_scale"] for logs in seen] == history["loss_scale"]
    assert (model.loss_scaling[0].steps, model.loss_scaling[0].skipped_share) == (12, 0.25)


def test_a_second_fit_counts_anew_and_the_sum_goes_on():
    model = MirroredFitter(half, devices="cpu:2", precision="mixed_float16", seed=1)
    model.compile(SGD(1e-3), "mse")
    for _ in range(2):
        history = model.fit(*data(), batch_size=4, shuffle=False, verbose=0, callbacks=[LossScaleMonitor()]).history
        assert history["skipped_steps"] == [1]
    assert model.loss_scaling[0].skipped == 2


def test_nothing_is_added_where_no_loss_is_scaled():
    model = MirroredFitter(half, devices="cpu:2")
    model.compile(SGD(1e-3), "mse")
    assert set(model.fit(*data(), verbose=0, callbacks=[LossScaleMonitor()]).history) == {"loss"}


def test_several_optimizers_are_told_apart():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)
            self.extra = LossScaleOptimizer(SGD(0.1), name="extra")

        def call(self, x):
            return self.dense(x)

    model = MirroredFitter(Two, devices="cpu:2")
    model.compile(LossScaleOptimizer(SGD(0.1), name="main"), "mse")
    x = np.ones((4, 3), "float32")
    model(x)
    model.extra.build(model.trainable_variables)
    history = model.fit(x, x[:, :1], verbose=0, callbacks=[LossScaleMonitor()]).history
    assert (history["loss_scale_main"], history["skipped_share_extra"]) == ([2.0**15], [0.0])


def test_a_plain_model_is_refused_before_training():
    model = half()
    model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(ValueError, match="isn't a MirroredFitter's"):
        model.fit(*data(), verbose=0, callbacks=[LossScaleMonitor()])
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
