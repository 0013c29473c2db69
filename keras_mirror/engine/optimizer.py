"""Reduce first, then the optimizer's own update, on each replica's own copy of the variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror.seams import gate, generation
from keras_mirror.seams import tensorflow as tf_seams

if TYPE_CHECKING:
    from keras_mirror.engine.step import Step


def gradient(
    step: Step,
    original: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """`GradientTape.gradient` inside a step: seeded with n/N, and summed over the replicas.

    Only gradients of variables are touched; a tape whose sources are tensors (a gradient penalty) is left alone.
    """
    flat_sources = tf.nest.flatten(sources)
    of_variable = [generation.is_variable(source) for source in flat_sources]
    if step.alone or not any(of_variable):
        return original(tape, target, sources, output_gradients, unconnected_gradients)
    given = [None] * len(tf.nest.flatten(target)) if output_gradients is None else tf.nest.flatten(output_gradients)
    seeds = [_seed(step, t, g) for t, g in zip(tf.nest.flatten(target), given, strict=True)]
    grads = original(tape, target, sources, seeds, unconnected_gradients)
    flat = tf.nest.flatten(grads)
    if step.engine.accumulates_locally and not step.own:
        return grads
    wanted = [i for i, (g, v) in enumerate(zip(flat, of_variable, strict=True)) if v and g is not None]
    reduced = step.all_reduce([flat[i] for i in wanted], "gradients were taken")
    for i, value in zip(wanted, reduced, strict=True):
        flat[i] = value
    return tf.nest.pack_sequence_as(sources, flat)


def _seed(step: Step, target: Any, given: Any) -> Any:
    """The weight of one target of a tape.

    A scalar is a mean over the share and counts n/N. A vector over the batch is summed by the tape, so each row counts
    once, and the copied row of a replica without examples not at all.
    """
    per_row = step.is_per_row(target)
    dtype = target.dtype
    weight = step.has_examples(dtype) if per_row or step.sums else step.weight(dtype)
    return tf.ones_like(target) * weight if given is None else given * weight


def apply(step: Step, original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """`Optimizer.apply` inside a step: the optimizer's own code, with no communication left in it."""
    if step.applying:
        return original(optimizer, grads, trainable_variables)
    if step.engine.accumulates_locally and not step.own and optimizer is step.engine.model.optimizer:
        return _accumulate(step, original, optimizer, list(grads), trainable_variables)
    return _alone(step, original, optimizer, grads, trainable_variables)


def _alone(step: Step, original: Callable[..., Any], *args: Any) -> Any:
    step.applying = True
    try:
        return original(*args)
    finally:
        step.applying = False


def _accumulate(step: Step, original: Callable[..., Any], optimizer: Any, grads: list[Any], variables: Any) -> None:
    """One batch of gradient accumulation: no communication until the accumulation is full.

    The condition is taken across replicas, since a reduction can't stand in one replica's cond. When it is full, Keras is
    handed the reduced sum and accumulators of zero, and does what it does on one device.
    """
    variables = list(variables)
    wanted = [i for i, g in enumerate(grads) if g is not None]
    held = generation.accumulators_of(optimizer, [variables[i] for i in wanted])
    scale = optimizer.loss_scale_factor or 1.0

    def per_replica(function: Callable[..., Any], strategy: Any, *args: Any) -> Any:
        @tf.autograph.experimental.do_not_convert
        def replica(*args: Any) -> Any:
            context = tf.distribute.get_replica_context()
            mine = step.siblings[int(tf.get_static_value(context.replica_id_in_sync_group))]
            with gate.entered(mine):
                return function(mine, *args)

        return strategy.extended.call_for_each_replica(replica, args=args)

    def take_total(mine: Step, *local: Any) -> list[Any]:
        totals = []
        for grad, accumulator in zip(local, held, strict=True):
            own = tf_seams.local_value(generation.raw_variable(accumulator), mine.local_index)
            totals.append(tf.convert_to_tensor(grad) + own * tf.cast(scale, own.dtype))
            own.assign(tf.zeros_like(own))
        return totals

    def update(mine: Step, *local: Any) -> None:
        full: list[Any] = [None] * len(grads)
        for i, grad in zip(wanted, local, strict=True):
            full[i] = grad
        _alone(mine, original, optimizer, full, variables)

    @tf.autograph.experimental.do_not_convert
    def merge(strategy: tf.distribute.Strategy, *values: Any) -> None:
        steps = generation.accumulation_steps(optimizer)
        is_full = tf.equal((tf.convert_to_tensor(generation.raw_iterations(optimizer)) + 1) % steps, 0)

        def when_full() -> tf.Tensor:
            totals = per_replica(take_total, strategy, *values)
            reduced = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(t, t) for t in totals])
            per_replica(update, strategy, *reduced)
            return tf.constant(0)

        def otherwise() -> tf.Tensor:
            per_replica(update, strategy, *values)
            return tf.constant(0)

        tf.cond(is_full, when_full, otherwise)

    tf.distribute.get_replica_context().merge_call(merge, args=[grads[i] for i in wanted])
