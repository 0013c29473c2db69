"""Splits a global batch into one share per replica, and feeds arrays in an order of our own."""

from __future__ import annotations

import dataclasses
import inspect
import random
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_mirror.seams import keras3

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine


@dataclasses.dataclass(frozen=True)
class Share:
    """A replica's rows of a global batch.

    Attributes:
        count: n, how many rows are the replica's own; an int32 scalar. With 0 it computes on a copy of one row.
        total: N, the rows of the global batch.
        first: index of its first row in the global batch.
    """

    count: Any
    total: Any
    first: Any


# What Keras takes where arrays are given without a batch size.
_KERAS_BATCH_SIZE = 32
_UNBATCHED = (
    "MirroredFitter: found a batch without any tensor of rank 1 or more, expected (inputs, targets, ...) whose"
    " first dimension counts examples.\nBatch the dataset: dataset.batch(global_batch_size)."
)


def refuse_unbatched(model: keras.Model, batch: Any) -> None:
    """Refuses what a dataset yields that was never batched.

    Args:
        model: a model; where its inputs' shapes are known, an example without a batch dimension is recognised.
        batch: a batch's tensors or their specs.

    Raises:
        ValueError: no tensor has a batch dimension, or the inputs have the shape of one example.
    """
    leaves = [v for v in keras.tree.flatten(batch) if isinstance(v, (tf.TensorSpec, tf.Tensor)) and v.shape.rank is not None]
    if leaves and all(leaf.shape.rank == 0 for leaf in leaves):
        raise ValueError(_UNBATCHED)
    given = keras.tree.flatten(keras3.unpack(batch)[0] if isinstance(batch, tuple) else batch)
    for leaf, want in zip(given, keras3.model_inputs(model), strict=False):
        if isinstance(leaf, (tf.TensorSpec, tf.Tensor)) and leaf.shape.rank == len(want.shape) - 1:
            one = tuple(leaf.shape)
            if one == tuple(want.shape[1:]) and None not in one:
                raise ValueError(
                    f"MirroredFitter: the data yields inputs of shape {one}, expected a batch of them: {tuple(want.shape)}.\n"
                    "Batch the dataset: dataset.batch(global_batch_size)."
                )


def without_optionals(batch: Any) -> Any:
    """Keras feeds a missing target as an empty Optional; the step wants None."""
    return keras.tree.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, batch)


