"""Values that fit into JSON, and back again the same: numbers to the last bit, NaN and infinities, tuples, NumPy's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_MARK = "is"


class NotPlain(Exception):
    """The value is an object that JSON has no form for."""


Arrays = Callable[[np.ndarray], str]


def encode(value: Any, arrays: Arrays | None = None) -> Any:
    """The JSON form of a value.

    Args:
        value: None, bools, numbers, strings; lists, tuples, and dicts of them with strings or ints for keys.
        arrays: given an array, keeps it elsewhere and returns the name under which it is found again.

    Raises:
        NotPlain: it holds something else, or an array and `arrays` is None.
    """
    if isinstance(value, np.ndarray) and arrays is not None and value.dtype.kind in "biufcV":
        return {_MARK: "array", "value": arrays(value)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_MARK: "float", "value": repr(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {_MARK: "numpy", "dtype": value.dtype.name, "value": encode(value.item())}
    if type(value) is list:
        return [encode(each, arrays) for each in value]
    if type(value) is tuple:
        return {_MARK: "tuple", "value": [encode(each, arrays) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        encoded = {key: encode(each, arrays) for key, each in value.items()}
        return {_MARK: "dict", "value": encoded} if _MARK in value else encoded
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {_MARK: "items", "value": [[key, encode(each, arrays)] for key, each in value.items()]}
    raise NotPlain(type(value).__name__)


def decode(value: Any, arrays: Callable[[str], np.ndarray] | None = None) -> Any:
    """What `encode` was given; `arrays` gives the array of a name."""
    if isinstance(value, list):
        return [decode(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: decode(each, arrays) for key, each in value.items()}
    inner = value["value"]
    if kind == "array" and arrays is not None:
        return arrays(inner)
    if kind == "float":
        return float(inner)
    if kind == "numpy":
        return np.dtype(value["dtype"]).type(decode(inner))
    if kind == "tuple":
        return tuple(decode(each, arrays) for each in inner)
    if kind == "items":
        return {key: decode(each, arrays) for key, each in inner}
    return {key: decode(each, arrays) for key, each in inner.items()}
