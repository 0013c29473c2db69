"""float32 and mixed_float16: equality to what rounding explains, and an overflow on one replica that destroys nothing."""

from typing import Any

import harness
import numpy as np
import pytest
from parts import dense, one_hot, regression, tagger, tokens, weighted
from stack import keras, layers, optimizers

from keras_mirror import MirroredFitter
from keras_mirror.seams import keras3
from keras_mirror.seams import tensorflow as tf_seams


def single(name: str, model: Any, data: Any, optimizer: Any, loss: str, metric: str = "mae") -> harness.Case:
    return harness.Case(
        name=f"float32-{name}",
        model=model,
        data=data,
        compile=lambda: {"optimizer": optimizer(), "loss": loss, "metrics": [metric]},
        dtype="float32",
        evaluate=True,
        predict=True,
    )


SINGLE = [
    single("dense-SGD-clipnorm", dense(), weighted(regression), lambda: optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), "mse"),
    single(
        "softmax-Adam",
        dense(3, "softmax"),
        one_hot,
        lambda: optimizers.Adam(0.01),
        "categorical_crossentropy",
        "top_k_categorical_accuracy",
    ),
    single("masked-AdamW", tagger, tokens, lambda: optimizers.AdamW(0.01, weight_decay=0.1), "mse"),
    single(
        "BatchNormalization-synchronized",
        lambda: keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, "tanh"), layers.BatchNormalization(synchronized=True), layers.Dense(2)]
        ),
        regression,
        lambda: optimizers.SGD(0.05),
        "mse",
    ),
]


@harness.parametrised(SINGLE)
def test_float32(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)


# -- mixed_float16


def half() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1, dtype="float32")])


def mixed(replicas: int | None, optimizer: Any = None) -> Any:
    """A model under mixed_float16, whose optimizer compile wraps; `replicas` None is plain Keras."""
    keras.utils.set_random_seed(harness.SEED)
    if replicas is None:
        keras.config.set_dtype_policy("mixed_float16")
        model = half()
    else:
        model = MirroredFitter(half, devices=f"cpu:{replicas}", precision="mixed_float16")
    model.compile(optimizer or optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


def scale_of(model: Any) -> list[float]:
    """The loss scale, on every replica."""
    return [float(c.numpy()) for c in tf_seams.components(keras3.raw_variable(model.optimizer.dynamic_scale))]


def snapshot(model: Any) -> list[np.ndarray]:
    return [v.numpy() for v in [*model.weights, *model.optimizer.inner_optimizer.variables]]


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_overflow_on_one_replica_changes_nothing_but_the_scale(replicas: int, where: str) -> None:
    model = mixed(replicas)
    assert isinstance(model.optimizer, optimizers.LossScaleOptimizer)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
    model.train_on_batch(x, y)
    before, scale = snapshot(model), scale_of(model)
    assert len(set(scale)) == 1
    bad = y.copy()
    bad[0 if where == "first" else -1] = 1e6  # times the scale that's more than float16 holds
    model.train_on_batch(x, bad)
    for a, b in zip(before, snapshot(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert scale_of(model) == [s / 2 for s in scale]
    harness.check_replicas_identical(model.model, replicas)
    model.train_on_batch(x, y)
    assert int(model.optimizer.inner_optimizer.iterations) == 2
    assert all(np.all(np.isfinite(v)) for v in snapshot(model))
    assert any(np.any(a != b) for a, b in zip(before, snapshot(model), strict=True))


@pytest.mark.parametrize("replicas", [2, 4])
def test_mixed_float16_with_a_bad_batch_as_on_one_device(replicas: int) -> None:
    """To float16 rounding: ten steps at the default scale, one of them skipped on one device and on N alike."""
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(n, 3)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")) for n in harness.SIZES]
    batches[4][1][0] = 1e6
    one, many = mixed(None), mixed(replicas)
    for model in (one, many):
        for x, y in batches:
            model.train_on_batch(x, y)
    assert scale_of(many) == scale_of(one) * replicas == [2.0**14] * replicas
    assert int(many.optimizer.inner_optimizer.iterations) == int(one.optimizer.inner_optimizer.iterations) == 9
    for a, b in zip(one.get_weights(), many.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    harness.check_replicas_identical(many.model, replicas)


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_scale_grows_as_on_one_device(replicas: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 3)).astype("float32"), rng.normal(size=(7, 1)).astype("float32")
    scales = []
    for n in (None, replicas):
        optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.001), initial_scale=64.0, dynamic_growth_steps=3)
        model = mixed(n, optimizer)
        for _ in range(7):
            model.train_on_batch(x, y)
        scales.append(scale_of(model))
    assert scales == [[256.0], [256.0] * replicas]
