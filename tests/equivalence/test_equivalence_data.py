"""Rows about the order and the completeness of what is trained on: generators, shuffled arrays, what fit was given."""

from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
import pytest
from stack import keras, layers, ops

from keras_mirror import MirroredFitter


class Recorder(keras.Model):
    """The weights after a step say which example it saw: weight i moves by the number of times that row i was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = layers.Embedding(45, 1, embeddings_initializer="zeros")
        self.seen.build()

    def call(self, inputs: Any) -> Any:
        return self.seen(inputs)


def minus_sum(y_true: Any, y_pred: Any) -> Any:
    return -ops.sum(y_pred)


def recorder(replicas: int | None, seed: int | None = None) -> Any:
    model = Recorder() if replicas is None else MirroredFitter(Recorder, devices=f"cpu:{replicas}", seed=seed)
    model.compile(keras.optimizers.SGD(1.0), minus_sum, jit_compile=False)
    return model


def times_seen(model: Any) -> np.ndarray:
    return model.seen.get_weights()[0][:, 0]


def numbered(sizes: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    first = 0
    for size in sizes:
        yield np.arange(first, first + size), np.zeros((size, 1))
        first += size


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_generator_is_trained_on_exactly_once(replicas: int) -> None:
    """Plain Keras under a strategy draws the first batches to build the model, and never trains on them."""
    model = recorder(replicas)
    model.fit(numbered(harness.SIZES), verbose=0)
    rows = sum(harness.SIZES)
    np.testing.assert_array_equal(times_seen(model)[:rows], np.ones(rows))


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_PyDataset_is_trained_on_exactly_once(replicas: int) -> None:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return np.arange(7 * index, 7 * index + 7), np.zeros((7, 1))

    model = recorder(replicas)
    model.fit(Batches(), verbose=0)
    np.testing.assert_array_equal(times_seen(model), [1.0] * 35 + [0.0] * 10)


@pytest.mark.parametrize("replicas", [2, 4])
def test_arrays_are_trained_on_exactly_once_in_each_epoch(replicas: int) -> None:
    model = recorder(replicas)
    model.fit(np.arange(37), np.zeros((37, 1)), batch_size=8, epochs=3, verbose=0)
    np.testing.assert_array_equal(times_seen(model), [3.0] * 37 + [0.0] * 8)


class Order(keras.callbacks.Callback):
    """Which rows each batch held, from how the recorder's weights moved."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[tuple[int, ...]]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.batches.append([])
        self.before = times_seen(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = times_seen(self.model)
        self.batches[-1].append(tuple(np.flatnonzero(now - self.before)))
        self.before = now


def orders(replicas: int, seed: int | None) -> list[list[tuple[int, ...]]]:
    order = Order()
    model = recorder(replicas, seed)
    model.fit(np.arange(37), np.zeros((37, 1)), batch_size=8, epochs=3, verbose=0, callbacks=[order])
    return order.batches


def test_shuffled_arrays_have_another_order_in_each_epoch() -> None:
    """After set_random_seed plain Keras repeats one order in every epoch."""
    keras.utils.set_random_seed(4)
    first, second, third = orders(2, None)
    assert first != second != third != first
    assert [len(batch) for batch in first] == [8, 8, 8, 8, 5]
    keras.utils.set_random_seed(4)
    assert orders(2, None) == [first, second, third]
    keras.utils.set_random_seed(5)
    assert orders(2, None) != [first, second, third]


def test_the_order_is_the_same_for_any_number_of_replicas() -> None:
    assert orders(2, 9) == orders(4, 9) == orders(1, 9)
    assert orders(2, 9) != orders(2, 10)


def test_the_users_optimizer_stays_the_live_object() -> None:
    """Made outside the scope and handed to compile: what the user sets on it takes effect, also from the first step on."""
    weights = []
    for make in (lambda: recorder(None), lambda: recorder(2)):
        model, optimizer = make(), keras.optimizers.SGD(1.0)
        model.compile(optimizer, minus_sum, jit_compile=False)
        assert model.optimizer is optimizer
        batch = np.arange(8), np.zeros((8, 1))
        model.train_on_batch(*batch)
        optimizer.learning_rate = 0.25
        model.train_on_batch(*batch)
        assert float(optimizer.learning_rate) == 0.25
        assert int(optimizer.iterations) == 2
        weights.append(times_seen(model))
    assert weights[0][0] == 1.25
    np.testing.assert_array_equal(weights[0], weights[1])


def test_the_users_metric_stays_the_live_object() -> None:
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    model = recorder(2)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[metric])
    found = model.evaluate(np.arange(5), np.arange(5.0)[:, None], verbose=0, return_dict=True)
    assert float(metric.result()) == found["mae"] == 2.0
    metric.reset_state()
    assert float(metric.result()) == 0.0
