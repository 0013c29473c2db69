"""RankZeroLogger: the one log of a fit, on the first worker: what is drawn, and the files."""

from __future__ import annotations

import numbers
import os
from typing import Any

from keras_mirror.callbacks import decisions
from keras_mirror.checkpoint.workers import Workers
from keras_mirror.engine.core import engine_of
from keras_mirror.log import files
from keras_mirror.log.fit import FitLog, Run
from keras_mirror.seams import log_seams, running
from keras_mirror.seams.stack import keras

WHO = files.WHO


class RankZeroLogger(keras.callbacks.Callback):
    """Shows how training goes and writes it down: once, by the first worker, however many replicas and workers there are.

    It shows the progress of epoch and run with the time left, loss and metrics, the learning rate in effect, loss scale and
    skipped steps, examples per second in total and per replica, a step's time (median and 95th percentile), the share of the
    time that was waiting for data, and memory in use. Values stay on their device until a line is due. Keras's own progress bar
    is left out unless `fit` is given a `verbose`.

    A line of a file has the loss and metrics of the epoch so far, as Keras's bar shows them; an epoch's line has History's.
    Speeds are those of the steps since the line before, from the end of a step to the end of the next; validation isn't in them,
    nor the first step of a fit, in which the step is compiled: that one's time is in the line of its epoch. Epochs count from 1.
    Put it last: then it has what other callbacks add to an epoch's logs.

    A run that goes on with SingleCopyCheckpoint appends to its files, without the lines after the step that it goes on from. A
    log of another run that is in the way is moved to a free name (`log.1.csv`), with a warning. When training has begun,
    whatever fails in logging (a full disk) is a warning, and training goes on.

    Example:
        ```python
        model.fit(x, y, epochs=10, callbacks=[RankZeroLogger(every=100, csv="run1/log.csv", jsonl="run1/log.jsonl")])
        ```

    Args:
        every: how many steps there are from one line of the files to the next; with several steps in a compiled call, the line
            comes at the end of the call. Epochs have lines of their own.
        console: True: a bar on a terminal (with the extra `log`, which brings rich), a display in a notebook, plain lines
            elsewhere: one for each epoch and at most one each ten seconds. False: nothing is drawn.
        csv: the path of a CSV file, which begins with the run's versions, devices, global batch, seed and command as comments.
        jsonl: the path of a file with one JSON object in each line, of which `keras-mirror report` makes a page.
        tensorboard: a directory for TensorBoard's event files. It needs the package tensorboard, which the extra `log` brings.

    Raises:
        TypeError, ValueError: `every` isn't a whole number of at least 1; a path is none. When training begins: a file is there
            that is no log of this kind.
        ImportError: when training begins: `tensorboard` is given and the package isn't installed.
        OSError: when training begins: a file or directory can't be written to.
    """

    keras_mirror_takes_raw_logs = True

    def __init__(
        self,
        every: int = 10,
        *,
        console: bool = True,
        csv: str | os.PathLike[str] | None = None,
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.every = _checked_every(every)
        self._wants_console = bool(console)
        self._sinks: dict[str, Any] = {}
        for name, path, kind in (
            ("csv", csv, files.Csv),
            ("jsonl", jsonl, files.JsonLines),
            ("tensorboard", tensorboard, files.TensorBoard),
        ):
            if path is not None:
                self._sinks[name] = kind(_checked_path(name, path))
        self._run = Run()
        self._fit: FitLog | None = None

    # -- Keras's hooks

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Leaves Keras's progress bar out where the user hasn't asked for it, and has batches' logs converted on demand only."""
        super().set_params(params)
        fit = running.running_fit()
        if fit is not None and params and "epochs" in params:
            log_seams.make_lean(fit.callbacks)
            running.silence(fit)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the files can be written to, on the first worker; where one can't, all workers stop."""
        if self._fit is not None:
            self._close()
        model = self.model
        engine = engine_of(model)
        workers = Workers(decisions.strategy_of(model))
        failure: Exception | None = None
        if workers.first:
            try:
                for sink in self._sinks.values():
                    sink.check()
            except (ImportError, OSError, ValueError) as error:
                failure = error
        if workers.any(failure is not None):
            if failure is not None:
                raise failure
            raise RuntimeError(f"{WHO}: the first worker can't write the log, so every worker stops. Its output says why.")
        if workers.first:
            strategy = decisions.strategy_of(model)
            self._fit = FitLog(model, self._run, self._sinks, self.every, self._wants_console, self.params or {}, strategy)
            if engine is not None:
                # Keras tells no callback that fit failed.
                engine.at_end.append(self._close)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to measure."""
        if self._fit is not None:
            self._fit.on_epoch_begin(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where a call of one or more steps begins."""
        if self._fit is not None:
            self._fit.begun_at = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts; writes and draws what is due."""
        if self._fit is not None:
            self._fit.on_batch_end(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes and shows the epoch's line."""
        if self._fit is not None:
            self._fit.on_epoch_end(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the files."""
        if self._fit is not None:
            self._fit.on_train_end()
        self._close()

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()

    # -- what a checkpoint keeps

    def get_state(self) -> dict[str, Any]:
        """Which run this is, its steps so far, and how long they took."""
        if self._fit is not None:
            self._fit.note()
        return {"name": self._run.name, "step": self._run.step, "seconds": self._run.seconds}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on with the run that `get_state` told of; to be called when training has begun."""
        self._run.name, self._run.step, self._run.seconds = str(state["name"]), int(state["step"]), float(state["seconds"])
        self._run.resumed = True
        if self._fit is not None:
            self._fit.go_on()


def _checked_every(every: Any) -> int:
    if isinstance(every, bool) or not isinstance(every, numbers.Integral):
        raise TypeError(f"{WHO}: every={every!r} is a {type(every).__name__}, expected a whole number of steps.")
    if every < 1:
        raise ValueError(f"{WHO}: every={every!r}, expected a whole number of steps of at least 1.")
    return int(every)


def _checked_path(name: str, path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{WHO}: {name}={path!r} is a {type(path).__name__}, expected a path.")
    if not os.fspath(path):
        raise ValueError(f"{WHO}: {name}={path!r}, expected a path.")
    return os.fspath(path)
