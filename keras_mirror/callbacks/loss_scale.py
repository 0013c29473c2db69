"""LossScaleMonitor: the loss scale and the skipped steps in the epoch's log."""

from __future__ import annotations

from typing import Any

from keras_mirror.engine.precision import LossScaling
from keras_mirror.precision import loss_scaling
from keras_mirror.seams.stack import keras


class LossScaleMonitor(keras.callbacks.Callback):
    """Adds the loss scale and the skipped steps to the log of each epoch, so that History and every later callback have them.

    The log gets `loss_scale` (at the epoch's end), `skipped_steps` (in this epoch) and `skipped_share` (of the epoch's steps,
    0 to 1). With several optimizers each name ends in `_` and the LossScaleOptimizer's name. Nothing is added where no loss
    is scaled. Put it before the callbacks that are to see them.

    Example:
        ```python
        model = MirroredFitter(build_model, precision="mixed_float16")
        model.compile("adam", "mse")
        history = model.fit(x, y, callbacks=[LossScaleMonitor(), keras.callbacks.CSVLogger("log.csv")])
        history.history["skipped_steps"]
        ```

    Raises:
        ValueError: at the start of fit, where the model isn't a MirroredFitter's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, LossScaling] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: D102
        self._before = self._read()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: D102
        now = self._read()
        if logs is not None:
            for key, state in now.items():
                before = self._before.get(key)
                steps = state.steps - (before.steps if before else 0)
                skipped = state.skipped - (before.skipped if before else 0)
                end = f"_{key}" if len(now) > 1 else ""
                logs[f"loss_scale{end}"] = state.scale
                logs[f"skipped_steps{end}"] = skipped
                logs[f"skipped_share{end}"] = skipped / steps if steps else 0.0
        self._before = now

    def _read(self) -> dict[str, LossScaling]:
        found = loss_scaling(self.model)
        names = [state.optimizer for state in found]
        return {
            name if names.count(name) == 1 else f"{name}_{i}": state
            for i, (name, state) in enumerate(zip(names, found, strict=True))
        }
