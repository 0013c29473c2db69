"""The call of Keras's fit that a callback is in, which Keras tells no callback of: found in the callers' frames.

Keras 3 (3.10 and 3.15) and Keras 2 (2.15, tf-keras 2.21), which name the same things differently.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import CodeType, FrameType
from typing import Any

from keras_mirror import requirements
from keras_mirror.seams import stack


@dataclasses.dataclass
class RunningFit:
    """The call of Keras's fit that a callback is in.

    Attributes:
        callbacks: its CallbackList; a callback is told of its model, not of its list.
        epoch_iterator: what feeds it (Keras 2's data handler); None where a loop of the user's own drives the callbacks.
        has_validation: whether it validates; None where that isn't known.
        verbose: what it was given; None where that isn't known.
    """

    callbacks: Any
    epoch_iterator: Any = None
    has_validation: bool | None = None
    verbose: Any = None


if requirements.keras_generation() == 3:
    _LIST = stack.source("callbacks.callback_list").CallbackList
    _fit = inspect.unwrap(stack.source("backend.tensorflow.trainer").TensorFlowTrainer.fit)
    _FEEDER = "epoch_iterator"
else:
    _LIST = stack.source("callbacks").CallbackList
    _fit = inspect.unwrap(stack.source("engine.training").Model.fit)
    _FEEDER = "data_handler"
_FIT: CodeType = _fit.__code__
_SIGNATURE = inspect.signature(_fit)


def running_fit() -> RunningFit | None:
    """The fit (or the CallbackList of a loop of the user's own) that is calling, found in the callers' frames."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if found is None and isinstance(owner, _LIST):
            found = RunningFit(owner, verbose=(getattr(owner, "params", None) or {}).get("verbose"))
        if found is not None and frame.f_code is _FIT:
            names = frame.f_locals
            found.epoch_iterator = names.get(_FEEDER)
            found.has_validation = names.get("validation_data") is not None
            if _FEEDER == "data_handler":
                found.verbose = _given_verbose(frame, found.verbose)
            break
        frame = frame.f_back
    return found


def _given_verbose(frame: FrameType, stated: Any) -> Any:
    """Keras 2 puts a number in the place of "auto" at once; the function around fit (it filters tracebacks) has what it was."""
    around = frame.f_back.f_locals if frame.f_back is not None else {}
    if not isinstance(around.get("args"), tuple) or not isinstance(around.get("kwargs"), dict):
        return stated
    return _SIGNATURE.bind(*around["args"], **around["kwargs"]).arguments.get("verbose", "auto")


def is_in_fit(callbacks: Any) -> bool:
    """Whether a fit with this CallbackList runs now, in any thread. Keras tells no callback when fit raises."""
    for frame in list(sys._current_frames().values()):
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _FIT and at.f_locals.get("callbacks") is callbacks:
                return True
            at = at.f_back
    return False


def history_of(callbacks: Any) -> Any:
    """The History callback of a CallbackList; None where it has none."""
    return callbacks._history


def silence(fit: RunningFit) -> None:
    """Takes Keras's own progress bar out of a list that Keras made, where the user hasn't asked for one: `verbose="auto"`.

    Keras adds its bar at the end; one of the user's own stands before Keras's History.
    """
    callbacks, bar = fit.callbacks, fit.callbacks._progbar
    if fit.verbose == "auto" and bar is not None and callbacks.callbacks and callbacks.callbacks[-1] is bar:
        callbacks.callbacks.remove(bar)
        callbacks._progbar = None
