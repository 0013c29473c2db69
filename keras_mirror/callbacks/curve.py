"""The curve of a warmup: a factor for each update, as a pure function, and its picture in text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Curve:
    """What the rate of update t is multiplied by: a straight line from `start` to `end`, then `end`.

    `factor(t) = start + (end - start) t / (updates - 1)` for t < updates - 1, exactly `end` from there on, t counting from 0
    (the gradual warmup of Goyal et al. 2017, arXiv 1706.02677, section 2.2, with start 1 and end k).

    Attributes:
        start: the factor of update 0, unless the warmup has only one update.
        end: k, the factor of the warmup's last update and of every later one.
        updates: T, the number of updates of the warmup.
    """

    start: float
    end: float
    updates: int

    def at(self, update: int) -> float:
        """The factor of one update, as a number."""
        if update >= self.updates - 1:
            return self.end
        return self.start + (self.end - self.start) * update / (self.updates - 1)

    def factor(self, update: Any) -> Any:
        """The same in the graph: a float64 scalar for a float64 scalar."""
        end = tf.constant(self.end, tf.float64)
        if self.updates == 1:
            return end
        line = self.start + (self.end - self.start) * update / (self.updates - 1)
        return tf.where(update >= self.updates - 1, end, line)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The planned rate of one optimizer over a training run. `print(plan)` draws it.

    Attributes:
        name: which optimizer: the model's attribute that holds it.
        curve: the factor of each update.
        updates: the number of updates of the run.
        points: (update, rate) of some updates, in order: the first, the last, the warmup's last and some between.
    """

    name: str
    curve: Curve
    updates: int
    points: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        """Two lines of what is planned, and the curve."""
        last = min(self.curve.updates, self.updates) - 1
        ends = "" if self.curve.updates <= self.updates else f" (training ends before the warmup, at update {last})"
        return "\n".join(
            [
                f"{self.name}: learning rate x {self.curve.start:g} at update 0, x {self.curve.end:g} from update"
                f" {self.curve.updates - 1} on{ends}",
                *draw(self.points),
            ]
        )


def plan(name: str, curve: Curve, updates: int, base: Callable[[int], float], points: int = 64) -> Plan:
    """Samples a run's rates.

    Args:
        name: which optimizer.
        curve: its factors.
        updates: the number of updates of the run.
        base: the user's own rate at an update.
        points: about how many updates to take.
    """
    chosen = {round(i * (updates - 1) / max(points - 1, 1)) for i in range(points)}
    chosen.update(update for update in (curve.updates - 1,) if update < updates)
    return Plan(name, curve, updates, tuple((t, base(t) * curve.at(t)) for t in sorted(chosen)))


def draw(points: Sequence[tuple[int, float]], width: int = 64, height: int = 10) -> list[str]:
    """A chart of points in text: one column for each part of the updates, the rate upwards from 0."""
    last, top = points[-1][0], max(rate for _, rate in points) or 1.0
    rows = [[" "] * width for _ in range(height)]
    for update, rate in points:
        column = round(update / max(last, 1) * (width - 1))
        rows[round((1 - rate / top) * (height - 1))][column] = "*"
    labels = [f"{top * (height - 1 - i) / (height - 1):.3g}" for i in range(height)]
    margin = max(map(len, labels))
    chart = [f"{label:>{margin}} |{''.join(row).rstrip()}" for label, row in zip(labels, rows, strict=True)]
    axis = f"{'':{margin}} +{'-' * width}"
    return [*chart, axis, f"{'':{margin}}  0{f'update {last}':>{width - 1}}"]
