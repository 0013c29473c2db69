"""The state of a fit's callbacks: which of their attributes a run has changed, to be put back when it goes on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_mirror.checkpoint import plain

# What is Keras's or the display's own; `min_delta`, whose sign Keras turns once for each object; a profiler can't go on.
# History is kept apart, for people to read.
_NOT_STATE = frozenset({"model", "_model", "params", "min_delta", "monitor_op", "validation_data", "_is_tracing"})
_NO_STATE: tuple[type, ...] = (keras.callbacks.ProgbarLogger, keras.callbacks.History)
# An array up to this size is compared by its content, a larger one by which object it is.
_COMPARED = 1 << 16


class CallbackStates:
    """Notes how callbacks are when a run begins; knows later what it has changed.

    A callback that has both `get_state()` and `set_state(state)` decides itself. Of any other, its attributes that are plain
    (numbers, strings, arrays, lists, dicts of them) and have changed are its state: an argument in a new script is kept.

    Args:
        callbacks: those of the fit, in order; callbacks that they hold as attributes count as well.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = dict(_named(callbacks))
        self._before = {name: _prints(each) for name, each in self._callbacks.items()}
        self._restored: dict[str, set[str]] = {}

    def collect(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The state of each callback that has any, by name, in JSON's types; arrays go into `arrays`."""
        out = {}
        for name, callback in self._callbacks.items():

            def keep(array: np.ndarray, name: str = name) -> str:
                key = f"callbacks/{name}/{len(arrays)}"
                # A copy: the callback may write into it while the file is written.
                arrays[key] = array.copy()
                return key

            if _decides_itself(callback):
                state = callback.get_state()
                if state is not None:
                    out[name] = {"state": plain.encode(state, keep)}
                continue
            before, restored = self._before[name], self._restored.get(name, set())
            changed = {}
            for attribute, value in _attributes(callback):
                found = _print(value)
                if found is not None and (attribute in restored or found != before.get(attribute)):
                    changed[attribute] = plain.encode(value, keep)
            if changed:
                out[name] = {"attributes": changed}
        return out

    def restore(self, states: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[str]:
        """Puts states back; to be called after every callback's `on_train_begin`, in which Keras's own are reset.

        Returns:
            The names of those whose callback isn't among this fit's.
        """
        for name, state in states.items():
            callback = self._callbacks.get(name)
            if callback is None:
                continue
            if "state" in state:
                if _decides_itself(callback):
                    callback.set_state(plain.decode(state["state"], arrays.__getitem__))
                continue
            for attribute, value in state["attributes"].items():
                setattr(callback, attribute, plain.decode(value, arrays.__getitem__))
            self._restored[name] = set(state["attributes"])
        return [name for name in states if name not in self._callbacks]


def _named(callbacks: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    """Each callback under its class and which of that class it is: another one before it doesn't change its name."""
    seen: Counter[str] = Counter()
    queue = list(callbacks)
    known: set[int] = set()
    while queue:
        callback = queue.pop(0)
        if id(callback) in known:
            continue
        known.add(id(callback))
        name = f"{type(callback).__module__}.{type(callback).__qualname__}"
        if not getattr(callback, "keras_mirror_is_the_checkpoint", False) and not isinstance(callback, _NO_STATE):
            yield f"{name}#{seen[name]}", callback
            seen[name] += 1
            queue.extend(each for each in vars(callback).values() if isinstance(each, keras.callbacks.Callback))


def _decides_itself(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


def _attributes(callback: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(callback).items() if name not in _NOT_STATE]


def _prints(callback: Any) -> dict[str, str]:
    return {name: found for name, value in _attributes(callback) if (found := _print(value)) is not None}


def _print(value: Any) -> str | None:
    """Tells whether a value has changed; None for one that is no plain state."""

    def array(found: np.ndarray) -> str:
        if found.nbytes > _COMPARED:
            return f"object {id(found)}"
        return f"{found.dtype} {found.shape} {hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()}"

    try:
        return json.dumps(plain.encode(value, array))
    except (plain.NotPlain, RecursionError):
        return None
