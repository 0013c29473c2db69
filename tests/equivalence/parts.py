"""Small models and data that several rows of the table share."""

from collections.abc import Callable
from typing import Any

import numpy as np
from stack import keras, layers

Data = Callable[[np.random.Generator, int], tuple[Any, ...]]


def dense(outputs: int = 2, activation: str | None = None) -> Callable[[], keras.Model]:
    """3 features, a hidden layer of 4, `outputs` units."""
    return lambda: keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(outputs, activation)])


def two_outputs() -> keras.Model:
    """Named outputs `a` (2 units) and `b` (3 classes)."""
    x = keras.Input((3,))
    h = layers.Dense(4, "tanh")(x)
    return keras.Model(x, {"a": layers.Dense(2, name="a")(h), "b": layers.Dense(3, "softmax", name="b")(h)})


def listed_outputs() -> keras.Model:
    """The same as a list."""
    x = keras.Input((3,))
    h = layers.Dense(4, "tanh")(x)
    return keras.Model(x, [layers.Dense(2, name="a")(h), layers.Dense(3, "softmax", name="b")(h)])


def tagger() -> keras.Model:
    """Token ids, 0 masked, to 2 numbers for each token; the output carries the mask."""
    return keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(6, 3, mask_zero=True), layers.Dense(2)])


def regression(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return rng.normal(size=(rows, 3)), rng.normal(size=(rows, 2))


def one_hot(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return rng.normal(size=(rows, 3)), np.eye(3)[rng.integers(0, 3, rows)]


def classes(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return rng.normal(size=(rows, 3)), rng.integers(0, 3, rows)


def named_targets(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return rng.normal(size=(rows, 3)), {"a": rng.normal(size=(rows, 2)), "b": np.eye(3)[rng.integers(0, 3, rows)]}


def listed_targets(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    x, y = named_targets(rng, rows)
    return x, (y["a"], y["b"])


def tokens(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    """Sequences of different lengths; row 23, the first of the batch of two (batch 4), is padding alone."""
    ids = rng.integers(1, 6, (rows, 4))
    lengths = rng.integers(1, 5, rows)
    lengths[23] = 0
    return ids * (np.arange(4) < lengths[:, None]), rng.normal(size=(rows, 4, 2))


def weighted(data: Data, shape: tuple[int, ...] = ()) -> Data:
    """Adds sample weights between 0 and 2, some of them 0; with `shape` (4,) one for each of 4 tokens."""

    def make(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
        x, y = data(rng, rows)
        weight = rng.uniform(0.2, 2.0, (rows, *shape))
        weight[::6] = 0.0
        return x, y, weight

    return make
