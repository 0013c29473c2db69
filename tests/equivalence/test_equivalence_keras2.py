"""What Keras 2 alone has: the legacy optimizers, overflows under both LossScaleOptimizers."""

from typing import Any

import harness
import numpy as np
import pytest
import stack
from stack import keras, layers, optimizers

from keras_mirror import MirroredFitter, loss_scaling
from keras_mirror.seams import generation, loss_scale
from keras_mirror.seams import tensorflow as tf_seams

if stack.GENERATION == 3:
    pytest.skip("Keras 2's own", allow_module_level=True)

import cases_legacy


@harness.parametrised(cases_legacy.CASES)
def test_legacy_optimizers(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)


def half() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1, dtype="float32")])


def scale_of(model: Any) -> list[float]:
    """The loss scale, on every replica."""
    variable = generation.raw_variable(loss_scale.scale_variable(model.optimizer))
    return [float(c.numpy()) for c in tf_seams.components(variable)]


@pytest.mark.parametrize("family", ["current", "legacy"])
def test_an_overflow_on_one_replica_is_skipped_by_all_as_on_one_device(family: str) -> None:
    """Ten steps under mixed_float16, one of them with a target that only the last replica can't hold."""
    kind = optimizers.Adam if family == "current" else optimizers.legacy.Adam
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(n, 3)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")) for n in harness.SIZES]
    batches[4][1][-1] = 1e6
    models = []
    for replicas in (None, 2):
        keras.utils.set_random_seed(harness.SEED)
        keras.config.set_dtype_policy("mixed_float16")
        model = half() if replicas is None else MirroredFitter(half, devices="cpu:2")
        model.compile(kind(0.01, clipnorm=0.5), "mse")
        for x, y in batches:
            model.train_on_batch(x, y)
        models.append(model)
    one, two = models
    assert isinstance(two.optimizer, optimizers.LossScaleOptimizer)
    assert scale_of(two) == scale_of(one) * 2 == [2.0**14] * 2
    assert int(two.optimizer.iterations.numpy()) == int(one.optimizer.iterations.numpy()) == 10
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    harness.check_replicas_identical(two.model, 2)
    (found,) = loss_scaling(two)
    assert (found.steps, found.skipped, found.scale) == (10, 1, 2.0**14)
