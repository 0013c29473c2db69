"""The log of one call of fit, on the first worker: what is measured when, and where it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from keras_mirror import notices
from keras_mirror.engine.core import engine_of
from keras_mirror.log import console as consoles
from keras_mirror.log import records
from keras_mirror.log.files import WHO
from keras_mirror.log.meter import Meter, Pace
from keras_mirror.seams import generation, log_seams, running
from keras_mirror.seams.rates import Rates

F = TypeVar("F", bound=Callable[..., None])


@dataclasses.dataclass
class Run:
    """A run: one fit, or several that go on with each other.

    Attributes:
        name: tells its files from those of other runs.
        step: the steps that it has made.
        seconds: how long its fits took.
        resumed: whether it was begun by another process, or by this one before something failed.
    """

    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:8])
    step: int = 0
    seconds: float = 0.0
    resumed: bool = False


def _guarded(method: F) -> F:
    """Training doesn't end because of its log: what fails is told once, and logging ends."""

    @functools.wraps(method)
    def guarded(self: FitLog, *args: Any) -> None:
        if self.silent:
            return
        try:
            method(self, *args)
        except Exception as error:
            self.silent = True
            warn(f"logging failed ({type(error).__name__}: {error}); training goes on without a log.")
            self.close()

    return guarded  # type: ignore[return-value]


