"""What a user asked SingleCopyCheckpoint for, checked."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
from typing import Any

WHO = "SingleCopyCheckpoint"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of SingleCopyCheckpoint in one form.

    Attributes:
        directory: where the checkpoints lie.
        steps: save whenever this many batches were trained on; None: no such trigger.
        seconds: save whenever this long has passed; None: no such trigger.
        keep_last: how many of the newest stay; None: all.
        keep_best: how many of the best stay beside them.
        monitor: the value that says what is best.
        mode: "auto", "min" or "max".
        resume: go on from what is there.
        signals: those on which to save and stop.
        background: write behind training.
        weights_only: write `.weights.h5` instead of `.keras`.
        on_error: "raise" or "warn".
    """

    directory: str
    steps: int | None
    seconds: float | None
    keep_last: int | None
    keep_best: int
    monitor: str
    mode: str
    resume: bool
    signals: tuple[signal.Signals, ...]
    background: bool
    weights_only: bool
    on_error: str

    @property
    def each_epoch(self) -> bool:
        """Whether every epoch's end is saved."""
        return self.steps is None and self.seconds is None


def check(
    directory: Any,
    every: Any,
    keep_last: Any,
    keep_best: Any,
    monitor: Any,
    mode: Any,
    resume: Any,
    save_on_interrupt: Any,
    background: Any,
    weights_only: Any,
    on_error: Any,
) -> Settings:
    """The settings for the arguments of SingleCopyCheckpoint. Raises as its constructor says."""
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise TypeError(f"{WHO}: directory={directory!r} is a {type(directory).__name__}, expected a path.")
    steps, seconds = _trigger(every)
    if keep_last is not None:
        keep_last = _count("keep_last", keep_last, 1, "a whole number of at least 1, or None to keep all")
    keep_best = _count("keep_best", keep_best, 0, "a whole number, 0 for none")
    if not isinstance(monitor, str):
        raise TypeError(f"{WHO}: monitor={monitor!r} is a {type(monitor).__name__}, expected the name of a log value.")
    for name, value, choices in (("mode", mode, ("auto", "min", "max")), ("on_error", on_error, ("raise", "warn"))):
        if value not in choices:
            raise ValueError(f"{WHO}: {name}={value!r}, expected one of {', '.join(map(repr, choices))}.")
    return Settings(
        directory=os.fspath(directory),
        steps=steps,
        seconds=seconds,
        keep_last=keep_last,
        keep_best=keep_best,
        monitor=monitor,
        mode=mode,
        resume=bool(resume),
        signals=_signals(save_on_interrupt),
        background=bool(background),
        weights_only=bool(weights_only),
        on_error=on_error,
    )


def _trigger(every: Any) -> tuple[int | None, float | None]:
    expected = 'expected "epoch", a number of steps of at least 1, or a timedelta such as timedelta(minutes=10)'
    if every == "epoch":
        return None, None
    if isinstance(every, datetime.timedelta):
        if every.total_seconds() <= 0:
            raise ValueError(f"{WHO}: every={every!r}, {expected}.")
        return None, every.total_seconds()
    if isinstance(every, int) and not isinstance(every, bool):
        if every < 1:
            raise ValueError(f"{WHO}: every={every!r}, {expected}.")
        return every, None
    raise (ValueError if isinstance(every, str) else TypeError)(f"{WHO}: every={every!r}, {expected}.")


def _count(name: str, value: Any, least: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{WHO}: {name}={value!r} is a {type(value).__name__}, expected {expected}.")
    if value < least:
        raise ValueError(f"{WHO}: {name}={value!r}, expected {expected}.")
    return value


def _signals(given: Any) -> tuple[signal.Signals, ...]:
    if isinstance(given, bool):
        return (signal.SIGTERM, signal.SIGINT) if given else ()
    try:
        return tuple(signal.Signals(each) for each in given)
    except (TypeError, ValueError):
        raise TypeError(
            f"{WHO}: save_on_interrupt={given!r}, expected True (SIGTERM and SIGINT), False, or a sequence of signals such as"
            " (signal.SIGTERM, signal.SIGUSR1)."
        ) from None
