"""Stands in for a step while the model's own code is run to make its variables or to look at its losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mirror.seams import gate, generation


class BuildStep:
    """A step that trains nothing: gradients are zeros, an optimizer's `apply` only builds it, the rest is Keras's own code."""

    local_index = 0

    def gradient(self, original: Callable[..., Any], tape: Any, target: Any, sources: Any, *_: Any, **__: Any) -> Any:
        if not any(generation.is_variable(source) for source in tf.nest.flatten(sources)):
            return original(tape, target, sources, *_, **__)
        return tf.nest.map_structure(lambda source: tf.zeros(source.shape, source.dtype), sources)

    def apply(self, original: Callable[..., Any], instance: Any, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is not None:
            generation.build_optimizer(instance, list(trainable_variables))

    def metric_weight(self, value: Any, sample_weight: Any) -> Any:
        return sample_weight

    def in_container(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def loss_scale_decided(self, state: Any, scale: Any, is_finite: Any, grads: Any) -> None:
        """Nothing is counted."""

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        if hook not in vars(gate.Hooks):
            raise AttributeError(hook)
        return lambda original, *args, **kwargs: original(*args, **kwargs)
