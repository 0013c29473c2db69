"""Train an existing Keras model on N replicas exactly as on one device.

Importing this package doesn't import TensorFlow; using a public name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_mirror.callbacks.checkpoint import SingleCopyCheckpoint
    from keras_mirror.callbacks.warmup import LinearScalingWarmup
    from keras_mirror.fitter import MirroredFitter
    from keras_mirror.verify import EquivalenceReport

__version__ = "0.1.0"
__all__ = ["EquivalenceReport", "LinearScalingWarmup", "MirroredFitter", "SingleCopyCheckpoint", "__version__"]

_HOMES = {
    "EquivalenceReport": "keras_mirror.verify",
    "LinearScalingWarmup": "keras_mirror.callbacks.warmup",
    "MirroredFitter": "keras_mirror.fitter",
    "SingleCopyCheckpoint": "keras_mirror.callbacks.checkpoint",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'keras_mirror' has no attribute {name!r}")
    from keras_mirror import requirements

    requirements.check()
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
