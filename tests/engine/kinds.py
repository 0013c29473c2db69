"""Every kind of input that fit takes, as the same numbered examples, and a model that notes which of them it was given."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_mirror import MirroredFitter

# More examples than any test has. 2 ** MOST is exact in float32.
MOST = 20
BATCH = 4


def numbers_of(inputs: Any) -> Any:
    """The examples' numbers, from inputs of any kind: the first column of the first input."""
    value = keras.tree.flatten(inputs)[0]
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    if isinstance(value, tf.RaggedTensor):
        value = value.to_tensor(shape=[None, 3])
    if value.dtype == tf.string:
        value = tf.strings.to_number(value)
    if value.dtype == tf.bool:  # binary digits
        value = tf.linalg.matvec(tf.cast(value, tf.float32), 2.0 ** tf.range(5, dtype=tf.float32))[:, None]
    if value.dtype == tf.uint8:
        value = tf.cast(value, tf.int32)
    return tf.cast(tf.reshape(value, [tf.shape(value)[0], -1])[:, 0], tf.int32)


class Tally(keras.metrics.Metric):
    """What a step was given: rows, the sum of 2 ** number, and how far targets are apart from their inputs."""

    def __init__(self) -> None:
        super().__init__(name="tally")
        self.sums = self.add_weight(shape=(3,), initializer="zeros")

    def update_state(self, numbers: Any, targets: Any) -> None:
        numbers = tf.cast(numbers, tf.float32)
        apart = numbers if targets is None else tf.abs(tf.cast(targets, tf.float32) - numbers)
        apart = tf.zeros_like(numbers) if targets is None else apart
        self.sums.assign_add(tf.reduce_sum(tf.stack([tf.ones_like(numbers), 2.0**numbers, apart]), 1))

    def result(self) -> dict[str, Any]:
        rows, powers, apart = tf.unstack(self.sums.value)
        return {"rows": rows, "powers": powers, "apart": apart}


class Notes(keras.Model):
    """A step adds an example's weight to `seen` at its number: what gradients do, not what was only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.add_weight(shape=(MOST,), initializer="zeros")
        self.tally = Tally()
        self.built = True

    def call(self, inputs: Any) -> Any:
        return tf.gather(self.seen.value, numbers_of(inputs))[:, None]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        numbers = numbers_of(x)
        self.tally.update_state(numbers, None if y is None else numbers_of(y))
        weight = tf.ones_like(numbers, tf.float32) if weight is None else tf.cast(tf.reshape(weight, [-1]), tf.float32)
        with tf.GradientTape() as tape:
            loss = -keras.ops.sum(self(x)[:, 0] * weight)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, [self.seen.value]), [self.seen], strict=True))
        return self.tally.result()

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.tally.update_state(numbers_of(x), None if y is None else numbers_of(y))
        return self.tally.result()

    def predict_step(self, data: Any) -> Any:
        return numbers_of(keras.utils.unpack_x_y_sample_weight(data)[0])[:, None]


MODELS: dict[Any, Any] = {}


def notes(replicas: int, **arguments: Any) -> Any:
    """A compiled `Notes` with nothing seen; one for all tests, so that a kind of batch is traced once."""
    key = replicas, *sorted(arguments.items())
    if key not in MODELS:
        MODELS[key] = MirroredFitter(Notes, devices=f"cpu:{replicas}", step_sums=True, **arguments)
        MODELS[key].compile(keras.optimizers.SGD(1.0))
    fitter = MODELS[key]
    fitter.seen.assign(np.zeros(MOST))
    return fitter


class Batches(keras.utils.PyDataset):
    """Numbered examples in batches; the n-th batch is the same in every pass."""

    def __init__(self, rows: int, form: Callable[[np.ndarray], Any], endless: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rows, self.form, self.endless = rows, form, endless

    @property
    def num_batches(self) -> int | None:
        return None if self.endless else -(-self.rows // BATCH)

    def __getitem__(self, index: int) -> Any:
        first = index * BATCH % (-(-self.rows // BATCH) * BATCH)
        return self.form(np.arange(first, min(first + BATCH, self.rows)))


def pair(n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of the examples `n`."""
    return n[:, None].astype("int64"), n[:, None].astype("float32")


