"""Seams into Keras 2's LossScaleOptimizers (2.15, tf-keras 2.21), of the current and of the legacy family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_mirror.seams import gate, stack
from keras_mirror.seams.stack import keras

_lso = stack.source("mixed_precision.loss_scale_optimizer")

Update = Callable[[Any, list[Any], Any], None]


def install(update: Update) -> None:
    """Has each step's verdict on its gradients counted.

    Keras 2 keeps the scale at 1 or more and finite by itself, and decides on all gradients once they are reduced; so its own
    update stays, and `update`, which Keras 3 needs instead of its own, isn't used.
    """
    state = _lso._DynamicLossScaleState
    original = vars(state)["update"]
    if hasattr(original, "_keras_mirror_original"):
        return

    @functools.wraps(original)
    def seam(self: Any, grads: Any) -> Any:
        step: Any = gate.current()
        scale = self()
        operation, is_finite = original(self, grads)
        if step is not None:
            step.loss_scale_decided(self, scale, is_finite, grads)
        return operation, is_finite

    seam._keras_mirror_original = original  # type: ignore[attr-defined]
    state.update = seam


def auto_scales(model: Any) -> bool:
    """Keras 2's compile always puts a LossScaleOptimizer around the optimizer under mixed_float16."""
    return True


def is_loss_scaled(optimizer: Any) -> bool:
    """Whether it is a LossScaleOptimizer, of either family."""
    return isinstance(optimizer, _lso.BaseLossScaleOptimizer)


def bound(optimizer: Any) -> None:
    """Nothing to do: Keras 2 keeps its scale within bounds."""


def is_bounded(optimizer: Any) -> bool:
    """Keras 2's scale always is."""
    return True


def wrap(optimizer: Any) -> Any:
    """The LossScaleOptimizer of the optimizer's family around it."""
    return keras.mixed_precision.LossScaleOptimizer(optimizer)


def scale_variable(optimizer: Any) -> Any:
    """The variable that holds the loss scale; None where the scale is fixed."""
    return getattr(optimizer._loss_scale, "current_loss_scale", None)


def scale_state(optimizer: Any) -> Any:
    """The object whose `update` decides for this optimizer."""
    return optimizer._loss_scale


def initial_scale(optimizer: Any) -> float:
    """The scale that training began with."""
    return float(optimizer.initial_scale)


def start_again(optimizer: Any) -> None:
    """Looks for the scale from the initial one again."""
    if scale_variable(optimizer) is not None:
        optimizer._loss_scale.current_loss_scale.assign(optimizer.initial_scale)
        optimizer._loss_scale.counter.assign(0)


def is_overwritten_by_gradient(optimizer: Any, variable: Any) -> bool:
    """Keras 2 has no such variables."""
    return False
