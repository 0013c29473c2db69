"""Splits a global batch into one share per replica, and feeds arrays in an order of our own."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mirror.engine import in_place
from keras_mirror.seams import data_seams, generation
from keras_mirror.seams.stack import keras


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
    given = keras.tree.flatten(generation.unpack(batch)[0] if isinstance(batch, tuple) else batch)
    for leaf, want in zip(given, generation.model_inputs(model), strict=False):
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


@dataclasses.dataclass(frozen=True)
class Given:
    """A batch that the user distributed: what each replica of this process was given is its own."""

    parts: list[Any]


def local_parts(distributed: Any, strategy: tf.distribute.Strategy) -> list[Any]:
    """Each local replica's part of a batch that the user distributed."""
    return [
        keras.tree.map_structure(lambda v, i=i: v.values[i] if isinstance(v, tf.distribute.DistributedValues) else v, distributed)
        for i in range(len(strategy.extended.worker_devices))
    ]


def example_count(batch: Any, strategy: tf.distribute.Strategy) -> int:
    """How many examples a batch has, outside a graph; of one that the user distributed, those of this process."""
    batch = without_optionals(batch)
    parts = local_parts(batch, strategy) if is_distributed_batch(batch) else [batch]
    return sum(int(rows(batch_leaves(part)[0])) for part in parts)


def shares_of(local: list[Any]) -> tuple[list[Any], list[Share]]:
    """The shares' data and their `Share`s where each replica's part is given."""
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

    def __init__(self, examples: int, batch_size: int, shuffle: Any, seed: int, first_epoch: int = 0) -> None:
        self._examples, self._batch_size, self._shuffle = examples, batch_size, shuffle
        self.seed, self._epoch, self._first_epoch = seed, first_epoch, first_epoch

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
        """Which pass (from 0) the next batch belongs to, after `drawn` batches since the data was opened."""
        return self._epoch - self._first_epoch - (1 if drawn else 0)

    def go_to(self, seed: int, passes: int) -> None:
        """Has `next` give the order of pass `passes` (from 0) of a run with that seed."""
        self.seed, self._epoch = seed, self._first_epoch + passes


def array_dataset(
    parts: Any, order: ArrayOrder | None, examples: int, batch_size: int, empty_batch: bool = False, first: int = 0
) -> tf.data.Dataset:
    """A dataset of batches taken from arrays; length known, batch dimension dynamic.

    Arrays of numbers of `in_place.BIG_ARRAY` bytes or more are read where they are; of smaller ones TensorFlow gets a copy, from
    which it gathers without Python. Where Keras casts to floatx, a big array is cast batch by batch.

    Args:
        parts: a nest of arrays of any kind that Keras takes; None stays None.
        order: draws the order of each pass; None: the order in which the rows are.
        examples: the number of rows of each array.
        batch_size: the number of rows of each batch but the last.
        empty_batch: without any example, give one batch without rows rather than none.
        first: the first batch of each pass, from 0; those before it are left out.
    """
    parts = keras.tree.lists_to_tuples(parts)
    leaves = keras.tree.flatten(parts)
    big = [i for i, leaf in enumerate(leaves) if in_place.is_big(leaf)]
    small = [i for i, leaf in enumerate(leaves) if leaf is not None and i not in big]
    read = in_place.Reader([leaves[i] for i in big])

    def batch(chosen: tuple[Any, ...], tensors: tuple[Any, ...] = ()) -> Any:
        found: list[Any] = [None] * len(leaves)
        for i, tensor in zip(small, tensors, strict=True):
            found[i] = _gathered(tensor, *chosen)
        for i, value in zip(big, read(*chosen), strict=True):
            found[i] = value
        return keras.tree.pack_sequence_as(parts, found)

    chosen = _passes(order, examples, batch_size, empty_batch, first)
    if small:
        held = tf.data.Dataset.from_tensors(tuple(data_seams.to_gather_from(leaves[i]) for i in small)).repeat()
        dataset = tf.data.Dataset.zip((chosen, held)).map(batch, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        dataset = chosen.map(lambda *rows: batch(rows), num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    length = -(-examples // batch_size) - first or int(empty_batch)
    dataset = dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def _passes(order: ArrayOrder | None, examples: int, batch_size: int, empty_batch: bool, first: int) -> tf.data.Dataset:
    """The rows of each batch of a pass: (indices,), or (start, stop) where they are consecutive."""
    starts = tf.data.Dataset.range(first * batch_size, examples, batch_size)
    if empty_batch and not examples:
        starts = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))

    def stop(start: Any) -> Any:
        return tf.minimum(start + batch_size, examples)

    if order is None:
        return starts.map(lambda start: (start, stop(start)))
    whole = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.ensure_shape(tf.numpy_function(order.next, [], tf.int64, stateful=True), [examples])
    )
    return whole.flat_map(lambda indices: starts.map(lambda start: (indices[start : stop(start)],)))


def _gathered(value: Any, first: Any, stop: Any = None) -> Any:
    """Rows of what `data_seams.to_gather_from` returned: those at the indices `first`, or from `first` to `stop`."""
    if data_seams.is_sparse_wrapper(value):
        return data_seams.gather_sparse(value, first if stop is None else tf.range(first, stop))
    return tf.gather(value, first, axis=0) if stop is None else value[first:stop]


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


def draw_seed() -> int:
    """A seed from Python's generator (which `keras.utils.set_random_seed` sets), for one call of fit."""
    return random.randrange(2**31)
