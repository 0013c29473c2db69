"""What a callback of the first worker decides for all: to stop, learning rates, weights that it has put back."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mirror.checkpoint.workers import Workers
from keras_mirror.engine.core import engine_of
from keras_mirror.seams import tensorflow as tf_seams


class Decisions:
    """The decisions about one model, carried from the first worker to all.

    Args:
        model: the model that is trained.
        look_at_weights: whether the callback may write weights: then they are compared at an epoch's end.
    """

    def __init__(self, model: Any, look_at_weights: bool) -> None:
        self.model = model
        self.workers = Workers(strategy_of(model))
        self._look_at_weights = look_at_weights

    def carry(self, failed: bool, stop: bool, weights: bool) -> tuple[bool, bool]:
        """Has every worker take the first one's decisions; each worker has to call it.

        Args:
            failed: whether the callback has failed here.
            stop: whether training should stop, for this worker.
            weights: whether weights may have been written since the last time.

        Returns:
            Whether it failed on any worker, and whether training should stop.
        """
        weights = weights and self._look_at_weights
        rates = [rate for _, rate in _rates(self.model)]
        numbers = [*map(_value, rates), *([_checksum(self.model)] if weights else [])]
        mine = numbers if self.workers.first else [0.0] * len(numbers)
        failures, stops, *of_first = self.workers.total([float(failed), float(stop), *mine])
        if failures:
            return True, bool(stops)
        if not self.workers.first:
            for rate, (optimizer, own), value in zip(numbers, _rates(self.model), of_first, strict=False):
                if rate != value and not (np.isnan(rate) and np.isnan(value)) and hasattr(own, "assign"):
                    optimizer.learning_rate = value
        if weights and self.workers.any(numbers[-1] != of_first[-1]):
            self._carry_weights()
        return False, bool(stops)

    def _carry_weights(self) -> None:
        for variable in self.model.weights:
            parts = tf_seams.components(_raw(variable))
            value = parts[0].numpy()
            sent = value if self.workers.first else np.zeros_like(value)
            found = self.workers.total_of(sent)
            for part in parts:
                part.assign(found.astype(value.dtype))


def strategy_of(model: Any) -> tf.distribute.Strategy | None:
    """The strategy that a model trains under: its engine's, or that of plain Keras's scope; None for a model without one."""
    engine = engine_of(model)
    found = getattr(model, "distribute_strategy", None) if engine is None else engine.strategy
    return found if found is not None and tf_seams.is_mirrored_strategy(found) else None


def reads_ask_all_workers(model: Any) -> bool:
    """Whether a variable of the model's is summed over the workers whenever its value is read, so that all have to read it.

    So it is with BatchNormalization's statistics under plain Keras 2; the engine reads its own copy.
    """
    if engine_of(model) is not None:
        return False
    variables = [_raw(variable) for variable in model.weights]
    return any(tf_seams.is_distributed(each) and not tf_seams.is_mirrored(each) for each in variables)


def _rates(model: Any) -> list[tuple[Any, Any]]:
    """The model's optimizers and their rates, in an order that all workers share; a schedule's isn't decided by a callback."""
    found: list[tuple[Any, Any]] = []
    for name in sorted({*(name for name in vars(model) if not name.startswith("_")), "optimizer"}):
        value = getattr(model, name, None)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if callable(getattr(each, "apply_gradients", None)) and not any(each is known for known, _ in found):
                rate = getattr(each, "learning_rate", None)
                if hasattr(rate, "assign"):
                    found.append((each, rate))
    return found


def _value(rate: Any) -> float:
    return float(tf.convert_to_tensor(rate))


def _raw(variable: Any) -> Any:
    return variable if isinstance(variable, (tf.Variable, tf.distribute.DistributedValues)) else variable.value


def _checksum(model: Any) -> float:
    """Tells whether weights differ; of those that are the same on every worker unless a callback writes them."""
    found = 0
    for variable in model.trainable_variables:
        value = tf_seams.components(_raw(variable))[0].numpy()
        found = zlib.crc32(np.ascontiguousarray(value).tobytes(), found)
    return float(found)
