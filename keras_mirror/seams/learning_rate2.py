"""The warmup isn't there on Keras 2 yet: nothing is ever attached."""

from __future__ import annotations

from typing import Any


def attached(model: Any) -> None:
    """Nothing is."""
    return None


def release(model: Any) -> None:
    """Nothing to take back."""
