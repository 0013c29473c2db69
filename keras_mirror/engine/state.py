"""What may differ between replicas, and how it is brought together before anyone reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror.seams import generation
from keras_mirror.seams import tensorflow as tf_seams

if TYPE_CHECKING:
    from keras_mirror.engine.step import Step

# Spreads the replicas' seeds over the 32 bits (the golden ratio's fraction): replica 0 draws as plain Keras does.
_SEED_STRIDE = 0x9E3779B1


def next_seed(step: Step, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A replica's own seed from a state that is the same on every replica, so nothing more has to be saved."""
    seed = original(*args, **kwargs)
    if step.replica == 0:
        return seed
    offset = step.replica * _SEED_STRIDE % 2**32
    if seed.dtype.size == 4 and offset >= 2**31:
        offset -= 2**32
    return seed + tf.constant([offset, 0], seed.dtype)


def metric_result(step: Step, original: Callable[..., Any], metric: Any) -> Any:
    """Notes which log value is which metric's result: it is read again, from all replicas' state, after the last step."""
    result = original(metric)
    parts = result.items() if isinstance(result, dict) else [(None, result)]
    for key, value in parts:
        step.results[id(value)] = (metric, key, value)
    return result


class MetricsBefore:
    """The metrics' state before a step, put back afterwards on a replica that had no example."""

    def __init__(self, step: Step, variables: list[Any]) -> None:
        self._step = step
        self._variables = [] if step.alone else [_local(step, v) for v in variables]
        self._values = [v.read_value() for v in self._variables]

    def restore_if_empty(self) -> None:
        """Undoes the step's updates where the replica computed on a copied row."""
        if not self._variables:
            return

        def put_back() -> tf.Tensor:
            for variable, value in zip(self._variables, self._values, strict=True):
                variable.assign(value)
            return tf.constant(0)

        tf.cond(self._step.has_examples(), lambda: tf.constant(0), put_back)


def _local(step: Step, variable: Any) -> tf.Variable:
    return tf_seams.local_value(generation.raw_variable(variable), step.local_index)


def combine(step: Step, variables: list[Any]) -> None:
    """Brings variables that the forward pass wrote (BatchNormalization's moving statistics) back into agreement.

    A floating-point variable becomes the mean over the replicas weighted by their examples; any other takes replica 0's
    value, since replica 0 always has an example.
    """
    if step.alone or not variables:
        return
    local = [_local(step, v) for v in variables]
    shares = []
    for variable in local:
        value = variable.read_value()
        if variable.dtype.is_floating:
            shares.append(tf.where(step.has_examples(), value * step.weight(value.dtype), tf.zeros_like(value)))
        else:
            number = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
            shares.append(number if step.replica == 0 else tf.zeros_like(number))
    for variable, value in zip(local, step.all_reduce(shares, "a layer's state was combined"), strict=True):
        variable.assign(tf.cast(value, variable.dtype))


class FiniteState:
    """The floating-point state of layers before a step, put back where the step made any of it inf or NaN.

    Under loss scaling an overflow is expected now and then; the weights skip it, and so do BatchNormalization's statistics.
    Keras's take it up, and stay inf or NaN for good.
    """

    def __init__(self, step: Step, variables: list[Any]) -> None:
        self._variables = {id(v): _local(step, v) for v in variables}
        self._variables = {key: v for key, v in self._variables.items() if v.dtype.is_floating}
        self._values = {key: v.read_value() for key, v in self._variables.items()}

    def restore_if_not_finite(self, written: list[Any]) -> None:
        """Puts all of it back, whichever of it isn't finite any more; what wasn't finite before doesn't count."""
        keys = [id(v) for v in written if id(v) in self._variables]
        if not keys:
            return
        old = [self._values[key] for key in keys]
        new = [self._variables[key].read_value() for key in keys]
        lost = [tf.reduce_any(tf.math.is_finite(a) & tf.logical_not(tf.math.is_finite(b))) for a, b in zip(old, new, strict=True)]

        def put_back() -> tf.Tensor:
            for key, value in zip(keys, old, strict=True):
                self._variables[key].assign(value)
            return tf.constant(0)

        tf.cond(tf.reduce_any(tf.stack(lost)), put_back, lambda: tf.constant(0))


def moments(step: Step, original: Callable[..., Any], x: Any, axes: Any, keepdims: bool, weight: Any = None) -> Any:
    """Synchronised moments over the global batch, E(x^2) - E(x)^2 as in Keras, in one reduction.

    The copied row of a replica without examples is left out of sums and count, and so is what a `weight` of 0 masks.
    """
    if step.alone or step.nested:
        return original(x, axes, keepdims)
    ones = tf.ones_like(x) if weight is None else tf.broadcast_to(weight, tf.shape(x))
    x = x if weight is None else x * weight
    sums = [
        tf.reduce_sum(x, axis=axes, keepdims=True),
        tf.reduce_sum(tf.square(x), axis=axes, keepdims=True),
        tf.reduce_sum(ones, axis=axes, keepdims=True),
    ]
    sums = [tf.where(step.has_examples(), s, tf.zeros_like(s)) for s in sums]
    total, squares, count = step.all_reduce(sums, "BatchNormalization was synchronised")
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def masked_moments(step: Step, original: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any:
    """BatchNormalization's moments. With a mask Keras forgets `synchronized`; here it counts."""
    if step.alone or mask is None or not layer.synchronized:
        return original(layer, inputs, mask)
    axes = [axis for axis in range(len(inputs.shape)) if axis != layer.axis % len(inputs.shape)]
    valid = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(inputs)) & step.has_examples()
    weight = tf.cast(valid, inputs.dtype)
    total, count = step.all_reduce(
        [tf.reduce_sum(tf.where(valid, inputs, 0), axes), tf.reduce_sum(weight, axes)],
        "BatchNormalization was synchronised",
    )
    count = count + generation.epsilon()
    mean = total / count
    shape = [-1 if axis == layer.axis % len(inputs.shape) else 1 for axis in range(len(inputs.shape))]
    centred = tf.where(valid, inputs - tf.reshape(mean, shape), 0)
    (squares,) = step.all_reduce([tf.reduce_sum(tf.square(centred), axes)], "BatchNormalization was synchronised")
    return mean, squares / count


def settle(strategy: tf.distribute.Strategy, accumulators: list[Any]) -> None:
    """Gives replica 0 the sum of each accumulator over the replicas, and the others zero.

    The sum is what one device holds, and what goes into a file; training goes on from it as if nothing had happened.
    """
    _on_first(
        strategy,
        accumulators,
        lambda context, variables: context.all_reduce(tf.distribute.ReduceOp.SUM, [tf.identity(v) for v in variables]),
    )


def keep_first(strategy: tf.distribute.Strategy, accumulators: list[Any]) -> None:
    """Leaves each accumulator as it is on replica 0, and makes it zero on the others."""
    _on_first(strategy, accumulators, lambda context, variables: [tf.identity(v) for v in variables])


def _on_first(
    strategy: tf.distribute.Strategy, accumulators: list[Any], values_of: Callable[[Any, list[Any]], list[Any]]
) -> None:
    variables = [generation.raw_variable(v) for v in accumulators]
    if not variables:
        return

    @tf.autograph.experimental.do_not_convert
    def replica() -> None:
        context = tf.distribute.get_replica_context()
        first = int(tf.get_static_value(context.replica_id_in_sync_group)) == 0
        for variable, value in zip(variables, values_of(context, variables), strict=True):
            variable.assign(value if first else tf.zeros_like(value))

    tf.function(lambda: strategy.run(replica), autograph=False)()