def ragged(n: np.ndarray) -> tf.RaggedTensor:
    """Rows of one to three numbers, the first is the example's."""
    return tf.RaggedTensor.from_row_lengths(np.repeat(n, n % 3 + 1), n % 3 + 1)


def dense_with_empty_rows(n: np.ndarray) -> np.ndarray:
    """Rows of which number 0 has no entry that isn't zero; it is the last one."""
    return np.stack([n[::-1], 2 * n[::-1]], 1).astype("float32")


def scipy_sparse(n: np.ndarray) -> Any:
    from scipy import sparse

    return sparse.csr_matrix(dense_with_empty_rows(n))


def pandas_frame(n: np.ndarray) -> Any:
    import pandas

    return pandas.DataFrame({"number": n, "half": n / 2})


def torch_loader(n: np.ndarray) -> Any:
    import torch

    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.from_numpy, pair(n))), batch_size=BATCH)


def dataset(n: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(pair(n)).batch(BATCH)


def generator(n: np.ndarray) -> Any:
    return (pair(n[first : first + BATCH]) for first in range(0, len(n), BATCH))


def distributed(n: np.ndarray, strategy: Any) -> Any:
    return strategy.experimental_distribute_dataset(dataset(n))


def distributed_from_function(n: np.ndarray, strategy: Any) -> Any:
    """Each replica gets every so many-th batch of two."""
    return strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.from_tensor_slices(pair(n)).batch(2))


@dataclasses.dataclass(frozen=True)
class Kind:
    """One row of the table.

    Attributes:
        name: what it is; the test's id and the row in docs/data.md.
        make: numbers (and the strategy, where it asks for one) -> fit's arguments, or its `x`.
        arrays: whether Keras cuts the batches, so that fit takes batch_size.
        shuffles: whether fit's shuffle applies.
        needs: a package without which the row is skipped.
        empty: whether there may be no example at all.
        times: how often fit sees each example in an epoch; 1, or a weight by number.
        once: whether the data can be gone through only once.
        order: the numbers in the order in which the data has them.
    """

    name: str
    make: Callable[..., Any]
    arrays: bool = False
    shuffles: bool = False
    needs: str = ""
    empty: bool = True
    times: Callable[[np.ndarray], np.ndarray] = lambda n: np.ones(len(n))
    once: bool = False
    order: Callable[[np.ndarray], np.ndarray] = lambda n: n

    def arguments(self, rows: int, strategy: Any) -> dict[str, Any]:
        """What is given to fit."""
        given = (
            self.make(np.arange(rows), strategy) if "strategy" in self.make.__code__.co_varnames else self.make(np.arange(rows))
        )
        given = given if isinstance(given, dict) else {"x": given}
        return {**given, "batch_size": BATCH} if self.arrays else given


def array_kind(name: str, x: Callable[[np.ndarray], Any], y: Any = lambda n: pair(n)[1], needs: str = "", **more: Any) -> Kind:
    """A kind of which x and y are arrays."""
    return Kind(name, lambda n: {"x": x(n), "y": y(n)}, arrays=True, shuffles=True, needs=needs, **more)


def reversed_numbers(n: np.ndarray) -> np.ndarray:
    return pair(n[::-1])[1]


def sparse_dataset(n: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense_with_empty_rows(n)),)).batch(BATCH)


def backwards(n: np.ndarray) -> np.ndarray:
    return n[::-1]


def backwards_in_batches(n: np.ndarray) -> np.ndarray:
    return np.concatenate([n[first : first + BATCH][::-1] for first in range(0, len(n), BATCH)])


