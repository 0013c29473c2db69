"""SingleCopyCheckpoint: one copy, always whole, and a run that goes on as if nothing had happened."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Sequence
from typing import Any

import keras

from keras_mirror.checkpoint import settings
from keras_mirror.checkpoint.files import Retention, Store
from keras_mirror.checkpoint.run import Run
from keras_mirror.checkpoint.settings import WHO
from keras_mirror.seams import running


class SingleCopyCheckpoint(keras.callbacks.Callback):
    """Saves training while it runs, and goes on from there when fit is called again.

    Each checkpoint is a plain `.keras` file (it loads with `keras.models.load_model` where keras_mirror isn't), a file of arrays
    that Keras doesn't save, and a small JSON, which is written last and makes the three count. One copy is written, by the first
    worker, however many replicas and workers there are. A crash at any moment leaves whole checkpoints only.

    When the same `fit` runs again, in this process or another, training goes on after the last step that was saved: weights,
    optimizer, random states, metrics, callbacks, History and the order of the batches. In MirroredFitter's fit that is the very
    step, inside an epoch too, and on the same number of replicas the end is the same to the bit. Plain Keras's fit goes on from
    the last checkpoint that ended an epoch, and says so.

    Example:
        ```python
        model = MirroredFitter(build_model)
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, epochs=10, callbacks=[SingleCopyCheckpoint("run1", every=500)])
        model = keras.models.load_model("run1/latest.keras")  # anywhere, later
        ```

    Args:
        directory: where the checkpoints lie, one directory for one run; made where it isn't there. It may be moved or copied.
        every: "epoch": at the end of each. 500: whenever that many batches were trained on, counted over all epochs.
            `timedelta(minutes=10)`: whenever that long has passed. The end of training is saved in any case.
        keep_last: how many of the newest checkpoints stay; None: all.
        keep_best: how many of the best stay beside those. Epochs whose `monitor` is among the best are saved whatever `every`
            says. NaN is never best; of two that are equal the earlier stays.
        monitor: the log value that says what is best; an epoch without it is an error that lists what there is.
        mode: "min" or "max"; "auto": what Keras knows of the metric of that name.
        resume: True: go on from what the directory has. False: refuse a directory that has checkpoints.
        save_on_interrupt: True: at SIGTERM or SIGINT save after the running step, then stop: with KeyboardInterrupt for SIGINT,
            SystemExit for any other. A sequence of signals: at those. Python sees a signal between two compiled calls.
        background: True: training waits only for the state to be taken; a thread writes it. False: training waits for the file.
        weights_only: True: a `.weights.h5` file (weights and optimizer, for `model.load_weights`) instead of `.keras`, for
            models whose classes can't be serialised.
        on_error: what happens when a checkpoint can't be written (a full disk, say): "raise": training stops with an OSError
            at the next save or at the end; "warn": it goes on. What was on disk stays whole either way.

    Raises:
        TypeError, ValueError: an argument isn't one of these. When training begins: the model can't be serialised, the monitored
            value can't be there, there is a second one in the same fit, or the directory's checkpoints don't fit model or data.
        OSError: when training begins: the directory can't be written to.
        RuntimeError: when training begins: another run uses the directory.
    """

    resumes_inside_epochs = True
    keras_mirror_is_the_checkpoint = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: str | int | datetime.timedelta = "epoch",
        keep_last: int | None = 1,
        keep_best: int = 0,
        monitor: str = "val_loss",
        mode: str = "auto",
        resume: bool = True,
        save_on_interrupt: bool | Sequence[int] = True,
        background: bool = True,
        weights_only: bool = False,
        on_error: str = "raise",
    ) -> None:
        super().__init__()
        self._settings = settings.check(
            directory,
            every,
            keep_last,
            keep_best,
            monitor,
            mode,
            resume,
            save_on_interrupt,
            background,
            weights_only,
            on_error,
        )
        self._run: Run | None = None

    # -- what is on disk

    @property
    def directory(self) -> str:
        """Where the checkpoints lie."""
        return self._settings.directory

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint's model file; None where there is none. While fit runs it may change at any time."""
        store = self._store()
        whole = [] if store is None else [each for each in store.checkpoints if each.damage is None]
        return store.path(whole[-1].model_file) if store is not None and whole else None

    @property
    def best(self) -> str | None:
        """The path of the best checkpoint's model file; None where `keep_best` is 0 or no epoch has been saved."""
        store = self._store()
        if store is None:
            return None
        mode = self._run.retention.mode if self._run is not None else self._settings.mode
        found = Retention(None, self._settings.keep_best, mode).best(store.checkpoints)
        return None if found is None else store.path(found.model_file)

    def _store(self) -> Store | None:
        if not os.path.isdir(self.directory):
            return None
        store = Store(self.directory)
        store.read()
        return store

    def interrupt(self) -> None:
        """Has training save at the next step's end and stop, as SIGTERM does; for whoever is told of a pre-emption otherwise.

        May be called from any thread. Nothing happens where no fit runs.
        """
        if self._run is not None:
            self._run.interrupt(signal.SIGTERM)

    # -- Keras's hooks

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Opens the directory when a fit begins: before any callback's `on_train_begin`, which may empty files."""
        super().set_params(params)
        fit = running.running_fit()
        if params and "epochs" in params and fit is not None and fit.epoch_iterator is not None:
            self._open(fit)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the second half of the callback at the end of the list, where it sees what all others have done."""
        fit = running.running_fit()
        if fit is None:
            raise RuntimeError(f"{WHO}: called by a loop without a keras.callbacks.CallbackList.\nPut the callbacks into one.")
        run = self._run
        if run is None or run.params is not self.params or run.fit.callbacks is not fit.callbacks:
            run = self._open(fit)
        run.begin()
        last = _Last(run)
        last.set_model(self.model)
        last.set_params(self.params)
        fit.callbacks.callbacks.append(last)

    def _open(self, fit: running.RunningFit) -> Run:
        found = [each for each in fit.callbacks.callbacks if isinstance(each, SingleCopyCheckpoint)]
        if len(found) > 1:
            raise ValueError(
                f"{WHO}: found {len(found)} of them in the same fit, expected one: only one can say where training goes on.\n"
                "Use one, with keep_last and keep_best."
            )
        if self._run is not None:
            self._run.close()
        self._run = run = Run(self._settings, self.model, self.params or {}, fit)
        run.open()
        return run


class _Last(keras.callbacks.Callback):
    """The last callback of a fit: what it saves is what all others, Keras's History too, have made of an event."""

    keras_mirror_is_the_checkpoint = True
    # Logs are converted when they are saved; see seams/logs3.py.
    keras_mirror_takes_raw_logs = True

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._validating = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._run.resume()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.on_epoch_begin(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.on_batch_begin(batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.on_batch_end(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._run.on_validation_begin()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.on_validation_batch_end()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        try:
            self._run.on_train_end()
        finally:
            callbacks = self._run.fit.callbacks.callbacks
            callbacks[:] = [each for each in callbacks if each is not self]
