"""Checks, before anything is imported, that a supported TensorFlow and Keras are there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

# Of each stack: the lowest and the highest TensorFlow, and the lowest Keras.
_TENSORFLOW = ((2, 18), (2, 21))
_KERAS = ((3, 10), None)
_KERAS2 = ((2, 15), (2, 15))
_TF_KERAS = ((2, 18), (2, 21))

# What needs Keras 3, and what a user of Keras 2 can do instead.
_NOT_ON_KERAS2 = {
    "SingleCopyCheckpoint": "Use keras.callbacks.ModelCheckpoint on the first worker (fitter.is_chief).",
    "verify": 'Compare fit\'s logs and get_weights() of a run with devices="cpu:1" and of one on the replicas.',
    "EquivalenceReport": "It is what verify returns, which isn't there either.",
}


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
    if uses_tf_keras():
        _check_tf_keras()
        return
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

    if keras.__version__.split(".")[:2] == ["2", "15"]:
        _check_version("TensorFlow", tf.__version__, *_KERAS2)
        return
    _check_version("Keras", keras.__version__, *_KERAS)
    _check_version("TensorFlow", tf.__version__, *_TENSORFLOW)
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise RuntimeError(_wrong_backend(backend))


def check_has(name: str) -> None:
    """Refuses a public name that this generation of Keras can't be given yet.

    Args:
        name: a name of the package.

    Raises:
        NotImplementedError: it needs Keras 3, and Keras 2 runs.
    """
    if name in _NOT_ON_KERAS2 and keras_generation() == 2:
        raise NotImplementedError(
            f"keras_mirror: {name} isn't there on Keras 2 yet; it needs Keras 3.10 or newer.\n{_NOT_ON_KERAS2[name]}"
        )


def keras_generation() -> int:
    """2 or 3: the generation of the Keras that runs."""
    if uses_tf_keras():
        return 2
    try:
        version = importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:  # A nightly build has another name.
        import keras

        version = keras.__version__
    return int(version.split(".")[0])


def uses_tf_keras() -> bool:
    """Whether TF_USE_LEGACY_KERAS asks for tf-keras, read as TensorFlow reads it."""
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def _check_tf_keras() -> None:
    if importlib.util.find_spec("tf_keras") is None:
        raise ImportError(
            "keras_mirror: TF_USE_LEGACY_KERAS is set, but found no tf-keras, expected 2.18 to 2.21.\n"
            "Install the one of TensorFlow's version: pip install tf-keras; or unset TF_USE_LEGACY_KERAS to use Keras 3."
        )
    import tensorflow as tf
    import tf_keras

    _check_version("TensorFlow", tf.__version__, *_TENSORFLOW)
    _check_version("tf-keras", tf_keras.__version__, *_TF_KERAS)


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
