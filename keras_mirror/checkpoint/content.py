"""What a checkpoint's JSON says: where training stands, for people and for the run that goes on."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any

import keras

from keras_mirror.checkpoint import plain
from keras_mirror.seams import log_seams, running

if TYPE_CHECKING:
    from keras_mirror.checkpoint.run import Run


def content_of(run: Run, value: float | None, arrays: dict[str, Any]) -> dict[str, Any]:
    """The JSON's content but for sizes and checksums.

    Args:
        run: where training stands.
        value: the monitored value, None where there is none.
        arrays: takes the arrays of the callbacks' state.
    """
    engine, cursor = run.engine, None if run.engine is None else run.engine.cursor
    history = running.history_of(run.fit.callbacks)
    return {
        "keras": keras.__version__,
        "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "global_step": run.step,
        "epoch": run.epoch,
        "batch": run.batch,
        "first_epoch": run.first_epoch,
        "steps_per_epoch": run.params.get("steps"),
        "stopped": run.stopped,
        "replicas": 1 if engine is None else engine.replicas,
        "global_batch": None if engine is None else engine.batch_size,
        "monitor": run.settings.monitor if run.settings.keep_best else None,
        "monitor_value": value if value is not None and math.isfinite(value) else None,
        "data": None if cursor is None else cursor.position(run.batch, run.steps_per_execution, run.validating),
        "logs": {name: _plainly(each) for name, each in log_seams.plain_logs(run.logs).items()} if run.batch else {},
        "history": None
        if history is None
        else {
            "epoch": list(history.epoch),
            "logs": {name: [_plainly(each) for each in values] for name, values in history.history.items()},
        },
        "callbacks": run.states.collect(arrays) if run.states is not None else {},
    }


def number(value: Any) -> float | None:
    """A log value as a number; None for what is none."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _plainly(value: Any) -> Any:
    """A log value in JSON's types: a number, or a list of numbers where a metric has several."""
    try:
        return plain.encode(value)
    except plain.NotPlain:
        return plain.encode(value.tolist() if hasattr(value, "tolist") else number(value))