def rows(value: Any) -> Any:
    """The number of rows of a dense, ragged or sparse tensor, as an int32 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0]


def batch_leaves(batch: Any) -> list[Any]:
    """The leaves that have a batch dimension, inputs first."""
    leaves = [v for v in keras.tree.flatten(batch) if v is not None]
    return [v for v in leaves if v.shape.rank != 0]


def split(batch: Any, replicas: int) -> tuple[list[Any], list[Share]]:
    """Cuts a global batch into consecutive shares, sizes as even as they can be, the larger ones first.

    A share without a row of its own gets a copy of one row, so that everything computed from it is finite.

    Args:
        batch: a nest of tensors; a leaf of rank 0 goes to every replica, None stays None.
        replicas: the number of shares.

    Returns:
        The shares' data and their `Share`s, in replica order.

    Raises:
        ValueError: no leaf has a batch dimension.
        tf.errors.InvalidArgumentError: when it runs, if the leaves' numbers of rows differ.
    """
    leaves = batch_leaves(batch)
    if not leaves:
        raise ValueError(_UNBATCHED)
    known = [leaf.shape[0] for leaf in leaves if leaf.shape[0] is not None]
    if len(set(known)) > 1:
        raise ValueError(
            f"MirroredFitter: inputs, targets and weights differ in rows: found {', '.join(map(str, known))}, expected the same"
            " number in every one."
        )
    total = rows(leaves[0])
    checks = []
    if not tf.executing_eagerly():
        for leaf in leaves[1:]:
            checks.append(tf.debugging.assert_equal(rows(leaf), total, "inputs, targets and weights differ in rows"))
    with tf.control_dependencies(checks):
        total = tf.identity(total)
    if replicas == 1:
        return [batch], [Share(total, total, tf.constant(0))]
    each, extra = total // replicas, total % replicas
    parts, shares = [], []
    for i in range(replicas):
        count = each + tf.cast(i < extra, tf.int32)
        first = i * each + tf.minimum(i, extra)
        shares.append(Share(count, total, first))
        start = tf.minimum(first, total - 1)
        size = tf.maximum(count, 1)
        parts.append(keras.tree.map_structure(lambda v, a=start, n=size: _with_open_rows(cut(v, a, n)), batch))
    return parts, shares


def cut(value: Any, start: Any, size: Any) -> Any:
    """Rows `start` to `start + size` of a dense, ragged or sparse tensor; what has no batch dimension is left whole."""
    if value is None or value.shape.rank == 0:
        return value
    if isinstance(value, tf.SparseTensor):
        rank = value.shape.rank
        begin = tf.pad(tf.cast([start], tf.int64), [[0, rank - 1]])
        extent = tf.concat([tf.cast([size], tf.int64), value.dense_shape[1:]], 0)
        cut = tf.sparse.slice(value, begin, extent)
        return tf.SparseTensor(cut.indices, cut.values, tf.ensure_shape(cut.dense_shape, [rank]))
    return value[start : start + size]


def shares_of(distributed: Any, strategy: tf.distribute.Strategy) -> tuple[list[Any], list[Share]]:
    """Shares of a batch that the user distributed already: whatever each replica was given is its own."""
    local = [
        keras.tree.map_structure(lambda v, i=i: v.values[i] if isinstance(v, tf.distribute.DistributedValues) else v, distributed)
        for i in range(len(strategy.extended.worker_devices))
    ]
    counts = [rows(batch_leaves(part)[0]) for part in local]
    local = [keras.tree.map_structure(_at_least_one_row, part) for part in local]
    total = tf.add_n(counts)
    shares, first = [], tf.constant(0)
    for count in counts:
        shares.append(Share(count, total, first))
        first = first + count
    return local, shares


def _at_least_one_row(value: Any) -> Any:
    """A row of zeros for a share that the user's own distribution left without any."""
    if value is None or not isinstance(value, tf.Tensor) or value.shape.rank == 0 or value.dtype == tf.string:
        return value
    row = tf.zeros(tf.concat([[1], tf.shape(value)[1:]], 0), value.dtype)
    return tf.concat([value, row], 0)[: tf.maximum(tf.shape(value)[0], 1)]


def _with_open_rows(value: Any) -> Any:
    """Hides a share's static size while tracing: Keras would weigh a loss by it, and retrace for another."""
    if not isinstance(value, tf.Tensor) or tf.executing_eagerly() or value.shape.rank == 0 or value.shape[0] is None:
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])


def first_local(batch: Any) -> Any:
    """The first replica's part of a batch that the user distributed; any other batch as it is."""
    return keras.tree.map_structure(lambda v: v.values[0] if isinstance(v, tf.distribute.DistributedValues) else v, batch)


def is_distributed_batch(batch: Any) -> bool:
    """Whether any leaf holds one value per replica."""
    return any(isinstance(v, tf.distribute.DistributedValues) for v in keras.tree.flatten(batch))


class ArrayOrder:
    """The order of arrays: a permutation for each epoch, a function of (seed, epoch) alone.

    Plain Keras draws the order from an op that starts anew with each epoch, so after `keras.utils.set_random_seed` every
    epoch has the same order. Here each epoch has its own, and it is the same for any number of replicas.
    """

    def __init__(self, examples: int, batch_size: int, shuffle: Any, seed: int, first_epoch: int = 0, inputs: Any = None) -> None:
        self._examples, self._batch_size, self._shuffle = examples, batch_size, shuffle
        self.seed, self._epoch = seed, first_epoch
        self._first_epoch, self._inputs = first_epoch, inputs

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of epoch `epoch`, as row indices. `shuffle="batch"` keeps full batches together."""
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        if self._shuffle != "batch":
            return generator.permutation(self._examples)
        full = self._examples // self._batch_size * self._batch_size
        batches = np.arange(full).reshape(-1, self._batch_size)
        return np.concatenate([generator.permutation(batches).reshape(-1), np.arange(full, self._examples)])

    def next(self) -> np.ndarray:
        """The next epoch's order; called once each time the dataset is opened."""
        order = self.permutation(self._epoch)
        self._epoch += 1
        return order.astype(np.int64)

    def pass_of(self, drawn: int) -> int:
        """Which pass (from 0) the next batch belongs to, after `drawn` batches since the arrays were opened."""
        return self._epoch - self._first_epoch - (1 if drawn else 0)

    def go_to(self, seed: int, passes: int, drawn: int) -> Callable[[], tf.data.Dataset]:
        """Goes on where another run stood; nothing is read for it.

        Args:
            seed: that run's.
            passes: how many times it had gone through the arrays.
            drawn: how many batches it had taken of the pass after those.

        Returns:
            What makes the dataset of the rest of that pass; `next` goes on with the pass after it.
        """
        self.seed, self._epoch = seed, self._first_epoch + passes
        rows = self.next()[drawn * self._batch_size :]
        rest = types.SimpleNamespace(next=lambda: rows)
        return lambda: array_dataset(self._inputs, rest, len(rows), self._batch_size)


