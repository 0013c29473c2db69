"""Seams into Keras 3's LossScaleOptimizer (tested on 3.10 and 3.15)."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import trainer as base_trainer

from keras_mirror.seams import gate

_LSO = keras.optimizers.LossScaleOptimizer
_BOUNDED = "_keras_mirror_bounded"
# Not on the model itself, whose copies are to be plain Keras.
_auto_scale_loss: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

Update = Callable[[Any, list[Any], Any], None]


def install(update: Update) -> None:
    """Replaces what LossScaleOptimizer does with gradients, inside a step and for optimizers that `bound` was called with.

    Keras asks replica 0 alone whether the gradients are finite, and bounds the scale neither above nor below. The
    replacement sits below the public `apply`, which still builds the optimizer and is what users call.

    Args:
        update: called with the optimizer, the gradients (already those of all replicas), and the variables or None.
    """
    original = _LSO.__dict__.get("_tf_apply")
    if original is None:
        raise RuntimeError("keras_mirror: LossScaleOptimizer._tf_apply is gone from the installed Keras.")
    # A gradient taken without `scale_loss` is divided by a scale that it was never multiplied with.
    gate.gated(_LSO, "scale_loss", "optimizer_scale_loss")
    _note_auto_scale_loss()
    if hasattr(original, "_keras_mirror_original"):
        return

    @functools.wraps(original)
    def seam(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        # In a loop of the user's own on several replicas the gradients aren't summed yet: that is Keras's to do.
        if gate.current() is None and (not is_bounded(self) or tf.distribute.get_strategy().num_replicas_in_sync > 1):
            original(self, grads, trainable_variables)
        else:
            update(self, list(grads), trainable_variables)

    seam._keras_mirror_original = original  # type: ignore[attr-defined]
    _LSO._tf_apply = seam


def _note_auto_scale_loss() -> None:
    """Has the trainer's `compile` note `auto_scale_loss`, however it is given: Keras forgets it."""
    original = base_trainer.Trainer.__dict__["compile"]
    if hasattr(original, "_keras_mirror_original"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _auto_scale_loss[self] = bool(signature.bind(self, *args, **kwargs).arguments.get("auto_scale_loss", True))
        return result

    compile._keras_mirror_original = original  # type: ignore[attr-defined]
    base_trainer.Trainer.compile = compile


def auto_scales(model: Any) -> bool:
    """Whether the model was compiled with `auto_scale_loss=True`, Keras's default."""
    return _auto_scale_loss.get(model, True)


def is_loss_scaled(optimizer: Any) -> bool:
    """Whether it is a LossScaleOptimizer, Keras's own or a subclass of the user's."""
    return isinstance(optimizer, _LSO)


def bound(optimizer: Any) -> None:
    """Marks one LossScaleOptimizer: outside a step too its scale stays within bounds. Copies keep the mark, files don't."""
    setattr(optimizer, _BOUNDED, True)


def is_bounded(optimizer: Any) -> bool:
    """Whether `bound` was called with it."""
    return bool(getattr(optimizer, _BOUNDED, False))


def wrap(optimizer: Any) -> Any:
    """The LossScaleOptimizer that Keras's compile puts around an optimizer under the policy mixed_float16."""
    return _LSO(optimizer, name="loss_scale_optimizer")


def is_overwritten_by_gradient(optimizer: Any, variable: Any) -> bool:
    """Whether the variable (an fp8 scale, a quantile) takes its "gradient" as its value, so that it is never scaled."""
    return bool(optimizer._overwrite_variable_with_gradient(variable))


def scale_variable(optimizer: Any) -> Any:
    """The variable that holds the loss scale."""
    return optimizer.dynamic_scale


def scale_state(optimizer: Any) -> Any:
    """Keras 3's optimizer keeps its scale itself."""
    return optimizer


def initial_scale(optimizer: Any) -> float:
    """The scale that training began with."""
    return float(optimizer.initial_scale)


def start_again(optimizer: Any) -> None:
    """Looks for the scale from the initial one again."""
    optimizer.dynamic_scale.assign(optimizer.initial_scale)
    optimizer.step_counter.assign(0)
