"""Which share of an epoch the replicas waited for data: measured inside the compiled call, said after the epoch.

A step waits from when it is asked for its batch, or from when the replicas are done with the step before (they may lag behind
the host), until it has the batch. What a pipeline does meanwhile, ahead of the steps, is no waiting.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror import notices

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine

# A warning is worth it from this share and this many seconds of an epoch on.
_SHARE, _SECONDS = 0.25, 1.0


class Waiting:
    """The account of one epoch: the running one, or the last.

    Attributes:
        waited: seconds that steps of the epoch waited for data.
        total: seconds from the first step's begin to the last step's end.
        steps: how many steps were trained on, since the model was made; over all epochs.
        examples: of how many examples.
    """

    def __init__(self) -> None:
        self.warned = False
        self.steps, self.examples = 0, 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Starts anew."""
        self.waited = self.total = 0.0
        self._began: float | None = None

    def count(self, steps: float, examples: float) -> None:
        """Counts steps that are trained on outside such a call."""
        self.steps += int(steps)
        self.examples += examples

    def add(self, began: float, waited: float, steps: float = 0, examples: float = 0.0) -> None:
        """Counts a call of one or more steps that has just returned: when it began (Unix time) and how long it waited."""
        self.count(steps, examples)
        self._began = began if self._began is None else self._began
        self.waited += waited
        self.total = time.time() - self._began

    @property
    def share(self) -> float | None:
        """The share of the epoch that was waiting, from 0 to 1; None where no step has run."""
        return min(1.0, self.waited / self.total) if self.total > 0 else None

    def warn(self, epoch: int, epochs: int) -> None:
        """Names a pipeline that is the bottleneck, once a fit. In the first of several epochs it may just be filling a cache."""
        share = self.share
        if self.warned or share is None or share < _SHARE or self.waited < _SECONDS or epoch == 1 < epochs:
            return
        self.warned = True
        notices.warn(
            f"fit: {share:.0%} of epoch {epoch} ({self.waited:.1f} s of {self.total:.1f} s) was waiting for data: the input"
            " pipeline is slower than the replicas.\n"
            "The usual cures: dataset.cache() behind what is slow and fits in memory; dataset.map(...,"
            " num_parallel_calls=tf.data.AUTOTUNE); dataset.prefetch(tf.data.AUTOTUNE) at its end; workers of a PyDataset."
        )


def now(*after: Any) -> Any:
    """The Unix time in seconds, as a float64 tensor, read once all of `after` (tensors, operations) are there."""
    with tf.device("CPU:0"), tf.control_dependencies([v for v in after if v is not None]):
        return tf.timestamp()


def caught_up(engine: Engine, asked: Any) -> Any:
    """When the first replica's device had done all it was asked to before `asked`; a CPU has by then.

    A device does its kernels in order, so one more of them tells; the host doesn't wait for it before it goes on.
    """
    device = engine.strategy.extended.worker_devices[0]
    if tf.DeviceSpec.from_string(device).device_type == "CPU":
        return asked
    with tf.device(device):
        kernel = tf.math.tanh(tf.cast(asked, tf.float32))
    with tf.device("CPU:0"):
        arrived = tf.identity(kernel)
    return now(arrived)


def executed(outputs: Any) -> list[Any]:
    """What to wait for so that a `tf.cond` is done with all it does, not only with computing `outputs`."""
    found = []
    for output in outputs:
        operation = output.op
        found.append(operation.inputs[0].op if operation.type == "Identity" and operation.inputs else operation)
    return found
