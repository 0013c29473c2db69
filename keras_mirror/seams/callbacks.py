"""Seams into Keras's callbacks that both generations share: what a callback tells Keras of itself by underscored names."""

from __future__ import annotations

from typing import Any

# What a callback sets that takes a batch's logs as they are: tensors, still on their device.
RAW_LOGS = "keras_mirror_takes_raw_logs"

# Keras 2 converts logs unless a callback says that it takes tensors; both leave a hook out that nobody has overridden.
_MARKS = ("_supports_tf_logs", "_chief_worker_only", "async_safe")


def is_default(hook: Any) -> bool:
    """Whether a hook is Keras's own empty one, which Keras marks."""
    return bool(getattr(hook, "_is_default", False))


def take_marks(wrapper: Any, wrapped: Any) -> None:
    """Lets a callback that stands for another one be treated as that one."""
    for name in _MARKS:
        if hasattr(wrapped, name):
            vars(wrapper)[name] = getattr(wrapped, name)
