"""The seam of a warmup on Keras 2 (2.15, tf-keras 2.21): inside its update an optimizer's rate is scaled, elsewhere it isn't.

The current family reads the property `learning_rate`, the legacy family (and tensorflow-addons) `_decayed_lr`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mirror.seams import gate, keras2, stack
from keras_mirror.seams import tensorflow as tf_seams
from keras_mirror.seams.attachment import ATTRIBUTE, Attachment, attach, attached, optimizers_of, release
from keras_mirror.seams.stack import keras

__all__ = [
    "ATTRIBUTE",
    "Attachment",
    "ScaledRate",
    "attach",
    "attached",
    "base_rate_at",
    "has_rate",
    "is_scalable",
    "optimizers_of",
    "release",
]

_optimizer = stack.source("optimizers.optimizer")
_legacy = stack.source("optimizers.legacy.optimizer_v2")

# Keras's own property, before `_make_scalable` puts one in its place.
_learning_rate = vars(_optimizer._BaseOptimizer)["learning_rate"]


def _make_scalable() -> None:
    """Has Keras's property `learning_rate` ask the optimizer's ScaledRate, where one is attached and an update runs."""
    if vars(_optimizer._BaseOptimizer)["learning_rate"] is not _learning_rate:
        return

    def rate(self: Any) -> Any:
        base = _learning_rate.fget(self)
        scaled = vars(self).get(ATTRIBUTE)
        return base if scaled is None or not keras2.is_updating() else scaled.scale(base)

    _optimizer._BaseOptimizer.learning_rate = property(rate, _learning_rate.fset, _learning_rate.fdel, _learning_rate.__doc__)


class ScaledRate:
    """One optimizer whose rate is multiplied by a factor of the update's number, in the graph.

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
        self._is_legacy = isinstance(optimizer, _legacy.OptimizerV2)
        strategy = tf_seams.owner_of(optimizer.iterations) or tf.distribute.get_strategy()
        with tf.init_scope(), strategy.scope() if not tf.distribute.has_strategy() else tf.name_scope("warmup"):
            self._used = tf.Variable(
                math.nan, trainable=False, dtype=tf.float64, aggregation=tf.VariableAggregation.NONE, name="effective_rate"
            )

    def attach(self) -> None:
        """Puts on the optimizer's instance what scales its rate."""
        keras2.install()
        _make_scalable()
        own: dict[str, Any] = {ATTRIBUTE: self}
        if self._is_legacy:
            self._original = self.optimizer._decayed_lr
            own["_decayed_lr"] = self._decayed_rate
        else:
            self._original = self.optimizer._compute_current_learning_rate
            own["_compute_current_learning_rate"] = self._begin_update
        vars(self.optimizer).update(own)

    def detach(self) -> None:
        """Leaves the optimizer as it was."""
        for name in (ATTRIBUTE, "_decayed_lr" if self._is_legacy else "_compute_current_learning_rate"):
            vars(self.optimizer).pop(name, None)

    @property
    def updates_done(self) -> int:
        """How many updates the optimizer has made; Keras 2 counts those that a LossScaleOptimizer skipped."""
        return int(tf.convert_to_tensor(self.optimizer.iterations).numpy())

    @property
    def last(self) -> float:
        """The rate that the last update used; NaN before the first. Waits for the device."""
        return float(tf_seams.components(self._used)[0].numpy())

    def restore_last(self, rate: float) -> None:
        """Goes on with the rate that a run's last update used."""
        for component in tf_seams.components(self._used):
            component.assign(rate)

    def scale(self, base: Any) -> Any:
        """A rate times the factor of the update that runs."""
        base = tf.convert_to_tensor(base)
        return tf.cast(tf.cast(base, tf.float64) * self._factor(self._update()), base.dtype)

    # -- what stands on the optimizer

    @tf.autograph.experimental.do_not_convert
    def _begin_update(self) -> None:
        self._original()
        self._used.assign(tf.cast(self.optimizer.learning_rate, tf.float64))
        if self._correct_momentum:
            self._scale_velocities(None)

    @tf.autograph.experimental.do_not_convert
    def _decayed_rate(self, var_dtype: Any) -> Any:
        base = self._original(var_dtype)
        if not keras2.is_updating():
            return base
        rate = self.scale(base)
        self._used.assign(tf.cast(rate, tf.float64))
        if self._correct_momentum and (gate.current() is not None or tf.distribute.get_strategy().num_replicas_in_sync == 1):
            # Under a plain strategy every replica asks for the rates of all devices.
            self._scale_velocities(var_dtype)
        return rate

    def _update(self) -> Any:
        return tf.cast(tf.convert_to_tensor(self.optimizer.iterations), tf.float64)

    def _scale_velocities(self, dtype: Any) -> None:
        update = self._update()
        changes = tf.logical_and(update > 0, update < self._updates)
        change = tf.where(changes, self._factor(update) / self._factor(tf.maximum(update - 1, 0)), 1.0)
        for slot in velocities(self.optimizer):
            if dtype is None or slot.dtype.base_dtype == dtype:
                slot.assign(slot * tf.cast(change, slot.dtype))


def velocities(optimizer: Any) -> list[Any]:
    """The optimizer's velocities that contain the rate: those of SGD and RMSprop with momentum, of both families."""
    if isinstance(optimizer, (keras.optimizers.legacy.SGD, keras.optimizers.legacy.RMSprop)):
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots]
    if isinstance(optimizer, keras.optimizers.SGD):
        return list(getattr(optimizer, "momentums", []) if optimizer.momentum else [])
    return list(getattr(optimizer, "_momentums", []) if isinstance(optimizer, keras.optimizers.RMSprop) else [])


def is_scalable(optimizer: Any) -> bool:
    """Whether the optimizer's update asks for its rate in the way that is scaled."""
    if not isinstance(optimizer, _legacy.OptimizerV2):
        return getattr(type(optimizer), "learning_rate", None) is vars(_optimizer._BaseOptimizer)["learning_rate"]
    own = [c for c in type(optimizer).__mro__ if issubclass(c, _legacy.OptimizerV2) and c is not _legacy.OptimizerV2]
    reads_itself = any(_READS_ITSELF in inspect.getsource(c).replace("\n", "").replace(" ", "") for c in own if _has_update(c))
    has_rate = "learning_rate" in optimizer._hyper
    return has_rate and type(optimizer)._decayed_lr is _legacy.OptimizerV2._decayed_lr and not reads_itself


# tfa's ConditionalGradient and the legacy Nadam.
_READS_ITSELF = 'self._get_hyper("learning_rate",var_dtype)'


def _has_update(owner: type) -> bool:
    return "_prepare_local" in vars(owner) or "_resource_apply_dense" in vars(owner)


def has_rate(optimizer: Any) -> bool:
    """Whether the optimizer has a learning rate: tensorflow-addons' COCOB has none."""
    return (
        "learning_rate" in optimizer._hyper
        if isinstance(optimizer, _legacy.OptimizerV2)
        else hasattr(optimizer, "_learning_rate")
    )


def base_rate_at(optimizer: Any, update: int) -> float:
    """The user's own rate at update `update`."""
    if isinstance(optimizer, _legacy.OptimizerV2):
        rate, decay = optimizer._hyper["learning_rate"], optimizer._initial_decay
    else:
        rate, decay = optimizer._learning_rate, 0.0
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(update))
    value = float(tf.convert_to_tensor(rate).numpy())
    return value / (1.0 + float(decay) * update)
