"""Sums and counts over the global batch: each loss becomes a mean over the replica's share, weighted n/N at the tape.

With n of N examples on a replica, the step counts its loss n/N. A mean over the share is then exact as it is. Everything
else is multiplied by what it lacks, so that the weighted mean over the replicas is the one-device value and gradient:

    sum                       N/n
    masked mean               (valid here / valid everywhere) N/n
    mean_with_sample_weight   (weight here / weight everywhere) N/n
    a function of the batch   evaluated on gathered outputs, gradient through the replica's own rows times N/n
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror.engine import checks, measure
from keras_mirror.seams import generation
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.step import Step


class _WholeBatch(Exception):
    """The loss returned a scalar: it is a function of the whole batch, to be evaluated on gathered outputs."""


def call(step: Step, original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """A Loss object's `__call__` inside a step."""
    y_true = checks.labels(step, loss, y_true, y_pred)
    if step.alone or step.whole_batch or generation.is_compile_loss(loss):
        return original(loss, y_true, y_pred, sample_weight)
    known = step.engine.whole_batch_losses
    if generation.looks_at_other_rows(loss):
        known[id(loss)] = loss
    elif step.engine.sums_added is None and not generation.treats_rows_alone(loss):
        raise measure.Unmeasured
    if id(loss) not in known:
        try:
            return original(loss, y_true, y_pred, sample_weight)
        except _WholeBatch:
            known[id(loss)] = loss
    step.whole_batch = True
    try:
        value = original(loss, *_gathered(step, y_true, y_pred, sample_weight))
    finally:
        step.whole_batch = False
    return _with_gradient(value, step.inverse_weight(value.dtype))


