"""Where a running fit stands in its data, and how another fit gets there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_mirror.seams import generation
from keras_mirror.seams import position as position_seams

if TYPE_CHECKING:
    from keras_mirror.engine.feed import Feed

# How often a long way through a dataset is reported, in seconds.
_REPORT_S = 10.0


class Cursor:
    """The data of one fit: how often it was opened and how many batches were drawn since.

    Args:
        feed: what the running fit is fed with.
        epoch_iterator: what Keras's fit feeds from.
    """

    def __init__(self, feed: Feed, epoch_iterator: Any) -> None:
        self._feed = feed
        self._iterator = epoch_iterator
        self._passes = 0
        self._drawn = 0
        self._shorter: int | None = None
        self._opening: Callable[[Callable[[], Any]], Any] | None = None
        self.kind = feed.kind
        position_seams.on_opening(epoch_iterator, self._open)

    def _open(self, original: Callable[[], Any]) -> Any:
        opening, self._opening = self._opening, None
        if opening is not None:
            return opening(original)
        self._passes += 1
        self._drawn = 0
        return original()

    # -- counting, asked by every execution

    def limit(self, steps: int) -> int:
        """The number of steps of the next execution, which may begin inside it after a resume."""
        shorter, self._shorter = self._shorter, None
        return steps if shorter is None else min(steps, shorter)

    def drew(self, steps: int) -> None:
        """Counts the batches of an execution."""
        self._drawn += steps

    # -- a position

    def position(self, done: int, steps_per_execution: int, validating: bool = False) -> dict[str, Any]:
        """Where the next batch is found; plain values.

        Args:
            done: the batches of the running epoch that were trained on; 0: it is over.
            steps_per_execution: how many batches Keras counts for an execution.
            validating: the epoch's batches are all done, and fit has turned to the next epoch's, but the epoch isn't over.
        """
        if validating:
            return {**self.position(0, steps_per_execution), "validating": True}
        over = done == 0 and position_seams.opens_each_epoch(self._iterator)
        drawn = 0 if over else self._drawn
        out: dict[str, Any] = {"kind": self.kind, "pass": self._passes if over else max(self._passes - 1, 0), "batch": drawn}
        order = self._feed.order
        if order is not None:
            out.update({"seed": order.seed, "pass": order.pass_of(drawn)})
        executions = -(-done // steps_per_execution)
        seen = 0 if over else max(position_seams.batches_seen(self._iterator) - executions * steps_per_execution, 0)
        return {**out, "seen": seen}

    def go_to(self, position: dict[str, Any], epochs: int, done: int, say: Callable[[str], None]) -> None:
        """Has the next epoch begin at a position; to be called before fit's first epoch.

        Args:
            position: what `position` returned in the run that goes on here.
            epochs: how many epochs that run had finished.
            done: how many batches of the next epoch it had trained on.
            say: told of a long way through the data.

        Raises:
            ValueError: the data is of another kind than that run's.
        """
        if position["kind"] != self.kind:
            raise ValueError(
                f"SingleCopyCheckpoint: the checkpoint was made with data of kind {position['kind']!r}, this fit was given"
                f" {self.kind!r}.\nPass fit the same data to go on, or another directory (or resume=False there) to begin anew."
            )
        passes, drawn = int(position["pass"]), int(position["batch"])
        # A pass that nothing was drawn of is opened when its first batch is due, and counted then.
        self._passes, self._drawn = passes + bool(passes or drawn), drawn
        if self._feed.skip is not None:
            rest = self._feed.go_to(position.get("seed"), passes, drawn)
            self._opening = lambda original: original() if rest is None else rest()
        elif passes or drawn:
            self._opening = lambda original: self._drawn_through(passes, drawn, say)
        validating = bool(position.get("validating"))
        self._feed.repeat_hooks(epochs + validating)
        if validating:
            position_seams.pass_epoch(self._iterator, int(position["seen"]))
        else:
            position_seams.start_inside_epoch(self._iterator, done, int(position["seen"]), self._be_shorter)

    def _be_shorter(self, steps: int) -> None:
        self._shorter = steps

    def _drawn_through(self, passes: int, drawn: int, say: Callable[[str], None]) -> Any:
        """An iterator of pass `passes` (from 0) after `drawn` batches. Opening a dataset is what moves its shuffling on."""
        source = generation.epoch_dataset(self._iterator)
        meter = _Meter(say)
        for _ in range(passes):
            opened = iter(source)
            if self.kind == "generator":
                # The generator goes on where it stands: earlier passes have to be taken out of it.
                for _ in opened:
                    meter.count()
        iterator = iter(source)
        for _ in range(drawn):
            if not iterator.get_next_as_optional().has_value():
                break
            meter.count(drawn)
        return iterator


class _Meter:
    """Reports how far a way through the data has come, where it is long."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._done = 0
        self._reported = time.monotonic()

    def count(self, of: int | None = None) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._reported >= _REPORT_S:
            self._reported = now
            self._say(f"read {self._done}{f' of {of}' if of else ''} batches that were trained on already")
