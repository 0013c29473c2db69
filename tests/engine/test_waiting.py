"""The share of an epoch that is waiting for data: a slow and a fast pipeline, whose shares are known beforehand."""

import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_mirror import MirroredFitter
from keras_mirror.engine import waiting

BATCHES = 12
SLOW = 0.03


@keras.saving.register_keras_serializable("waiting")
class Sleeper(keras.Model):
    """Each step takes `seconds` of the host's time on the first replica."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.dense = seconds, keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        pause = tf.numpy_function(lambda: (time.sleep(self.seconds), np.float32(0))[1], [], tf.float32)
        x, y = data
        with tf.control_dependencies([pause]):
            x = tf.identity(x)
        return super().train_step((x, y))


def fitter(seconds, **arguments):
    made = MirroredFitter(lambda: Sleeper(seconds), devices="cpu:2")
    made.compile("sgd", "mse", **arguments)
    return made


def pipeline(seconds, ahead=False):
    def batch(i):
        time.sleep(seconds)
        return np.ones((4, 2), "float32")

    def pair(i):
        x = tf.ensure_shape(tf.numpy_function(batch, [i], tf.float32), [None, 2])
        return x, x[:, :1]

    dataset = tf.data.Dataset.range(BATCHES).map(pair)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return (dataset.prefetch(4) if ahead else dataset).with_options(options)


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 4}, {"run_eagerly": True}], ids=["one", "four", "eager"])
def test_a_slow_pipeline_is_waited_for_and_a_fast_one_is_not(options):
    slow, fast = fitter(0.0, **options), fitter(SLOW, **options)
    assert slow.waiting_share is None
    slow.fit(pipeline(SLOW), epochs=2, verbose=0)
    fast.fit(pipeline(0.0), epochs=2, verbose=0)
    assert slow._engine.waiting.waited > 0.9 * SLOW * (BATCHES - 1)
    assert fast._engine.waiting.waited < 0.6 * SLOW * (BATCHES - 1)
    if "run_eagerly" not in options:  # An eager step is slower than the pipeline.
        assert slow.waiting_share > 0.6
    assert fast.waiting_share < 0.25


@pytest.mark.parametrize("steps", [1, 4])
def test_a_pipeline_as_slow_as_the_steps_is_waited_for_where_it_is_not_ahead(steps):
    model = fitter(SLOW, steps_per_execution=steps)
    model.fit(pipeline(SLOW), epochs=2, verbose=0)
    one_after_the_other = model.waiting_share
    model.fit(pipeline(SLOW * 0.8, ahead=True), epochs=2, verbose=0)
    assert 0.2 < one_after_the_other < 0.6
    assert model.waiting_share < 0.5 * one_after_the_other


def test_an_accelerator_that_lags_behind_is_asked_when_it_is_done(monkeypatch):
    """What runs on GPUs, run on the CPU: the share is the same."""
    monkeypatch.setattr(tf.DeviceSpec, "device_type", "GPU")
    model = fitter(0.0, steps_per_execution=4)
    model.fit(pipeline(SLOW), epochs=2, verbose=0)
    assert model.waiting_share > 0.6


def test_a_bottleneck_is_named_once_and_not_for_the_epoch_that_fills_a_cache(monkeypatch):
    monkeypatch.setattr(waiting, "_SECONDS", 0.1)
    model = fitter(0.0)
    with pytest.warns(
        UserWarning, match=r"^fit: \d+% of epoch 2 .* waiting for data(.|\n)*cache\(\)(.|\n)*num_parallel_calls(.|\n)*prefetch"
    ) as caught:
        model.fit(pipeline(SLOW), epochs=3, verbose=0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(pipeline(SLOW).cache(), epochs=2, verbose=0)
        model.fit(pipeline(0.0), verbose=0)
