"""Seams into TensorFlow that every Keras generation shares."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values

from keras_mirror.seams import gate


def install() -> None:
    """Replaces what a step needs of TensorFlow's own.

    `tf.GradientTape.gradient` (public, but replaced): inside a step it is seeded with the replica's weight and summed.
    """
    gate.gated(tf.GradientTape, "gradient", "gradient")
    _tell_variables_apart()


def _tell_variables_apart() -> None:
    """Has a tf.function inside a step tell a distributed variable that it is given from another of the same shape and type.

    Its trace holds the variables themselves, yet TensorFlow 2.15 to 2.21 calls two of them the same argument if shape and type
    are equal, so that a call with the second one reads and writes the first.
    """
    kind = values.DistributedVariableTraceType
    original = kind.__eq__
    if hasattr(original, "_keras_mirror_original"):
        return

    @functools.wraps(original)
    def same(self: Any, other: Any) -> bool:
        found = bool(original(self, other))
        return found and (gate.current() is None or self.distributed_variable is other.distributed_variable)

    same._keras_mirror_original = original  # type: ignore[attr-defined]
    kind.__eq__ = same


def local_value(variable: Any, index: int) -> tf.Variable:
    """The component of a distributed variable that lives on this process's replica `index`.

    An optimizer's `update_step` gets a plain `tf.Variable` on one device; so it does here.
    """
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable.values[index]
    return variable


def components(variable: Any) -> tuple[tf.Variable, ...]:
    """All components of a variable in this process, in replica order."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return tuple(variable.values)
    return (variable,)


def is_distributed(variable: Any) -> bool:
    """Whether the variable has a component on each replica."""
    return isinstance(variable, tf.distribute.DistributedValues)


def is_mirrored(variable: Any) -> bool:
    """Whether the variable holds the same value on each replica (a metric's holds a part on each)."""
    return is_distributed(variable) and variable.synchronization != tf.VariableSynchronization.ON_READ


def owner_of(variable: Any) -> tf.distribute.Strategy | None:
    """The strategy under which a distributed variable was made; None for a plain one."""
    return getattr(variable, "_distribute_strategy", None) if is_distributed(variable) else None


def make_local(variable: Any) -> None:
    """Lets a replica write its own copy of a mirrored variable without asking the others.

    With aggregation NONE, `values._on_write_update_replica` updates the replica's component. With any other, the write is
    a merge_call, which can't stand in a `tf.cond`. TensorFlow 2.18 to 2.21: `DistributedVariable._aggregation`.
    """
    if is_distributed(variable) and variable.aggregation != tf.VariableAggregation.NONE:
        if not hasattr(variable, "_aggregation"):
            raise RuntimeError(
                "keras_mirror: DistributedVariable._aggregation is gone from the installed TensorFlow.\n"
                "Install a TensorFlow from the table of supported stacks."
            )
        variable._aggregation = tf.VariableAggregation.NONE


def is_mirrored_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Synchronous data parallelism with a copy of each variable per replica: Mirrored and MultiWorkerMirrored."""
    return isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy))


def local_replica_count(strategy: tf.distribute.Strategy) -> int:
    """How many of the strategy's replicas live in this process."""
    return len(strategy.extended.worker_devices)


def devices_started() -> bool:
    """Whether TensorFlow has already fixed its devices, after which simulated replicas can't be added.

    TensorFlow 2.18 to 2.21: `context.context()._context_handle` is set on first use.
    """
    from tensorflow.python.eager import context

    return context.context()._context_handle is not None
