"""Seams of logging (Keras 2.15, tf-keras 2.21): the same small functions as logs3."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_mirror.seams import callbacks as callback_seams
from keras_mirror.seams import keras2, learning_rate2, stack

_tf_utils = stack.source("utils.tf_utils")


def make_lean(callbacks: Any) -> None:
    """Has a CallbackList hand the callbacks that want them batches' logs as tensors: Keras 2's own lists can do it.

    It converts for all as soon as one callback with a batch hook takes no tensors. To be called before the list has looked: when
    it sets its callbacks' parameters.
    """
    for callback in callbacks.callbacks:
        if getattr(callback, callback_seams.RAW_LOGS, False):
            callback._supports_tf_logs = True


def plain_logs(logs: Any) -> dict[str, Any]:
    """A batch's logs as Keras hands them to callbacks: numbers where they can be. Waits for the device."""
    found: dict[str, Any] = _tf_utils.sync_to_numpy_or_python_type(logs)
    return found


def own_rate(optimizer: Any) -> float | None:
    """The optimizer's own rate at its last update (the first before any), without a warmup's factor; None where it has none."""
    if not learning_rate2.has_rate(optimizer):
        return None
    done = int(tf.convert_to_tensor(keras2.raw_iterations(optimizer)).numpy())
    return learning_rate2.base_rate_at(optimizer, max(done - 1, 0))


def batch_size_of(data_handler: Any) -> int | None:
    """The batch size of the data that plain Keras's fit feeds from; None where it isn't known."""
    adapter = getattr(data_handler, "_adapter", None)
    size = adapter.batch_size() if adapter is not None else None
    return int(size) if size else None