class FitLog:
    """Logs one fit. It is what a console draws from, too: its Progress.

    Args:
        model: the model that is trained.
        run: the run that the fit belongs to; its step and seconds are kept up to date by `note`.
        sinks: the files, by the name of the argument that asked for each.
        every: how many steps from line to line.
        console: whether anything is drawn.
        params: what Keras gives to every callback of this fit.
        strategy: that of the model; None: one device.
    """

    def __init__(
        self, model: Any, run: Run, sinks: dict[str, Any], every: int, console: bool, params: dict[str, Any], strategy: Any
    ) -> None:
        self._model = model
        self._run = run
        self._files = sinks
        self._every = every
        self._wants_console = console
        self._params = params
        self._strategy = strategy
        self._engine = engine_of(model)
        self._replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        self._gpus = records.gpus_of(strategy)
        self._memory = records.Memory(strategy)
        self._rates = Rates(model)
        fit = running.running_fit()
        self._batch_size = (
            self._engine.batch_size
            if self._engine is not None
            else log_seams.batch_size_of(None if fit is None else fit.epoch_iterator)
        )
        self.silent = False
        self._open_sinks: dict[str, Any] = {}
        self._console: consoles.Plain | None = None
        self._throttle = consoles.Throttle(consoles.Plain.every_s)
        self._meter = Meter()
        self._opened = self._ended = False
        self._step_before, self._seconds_before = run.step, run.seconds
        self._skipped_before = self._skipped()
        self._counted: tuple[int, float] = (0, 0.0)
        self._each = generation.steps_per_execution(model)
        self.begun_at = 0
        self._epochs_took: list[float] = []
        # What a console draws from.
        self.epoch, self.step = 1, 0
        self.epochs = int(params.get("epochs") or 1)
        self.steps: int | None = params.get("steps")
        self.record: dict[str, Any] = {"logs": {}}

    # -- events

    @_guarded
    def go_on(self) -> None:
        """The run goes on where another fit of it has stood."""
        self._step_before, self._seconds_before = self._run.step, self._run.seconds

    @_guarded
    def on_epoch_begin(self, epoch: int) -> None:
        if not self._opened:
            # Not earlier: only now a run that goes on knows that it does.
            self._opened = True
            self._open()
        self.epoch, self.step, self.begun_at = epoch + 1, 0, 0
        if self._engine is not None:
            self._counted = (self._engine.waiting.steps, self._engine.waiting.examples)
        self._meter.begin_epoch()

    @_guarded
    def on_batch_end(self, logs: Any) -> None:
        steps, examples = self._done()
        if not steps:  # A call whose steps were all made before the run went on.
            return
        before = self._step_before + self._meter.steps
        due = bool(self._open_sinks) and (before + steps) // self._every > before // self._every
        # A device may work behind the host: with the values here, it is done, and the clock tells.
        values = records.plain_logs(logs) if due else None
        tracing = self._meter.first is None
        now = self._meter.executed(steps, examples)
        self.step = self._position(steps)
        if values is not None:
            self.record = self._record(values, self._meter.window())
            self._write("step", self.record)
        if self._console is not None and self._throttle.due(now) and not tracing:
            if values is None:
                self.record = self._record(records.plain_logs(logs), self._meter.recent())
            self._show("draw")

    @_guarded
    def on_epoch_end(self, logs: Any) -> None:
        self.record = self._record(records.plain_logs(logs), self._meter.epoch())
        self.record["seconds"] = self._meter.epoch_elapsed
        self._epochs_took.append(self._meter.epoch_elapsed)
        if len(self._epochs_took) == 1 and self._meter.first is not None:
            self.record["first_step_seconds"] = self._meter.first
        if self._gpus:
            self.record["device_ms"] = records.device_times(self._gpus)
        self._write("epoch", self.record)
        self._show("epoch")

    @_guarded
    def on_train_end(self) -> None:
        self._ended = True
        self._put_event("end")

    def close(self) -> None:
        """Closes what is open. A fit that has failed is noted as interrupted."""
        self.note()
        if not self._ended and not self.silent:
            with contextlib.suppress(Exception):
                self._put_event("interrupted")
        sinks, self._open_sinks = self._open_sinks, {}
        for sink in sinks.values():
            with contextlib.suppress(Exception):
                sink.close()
        console, self._console = self._console, None
        if console is not None:
            with contextlib.suppress(Exception):
                console.close()

    def note(self) -> None:
        """Brings the run's account up to now."""
        self._run.step = self._step_before + self._meter.steps
        self._run.seconds = self._seconds_before + self._meter.elapsed

    # -- counting

    def _done(self) -> tuple[int, float | None]:
        """Steps and examples of the call that has just ended. Keras counts all of a call's steps where it had fewer, too."""
        if self._engine is not None:
            now, before = (self._engine.waiting.steps, self._engine.waiting.examples), self._counted
            self._counted = now
            return now[0] - before[0], now[1] - before[1]
        steps = self._position(self._each) - self.step
        return steps, None if self._batch_size is None else float(steps * self._batch_size)

    def _position(self, steps: int) -> int:
        """How many steps of the epoch are done, with those of the call that has just ended.

        Keras 3.10 tells that call's first batch at its end, later versions its last: so it is noted at its beginning. A run that
        goes on may begin inside a call.
        """
        return min(self.begun_at + self._each, self.steps) if self.steps else self.begun_at + steps

    def _skipped(self) -> int:
        return 0 if self._engine is None else sum(each.skipped for each in self._engine.loss_scales.read())

    @property
    def epoch_left(self) -> float | None:
        """Seconds to the end of the epoch's steps, at the pace of the epoch so far."""
        if not self.steps or not self.step:
            return None
        return (self.steps - self.step) * self._meter.epoch_elapsed / self.step

    @property
    def run_left(self) -> float | None:
        """Seconds to the end of the run, at the pace of the last epoch."""
        rest = self.epochs - self.epoch
        if self.record.get("seconds") is not None:
            return rest * self._epochs_took[-1] if rest else None
        if self._epochs_took:
            return (self.epoch_left or 0.0) + rest * self._epochs_took[-1]
        left = self.epoch_left
        return None if left is None or not self.steps else left + rest * self._meter.epoch_elapsed / self.step * self.steps

    # -- what is written

    def _record(self, logs: dict[str, Any], pace: Pace) -> dict[str, Any]:
        """What a line has, but for its place in the run."""
        out: dict[str, Any] = {"logs": logs}
        for i, (name, rate) in enumerate(self._rates.in_effect().items()):
            out["learning_rate" if i == 0 else f"learning_rate_{name}"] = rate
        if self._engine is not None and self._engine.loss_scales:
            out["loss_scale"] = self._engine.loss_scales.read()[0].scale
            out["skipped_steps"] = self._skipped() - self._skipped_before
        speed = pace.examples_per_second
        out["examples_per_second"] = speed
        out["examples_per_second_per_replica"] = None if speed is None else speed / self._replicas
        measured = not math.isnan(pace.median)
        out["step_ms"], out["step_ms_p95"] = (1000 * pace.median, 1000 * pace.p95) if measured else (None, None)
        if self._engine is not None:
            out["waiting_share"] = self._engine.waiting.share
        out["memory_mb"] = self._memory.read()
        return out

    def _write(self, event: str, record: dict[str, Any]) -> None:
        place = {
            "event": event,
            "step": self._step_before + self._meter.steps,
            "epoch": self.epoch,
            "batch": self.step,
            "time": time.time(),
            "elapsed": self._seconds_before + self._meter.elapsed,
        }
        for name in list(self._open_sinks):
            self._to_sink(name, {**place, **record})

    def _put_event(self, event: str) -> None:
        self.note()
        if "jsonl" in self._open_sinks:
            found = {"event": event, "time": time.time(), "step": self._run.step, "elapsed": self._run.seconds}
            self._to_sink("jsonl", found)

    def _to_sink(self, name: str, record: dict[str, Any]) -> None:
        sink = self._open_sinks[name]
        try:
            sink.write(record)
        except Exception as error:
            self._give_up(name, sink, error)

    def _give_up(self, name: str, sink: Any, error: Exception) -> None:
        self._open_sinks.pop(name, None)
        with contextlib.suppress(Exception):
            sink.close()
        warn(f"{sink.path} can't be written to any more ({error}); training goes on without it.")

    def _open(self) -> None:
        facts = records.facts(self._model, self._engine, self._params, self._strategy, self._batch_size)
        for name, sink in self._files.items():
            try:
                moved = sink.open(self._run.name, self._run.step if self._run.resumed else None)
                self._open_sinks[name] = sink
                sink.begin(self._run.name, facts, time.time())
            except Exception as error:
                self._give_up(name, sink, error)
                continue
            if moved is not None:
                warn(f"{sink.path} was the log of another run; it is {moved} now.")
        self._run.resumed = False
        if self._wants_console:
            self._console = consoles.choose(redirect=self._engine is not None)
            self._throttle = consoles.Throttle(self._console.every_s)
            self._show("begin", facts)

    def _show(self, what: str, *args: Any) -> None:
        """Draws; a terminal that has gone (a closed pipe, say) ends the drawing, and nothing else."""
        if self._console is None:
            return
        try:
            getattr(self._console, what)(*args or (self,))
        except Exception as error:
            console, self._console = self._console, None
            with contextlib.suppress(Exception):
                console.close()
            warn(f"the console can't be drawn on any more ({type(error).__name__}: {error}); training goes on.")


def warn(message: str) -> None:
    """Warns; where the user has made warnings errors, it is a line on stderr, since training mustn't end by it."""
    try:
        notices.warn(f"{WHO}: {message}")
    except UserWarning:
        with contextlib.suppress(Exception):
            print(f"{WHO}: {message}", file=sys.stderr)
