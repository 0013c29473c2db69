"""Times and counts of steps: no Keras, and nothing is asked of a device."""

from __future__ import annotations

import dataclasses
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

# A line's median and 95th percentile are those of this many executions at most: sorting them is all that a line costs.
_RECENT = 200


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast steps went.

    Attributes:
        steps: how many.
        examples: of how many examples; None where that isn't known.
        seconds: from the end of the step before the first of them to the end of the last.
        median: of a step, in seconds; of the calls' means where a call has several steps. NaN without a step.
        p95: its 95th percentile.
    """

    steps: int
    examples: float | None
    seconds: float
    median: float
    p95: float

    @property
    def examples_per_second(self) -> float | None:
        """None where it isn't known."""
        return self.examples / self.seconds if self.examples is not None and self.seconds > 0 else None


class Meter:
    """Measures one fit. The first execution, in which the step is traced and compiled, counts for itself.

    A step's time is from the end of the one before it (or the epoch's beginning) to its own: with waiting for data and other
    callbacks, without validation. On a device that works behind the host, `executed` is to be called after a value was
    pulled wherever the time of a window is to be right.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began = clock()
        self.first: float | None = None
        self.steps = 0
        self.examples: float | None = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._recent_steps: deque[int] = deque(maxlen=_RECENT)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """The next step's time begins now."""
        now = self._clock()
        self._epoch_means, self._epoch_steps = array("d"), array("l")
        self._epoch_seconds = 0.0
        self._epoch_examples: float | None = 0.0
        self._recent.clear()
        self._recent_steps.clear()
        self._last = self.epoch_began = now
        self._open_window(now)

    def _open_window(self, now: float) -> None:
        self._window_began, self._window_steps = now, 0
        self._window_examples: float | None = 0.0

    def executed(self, steps: int, examples: float | None) -> float:
        """Counts a call that has just ended, of one or more steps; returns the time."""
        now = self._clock()
        took, self._last = now - self._last, now
        self.steps += steps
        self.examples = _sum(self.examples, examples)
        if self.first is None:
            self.first = took
            self._open_window(now)
            return now
        self._recent.append(took / steps)
        self._recent_steps.append(steps)
        self._epoch_means.append(took / steps)
        self._epoch_steps.append(steps)
        self._epoch_seconds += took
        self._window_steps += steps
        self._window_examples = _sum(self._window_examples, examples)
        self._epoch_examples = _sum(self._epoch_examples, examples)
        return now

    def window(self) -> Pace:
        """The steps since the last call of this; their median and percentile are of the last 200 calls at most."""
        seconds = self._last - self._window_began
        median, p95 = _quantiles(self._recent, self._recent_steps)
        pace = Pace(self._window_steps, self._window_examples, seconds, median, p95)
        self._open_window(self._last)
        return pace

    def recent(self) -> Pace:
        """The steps since the last `window`, which stays open."""
        median, p95 = _quantiles(self._recent, self._recent_steps)
        return Pace(self._window_steps, self._window_examples, self._last - self._window_began, median, p95)

    def epoch(self) -> Pace:
        """The epoch's steps, but for the first of all."""
        median, p95 = _quantiles(self._epoch_means, self._epoch_steps)
        return Pace(sum(self._epoch_steps), self._epoch_examples, self._epoch_seconds, median, p95)

    @property
    def elapsed(self) -> float:
        """Seconds since the fit began."""
        return self._clock() - self.began

    @property
    def epoch_elapsed(self) -> float:
        """Seconds since the epoch began."""
        return self._clock() - self.epoch_began


def _sum(total: float | None, more: float | None) -> float | None:
    return None if total is None or more is None else total + more


def _quantiles(means: Sequence[float], steps: Sequence[int]) -> tuple[float, float]:
    """Median and 95th percentile of a step's time; a call of k steps counts for k of its mean."""
    if not means:
        return math.nan, math.nan
    if len(set(steps)) == 1:
        found = sorted(means)
        return found[(len(found) - 1) // 2], found[max(0, math.ceil(0.95 * len(found)) - 1)]
    total, passed, out = sum(steps), 0, []
    wanted = [0.5 * total, 0.95 * total]
    for mean, count in sorted(zip(means, steps, strict=True)):
        passed += count
        while wanted and passed >= wanted[0]:
            out.append(mean)
            wanted.pop(0)
    return out[0], out[1]