def array_dataset(inputs: Any, order: Any, examples: int, batch_size: int) -> tf.data.Dataset:
    """A dataset of batches gathered from arrays in the given order; length known, batch dimension dynamic."""
    indices = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.ensure_shape(tf.numpy_function(order.next, [], tf.int64, stateful=True), [examples])
    )
    batches = indices.flat_map(lambda all_rows: tf.data.Dataset.from_tensor_slices(all_rows).batch(batch_size))
    held = tf.data.Dataset.from_tensors(inputs).repeat()
    dataset = tf.data.Dataset.zip((batches, held)).map(
        lambda chosen, data: keras3.gather_rows(data, chosen), num_parallel_calls=tf.data.AUTOTUNE
    )
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    length = -(-examples // batch_size)
    dataset = dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. What doesn't fit the signature raises the TypeError that the call itself would."""
    signature = inspect.signature(function)
    try:
        found = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.update(found.pop(name, {}))
    return dict(found)


def per_replica(engine: Engine, arguments: dict[str, Any]) -> dict[str, Any]:
    """The call's batch sizes as global ones, where the fitter's count one replica's share; Keras's default of 32 too."""
    if engine.batch != "per_replica":
        return arguments
    arguments = dict(arguments)
    if arguments.get("batch_size") is None and keras3.holds_arrays(arguments) and not arguments.get("steps_per_epoch"):
        arguments["batch_size"] = _KERAS_BATCH_SIZE
    for name in ("batch_size", "validation_batch_size"):
        if arguments.get(name):
            arguments[name] *= engine.replicas
    return arguments


def prepare_fit(engine: Engine, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of fit, with arrays that are shuffled in an order of our own; everything else goes to Keras as it is."""
    arguments = per_replica(engine, arguments)
    if arguments.get("validation_split") and arguments.get("validation_data") is None:
        arrays = tuple(arguments.get(name) for name in ("x", "y", "sample_weight"))
        (x, y, weight), arguments["validation_data"] = keras3.train_validation_split(arrays, arguments.pop("validation_split"))
        arguments.update(x=x, y=y, sample_weight=weight)
    shuffle = arguments.get("shuffle", True)
    if not shuffle or keras3.is_data_adapter(arguments.get("x")):
        return arguments
    taken = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")
    given = {name: arguments[name] for name in taken if arguments.get(name) is not None}
    if not keras3.holds_arrays(given):
        return arguments
    adapter = keras3.data_adapter(**given)
    inputs, examples, batch_size = keras3.array_inputs(adapter)
    seed = draw_seed() if engine.seed is None else engine.seed
    order = ArrayOrder(examples, batch_size, shuffle, seed, first_epoch=arguments.get("initial_epoch") or 0, inputs=inputs)
    adapter.get_tf_dataset = lambda: array_dataset(inputs, order, examples, batch_size)
    engine.order = order
    for name in ("y", "sample_weight", "class_weight"):
        arguments.pop(name, None)
    return {**arguments, "x": adapter}


def draw_seed() -> int:
    """A seed from Python's generator (which `keras.utils.set_random_seed` sets), for one call of fit."""
    return random.randrange(2**31)
