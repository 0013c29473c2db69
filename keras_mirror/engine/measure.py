"""What can't be seen in a loss's value and is measured instead, once, on a few rows of the first batch.

- `self.add_loss(ops.sum(x))` and `self.add_loss(ops.mean(x))` look alike, and so does an activity regulariser before Keras
  divided it by the batch size. On a share the first has to be multiplied by N/n, the second not.
- A loss that returns a value for each row may still look at the other rows (in-batch negatives, Circle). It has to be
  evaluated on the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_mirror.engine import data
from keras_mirror.engine.build import BuildStep
from keras_mirror.seams import gate, generation
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine

# Enough rows to tell a sum from a mean, few enough for one device to hold.
_ROWS = 32


class Unmeasured(Exception):
    """A step met what has to be measured first. It is raised in tracing; the step is traced again afterwards."""


class Recorder(BuildStep):
    """Runs a step on values without changing anything, and keeps what layers add and how losses treat their rows."""

    def __init__(self) -> None:
        self.added: dict[tuple[str, int], float] = {}
        self.looks_at_other_rows: dict[int, Any] = {}
        self._counts: dict[int, int] = {}

    def add_loss(self, original: Callable[..., Any], layer: Any, loss_value: Any) -> None:
        for value in keras.tree.flatten(loss_value):
            index = self._counts.get(id(layer), 0)
            self._counts[id(layer)] = index + 1
            if len(value.shape) == 0:
                self.added[(generation.layer_key(layer), index)] = float(value)
        original(layer, loss_value)

    def clear_losses(self, original: Callable[..., Any], layer: Any) -> None:
        for each in generation.sublayers(layer):
            self._counts.pop(id(each), None)
        original(layer)

    def call_loss(self, original: Callable[..., Any], instance: Any, y_true: Any, y_pred: Any, *more: Any, **kwargs: Any) -> Any:
        known = generation.is_compile_loss(instance) or generation.treats_rows_alone(instance)
        if not known and _looks_at_other_rows(instance, y_true, y_pred):
            self.looks_at_other_rows[id(instance)] = instance
        return original(instance, y_true, y_pred, *more, **kwargs)


def measure(engine: Engine, step_name: str, batch: Any) -> None:
    """Runs the model's step on a few rows, and on the same rows twice over, and tells the engine what it found.

    An added loss that doubles is a sum; anything else is taken for a mean. (Parts of the rows wouldn't do: behind
    BatchNormalization they have other moments.) Nothing in the model is changed.

    Args:
        engine: the model's engine, whose `sums_added` and `whole_batch_losses` are filled.
        step_name: "train_step" or "test_step".
        batch: a batch of values.
    """
    engine.sums_added = set()
    batch = keras.tree.map_structure(lambda v: None if v is None else generation.to_tensor(v), data.without_optionals(batch))
    rows = min(int(data.rows(data.batch_leaves(batch)[0])), _ROWS)
    # A single row can't show whether a loss looks at other rows; two copies of it can.
    copies = 1 if rows > 1 else 2
    whole = _record(engine.model, step_name, batch, rows, copies)
    engine.whole_batch_losses.update(whole.looks_at_other_rows)
    if not whole.added:
        return
    twice = _record(engine.model, step_name, batch, rows, 2 * copies).added
    for key, value in whole.added.items():
        if key in twice and abs(twice[key] - 2 * value) < min(abs(twice[key] - value), 1e-3 * abs(value)):
            engine.sums_added.add(key)


def _record(model: keras.Model, step_name: str, batch: Any, rows: int, times: int) -> Recorder:
    recorder = Recorder()
    part = keras.tree.map_structure(lambda v: _repeated(data.cut(v, 0, rows), times), batch)
    try:
        with gate.entered(recorder), generation.stateless(model), tf.init_scope():
            getattr(model, step_name)(part)
    except Exception:
        # The step itself will be run right after this, and tell the user what is wrong with it.
        return recorder
    return recorder


def _repeated(value: Any, times: int) -> Any:
    if value is None or value.shape.rank == 0 or times == 1:
        return value
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.concat(0, [value] * times)
    return tf.concat([value] * times, 0)


def _looks_at_other_rows(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether a loss's values for the rows of a batch differ from its values for the same rows in two parts."""
    rows = int(data.rows(keras.tree.flatten(y_pred)[0]))
    if rows < 2:
        return False
    cut = max(1, rows // 3)

    def values(start: int, stop: int) -> Any:
        part = keras.tree.map_structure(lambda v: v[start:stop], (y_true, y_pred))
        return np.asarray(generation.loss_values(loss, *part))

    try:
        whole, parts = values(0, rows), [values(0, cut), values(cut, rows)]
    except Exception:
        return False
    if whole.ndim == 0:
        return True
    joined = np.concatenate(parts)
    scale = np.max(np.abs(whole[np.isfinite(whole)]), initial=0.0)
    return joined.shape == whole.shape and not np.allclose(joined, whole, rtol=1e-4, atol=1e-4 * scale, equal_nan=True)
