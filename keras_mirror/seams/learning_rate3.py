"""The seam of a warmup (Keras 3.10 and 3.15): inside its update an optimizer's rate is scaled, everywhere else it isn't.

Keras reads the rate while the step is traced, so a callback that assigns it acts once per execution at best, and whoever
reads it, multiplies it and assigns it (ReduceLROnPlateau) would multiply the factor into the base. So the factor is put into
the graph, below the user's class, by functions on the optimizer's instance: class, config, state and file stay the user's.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from keras_mirror.seams import keras3
from keras_mirror.seams.attachment import ATTRIBUTE, Attachment, attach, attached, optimizers_of, release

__all__ = [
    "ATTRIBUTE",
    "Attachment",
    "ScaledRate",
    "attach",
    "attached",
    "base_rate_at",
    "is_scalable",
    "optimizers_of",
    "release",
    "velocities",
]

_here = threading.local()


class ScaledRate:
    """One optimizer whose rate is multiplied by a factor of the update's number, in the graph.

    Put on the instance are `apply` and `_backend_apply_gradients`, which say that an update runs in this thread (the second
    also where gradient accumulation updates in a thread of its own); `_backend_update_step`, which Keras calls for real
    updates only, not for an accumulated or a skipped batch; and `_get_current_learning_rate`, behind `learning_rate`.

    Args:
        optimizer: an optimizer of the user's, with a rate of its own.
        factor: update number t (a float64 scalar, from 0) to factor, both tensors.
        updates: from this update on the factor no longer changes.
        correct_momentum: multiply velocities that contain the rate by factor(t) / factor(t - 1) before update t.
    """

    def __init__(self, optimizer: Any, factor: Callable[[Any], Any], updates: int, correct_momentum: bool) -> None:
        self.optimizer = optimizer
        self._factor = factor
        self._updates = updates
        self._correct_momentum = correct_momentum
        self._updating = 0
        self._lock = threading.Lock()
        self._before: dict[str, Any] = {}
        self._original: dict[str, Callable[..., Any]] = {}
        with tf.init_scope(), optimizer._distribution_strategy.scope():
            self._used = tf.Variable(
                math.nan, trainable=False, dtype=tf.float64, aggregation=tf.VariableAggregation.NONE, name="effective_rate"
            )

    def attach(self) -> None:
        """Puts the functions on the optimizer, past its tracking of attributes."""
        own = {
            "apply": self._apply,
            "_backend_apply_gradients": self._apply_gradients,
            "_backend_update_step": self._update_step,
            "_get_current_learning_rate": self._current_rate,
        }
        self._original = {name: getattr(self.optimizer, name) for name in own}
        self._before = {name: vars(self.optimizer)[name] for name in own if name in vars(self.optimizer)}
        vars(self.optimizer).update(own)

    def detach(self) -> None:
        """Leaves the optimizer as it was."""
        for name in self._original:
            vars(self.optimizer).pop(name, None)
        vars(self.optimizer).update(self._before)

    @property
    def updates_done(self) -> int:
        """How many updates the optimizer has made: accumulated batches and skipped ones don't count."""
        return int(tf.convert_to_tensor(self.optimizer.iterations).numpy())

    @property
    def last(self) -> float:
        """The rate that the last update used; NaN before the first. Waits for the device."""
        return float(self._used.numpy())

    def restore_last(self, rate: float) -> None:
        """Goes on with the rate that a run's last update used."""
        self._used.assign(rate)

    # -- what stands on the optimizer

    @tf.autograph.experimental.do_not_convert
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with self._inside():
            return self._original["apply"](*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def _apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        with self._inside():
            return self._original["_backend_apply_gradients"](*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def _update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
        self._used.assign(tf.cast(learning_rate, tf.float64))
        if self._correct_momentum:
            self._scale_velocities()
        return self._original["_backend_update_step"](grads, trainable_variables, learning_rate)

    @tf.autograph.experimental.do_not_convert
    def _current_rate(self) -> Any:
        base = self._original["_get_current_learning_rate"]()
        if not self._is_inside():
            return base
        base = keras.ops.convert_to_tensor(base)
        return tf.cast(tf.cast(base, tf.float64) * self._factor(self._update()), base.dtype)

    def _update(self) -> Any:
        return tf.cast(keras.ops.convert_to_tensor(self.optimizer.iterations), tf.float64)

    def _scale_velocities(self) -> None:
        """Writes are local to a replica, so that they may stand in its cond."""
        slots = velocities(self.optimizer)
        if not slots:
            return
        update = self._update()

        def scale() -> Any:
            change = self._factor(update) / self._factor(update - 1)
            for slot in slots:
                slot.assign(slot * tf.cast(change, slot.dtype))
            return tf.constant(0)

        tf.cond(tf.logical_and(update > 0, update < self._updates), scale, lambda: tf.constant(0))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before = getattr(_here, "optimizer", None)
        _here.optimizer = self.optimizer
        with self._lock:
            self._updating += 1
        try:
            yield
        finally:
            _here.optimizer = before
            with self._lock:
                self._updating -= 1

    def _is_inside(self) -> bool:
        """Whether an update of this optimizer runs in this thread, or across replicas on behalf of this thread.

        A plain MirroredStrategy runs Keras's weight decay in a merge_call: in another thread, in which the replicas' threads
        wait inside their updates.
        """
        if getattr(_here, "optimizer", None) is self.optimizer:
            return True
        return self._updating > 0 and tf.distribute.in_cross_replica_context()


def velocities(optimizer: Any) -> list[Any]:
    """The optimizer's velocities that contain the rate: of Keras's optimizers, those of SGD and RMSprop with momentum."""
    if isinstance(optimizer, keras.optimizers.SGD):
        slots = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        slots = getattr(optimizer, "_momentums", [])
    else:
        slots = []
    return [slot for slot in slots if slot is not None]


def is_scalable(optimizer: Any) -> bool:
    """Whether `learning_rate` is Keras's own property, so that the rate it hands to an update can be scaled."""
    return type(optimizer).learning_rate is base_optimizer.BaseOptimizer.learning_rate


def base_rate_at(optimizer: Any, update: int) -> float:
    """The user's own rate at update `update`: a schedule's clock counts batches, accumulated ones too."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        steps = keras3.accumulation_steps(optimizer)
        return float(rate(update * steps + steps - 1))
    return float(keras.ops.convert_to_tensor(optimizer.learning_rate).numpy())