def steps(n: np.ndarray) -> int:
    return max(1, -(-len(n) // BATCH))


ARRAYS = [
    array_kind("NumPy", lambda n: pair(n)[0]),
    array_kind("TensorFlow tensors", lambda n: tf.constant(pair(n)[0]), lambda n: tf.constant(pair(n)[1])),
    array_kind("pandas", pandas_frame, lambda n: pandas_frame(n)["number"], needs="pandas"),
    array_kind("list", lambda n: [n, np.ones(len(n))]),
    array_kind("dict by name", lambda n: {"a": n, "b": pair(n)[1]}),
    array_kind("nest", lambda n: {"a": (n, [n]), "b": n}, lambda n: {"out": [n, n]}),
    array_kind("float16", lambda n: n.astype("float16")),
    array_kind("float64", lambda n: n.astype("float64"), lambda n: n.astype("float64")),
    array_kind("uint8", lambda n: n.astype("uint8"), lambda n: n.astype("int8")),
    array_kind("bool", lambda n: (n[:, None] >> np.arange(5) & 1).astype(bool)),
    array_kind("strings", lambda n: n.astype("U3"), lambda n: n.astype("U3").astype(object)),
    array_kind("SciPy sparse", scipy_sparse, reversed_numbers, needs="scipy", empty=False, order=backwards),
    array_kind(
        "SparseTensor", lambda n: tf.sparse.from_dense(dense_with_empty_rows(n)), reversed_numbers, empty=False, order=backwards
    ),
    array_kind("RaggedTensor", ragged, empty=False),
    array_kind("no targets", lambda n: pair(n)[0], lambda n: None),
    Kind(
        "sample_weight",
        lambda n: {"x": pair(n)[0], "y": pair(n)[1], "sample_weight": n + 1},
        arrays=True,
        shuffles=True,
        times=lambda n: n + 1.0,
    ),
    Kind(
        "class_weight",
        lambda n: {"x": pair(n)[0], "y": pair(n)[1], "class_weight": {0: 2.0, 3: 5.0}},
        arrays=True,
        shuffles=True,
        times=lambda n: np.where(n == 0, 2.0, np.where(n == 3, 5.0, 1.0)),
    ),
]
OTHERS = [
    Kind("tf.data", dataset),
    Kind("tf.data of unknown length", lambda n: dataset(n).filter(lambda *_: True)),
    Kind("tf.data, endless", lambda n: {"x": dataset(n).repeat(), "steps_per_epoch": steps(n)}, empty=False),
    Kind("tf.data, sparse", lambda n: sparse_dataset(n), empty=False, order=backwards),
    Kind("tf.data, ragged", lambda n: tf.data.Dataset.from_tensor_slices((ragged(n), n)).batch(BATCH), empty=False),
    Kind("tf.data, strings", lambda n: tf.data.Dataset.from_tensor_slices((n.astype("U3"), n)).batch(BATCH)),
    Kind("tf.data, dict by name", lambda n: tf.data.Dataset.from_tensor_slices(({"a": n, "b": n}, n)).batch(BATCH)),
    Kind(
        "tf.data with class_weight",
        lambda n: {"x": dataset(n), "class_weight": {i: 5.0 if i == 3 else 1.0 for i in range(MOST)}},
        times=lambda n: np.where(n == 3, 5.0, 1.0),
    ),
    Kind("distributed dataset", distributed),
    Kind("dataset distributed from a function", distributed_from_function, empty=False),
    Kind("PyDataset", lambda n: Batches(len(n), pair), shuffles=True, empty=False),
    Kind("PyDataset, 2 workers", lambda n: Batches(len(n), pair, workers=2), shuffles=True, empty=False),
    Kind("PyDataset, no targets", lambda n: Batches(len(n), lambda n: (n, None)), shuffles=True, empty=False),
    Kind("PyDataset, endless", lambda n: {"x": Batches(len(n), pair, endless=True), "steps_per_epoch": steps(n)}, empty=False),
    Kind("generator", generator, empty=False, once=True),
    Kind("generator, no targets", lambda n: ((x, None) for x, _ in generator(n)), empty=False, once=True),
    Kind(
        "generator of SciPy sparse",
        lambda n: ((scipy_sparse(n[i : i + BATCH]),) for i in range(0, len(n), BATCH)),
        needs="scipy",
        empty=False,
        once=True,
        order=backwards_in_batches,
    ),
    Kind("torch DataLoader", torch_loader, needs="torch", empty=False),
]
KINDS = {kind.name: kind for kind in [*ARRAYS, *OTHERS]}


def parametrised(kinds: Any) -> Any:
    """`pytest.mark.parametrize` over kinds, those skipped whose package isn't installed."""
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(
                kind,
                id=kind.name,
                marks=pytest.mark.skipif(
                    bool(kind.needs) and importlib.util.find_spec(kind.needs) is None, reason=f"{kind.needs} isn't installed"
                ),
            )
            for kind in kinds
        ],
    )
