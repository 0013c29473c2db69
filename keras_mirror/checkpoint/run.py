"""The checkpointing of one fit: when to save, what to say, and where every worker stands."""

from __future__ import annotations

import time
from typing import Any

from keras_mirror import notices
from keras_mirror.checkpoint import formats
from keras_mirror.checkpoint.callbacks import CallbackStates
from keras_mirror.checkpoint.content import content_of, number
from keras_mirror.checkpoint.files import STATE, Retention, Store
from keras_mirror.checkpoint.resuming import Resuming
from keras_mirror.checkpoint.settings import WHO, Settings
from keras_mirror.checkpoint.signals import Interrupts
from keras_mirror.checkpoint.snapshot import ModelState
from keras_mirror.checkpoint.workers import Workers
from keras_mirror.checkpoint.writer import Writer, system_error
from keras_mirror.engine.core import engine_of
from keras_mirror.seams import checkpoint3, position3, running


class Run:
    """Keeps the checkpoints of one fit. Its methods are called at fit's own events, on every worker alike.

    Args:
        settings: what the user asked for.
        model: the model that is trained.
        params: the parameters that Keras gives to every callback of this fit.
        fit: the call of fit.
    """

    def __init__(self, settings: Settings, model: Any, params: dict[str, Any], fit: running.RunningFit) -> None:
        self.settings = settings
        self.model = model
        self.params = params
        self.fit = fit
        self.engine = engine_of(model)
        strategy = checkpoint3.strategy_of(model) if self.engine is None else self.engine.strategy
        self.workers = Workers(strategy)
        self.store = Store(settings.directory)
        self.state = ModelState(model, self.engine, self.workers, config=not settings.weights_only)
        self.states: CallbackStates | None = None
        self.retention = Retention(settings.keep_last, settings.keep_best, keep_epoch_end=self.engine is None)
        self.opened = Resuming(self)
        self._writer = Writer(settings.background)
        self._interrupts = Interrupts(settings.signals, self.is_running)
        self._closed = False
        # Where training stands: `batch` batches of epoch `epoch` are done, `step` since training began.
        self.first_epoch: int | None = None
        self.epoch = 0
        self.batch = 0
        self.step = 0
        self.logs: dict[str, Any] = {}
        self.stopped = False
        self.steps_per_execution = 1
        self._begun_at = 0
        # What was saved, and when.
        self._saved: tuple[int, int] | None = None
        self._saved_s = time.monotonic()
        self._due = False
        self._warned = False
        self.validating = False
        self._metrics_before_validation: list[Any] | None = None
        # Workers of several processes ask each other about once a second, at steps that they all count alike.
        self._ask_at = 0
        self._asked: tuple[float, int] = (time.monotonic(), 0)

    # -- the beginning

    def is_running(self) -> bool:
        """Whether the fit still runs: one that raised tells nobody."""
        return not self._closed and running.is_in_fit(self.fit.callbacks)

    def open(self) -> None:
        """Takes the directory and decides where training goes on; before any callback's `on_train_begin`."""
        if self.engine is not None:
            self.engine.at_end.append(self.close)
        try:
            self.opened.open()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Checks what would fail at the first save; in our own `on_train_begin`."""
        settings = self.settings
        if not settings.weights_only:
            try:
                checkpoint3.check_serializable(self.model)
            except Exception as error:
                raise ValueError(
                    f"{WHO}: the model can't be saved as a .keras file: {error}\nGive its classes a get_config, or pass"
                    " weights_only=True."
                ) from error
        if settings.keep_best:
            if settings.monitor.startswith("val_") and self.fit.has_validation is False:
                raise ValueError(
                    f"{WHO}: keep_best={settings.keep_best} looks at {settings.monitor!r}, but fit was given no validation_data."
                    "\nPass validation data, or monitor='loss'."
                )
            mode = checkpoint3.better(self.model, settings.monitor) if settings.mode == "auto" else settings.mode
            self.retention = Retention(settings.keep_last, settings.keep_best, mode, self.retention.keep_epoch_end)

    def resume(self) -> None:
        """Puts everything where the last run stood; after every callback's `on_train_begin`, which resets some."""
        self.states = CallbackStates(each for each in self.fit.callbacks.callbacks if each is not None)
        self.steps_per_execution = int(self.model.steps_per_execution)
        self.opened.restore()
        self._ask_at = self.step
        self._interrupts.install()

    # -- fit's events

    def on_epoch_begin(self, epoch: int) -> None:
        """An epoch begins, and metrics have just been reset."""
        if self.first_epoch is None:
            self.first_epoch = epoch
        if epoch != self.epoch:
            self.epoch, self.batch = epoch, 0
        self.opened.restore_metrics()
        self._metrics_before_validation = None

    def on_batch_begin(self, batch: int) -> None:
        """An execution begins with batch `batch`."""
        self._begun_at = batch

    def on_batch_end(self, logs: dict[str, Any] | None) -> None:
        """An execution has ended. Keras 3.10 tells its first batch, later versions its last: so we note its first."""
        total = self.params.get("steps")
        done = self._begun_at + self.steps_per_execution
        done = done if not total else min(done, total)
        before = self.step
        self.step += done - self.batch
        self.batch = done
        self.logs = logs or {}
        wanted = self.settings.steps is not None and self.step // self.settings.steps > before // self.settings.steps
        interrupted, late = self._agree(now=False)
        if interrupted:
            self._stop(self._save(wait=True))
        elif wanted or late:
            if total and done >= total:
                # The epoch's end is next, and a checkpoint of it is worth more.
                self._due = True
            else:
                self._save()

    def on_validation_begin(self) -> None:
        """Validation begins: it resets the metrics, and a signal in it has to save the epoch's."""
        self.validating = True
        self._metrics_before_validation = self.state.metrics() if self._interrupts.received or self.workers.alone else None
        self._stop_in_validation()

    def on_validation_batch_end(self) -> None:
        """A batch of fit's validation has ended."""
        self._stop_in_validation()

    def _stop_in_validation(self) -> None:
        # Several processes stop at the epoch's end: they would have to ask each other at every batch.
        if self._interrupts.received and self.workers.alone:
            self._stop(self._save(wait=True, metrics=self._metrics_before_validation))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """An epoch has ended, and every other callback has seen it."""
        logs = logs or {}
        self.epoch, self.batch, self.validating = epoch + 1, 0, False
        self.stopped = bool(self.model.stop_training)
        value = number(logs.get(self.settings.monitor)) if self.settings.keep_best else None
        wanted = self.settings.each_epoch or self._due or epoch + 1 >= self.params["epochs"] or self.stopped
        if not wanted and self.settings.keep_best:
            self._check(self._writer.wait())
            wanted = self.retention.would_be_kept(value, self.store.checkpoints)
        interrupted, late = self._agree(now=True, wanted=wanted)
        self.logs = {}
        if interrupted or late or wanted or (self.engine is None and self._saved is not None and self._saved[1]):
            error = self._save(wait=interrupted, value=value)
            self._due = False
            if interrupted:
                self._stop(error)
        self._check_monitor(logs)

    def on_train_end(self) -> None:
        """Training is over: returns when the last checkpoint is on disk."""
        try:
            self._check(self._writer.wait())
        finally:
            self.close()

    def close(self) -> None:
        """Leaves everything as it was before fit, however fit ends; nothing happens the second time."""
        if self._closed:
            return
        self._closed = True
        self._interrupts.restore()
        error = self._writer.wait()
        if error is not None:
            notices.warn(self._failure(error))
        self.opened.close()

    # -- agreeing

    def interrupt(self, which: Any) -> None:
        """Notes a signal, as a handler does."""
        self._interrupts.received = which

    def _agree(self, *, now: bool, wanted: bool = False) -> tuple[bool, bool]:
        """Whether to stop, and whether a save is due by the clock or `wanted`, the same on every worker."""
        settings, stop = self.settings, self._interrupts.received is not None
        late = settings.seconds is not None and time.monotonic() - self._saved_s >= settings.seconds
        if self.workers.alone:
            return stop, late
        if not now and (self.step < self._ask_at or not (settings.signals or settings.seconds)):
            return False, False
        first = self.workers.first
        since, at = self._asked
        pace = (self.step - at) / max(time.monotonic() - since, 1e-3)
        self._asked = (time.monotonic(), self.step)
        found = self.workers.total([stop, first and (late or wanted), max(1, min(pace, 1000)) if first else 0])
        self._ask_at = self.step + int(found[2])
        if found[0] and not stop:
            self._interrupts.received = self._interrupts.received or settings.signals[0]
        return found[0] > 0, found[1] > 0

    # -- saving

    def _save(self, wait: bool = False, value: float | None = None, metrics: list[Any] | None = None) -> BaseException | None:
        """Takes the state and has it written. Returns an error that only warns, where `wait` knows of one."""
        self._check(self._writer.wait())
        if self._saved != (self.epoch, self.batch):
            self._warn_of_what_cannot_be_had_again()
            failure: BaseException | None = None
            try:
                if metrics is None:
                    metrics = self.state.metrics() if self.batch else []
                record, arrays = self.state.take(metrics)
                if self.workers.first:
                    content = content_of(self, value, arrays)
                    kind = "weights.h5" if self.settings.weights_only else "keras"
                    write = formats.write_weights if self.settings.weights_only else formats.write_keras
                    parts = {
                        kind: lambda stream: write(stream, record),
                        STATE: lambda stream: formats.write_arrays(stream, arrays),
                    }
                    step = self.step
                    self._writer.submit(lambda: self._write(step, content, parts))
            except Exception as error:
                failure = error
            if failure is not None or not self.workers.alone:
                self._check(failure)
            self._saved = (self.epoch, self.batch)
            self._saved_s = time.monotonic()
        return self._check(self._writer.wait(), stopping=True) if wait else None

    def _write(self, step: int, content: dict[str, Any], parts: dict[str, Any]) -> None:
        self.store.write(step, content, parts)
        self.store.keep(self.retention.kept(self.store.checkpoints), self.retention.best(self.store.checkpoints))

    def _check(self, error: BaseException | None, stopping: bool = False) -> BaseException | None:
        """Raises or warns of an error of saving, on every worker alike; to be called by all of them."""
        if self.workers.alone:
            failed = error is not None
        else:
            failed = self.workers.any(error is not None)
        if not failed:
            return None
        self._saved = None
        if self.settings.on_error == "raise" and not stopping:
            if error is None:
                raise RuntimeError(f"{WHO}: the first worker couldn't save to {self.settings.directory}; its message says why.")
            found = system_error(error)
            raise (OSError if found else RuntimeError)(*((found.errno,) if found else ()), self._failure(error)) from error
        if error is not None and not stopping:
            notices.warn(self._failure(error))
        return error

    def _failure(self, error: BaseException) -> str:
        found = system_error(error) or error
        whole = [each for each in self.store.checkpoints if each.damage is None]
        there = f"the last whole checkpoint is {whole[-1].stem}" if whole else "no checkpoint has been written yet"
        advice = "" if self.settings.on_error == "warn" else "\nPut that right and run again to go on from there, or pass"
        advice = advice and f'{advice} on_error="warn" to train on regardless.'
        return (
            f"{WHO}: saving to {self.settings.directory} failed: {type(found).__name__}: {found}. What was there is whole;"
            f" {there}.{advice}"
        )

    def note_saved(self, epoch: int, batch: int) -> None:
        """What a run goes on from needn't be saved again."""
        self._saved = (epoch, batch)

    # -- what is said

    def say(self, text: str) -> None:
        """Prints a line, on the first worker."""
        if self.workers.first:
            print(f"{WHO}: {text}", flush=True)

    def _stop(self, error: BaseException | None) -> None:
        """Leaves fit after a signal."""
        which = self._interrupts.received
        if error is not None and self.workers.first:
            message = f"stopped, but {self._failure(error)}"
        else:
            message = (
                f"stopped by {getattr(which, 'name', which)}; {self.where(self.epoch, self.batch, self.step)} saved in"
                f" {self.settings.directory}. Run the same again to go on."
            )
        self.say(message)
        if which is not None:
            self._interrupts.stop(which, f"{WHO}: {message}")

    def where(self, epoch: int, batch: int, step: int) -> str:
        """A position, as a person counts."""
        total = self.params.get("steps")
        place = f"epoch {epoch + 1}, batch {batch}{f' of {total}' if total else ''}" if batch else f"the end of epoch {epoch}"
        return f"{place} (step {step})"

    def _check_monitor(self, logs: dict[str, Any]) -> None:
        monitor = self.settings.monitor
        if not self.settings.keep_best or monitor in logs:
            return
        # With validation_freq some epochs have no such values.
        if monitor.startswith("val_") and not any(name.startswith("val_") for name in logs):
            return
        error = self._writer.wait()
        if error is not None:
            notices.warn(self._failure(error))
        raise ValueError(
            f"{WHO}: keep_best={self.settings.keep_best} looks at {monitor!r}, which isn't among the epoch's logs: found"
            f" {', '.join(sorted(logs))}.\nPass one of these as monitor; what was trained so far is saved."
        )

    def _warn_of_what_cannot_be_had_again(self) -> None:
        """Once, at the first save: data that another run can't be given in the same order."""
        if self._warned or self.engine is None or self.fit.epoch_iterator is None:
            return
        self._warned = True
        found = position3.order_is_lost(self.fit.epoch_iterator)
        if found is not None and self.workers.first:
            notices.warn(
                f"{WHO}: the data has {found}, so a run that goes on inside an epoch gets other batches than this one would have:"
                " nothing is lost, but the end isn't the same to the bit.\nGive it a seed."
            )
