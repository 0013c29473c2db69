"""What is wrong with targets, seen on the batch that a step gets: NaN, and class numbers that the output doesn't have.

Batches are on the host, and so are the checks: no accelerator waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_mirror import notices
from keras_mirror.engine import data
from keras_mirror.seams import data_seams, generation
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.step import Step

_CALLS = {"train_step": "fit", "test_step": "evaluate", "predict_step": "predict"}


class Targets:
    """What was found in the targets of the running call.

    Attributes:
        nan: whether a target was NaN.
        warned: whether that was said.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A call of fit begins."""
        self.nan = self.warned = False

    def look_for_nan(self, batch: Any) -> None:
        """Adds to a step (or does at once, run eagerly) the look for NaN among its floating-point targets."""
        targets = [tensor for part in _parts(batch) for tensor in _floating(_targets(part))]
        if not targets:
            return
        with tf.device("CPU:0"):
            # A sum is NaN where a term is, and costs less than looking at each. So is that of opposite infinities.
            doubtful = tf.math.is_nan(tf.add_n([tf.cast(tf.reduce_sum(t), tf.float64) for t in targets]))
            tf.cond(doubtful, lambda: self._found(targets), lambda: tf.constant(False))

    def _found(self, targets: list[Any]) -> Any:
        is_nan = tf.reduce_any(tf.stack([tf.reduce_any(tf.math.is_nan(t)) for t in targets]))
        return tf.ensure_shape(tf.numpy_function(self._note, [is_nan], tf.bool), [])

    def _note(self, is_nan: np.ndarray) -> np.ndarray:
        self.nan = self.nan or bool(is_nan)
        return is_nan

    def warn(self, step_name: str) -> None:
        """Says once that a target was NaN."""
        if self.nan and not self.warned:
            self.warned = True
            notices.warn(
                f"{_CALLS[step_name]}: the targets contain NaN, from which most losses and then all weights become NaN.\n"
                "Drop those examples, or give them a number as target and sample_weight 0."
            )


def labels(step: Step, loss: Any, y_true: Any, y_pred: Any) -> Any:
    """The targets, to be used once they are known to be class numbers that the output has.

    TensorFlow's loss raises an error that names its operation on a CPU, and is NaN without a word on a GPU.

    Args:
        step: the replica's step.
        loss: a Loss that is called in it.
        y_true: its targets.
        y_pred: its outputs.

    Raises:
        ValueError: run eagerly, there is a label of no class; else the compiled call raises it, see `feed.own_errors`.
    """
    known = data_seams.class_labels(loss, y_pred) if tf.is_tensor(y_pred) else None
    if known is None or not isinstance(y_true, tf.Tensor) or not (y_true.dtype.is_integer or y_true.dtype.is_floating):
        return y_true
    classes, ignored = known

    def report(lowest: Any, highest: Any) -> Any:
        error = ValueError(
            f"{_CALLS[step.name]}: labels from {lowest:g} to {highest:g} were found, expected 0 to {classes - 1}: the output"
            f" has {classes} classes, and sparse categorical crossentropy takes their numbers.\n"
            "Number the classes from 0, or give the last layer more units; ignore_class=... of the loss leaves out one label."
        )
        step.engine.failure = error
        raise error

    whole = _whole(step, y_true)
    with tf.device("CPU:0"):
        wrong = tf.logical_or(whole < 0, whole >= tf.cast(classes, whole.dtype))
        if ignored is not None:
            wrong = tf.logical_and(wrong, tf.not_equal(whole, tf.cast(ignored, whole.dtype)))
        bad = tf.cast(tf.boolean_mask(whole, wrong), tf.float64)
        if step.graph is None:
            if tf.size(bad) > 0:
                report(float(tf.reduce_min(bad)), float(tf.reduce_max(bad)))
            return y_true
        checked = tf.cond(
            tf.reduce_any(wrong),
            lambda: tf.ensure_shape(tf.numpy_function(report, [tf.reduce_min(bad), tf.reduce_max(bad)], tf.bool), []),
            lambda: tf.constant(True),
        )
    with tf.control_dependencies([checked]):
        return tf.identity(y_true)


def _whole(step: Step, y_true: Any) -> Any:
    """The global batch's tensor on the host that `y_true` is cut from; `y_true` itself where the step has changed it."""
    if isinstance(step.batch, data.Given) or data.is_distributed_batch(step.batch):
        return y_true
    for part, whole in zip(keras.tree.flatten(step.part), keras.tree.flatten(step.batch), strict=True):
        if part is y_true:
            return whole
    return y_true


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, data.Given):
        return batch.parts
    return [batch]


def _targets(batch: Any) -> Any:
    return generation.unpack(batch)[1] if isinstance(batch, (tuple, list)) and 2 <= len(batch) <= 3 else None


def _floating(targets: Any) -> list[Any]:
    tensors: list[Any] = []
    for value in keras.tree.flatten(targets):
        for each in value.values if isinstance(value, tf.distribute.DistributedValues) else (value,):
            each = each.flat_values if isinstance(each, tf.RaggedTensor) else each
            each = each.values if isinstance(each, tf.SparseTensor) else each
            if isinstance(each, tf.Tensor) and each.dtype.is_floating:
                tensors.append(each)
    return tensors
