"""RankZero: any Keras callback on the first worker only, and what it decides on every worker."""

from __future__ import annotations

import functools
from typing import Any

from keras_mirror import ranks
from keras_mirror.callbacks import decisions
from keras_mirror.engine.core import engine_of
from keras_mirror.seams import callbacks as seams
from keras_mirror.seams.stack import keras

_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_HOOKS = (
    *_BATCH_HOOKS,
    "on_epoch_begin",
    "on_epoch_end",
    *(f"on_{phase}{when}" for phase in ("train", "test", "predict") for when in ("_begin", "_end")),
    *(f"on_{phase}_batch{when}" for phase in ("test", "predict") for when in ("_begin", "_end")),
)
_EPOCHS_ONLY = (
    "BaseLogger",
    "CSVLogger",
    "EarlyStopping",
    "History",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "RemoteMonitor",
    "TensorBoard",
)
_NO_WEIGHTS = tuple(name for name in _EPOCHS_ONLY if name != "EarlyStopping")
_OWN = frozenset({"model", "params", "validation_data"})


class RankZero(keras.callbacks.Callback):
    """A Keras callback on the first worker only; what it decides holds for every worker.

    On the first worker each hook, `set_model` and `set_params` are handed on, in the order of the callbacks; on the others none,
    so that there is one log, one file, one line. With one process it is the callback itself. Attributes are the callback's, to
    read and to set.

    With several workers the first one's decisions are carried to all: `model.stop_training`, the learning rates of the model's
    optimizers, and weights that the callback has put back (EarlyStopping(restore_best_weights=True)). That happens at the ends
    of epochs and of training, after `on_epoch_begin` where the callback has one, and after each batch where `decides` says so:
    one collective of a few numbers. Where the callback fails on the first worker, all workers stop at the next of these moments:
    there with its exception, elsewhere with a RuntimeError.

    Example:
        ```python
        model.fit(x, y, callbacks=[RankZero(keras.callbacks.CSVLogger("log.csv")), RankZero(keras.callbacks.EarlyStopping())])
        ```

    Args:
        callback: any Keras callback.
        decides: "epoch": whatever it decides in a batch holds from the end of the epoch on. "batch": at once, which costs a
            collective in each batch. "auto": "epoch" for those of Keras's own callbacks that decide at the end of epochs or not
            at all (TensorBoard, CSVLogger and others), "batch" for any other that has a batch hook.

    Raises:
        TypeError: `callback` isn't a Keras callback, or is one of keras_mirror's own: these know the workers.
        ValueError: `decides` is none of these. When training begins with several workers: the callback reads weights that only
            all workers together can read.
    """

    def __init__(self, callback: keras.callbacks.Callback, *, decides: str = "auto") -> None:
        super().__init__()
        _check(callback, decides)
        self._callback = callback
        self._decisions: decisions.Decisions | None = None
        self._failure: Exception | None = None
        self._stop = False
        own = {name for name in _HOOKS if not seams.is_default(getattr(callback, name, None)) and hasattr(callback, name)}
        self._moments = _moments(own, _decides_in_batches(callback) if decides == "auto" else decides == "batch")
        for name in own | self._moments:
            # On the instance: what the callback leaves out stays Keras's empty hook, which costs nothing.
            self.__dict__[name] = functools.partial(self._hand_on, name)
        seams.take_marks(self, callback)

    @property
    def callback(self) -> keras.callbacks.Callback:
        """The callback itself."""
        return self._callback

    # -- Keras's hooks

    def set_model(self, model: Any) -> None:
        """Hands the model on, on the first worker."""
        super().set_model(model)
        if self._decisions is None or self._decisions.model is not model:
            self._decisions = decisions.Decisions(model, _may_write_weights(self._callback))
        if self._first:
            self._callback.set_model(model)

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Hands the parameters on, on the first worker."""
        super().set_params(params)
        if self._first:
            self._callback.set_params(params)

    def _hand_on(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._alone:
            if self._first:
                getattr(self._callback, name)(*args, **kwargs)
            return
        if name == "on_train_begin":
            self._failure, self._stop = None, False
            self._refuse_what_asks_all()
        if self._first and self._failure is None:
            self._call(name, args, kwargs)
        if name in self._moments:
            self._carry(weights=name in ("on_train_begin", "on_epoch_end", "on_train_end"))

    def _call(self, name: str, args: Any, kwargs: Any) -> None:
        """Runs the hook; that it failed, or would stop, is kept to the moment at which every worker hears of it."""
        before = getattr(self.model, "stop_training", False)
        try:
            getattr(self._callback, name)(*args, **kwargs)
        except Exception as error:
            self._failure = error
        if getattr(self.model, "stop_training", False) and not before:
            self._stop = True
            self.model.stop_training = False

    def _carry(self, weights: bool) -> None:
        if self._decisions is None:
            return
        wants = self._stop or bool(getattr(self.model, "stop_training", False))
        failed, stop = self._decisions.carry(self._failure is not None, wants, weights)
        self._stop = False
        if failed:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            raise RuntimeError(
                f"RankZero({type(self._callback).__name__}): the callback failed on the first worker, so every worker stops.\n"
                "The first worker's output says why."
            )
        if stop:
            self.model.stop_training = True

    def _refuse_what_asks_all(self) -> None:
        if not _is_keras(self._callback, ("ModelCheckpoint", "BackupAndRestore", "EarlyStopping")) or not _uses_weights(
            self._callback
        ):
            return
        engine = engine_of(self.model)
        saves = not isinstance(self._callback, keras.callbacks.EarlyStopping)
        if decisions.reads_ask_all_workers(self.model):
            why = "the model has statistics (BatchNormalization's) that are summed over all workers when they are read"
        elif saves and engine is not None and engine.accumulates_locally:
            why = "with gradient_accumulation_steps each worker holds a part of what is saved"
        else:
            return
        name = type(self._callback).__name__
        cure = "use SingleCopyCheckpoint" if saves else f"pass {name} itself: all workers have the same logs"
        raise ValueError(f"RankZero({name}): it would wait for the other workers for ever: {why}.\nDrop RankZero here: {cure}.")

    # -- who and what

    @property
    def _alone(self) -> bool:
        return self._decisions is None or self._decisions.workers.alone

    @property
    def _first(self) -> bool:
        if self._decisions is None or self._decisions.workers.alone:
            return ranks.rank() == 0
        return self._decisions.workers.first

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_callback" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_callback"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in _OWN or "_callback" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self._callback, name, value)

    def __repr__(self) -> str:
        return f"RankZero({self._callback!r})"


def _check(callback: Any, decides: str) -> None:
    if not isinstance(callback, keras.callbacks.Callback):
        what = "the class" if isinstance(callback, type) else type(callback).__name__
        raise TypeError(
            f"RankZero: got {callback!r} ({what}), expected a Keras callback.\nPass an instance of a keras.callbacks.Callback."
        )
    if type(callback).__module__.split(".")[0] == "keras_mirror":
        name = type(callback).__name__
        raise TypeError(
            f"RankZero: got a {name}, which knows the workers by itself and is needed on each.\n"
            f"Pass it to fit as it is: {name}(...)."
        )
    if decides not in ("auto", "epoch", "batch"):
        raise ValueError(f'RankZero: decides={decides!r}, expected "auto", "epoch" or "batch".')


def _moments(own: set[str], in_batches: bool) -> set[str]:
    """The hooks after which the first worker's decisions are carried to all."""
    found = {"on_train_begin", "on_epoch_end", "on_train_end"} | (own & {"on_epoch_begin"})
    for phase in ("test", "predict"):
        if any(name.startswith(f"on_{phase}") for name in own):
            found.add(f"on_{phase}_end")
    if in_batches and own & set(_BATCH_HOOKS):
        found.add("on_train_batch_end")
    return found


def _decides_in_batches(callback: Any) -> bool:
    return not _is_keras(callback, _EPOCHS_ONLY)


def _is_keras(callback: Any, names: tuple[str, ...]) -> bool:
    """Whether it is one of these callbacks of Keras's own, and no subclass, which may do anything."""
    return any(type(callback) is getattr(keras.callbacks, name, None) for name in names)


def _may_write_weights(callback: Any) -> bool:
    return not _is_keras(callback, _NO_WEIGHTS) and _uses_weights(callback)


def _uses_weights(callback: Any) -> bool:
    return not _is_keras(callback, ("EarlyStopping",)) or bool(callback.restore_best_weights)
