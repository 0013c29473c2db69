"""Where a fit goes on: choosing a checkpoint, and putting model, callbacks, History and data there."""

from __future__ import annotations

import csv
import os
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_mirror import notices
from keras_mirror.checkpoint import formats, plain
from keras_mirror.checkpoint.files import Checkpoint
from keras_mirror.checkpoint.lock import Lock, Locked
from keras_mirror.checkpoint.settings import WHO
from keras_mirror.seams import checkpoint3, keras3, running

if TYPE_CHECKING:
    from keras_mirror.checkpoint.run import Run


class Resuming:
    """The part of a run that happens before its first step.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = Lock(run.settings.directory, run.is_running)
        self._from: Checkpoint | None = None
        self._arrays: dict[str, np.ndarray] = {}
        self._metrics_due = False

    # -- choosing

    def open(self) -> None:
        """Locks the directory, cleans it, and agrees with the other workers on the checkpoint to go on from.

        Raises:
            RuntimeError: another run uses the directory; another worker failed here.
            OSError: the directory can't be made, read or written to.
            ValueError: what is there can't be gone on from.
        """
        run, failure = self._run, None
        if run.workers.first:
            try:
                self._from = self._open_first()
            except Exception as error:
                failure = error
        if run.workers.any(failure is not None):
            raise failure or RuntimeError(
                f"{WHO}: the first worker couldn't open {run.settings.directory}; its message says why."
            )
        number = run.workers.of_first(self._from.number if self._from is not None else 0)
        if number and not run.workers.first:
            try:
                run.store.read()
                self._from = next(each for each in run.store.checkpoints if each.number == number)
            except Exception as error:
                failure = error
        if run.workers.any(failure is not None):
            raise ValueError(
                f"{WHO}: a worker doesn't see checkpoint {number} in {run.settings.directory}, which the first goes on from."
                "\nPut the directory where every worker can read it."
            ) from failure
        if self._from is not None:
            self._continue_logs(self._from)

    def _open_first(self) -> Checkpoint | None:
        run, directory = self._run, self._run.settings.directory
        try:
            run.store.make_directory()
            self._lock.acquire()
        except Locked as held:
            raise RuntimeError(
                f"{WHO}: {directory} is in use by {held}, and two runs can't save to one directory.\n"
                "Wait for that run or end it, or pass another directory."
            ) from None
        except OSError as error:
            raise OSError(
                error.errno,
                f"{WHO}: the directory {directory} can't be written to: {error.strerror}.\nMake it writable, or pass another.",
            ) from error
        run.store.read()
        run.store.clean()
        return self._choose()

    def _choose(self) -> Checkpoint | None:
        run, directory = self._run, self._run.settings.directory
        there = list(run.store.checkpoints)
        if not there:
            return None
        if not run.settings.resume:
            raise ValueError(
                f"{WHO}: resume=False, but {directory} has {len(there)} checkpoints of an earlier run, up to {there[-1].stem}."
                "\nPass another directory, or remove them."
            )
        inside = run.engine is not None and run.fit.epoch_iterator is not None
        found, damaged = run.store.newest_whole(lambda each: inside or each.ends_an_epoch)
        for each in damaged:
            notices.warn(f"{WHO}: a damaged checkpoint was passed over: {each}")
        if found is None:
            whole = [each for each in run.store.checkpoints if each.damage is None]
            reason = (
                f"{whole[-1].stem} was taken inside an epoch, which plain fit can't go on in.\nWrap the model in"
                " MirroredFitter to go on"
                if whole
                else "every checkpoint is damaged.\nPut back a whole copy"
            )
            raise ValueError(
                f"{WHO}: nothing in {directory} can be gone on from: {reason}, or pass another directory to begin anew."
            )
        last = [each for each in run.store.checkpoints if each.damage is None][-1]
        if last is not found:
            run.say(
                f"plain fit can't go on inside an epoch: going on from {found.stem}, the last that ended one, instead of"
                f" {last.stem}; {last.step - found.step} steps are trained again. MirroredFitter's fit goes on at the very step."
            )
        return found

    def _continue_logs(self, checkpoint: Checkpoint) -> None:
        """Keras's CSVLogger empties its file when training begins, and a crash after a row would write that row twice."""
        for each in self._run.fit.callbacks.callbacks:
            # RankZero(CSVLogger(...)) says which it holds.
            callback = getattr(each, "callback", each)
            if type(callback) is keras.callbacks.CSVLogger:
                callback.append = True
                if self._run.workers.first:
                    _drop_rows(callback.filename, callback.sep, int(checkpoint.content["epoch"]))

    # -- going on

    def restore(self) -> None:
        """Puts everything but the metrics in place.

        Raises:
            ValueError: model or data aren't those of the checkpoint.
        """
        run, checkpoint = self._run, self._from
        if checkpoint is None:
            return
        content = checkpoint.content
        self._check_batches(checkpoint)
        if run.engine is None and run.fit.epoch_iterator is not None:
            checkpoint3.build_for_fit(run.model, run.fit.epoch_iterator)
        state = next((name for name in checkpoint.files if name.endswith(".npz")), None)
        self._arrays = formats.read_arrays(run.store.path(state)) if state else {}
        run.state.restore(run.store.path(checkpoint.model_file), self._arrays)
        missing = run.states.restore(content["callbacks"], self._arrays) if run.states is not None else []
        self._restore_history(content["history"])
        epoch, batch = int(content["epoch"]), int(content["batch"])
        run.epoch, run.batch, run.step = epoch, batch, checkpoint.step
        run.first_epoch, run.stopped = content["first_epoch"], bool(content["stopped"])
        run.note_saved(epoch, batch)
        over = run.stopped or epoch >= run.params["epochs"]
        checkpoint3.start_at_epoch(run.model, max(epoch, run.params["epochs"]) if over else epoch)
        if run.engine is not None and run.engine.cursor is not None and not over:
            run.engine.go_to(content["data"], epoch - int(content["first_epoch"] or 0), batch, run.say)
        if batch and not over:
            run.logs = plain.decode(content["logs"])
            checkpoint3.use_logs_where_no_step_ran(run.model, run.logs)
        self._metrics_due = bool(batch)
        self._say_where(checkpoint, over, missing)

    def restore_metrics(self) -> None:
        """Puts the metrics in place; fit resets them just before an epoch's beginning."""
        checkpoint3.start_at_epoch(self._run.model, None)
        if self._metrics_due:
            self._metrics_due = False
            self._run.state.restore_metrics(self._arrays)
        self._arrays = {}

    def close(self) -> None:
        """Gives the directory back."""
        checkpoint3.start_at_epoch(self._run.model, None)
        checkpoint3.forget_logs(self._run.model)
        self._lock.release()

    def _check_batches(self, checkpoint: Checkpoint) -> None:
        run, content = self._run, checkpoint.content
        now = {"steps_per_epoch": run.params.get("steps"), "global_batch": None if run.engine is None else run.engine.batch_size}
        for name, found in now.items():
            wanted = content[name]
            if content["batch"] and None not in (found, wanted) and found != wanted:
                raise ValueError(
                    f"{WHO}: {checkpoint.stem} was taken inside an epoch with {name.replace('_', ' ')} {wanted}, this fit has"
                    f" {found}: its next batch can't be found.\nPass fit the same data and global batch, or another directory."
                )

    def _restore_history(self, kept: dict[str, Any] | None) -> None:
        history = running.history_of(self._run.fit.callbacks)
        if history is not None and kept is not None:
            history.epoch = plain.decode(kept["epoch"])
            history.history = plain.decode(kept["logs"])

    def _say_where(self, checkpoint: Checkpoint, over: bool, missing: list[str]) -> None:
        run, content = self._run, checkpoint.content
        place = run.where(run.epoch, run.batch, run.step)
        if over:
            why = "a callback had stopped training" if run.stopped else f"all {run.params['epochs']} epochs were done"
            run.say(f"nothing to train: {why} at {place}, as {checkpoint.stem} in {run.settings.directory} says")
            return
        run.say(f"going on from {place}, {checkpoint.stem} in {run.settings.directory}")
        now = 1 if run.engine is None else run.engine.replicas
        if now != content["replicas"]:
            random = any(keras3.draws_at_random(layer) for layer in keras3.sublayers(run.model))
            extent = "but for dropout and the like, which draw other numbers" if random else "but for rounding"
            run.say(f"{content['replicas']} replicas before, {now} now: the same as before {extent}")
        if missing:
            run.say(f"these callbacks' state isn't used, since fit has no such callback now: {', '.join(missing)}")


def _drop_rows(path: str, separator: str, epoch: int) -> None:
    """Removes the rows of epochs that are trained again from a CSVLogger's file."""
    if not os.path.exists(path):
        return
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter=separator))
    if not rows or "epoch" not in rows[0]:
        return
    column = rows[0].index("epoch")
    kept = [rows[0], *(row for row in rows[1:] if len(row) > column and row[column].isdigit() and int(row[column]) < epoch)]
    if len(kept) < len(rows):
        temporary = f"{path}.tmp"
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator, lineterminator="\n").writerows(kept)
        os.replace(temporary, path)
