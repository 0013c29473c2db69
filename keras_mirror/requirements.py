"""Checks, before anything is imported, that a supported TensorFlow and Keras are there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

_TENSORFLOW = ((2, 18), (2, 21))
_KERAS = ((3, 10), None)


def check() -> None:
    """Imports Keras on TensorFlow, or says what is missing.

    Raises:
        ImportError: no TensorFlow or no Keras, with the extra to install; or a version outside the supported stacks.
        RuntimeError: Keras runs on another backend.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "keras_mirror: found no TensorFlow, expected 2.18 to 2.21.\n"
            'Install it with an extra: pip install "keras-mirror[cpu]", or "keras-mirror[cuda]" for NVIDIA GPUs.'
        )
    if importlib.util.find_spec("keras") is None:
        raise ImportError(
            "keras_mirror: found no Keras, expected 3.10 or newer.\n"
            'Install it with an extra: pip install "keras-mirror[cpu]", or "keras-mirror[cuda]" for NVIDIA GPUs.'
        )
    try:
        import keras
    except ModuleNotFoundError as error:
        # Keras imports its backend at once, installed or not.
        if (error.name or "").split(".")[0] not in ("jax", "torch", "openvino"):
            raise
        raise RuntimeError(_wrong_backend(os.environ.get("KERAS_BACKEND") or str(error.name))) from None
    import tensorflow as tf

    _check_version("Keras", keras.__version__, *_KERAS)
    _check_version("TensorFlow", tf.__version__, *_TENSORFLOW)
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise RuntimeError(_wrong_backend(backend))


def _wrong_backend(backend: str) -> str:
    return (
        f"keras_mirror: Keras runs on the {backend!r} backend, expected 'tensorflow': replicas are those of"
        " tf.distribute.\nSet KERAS_BACKEND=tensorflow before Keras is imported (or in ~/.keras/keras.json). On JAX use"
        " keras.distribution.DataParallel instead."
    )


def _check_version(name: str, found: str, lowest: tuple[int, int], highest: tuple[int, int] | None) -> None:
    version = tuple(int(part) for part in found.split(".")[:2])
    if version < lowest or (highest is not None and version[: len(highest)] > highest):
        upto = f"to {highest[0]}.{highest[1]}" if highest else "or newer"
        raise ImportError(
            f"keras_mirror: found {name} {found}, expected {lowest[0]}.{lowest[1]} {upto}.\n"
            f'Install a supported one: pip install "keras-mirror[cpu]" (or [cuda]) in a fresh environment.'
        )
