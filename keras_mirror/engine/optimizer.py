"""Reduce first, then the optimizer's own update, on each replica's own copy of the variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror.seams import keras3

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
    of_variable = [keras3.is_variable(source) for source in flat_sources]
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
    per_row = len(target.shape) > 0 and target.shape[0] is None
    dtype = target.dtype
    weight = step.has_examples(dtype) if per_row or step.sums else step.weight(dtype)
    return tf.ones_like(target) * weight if given is None else given * weight


def apply(step: Step, original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """`Optimizer.apply` inside a step: the optimizer's own code, with no communication left in it."""
    if step.applying:
        return original(optimizer, grads, trainable_variables)
    step.applying = True
    try:
        return original(optimizer, grads, trainable_variables)
    finally:
        step.applying = False