def reduce(
    step: Step,
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """`reduce_weighted_values` inside a step: Keras's own value, times what the share lacks."""
    if step.alone or step.whole_batch:
        return original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if len(values.shape) == 0:
        raise _WholeBatch
    value = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if reduction in (None, "none"):
        return value
    if reduction == "sum":
        value = value * step.inverse_weight(value.dtype)
    elif reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weight = generation.merged_weight(values, sample_weight, mask, reduction, dtype)
        value = value * _divided_globally(step, tf.reduce_sum(tf.cast(weight, value.dtype)))
    elif mask is not None:
        valid = tf.reduce_sum(tf.cast(mask, value.dtype))
        value = value * _divided_globally(step, valid, generation.masked_mean_epsilon())
    if step.own and not step.nested:
        value = _with_value(value, _mean_over_replicas(step, value))
    return value


def _divided_globally(step: Step, divisor: Any, epsilon: float = 0.0) -> Any:
    """Replaces a local divisor by the global one: (divisor here / divisor everywhere) N/n, each with Keras's epsilon."""
    here = tf.where(step.has_examples(), divisor, tf.zeros_like(divisor))
    (everywhere,) = step.all_reduce([here], "a masked or weighted mean was taken")
    small = tf.cast(epsilon, divisor.dtype)
    return tf.stop_gradient(tf.math.divide_no_nan(here + small, everywhere + small)) * step.inverse_weight(divisor.dtype)


def _mean_over_replicas(step: Step, value: Any) -> Any:
    weighted = tf.where(step.has_examples(), value * step.weight(value.dtype), tf.zeros_like(value))
    return step.all_reduce([tf.stop_gradient(weighted)], "a loss was computed")[0]


def _with_value(gradient_of: Any, value: Any) -> Any:
    """`value`, with the gradient of `gradient_of`."""
    return gradient_of + tf.stop_gradient(value - gradient_of)


def _with_gradient(value: Any, factor: Any) -> Any:
    """`value`, with its gradient times `factor`."""
    return _with_value(value * factor, value)


def additional(step: Step, original: Callable[..., Any], model: Any, loss: Any) -> Any:
    """A loss from `add_loss`, an activity regulariser or a weight's regulariser inside a step.

    A scalar counts as a mean over the share. One with a batch dimension is summed by Keras, hence times N/n.
    """
    value = original(model, loss)
    if step.alone or not step.is_per_row(loss):
        return value
    return value * step.inverse_weight(value.dtype)


def added(step: Step, original: Callable[..., Any], layer: Any, loss: Any) -> None:
    """What a layer's `add_loss` adds inside a step: a sum over the batch is turned into a mean over the share.

    Which of a layer's losses are sums was measured beforehand, see `engine.measure`.
    """
    if not step.alone and step.engine.sums_added is None:
        raise measure.Unmeasured
    held = step.losses.setdefault(id(layer), [])
    for value in keras.tree.flatten(loss):
        is_sum = (generation.layer_key(layer), len(held)) in (step.engine.sums_added or ())
        held.append(value if step.alone or not is_sum else value * step.inverse_weight(value.dtype))
        if generation.takes_added_losses_itself():
            original(layer, held[-1])


def metric_update(
    step: Step, original: Callable[..., Any], metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """`MeanMetricWrapper.update_state` inside a step: a metric function that returns a scalar sees the global batch."""
    if step.alone or step.nested:
        return original(metric, y_true, y_pred, sample_weight)
    if id(metric) not in step.engine.whole_batch_losses:
        step.scalar_means_whole_batch = True
        try:
            return original(metric, y_true, y_pred, sample_weight)
        except _WholeBatch:
            step.engine.whole_batch_losses[id(metric)] = metric
        finally:
            step.scalar_means_whole_batch = False
    y_true, y_pred, sample_weight = _gathered(step, y_true, y_pred, sample_weight)
    if sample_weight is not None:
        # Every replica adds the whole batch's value; weighted n/N they add up to it once.
        sample_weight = keras.ops.cast(sample_weight, metric.dtype) * step.weight(metric.dtype)
    return original(metric, y_true, y_pred, sample_weight)


def metric_values(step: Step, original: Callable[..., Any], values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any) -> Any:
    """`reduce_to_samplewise_values` inside a step.

    A scalar without a weight (a custom step's `tracker.update_state(loss)`) counts once per step on one device. Weighted
    n/N on each replica, total and count both come out as on one device.
    """
    return original(values, metric_weight(step, values, sample_weight, dtype), reduce_fn, dtype)


def metric_weight(step: Step, values: Any, sample_weight: Any, dtype: Any = None) -> Any:
    """The weight that the values given to a metric have to get; `sample_weight` itself where nothing has to change."""
    if step.alone:
        return sample_weight
    if len(values.shape) > 0:
        # Keras 2's container weighs a vector of losses by the rows of the share; on one device by those of the batch.
        return step.share.total if step.contained and sample_weight is not None else sample_weight
    if step.scalar_means_whole_batch:
        raise _WholeBatch
    if sample_weight is not None:
        return sample_weight
    weight_dtype = dtype or keras.config.floatx()
    return step.has_examples(weight_dtype) if step.sums else step.weight(weight_dtype)


# -- the whole batch on every replica ----------------------------------------------------------------------------------


def _gathered(step: Step, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Targets, outputs and weights of the global batch; only the replica's own rows carry a gradient."""
    tensors = keras.tree.map_structure(
        lambda v: None if v is None else keras.ops.convert_to_tensor(v), (y_true, y_pred, sample_weight)
    )
    flat = [v for v in keras.tree.flatten(tensors) if v is not None]
    masks = {i: generation.mask_of(v) for i, v in enumerate(flat)}
    values = flat + [m for m in masks.values() if m is not None]
    gathered = gather(step, values)
    for i, mask in ((i, m) for i, m in masks.items() if m is not None):
        where = next(k for k, v in enumerate(values) if v is mask)
        generation.set_mask(gathered[i], gathered[where])
    supply = iter(gathered)
    out = keras.tree.map_structure(lambda v: None if v is None else next(supply), tensors)
    return out[0], out[1], out[2]


def gather(step: Step, values: list[Any]) -> list[Any]:
    """Concatenates each value's rows over the replicas; the rows of a replica without examples are left out.

    Args:
        step: the replica's step.
        values: tensors whose first dimension is the share's size, or a fixed multiple of it.

    Returns:
        The global tensors. The gradient flows through the replica's own rows alone.
    """
    if step.nested:
        raise RuntimeError(
            "MirroredFitter: a loss that is a function of the whole batch was computed inside a tf.function, tf.cond or"
            " loop within the step, where replicas can't communicate.\nMove that call to the top level of the step."
        )
    context = tf.distribute.get_replica_context()
    out = []
    for value in values:
        if value.shape.rank == 0:
            out.append(value)
            continue
        value = value[: tf.where(step.share.count > 0, tf.shape(value)[0], 0)]
        number = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
        everywhere = tf.cast(tf.stop_gradient(context.all_gather(tf.stop_gradient(number), axis=0)), value.dtype)
        if value.dtype.is_floating:
            per_example = tf.shape(value)[0] // tf.maximum(step.share.count, 1)
            first = step.share.first * per_example
            last = first + tf.shape(value)[0]
            everywhere = tf.concat([everywhere[:first], value, everywhere[last:]], 0)
        everywhere.set_shape([None, *value.shape[1:]])
        out.append(everywhere)
    return out
