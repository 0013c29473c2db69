"""The words and numbers of a line: the same on every kind of console."""

from __future__ import annotations

import math
from typing import Any


def header(facts: dict[str, Any]) -> list[str]:
    """What a run's log begins with, in two lines."""
    versions = facts["versions"]
    replicas, batch, steps = facts["replicas"], facts["global_batch"], facts["steps_per_epoch"]
    workers = f" on each of {facts['workers']} workers" if facts["workers"] > 1 else ""
    where = f"{replicas} replica{'s' * (replicas != 1)} ({', '.join(facts['devices'])}{workers})"
    parts = [
        where,
        f"global batch {batch}" if batch else None,
        f"{steps} steps an epoch" if steps else None,
        f"{facts['epochs']} epoch{'s' * (facts['epochs'] != 1)}",
        facts["precision"] if facts["precision"] != "float32" else None,
        f"seed {facts['seed']}" if facts["seed"] is not None else None,
    ]
    return [
        f"keras_mirror {versions['keras_mirror']}, Keras {versions['keras']}, TensorFlow {versions['tensorflow']}",
        ", ".join(part for part in parts if part),
    ]


def number(value: Any) -> str:
    """A metric's value in a few digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "..."
    if math.isnan(value) or math.isinf(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:.3e}"


def rate(value: Any) -> str:
    """A learning rate without needless zeros."""
    return f"{value:.3g}" if isinstance(value, (int, float)) else "..."


def count(value: float) -> str:
    """A count in three digits: 523, 5.23k, 52.3k, 5.23M."""
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.0f}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def milliseconds(seconds: float) -> str:
    """A step's time."""
    value = 1000 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def duration(seconds: float) -> str:
    """A length of time: 8.2 s, 3:25, 1:03:25."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# What callbacks add to an epoch's logs, and a line says in its own, shorter words.
_SAID_ANYWAY = frozenset({"learning_rate", "effective_learning_rate", "loss_scale", "skipped_steps", "skipped_share"})


def values(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a record's metrics and settings, in the order of reading: the loss first, validation beside each."""
    logs = {name: value for name, value in record["logs"].items() if not isinstance(value, (list, str))}
    names = sorted(set(logs) - _SAID_ANYWAY, key=_reading_order)
    found = [(name, number(logs[name])) for name in names]
    if record.get("learning_rate") is not None:
        found.append(("lr", rate(record["learning_rate"])))
    if record.get("loss_scale") is not None:
        found.append(("loss scale", count(record["loss_scale"])))
        if record.get("skipped_steps"):
            found.append(("skipped", str(record["skipped_steps"])))
    return found


def _reading_order(name: str) -> tuple[bool, str, bool]:
    base = name.removeprefix("val_")
    return base != "loss", base, name != base


def speed(record: dict[str, Any]) -> list[str]:
    """How fast it goes, in words."""
    found = []
    if record.get("examples_per_second"):
        found.append(f"{count(record['examples_per_second'])} examples/s")
        each = record.get("examples_per_second_per_replica")
        if each and each != record["examples_per_second"]:
            found[-1] += f" ({count(each)} a replica)"
    step = record.get("step_ms")
    if step is not None:
        found.append(f"{milliseconds(step / 1000)}/step (p95 {milliseconds(record['step_ms_p95'] / 1000)})")
    share = record.get("waiting_share")
    if share is not None and share >= 0.005:
        found.append(f"{share:.0%} waiting for data")
    memory = record.get("memory_mb") or {}
    if memory:
        found.append(f"{count(max(memory.values()))} MB")
    return found
