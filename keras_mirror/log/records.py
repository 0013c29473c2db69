"""What is logged: a run's facts, and a value as every file can hold it."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import keras_mirror
from keras_mirror.engine.core import Engine
from keras_mirror.seams import generation
from keras_mirror.seams.stack import keras

# A metric may return a tensor; a longer one isn't worth a line of a log.
_LONGEST = 64
_MEMORY_S = 1.0
# A product of matrices of this size takes a GPU some milliseconds at most.
_PROBE = 2048


def plain(value: Any) -> float | list[Any] | str | None:
    """A log value as a number, a (nested) list of numbers, or text; None for what is none of these. Waits for the device."""
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    if isinstance(value, (str, type(None))):
        return value
    try:
        array = np.asarray(value)
    except Exception:  # Whatever a user's metric returns: it is left out, and training goes on.
        return None
    if array.size > _LONGEST or array.dtype.kind not in "fiub":
        return None
    found: list[Any] = array.astype(float).tolist()
    return found


def plain_logs(logs: dict[str, Any] | None) -> dict[str, Any]:
    """The logs of a batch or an epoch; nested ones under their own names, as Keras flattens them."""
    out: dict[str, Any] = {}
    for key, value in (logs or {}).items():
        if isinstance(value, dict):
            out.update(plain_logs(value))
            continue
        found = plain(value)
        if found is not None:
            out[str(key)] = found
    return out


def facts(model: Any, engine: Engine | None, params: dict[str, Any], strategy: Any, batch: int | None) -> dict[str, Any]:
    """What is to be known of a run: versions, devices, sizes, seed and command."""
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    names = ["CPU:0"] if strategy is None else [_short(name) for name in strategy.extended.worker_devices]
    return {
        "versions": {
            "keras_mirror": keras_mirror.__version__,
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "python": platform.python_version(),
        },
        "devices": [f"{name} ({kind})" if (kind := _model_of(name)) else name for name in names],
        "replicas": replicas,
        "workers": max(1, replicas // len(names)),
        "global_batch": batch,
        "steps_per_epoch": params.get("steps"),
        "steps_per_execution": generation.steps_per_execution(model),
        "epochs": params.get("epochs"),
        "seed": None if engine is None else engine.seed,
        "precision": str(keras.config.dtype_policy().name) if engine is None or engine.policy is None else engine.policy,
        "model": model.name,
        "parameters": int(model.count_params()) if model.built else None,
        "optimizer": type(getattr(model, "optimizer", None)).__name__,
        "command": shlex.join([os.path.basename(sys.executable), *sys.argv]) if sys.argv and sys.argv[0] else "(interactive)",
    }


def _short(name: str) -> str:
    spec = tf.DeviceSpec.from_string(name)
    return f"{spec.device_type}:{spec.device_index}"


def _model_of(name: str) -> str | None:
    for device in tf.config.list_physical_devices("GPU"):
        if device.name.endswith(name):
            return str(tf.config.experimental.get_device_details(device).get("device_name", "")) or None
    return None


class Memory:
    """Memory in use, in MB (10^6 bytes): of each GPU of this process, else the process's own. Asked for once a second at most.

    Args:
        strategy: the model's; None: one device.
    """

    def __init__(self, strategy: Any) -> None:
        names = [] if strategy is None else [_short(name) for name in strategy.extended.worker_devices]
        self._gpus = [name for name in names if name.startswith("GPU")]
        self._found: dict[str, float] = {}
        self._asked = -math.inf

    def read(self) -> dict[str, float]:
        now = time.monotonic()
        if now - self._asked >= _MEMORY_S:
            self._asked = now
            gpus = {name: tf.config.experimental.get_memory_info(name)["current"] / 1e6 for name in self._gpus}
            self._found = gpus or {"process": _resident() / 1e6}
        return self._found


def device_times(names: Sequence[str]) -> dict[str, float]:
    """Milliseconds that each device takes for the same matrix products: a slower one shows, whatever makes it slow.

    Args:
        names: devices of this process, such as "GPU:0".
    """
    out = {}
    for name in names:
        with tf.device(name):
            square = tf.fill([_PROBE, _PROBE], 1.0 / _PROBE)
            float(tf.reduce_sum(tf.matmul(square, square)))
            began = time.perf_counter()
            product = square
            for _ in range(4):
                product = tf.matmul(product, square)
            # Waits for the device.
            float(tf.reduce_sum(product))
        out[name] = 1000 * (time.perf_counter() - began)
    return out


def gpus_of(strategy: Any) -> list[str]:
    """The GPUs of this process, where there are several: simulated replicas share the same cores."""
    names = [] if strategy is None else [_short(name) for name in strategy.extended.worker_devices]
    return names if len(names) > 1 and all(name.startswith("GPU") for name in names) else []


def _resident() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows.
        return math.nan
    peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024
