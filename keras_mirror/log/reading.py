"""Reads the JSON lines of a run back: its facts, its lines, and what in them deserves a warning."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from typing import Any

# From these on a finding is worth a reader's time.
_WAITING, _SKIPPED, _SLOWER, _UNEVEN, _SLOWED = 0.2, 0.01, 1.15, 3.0, 0.75


class NotALog(ValueError):
    """The file isn't what RankZeroLogger writes with `jsonl=`."""


@dataclasses.dataclass
class RunLog:
    """What a file tells of a run.

    Attributes:
        path: the file.
        facts: versions, devices, sizes, seed and command, those of the first fit.
        starts: when each fit of the run began (Unix time).
        steps: the lines within epochs, in order.
        epochs: the lines of epochs.
        ended: how the last fit ended: "end", "interrupted", or "" where it runs still or was killed.
    """

    path: str
    facts: dict[str, Any]
    starts: list[float]
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    ended: str

    @property
    def metrics(self) -> list[str]:
        """The names of what epochs have a number for, without `val_`; the loss first."""
        names: dict[str, None] = {}
        for record in [*self.epochs, *self.steps]:
            for name, value in record["logs"].items():
                if isinstance(value, (int, float)):
                    names[name.removeprefix("val_")] = None
        return sorted(names, key=lambda name: (name != "loss", "loss" not in name))

    def series(self, name: str, *, epochs: bool = False, logs: bool = False) -> list[tuple[float, float]]:
        """(step, value) of each line that has a number of this name."""
        found = []
        for record in self.epochs if epochs else self.steps:
            value = (record["logs"] if logs else record).get(name)
            if isinstance(value, (int, float)):
                found.append((float(record["step"]), float(value)))
        return found


def read(path: str) -> RunLog:
    """Reads a file. A line that a crash has torn is left out; a later fit of the run has dropped what it trained again.

    Raises:
        OSError: it can't be read.
        NotALog: it is something else, or has no line of a step or an epoch yet.
    """
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or "event" not in record:
                if number == 0:
                    raise NotALog(f"{path} isn't a log that RankZeroLogger(jsonl=...) wrote: it begins {line[:60]!r}.")
                continue
            records.append(_numbers(record))
    starts = [record for record in records if record["event"] == "start"]
    steps = [record for record in records if record["event"] == "step"]
    epochs = [record for record in records if record["event"] == "epoch"]
    if not starts or not (steps or epochs):
        what = "is empty" if not records else "has no line of a step or an epoch yet"
        raise NotALog(f"{path} {what}: let a fit with RankZeroLogger(jsonl=...) write some first.")
    last = records[-1]["event"]
    return RunLog(
        path=os.fspath(path),
        facts={key: value for key, value in starts[0].items() if key not in ("event", "log")},
        starts=[record["time"] for record in starts],
        steps=steps,
        epochs=epochs,
        ended=last if last in ("end", "interrupted") else "",
    )


def _numbers(value: Any) -> Any:
    """Turns the strings that stand for NaN and infinities back."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(each) if key not in ("command", "model") else each for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return value


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a log that deserves a look.

    Attributes:
        severity: "warning" or "note".
        text: what was found, and what to do.
    """

    severity: str
    text: str


def findings(run: RunLog) -> list[Finding]:
    """What is worth a look: waiting for data, skips, a slow device, NaN, uneven or slowing steps, interruptions."""
    found = [_nan(run), _waiting(run), _skips(run), _slow_device(run), _different_devices(run), _uneven(run), _slowing(run)]
    return [each for each in found if each is not None] + _course(run)


def _nan(run: RunLog) -> Finding | None:
    for record in [*run.steps, *run.epochs]:
        for name, value in record["logs"].items():
            if isinstance(value, float) and not math.isfinite(value):
                return Finding("warning", f"{name} is {value} from step {record['step']} (epoch {record['epoch']}) on.")
    return None


def _waiting(run: RunLog) -> Finding | None:
    # The first epoch fills buffers and caches.
    shares = [record["waiting_share"] for record in run.epochs[1:] or run.epochs if record.get("waiting_share") is not None]
    share = statistics.fmean(shares) if shares else 0.0
    if share < _WAITING:
        return None
    return Finding(
        "warning",
        f"{share:.0%} of the time the replicas waited for data. The usual cures: dataset.cache(), map(...,"
        " num_parallel_calls=tf.data.AUTOTUNE), prefetch(tf.data.AUTOTUNE), more workers of a PyDataset.",
    )


def _skips(run: RunLog) -> Finding | None:
    last = (run.epochs or run.steps)[-1]
    skipped = max((record.get("skipped_steps") or 0 for record in [*run.epochs, *run.steps]), default=0)
    if not skipped:
        return None
    share = skipped / max(last["step"], 1)
    severity = "warning" if share >= _SKIPPED else "note"
    tail = " A few at the beginning are how the loss scale is found; so many are not." if severity == "warning" else ""
    return Finding(severity, f"{skipped} of {last['step']} steps ({share:.1%}) were skipped: gradients weren't finite.{tail}")


def _slow_device(run: RunLog) -> Finding | None:
    times: dict[str, list[float]] = {}
    for record in run.epochs:
        for name, value in (record.get("device_ms") or {}).items():
            times.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda name: medians[name])
    others = statistics.median([value for name, value in medians.items() if name != slowest])
    if medians[slowest] < _SLOWER * others:
        return None
    return Finding(
        "warning",
        f"{slowest} is slower than the others: {medians[slowest] / others - 1:.0%} at the same work after each epoch; every step"
        " waits for it. Look for another process on it, its temperature and its clock.",
    )


def _different_devices(run: RunLog) -> Finding | None:
    kinds = {device.partition(" ")[2] for device in run.facts.get("devices", [])}
    if len(kinds) < 2:
        return None
    return Finding(
        "warning", f"The devices are of different kinds ({', '.join(run.facts['devices'])}): each step waits for the slowest."
    )


def _uneven(run: RunLog) -> Finding | None:
    pairs = [(each["step_ms"], each["step_ms_p95"]) for each in run.epochs[1:] or run.epochs if each.get("step_ms")]
    if not pairs:
        return None
    median, p95 = statistics.median(each for each, _ in pairs), statistics.median(each for _, each in pairs)
    if p95 < _UNEVEN * median:
        return None
    return Finding(
        "note", f"Steps are uneven: one in twenty takes {p95 / median:.1f} times the median ({p95:.3g} ms for {median:.3g} ms)."
    )


def _slowing(run: RunLog) -> Finding | None:
    speeds = [record["examples_per_second"] for record in run.epochs[1:] if record.get("examples_per_second")]
    if len(speeds) < 3 or statistics.median(speeds[-3:]) > _SLOWED * max(speeds):
        return None
    ratio = statistics.median(speeds[-3:]) / max(speeds)
    return Finding(
        "note", f"Training has slowed down: the last epochs reached {ratio:.0%} of the fastest one's examples per second."
    )


def _course(run: RunLog) -> list[Finding]:
    found = []
    if len(run.starts) > 1:
        times = len(run.starts) - 1
        found.append(Finding("note", f"The run went on {times} time{'s' * (times != 1)} in another call of fit."))
    if run.ended == "interrupted":
        found.append(Finding("warning", "The last fit was interrupted before its end."))
    elif not run.ended:
        found.append(Finding("note", "The log has no end: the run goes on still, or its process was killed."))
    return found
