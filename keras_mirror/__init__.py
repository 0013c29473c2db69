"""Train an existing Keras model on N replicas exactly as on one device.

Importing this package doesn't import TensorFlow; using a public name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_mirror.callbacks.checkpoint import SingleCopyCheckpoint
    from keras_mirror.callbacks.loss_scale import LossScaleMonitor
    from keras_mirror.callbacks.warmup import LinearScalingWarmup
    from keras_mirror.engine.precision import LossScaling
    from keras_mirror.fitter import MirroredFitter
    from keras_mirror.precision import loss_scaling, precision_scope, set_precision
    from keras_mirror.verify import EquivalenceReport

__version__ = "0.1.0"
__all__ = [
    "EquivalenceReport",
    "LinearScalingWarmup",
    "LossScaleMonitor",
    "LossScaling",
    "MirroredFitter",
    "SingleCopyCheckpoint",
    "__version__",
    "loss_scaling",
    "precision_scope",
    "set_precision",
]

_HOMES = {
    "EquivalenceReport": "keras_mirror.verify",
    "LinearScalingWarmup": "keras_mirror.callbacks.warmup",
    "LossScaleMonitor": "keras_mirror.callbacks.loss_scale",
    "LossScaling": "keras_mirror.engine.precision",
    "MirroredFitter": "keras_mirror.fitter",
    "SingleCopyCheckpoint": "keras_mirror.callbacks.checkpoint",
    "loss_scaling": "keras_mirror.precision",
    "precision_scope": "keras_mirror.precision",
    "set_precision": "keras_mirror.precision",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'keras_mirror' has no attribute {name!r}")
    from keras_mirror import requirements

    requirements.check()
    requirements.check_has(name)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
