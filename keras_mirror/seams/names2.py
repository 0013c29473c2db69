"""Keras 2 under the public names of Keras 3 that the package uses: `keras.tree`, `keras.config`, a few of `keras.ops`."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mirror.seams import stack

_keras = importlib.import_module(stack.source_name())


def _lists_to_tuples(structure: Any) -> Any:
    if isinstance(structure, dict):
        return {key: _lists_to_tuples(value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_lists_to_tuples(value) for value in structure)
    return structure


def _map_structure(function: Callable[..., Any], *structures: Any) -> Any:
    return tf.nest.map_structure(function, *structures)


def _convert_to_tensor(value: Any, dtype: Any = None) -> Any:
    value = tf.convert_to_tensor(value)
    return value if dtype is None else tf.cast(value, dtype)


tree = types.SimpleNamespace(
    flatten=tf.nest.flatten,
    map_structure=_map_structure,
    pack_sequence_as=tf.nest.pack_sequence_as,
    assert_same_structure=tf.nest.assert_same_structure,
    lists_to_tuples=_lists_to_tuples,
)
config = types.SimpleNamespace(
    floatx=_keras.backend.floatx,
    set_floatx=_keras.backend.set_floatx,
    epsilon=_keras.backend.epsilon,
    dtype_policy=_keras.mixed_precision.global_policy,
    set_dtype_policy=_keras.mixed_precision.set_global_policy,
)
ops = types.SimpleNamespace(cast=tf.cast, convert_to_tensor=_convert_to_tensor)


class _Names(types.ModuleType):
    """The Keras module, with what it lacks."""

    def __init__(self) -> None:
        super().__init__(_keras.__name__)
        self.tree, self.config, self.ops = tree, config, ops
        # Keras 2 has no class of its own for variables.
        self.Variable = tf.Variable
        self.__version__ = _keras.__version__

    def __getattr__(self, name: str) -> Any:
        return getattr(_keras, name)


KERAS_2 = _Names()
