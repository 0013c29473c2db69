"""Warnings that point at the user's own line, however deep in Keras or in this package they are raised."""

from __future__ import annotations

import inspect
import warnings

_NOT_THE_USERS = ("keras_mirror", "keras", "tensorflow", "functools", "contextlib", "threading")


def warn(message: str) -> None:
    """Warns (UserWarning) at the nearest caller outside keras_mirror, Keras and TensorFlow."""
    level = 0
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level + 1)
