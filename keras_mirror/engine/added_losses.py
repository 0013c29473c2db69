"""Which of the losses that layers add are sums over the batch: measured once, since a scalar doesn't tell.

`self.add_loss(ops.sum(x))` and `self.add_loss(ops.mean(x))` look alike, and so does an activity regulariser before Keras
divided it by the batch size. On a share the first has to be multiplied by N/n, the second not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_mirror.engine import data
from keras_mirror.engine.build import BuildStep
from keras_mirror.seams import gate, keras3


class Unmeasured(Exception):
    """A step met an added loss before it was measured. The step is traced again once it is."""


class Recorder(BuildStep):
    """Runs a step's forward pass on values without changing anything, and keeps what layers add."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}
        self._counts: dict[int, int] = {}

    def add_loss(self, original: Callable[..., Any], layer: Any, loss_value: Any) -> None:
        for value in keras.tree.flatten(loss_value):
            index = self._counts.get(id(layer), 0)
            self._counts[id(layer)] = index + 1
            if len(value.shape) == 0:
                self.values[(layer.path, index)] = float(value)

    def clear_losses(self, original: Callable[..., Any], layer: Any) -> None:
        for each in keras3.sublayers(layer):
            self._counts.pop(id(each), None)


def find_sums(model: keras.Model, step_name: str, batch: Any) -> set[tuple[str, int]]:
    """Runs the model's step on one batch and on two uneven parts of it, and compares the losses that its layers add.

    A mean over the batch: the parts' weighted mean is the whole. A sum: the parts' sum is. Anything else (random draws, a
    function of the whole batch) is taken for a mean.

    Args:
        model: a built model. It isn't changed.
        step_name: "train_step" or "test_step".
        batch: a batch of values.

    Returns:
        (layer's path, index among the layer's losses) of each sum.
    """
    batch = keras.tree.map_structure(lambda v: None if v is None else keras3.to_tensor(v), data.without_optionals(batch))
    rows = int(data.rows(data.batch_leaves(batch)[0]))
    if rows < 2:
        return set()
    first = max(1, rows // 3)
    whole = _added(model, step_name, batch, 0, rows)
    head, tail = _added(model, step_name, batch, 0, first), _added(model, step_name, batch, first, rows)
    sums = set()
    for key, value in whole.items():
        if key not in head or key not in tail:
            continue
        as_sum = abs(head[key] + tail[key] - value)
        as_mean = abs((first * head[key] + (rows - first) * tail[key]) / rows - value)
        if as_sum < as_mean and as_sum <= 1e-3 * abs(value):
            sums.add(key)
    return sums


def _added(model: keras.Model, step_name: str, batch: Any, start: int, stop: int) -> dict[tuple[str, int], float]:
    recorder = Recorder()
    part = keras.tree.map_structure(lambda v: data.cut(v, start, stop - start), batch)
    with gate.entered(recorder), keras3.stateless(), tf.init_scope():
        getattr(model, step_name)(part)
    return recorder.values
