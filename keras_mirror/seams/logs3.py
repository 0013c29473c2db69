"""Seams of logging (Keras 3.10 and 3.15): what Keras's list of callbacks does in each batch, and its own progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils import python_utils

from keras_mirror.seams import callbacks as callback_seams
from keras_mirror.seams import keras3, learning_rate3
from keras_mirror.seams import tensorflow as tf_seams

_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end")


def make_lean(callbacks: Any) -> None:
    """Has a CallbackList call only the batch hooks that somebody has written, and convert logs only for those who read them.

    Keras 3's list converts all logs on every batch hook in the training thread, without any callback too. Functions on the
    instance: other lists stay as they are.
    """
    if getattr(callbacks, "_async_train", False) or getattr(callbacks, "_async_test", False):
        return
    for name in _HOOKS:
        if name not in vars(callbacks):
            vars(callbacks)[name] = _Dispatch(callbacks, name)


class _Dispatch:
    """One batch hook of one list. The list may change while fit runs."""

    def __init__(self, callbacks: Any, name: str) -> None:
        self._list = callbacks
        self._name = name
        self._known: list[Any] | None = None
        self._hooks: list[tuple[Callable[..., None], bool]] = []

    def __call__(self, batch: int, logs: Any = None) -> None:
        if self._list.callbacks != self._known:
            self._find()
        converted = None
        for hook, raw in self._hooks:
            if raw:
                hook(batch, logs)
                continue
            if converted is None:
                converted = plain_logs(logs)
            hook(batch, logs=converted)

    def _find(self) -> None:
        self._known = list(self._list.callbacks)
        old = f"on_batch_{self._name.rpartition('_')[2]}" if "train" in self._name else None
        self._hooks = []
        for callback in self._known:
            hook = getattr(callback, self._name)
            # Keras's empty hook of training calls the one that isn't named after it.
            empty = callback_seams.is_default(hook) and (old is None or callback_seams.is_default(getattr(callback, old, None)))
            if not empty:
                self._hooks.append((hook, bool(getattr(callback, callback_seams.RAW_LOGS, False))))


def plain_logs(logs: Any) -> dict[str, Any]:
    """A batch's logs as Keras hands them to callbacks: numbers where they can be. Waits for the device."""
    found: dict[str, Any] = python_utils.pythonify_logs(logs)
    return found


def own_rate(optimizer: Any) -> float | None:
    """The optimizer's own rate at its last update (the first before any), without a warmup's factor; None where it has none."""
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:
        return None
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        done = int(_local(keras3.raw_iterations(optimizer))) // keras3.accumulation_steps(optimizer)
        return learning_rate3.base_rate_at(optimizer, max(done - 1, 0))
    # Not the property, nor the distributed variable: each costs more than the rest of a line.
    return float(_local(keras3.raw_variable(rate)))


def _local(variable: Any) -> Any:
    """The value in one operation; `variable.numpy()` runs two, and each costs a line of a log a tenth of what it may cost."""
    found = tf_seams.local_value(variable, 0)
    return tf.raw_ops.ReadVariableOp(resource=found.handle, dtype=found.dtype).numpy()


def batch_size_of(epoch_iterator: Any) -> int | None:
    """The batch size of the data that plain Keras's fit feeds from; None where it isn't known."""
    size = getattr(epoch_iterator.data_adapter, "batch_size", None) if epoch_iterator is not None else None
    return int(size) if size else None
