"""Train an existing Keras model on N replicas exactly as on one device.

Importing this package doesn't import TensorFlow; using a public name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_mirror.callbacks.checkpoint import SingleCopyCheckpoint
    from keras_mirror.callbacks.logger import RankZeroLogger
    from keras_mirror.callbacks.loss_scale import LossScaleMonitor
    from keras_mirror.callbacks.rank_zero import RankZero
    from keras_mirror.callbacks.warmup import LinearScalingWarmup
    from keras_mirror.engine.precision import LossScaling
    from keras_mirror.fitter import MirroredFitter
    from keras_mirror.precision import loss_scaling, precision_scope, set_precision
    from keras_mirror.ranks import get_logger, rank_zero_only
    from keras_mirror.verify import EquivalenceReport

__version__ = "0.1.0"
__all__ = [
    "EquivalenceReport",
    "LinearScalingWarmup",
    "LossScaleMonitor",
    "LossScaling",
    "MirroredFitter",
    "RankZero",
    "RankZeroLogger",
    "SingleCopyCheckpoint",
    "__version__",
    "get_logger",
    "loss_scaling",
    "precision_scope",
    "rank_zero_only",
    "set_precision",
]

_HOMES = {
    "EquivalenceReport": "keras_mirror.verify",
    "LinearScalingWarmup": "keras_mirror.callbacks.warmup",
    "LossScaleMonitor": "keras_mirror.callbacks.loss_scale",
    "LossScaling": "keras_mirror.engine.precision",
    "MirroredFitter": "keras_mirror.fitter",
    "RankZero": "keras_mirror.callbacks.rank_zero",
    "RankZeroLogger": "keras_mirror.callbacks.logger",
    "SingleCopyCheckpoint": "keras_mirror.callbacks.checkpoint",
    "get_logger": "keras_mirror.ranks",
    "loss_scaling": "keras_mirror.precision",
    "precision_scope": "keras_mirror.precision",
    "rank_zero_only": "keras_mirror.ranks",
    "set_precision": "keras_mirror.precision",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'keras_mirror' has no attribute {name!r}")
    if home != "keras_mirror.ranks":  # Which needs neither TensorFlow nor Keras.
        from keras_mirror import requirements

        requirements.check()
        requirements.check_has(name)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
