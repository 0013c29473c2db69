"""What can't be as on one device, and what holds instead: random draws, and BatchNormalization without synchronisation."""

from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import pytest
import tensorflow as tf
from stack import keras, layers, ops

from keras_mirror import MirroredFitter
from keras_mirror.seams import keras3
from keras_mirror.seams import tensorflow as tf_seams

WIDTH = 400


class Noisy(layers.Layer):
    """Draws from `keras.random` without a seed."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + keras.random.normal(ops.shape(inputs)) if training else inputs


def minus_mean(y_true: Any, y_pred: Any) -> Any:
    return -ops.mean(y_pred, axis=-1)


def draws(make: Callable[[], layers.Layer], value: float, replicas: int, seed: int = 3, steps: int = 1) -> np.ndarray:
    """The mean over the replicas of what `make`'s layer makes of `value`, one example on each; `WIDTH` draws for each step.

    The gradient of the last layer's kernel is just that mean, and SGD with rate 1 moves the kernel by it.
    """

    def model() -> keras.Model:
        return keras.Sequential([keras.Input((WIDTH,)), make(), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    fitter = MirroredFitter(model, devices=f"cpu:{replicas}", seed=seed)
    fitter.compile(keras.optimizers.SGD(1.0), minus_mean)
    x = np.full((replicas, WIDTH), value, "float32")
    out, before = [], np.zeros((WIDTH, 1))
    for _ in range(steps):
        fitter.train_on_batch(x, np.zeros((replicas, 1)))
        after = fitter.layers[-1].get_weights()[0]
        out.append((after - before)[:, 0])
        before = after
    return np.array(out)


RANDOM = {
    # name: (layer, input, mean and variance of one output)
    "Dropout": (lambda: layers.Dropout(0.5), 1.0, 1.0, 1.0),
    "SpatialDropout": (lambda: _spatial(), 1.0, 1.0, 1.0),
    "GaussianNoise": (lambda: layers.GaussianNoise(0.5), 0.0, 0.0, 0.25),
    "GaussianDropout": (lambda: layers.GaussianDropout(0.5), 1.0, 1.0, 1.0),
    "unseeded_keras_random": (Noisy, 0.0, 0.0, 1.0),
    "seeded_Dropout": (lambda: layers.Dropout(0.5, seed=11), 1.0, 1.0, 1.0),
}


def _spatial() -> layers.Layer:
    return keras.Sequential([layers.Reshape((1, WIDTH)), layers.SpatialDropout1D(0.5), layers.Flatten()])


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", RANDOM)
def test_each_replica_draws_its_own(name: str, replicas: int) -> None:
    """The mean over N independent draws has an N-th of their variance; of N equal draws it would have all of it."""
    make, value, mean, variance = RANDOM[name]
    (found,) = draws(make, value, replicas)
    deviation = np.sqrt(variance / replicas)
    assert abs(found.mean() - mean) < 4 * deviation / np.sqrt(WIDTH)
    # The estimated variance of WIDTH draws is within 4 standard errors of an N-th, and N = 2 and 1 are 10 apart.
    assert abs(found.var() / variance * replicas - 1) < 4 * np.sqrt(2 / WIDTH)


def test_each_step_draws_anew() -> None:
    first, second = draws(lambda: layers.Dropout(0.5), 1.0, 2, steps=2)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(WIDTH)


@pytest.mark.parametrize("name", ["Dropout", "unseeded_keras_random"])
def test_a_seed_fixes_the_draws(name: str) -> None:
    make, value, *_ = RANDOM[name]
    np.testing.assert_array_equal(draws(make, value, 2, seed=5), draws(make, value, 2, seed=5))
    assert np.any(draws(make, value, 2, seed=5) != draws(make, value, 2, seed=6))


def test_one_replica_draws_what_plain_keras_draws() -> None:
    def model() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), layers.Dense(1)])

    x, weights = np.ones((4, 8)), []
    for make in (model, lambda: MirroredFitter(model, devices="cpu:1")):
        keras.utils.set_random_seed(1)
        made = make()
        made.compile(keras.optimizers.SGD(0.1), "mse")
        for _ in range(3):
            made.train_on_batch(x, np.zeros((4, 1)))
        weights.append(made.get_weights()[0])
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-6)


def test_predictions_and_evaluation_draw_nothing() -> None:
    def model() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), Noisy(), layers.Dense(1)])

    fitter = MirroredFitter(model, devices="cpu:2")
    x = np.random.default_rng(0).normal(size=(5, 8)).astype("float32")
    np.testing.assert_array_equal(fitter.predict(x, verbose=0), fitter.predict(x, verbose=0))


# -- BatchNormalization without synchronisation


def batch_normalised() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.BatchNormalization(momentum=0.8),
            layers.Dense(4, "tanh"),
            layers.BatchNormalization(momentum=0.8),
            layers.Dense(2),
        ]
    )


def per_share_reference(case: harness.Case, replicas: int) -> list[np.ndarray]:
    """By hand, on one device: each share is normalised by its own moments; statistics are weighted means over the shares."""
    model = case.model()
    optimizer = case.compile()["optimizer"]
    for x, y in case.batches() * case.epochs:
        shares = [(a, b) for a, b in zip(np.array_split(x, replicas), np.array_split(y, replicas), strict=True) if len(a)]
        before = [v.numpy() for v in model.non_trainable_variables]
        gradients: list[Any] = [0.0] * len(model.trainable_variables)
        after: list[Any] = [0.0] * len(before)
        for a, b in shares:
            share = len(a) / len(x)
            for variable, value in zip(model.non_trainable_variables, before, strict=True):
                variable.assign(value)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(a, training=True) - b))
            found = tape.gradient(loss, [v.value for v in model.trainable_variables])
            gradients = [g + share * f for g, f in zip(gradients, found, strict=True)]
            after = [s + share * v.numpy() for s, v in zip(after, model.non_trainable_variables, strict=True)]
        for variable, value in zip(model.non_trainable_variables, after, strict=True):
            variable.assign(value)
        optimizer.apply(gradients, model.trainable_variables)
    return model.get_weights()


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_unsynchronised_BatchNormalization_is_that_of_the_shares(replicas: int, tmp_path: Any) -> None:
    case = harness.Case(
        name="BatchNormalization",
        model=batch_normalised,
        data=lambda rng, rows: (rng.normal(1.0, 2.0, size=(rows, 3)), rng.normal(size=(rows, 2))),
        compile=lambda: {"optimizer": keras.optimizers.SGD(0.05, momentum=0.5, clipnorm=0.2), "loss": "mse"},
    )
    assert min(case.sizes) < replicas
    with harness.dtype("float64"):
        keras.utils.set_random_seed(harness.SEED)
        expected = per_share_reference(case, replicas)
        keras.utils.set_random_seed(harness.SEED)
        fitter = MirroredFitter(case.model, devices=f"cpu:{replicas}")
        fitter.compile(**case.compile(), steps_per_execution=harness.STEPS_PER_EXECUTION[replicas])
        fitter.fit(case.dataset(), epochs=case.epochs, verbose=0)
        for i, (a, b) in enumerate(zip(expected, fitter.get_weights(), strict=True)):
            assert harness.difference(a, b) < 1e-10, f"weight {i}"
        # What is saved is that mean too, and every replica has it.
        harness.check_replicas_identical(fitter.model, replicas)
        fitter.save(tmp_path / "m.keras")
        saved = keras.saving.load_model(tmp_path / "m.keras")
        for a, b in zip(expected, saved.get_weights(), strict=True):
            assert harness.difference(a, b) < 1e-10


def test_unsynchronised_statistics_are_not_replica_0s() -> None:
    """Rows of replica 0 are 0, those of replica 1 are 10: the moving mean after one step says which were counted."""

    def model() -> keras.Model:
        return keras.Sequential([keras.Input((1,)), layers.BatchNormalization(momentum=0.0), layers.Dense(1)])

    fitter = MirroredFitter(model, devices="cpu:2")
    fitter.compile("sgd", "mse")
    fitter.train_on_batch(np.array([[0.0], [0.0], [10.0]]), np.zeros((3, 1)))
    mean = fitter.layers[0].moving_mean
    for component in tf_seams.components(keras3.raw_variable(mean)):
        np.testing.assert_allclose(component.numpy(), [10 / 3], rtol=1e-6)
