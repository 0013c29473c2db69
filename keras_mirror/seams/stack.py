"""Which Keras runs in this process: Keras 3, Keras 2 as TensorFlow 2.15 has it, or Keras 2 as the package tf-keras."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keras_mirror import requirements

if TYPE_CHECKING:
    import keras as keras


def source_name() -> str:
    """The package that Keras's own code is imported from: "keras" or "tf_keras"."""
    return "tf_keras" if requirements.uses_tf_keras() else "keras"


def source(path: str) -> Any:
    """A module of Keras's own code, e.g. `source("losses")` for `keras.src.losses` or `tf_keras.src.losses`."""
    return importlib.import_module(f"{source_name()}.src.{path}")


def choose(three: str, two: str) -> Any:
    """The module that does a job for this generation of Keras.

    Args:
        three: the name of the module for Keras 3.
        two: the name of the module for Keras 2.
    """
    return importlib.import_module(three if requirements.keras_generation() == 3 else two)


if not TYPE_CHECKING:
    # Keras 2 has other names for some of what Keras 3 calls `keras.tree`, `keras.ops`, `keras.config`.
    keras = choose("keras", "keras_mirror.seams.names2")
    keras = getattr(keras, "KERAS_2", keras)
