"""The gate of every seam: which step, if any, runs in this thread.

Keras and TensorFlow trace each replica in a thread of its own. A seam asks `current()`; without a step in this very
thread it calls the original, so Keras outside the engine is untouched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Hooks(Protocol):
    """What a step answers when a seam asks. The engine implements it; a seam passes the original as first argument."""

    def scale_loss(self, original: Callable[..., Any], value: Any) -> Any: ...
    def unscale_loss(self, original: Callable[..., Any], value: Any) -> Any: ...
    def call_loss(self, original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any: ...
    def reduce_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def add_loss(self, original: Callable[..., Any], layer: Any, loss_value: Any) -> Any: ...
    def own_losses(self, original: Callable[..., Any], layer: Any) -> Any: ...
    def clear_losses(self, original: Callable[..., Any], layer: Any) -> Any: ...
    def additional_loss(self, original: Callable[..., Any], model: Any, loss_value: Any) -> Any: ...
    def metric_update(self, original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any: ...
    def metric_values(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def metric_result(self, original: Callable[..., Any], metric: Any) -> Any: ...
    def next_seed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def global_seeds(self, original: Callable[..., Any]) -> Any: ...
    def assign(self, original: Callable[..., Any], variable: Any, value: Any) -> Any: ...
    def moments(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def masked_moments(self, original: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any: ...
    def gradient(self, original: Callable[..., Any], tape: Any, *args: Any, **kwargs: Any) -> Any: ...
    def optimizer_scale_loss(self, original: Callable[..., Any], optimizer: Any, loss_value: Any) -> Any: ...
    def apply(self, original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any: ...


_here = threading.local()


def current() -> Hooks | None:
    """The step that runs in this thread, or None."""
    return getattr(_here, "step", None)


@contextlib.contextmanager
def entered(step: Hooks | None) -> Iterator[None]:
    """Makes `step` the current one of this thread; None closes the gate for the block."""
    before = current()
    _here.step = step
    try:
        yield
    finally:
        _here.step = before


def gated(owner: Any, name: str, hook: str) -> None:
    """Replaces `owner.name` by a function that asks the step's `hook`, and calls the original without a step.

    Args:
        owner: a module or a class of Keras or TensorFlow.
        name: the attribute to replace.
        hook: the method of `Hooks` that decides inside a step.

    Raises:
        RuntimeError: upstream no longer has that attribute.
    """
    try:
        original = owner.__dict__[name]
    except KeyError:
        raise RuntimeError(
            f"keras_mirror: {owner.__name__}.{name} is gone from the installed Keras or TensorFlow.\n"
            "This version of keras_mirror does not know them: install versions from its table of supported stacks."
        ) from None
    if hasattr(original, "_keras_mirror_original"):
        return

    @functools.wraps(original)
    def seam(*args: Any, **kwargs: Any) -> Any:
        step = current()
        if step is None:
            return original(*args, **kwargs)
        return getattr(step, hook)(original, *args, **kwargs)

    seam._keras_mirror_original = original  # type: ignore[attr-defined]
    setattr(owner, name, seam)
