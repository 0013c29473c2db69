"""What the workers of a fit agree on, each through the same sequence of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mirror import replicas


class Workers:
    """All processes of a strategy; with one process every call returns at once what it was given.

    Every method is a collective: each worker calls it, in the same order, or all of them wait.

    Args:
        strategy: the model's strategy; None: one device.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None) -> None:
        self._strategy = strategy
        self.first = strategy is None or replicas.is_chief(strategy)
        local = 1 if strategy is None else len(strategy.extended.worker_devices)
        self.local_replicas = local
        self.alone = strategy is None or strategy.num_replicas_in_sync == local
        self._sum: Any = None

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over the workers."""
        return [float(each) for each in self.total_of(np.asarray(list(numbers), np.float64))]

    def total_of(self, array: np.ndarray) -> np.ndarray:
        """The sum of an array over the workers, in float64."""
        if self.alone or self._strategy is None:
            return array
        if self._sum is None:
            self._sum = tf.function(self._add, input_signature=[tf.TensorSpec([None], tf.float64)], autograph=False)
        total: np.ndarray = self._sum(tf.constant(array.reshape(-1), tf.float64)).numpy()
        return total.reshape(array.shape)

    def _add(self, numbers: Any) -> Any:
        strategy = self._strategy
        if strategy is None:
            return numbers

        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            index = int(tf.get_static_value(context.replica_id_in_sync_group)) % self.local_replicas
            # Each process counts once, however many replicas it has.
            return tf.identity(numbers) if index == 0 else tf.zeros_like(numbers)

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica), axis=None)

    def any(self, flag: bool) -> bool:
        """Whether any worker says so."""
        return self.total([1.0 if flag else 0.0])[0] > 0

    def wait(self) -> None:
        """Returns once every worker has come here."""
        self.total([0.0])

    def of_first(self, number: int) -> int:
        """The first worker's number."""
        return round(self.total([float(number) if self.first else 0.0])[0])

    def gather(self, variables: Sequence[Any]) -> list[np.ndarray]:
        """The value of each variable on every replica of every worker: arrays of shape (replicas, ...).

        Args:
            variables: tf.Variables with a component on each replica, or plain ones.
        """
        if not variables:
            return []
        strategy = self._strategy
        if self.alone or strategy is None:
            return [np.stack([part.numpy() for part in components(each)]) for each in variables]

        def replica() -> list[Any]:
            index = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            return [tf.expand_dims(components(each)[index % self.local_replicas].read_value(), 0) for each in variables]

        def all_of() -> list[Any]:
            return [strategy.gather(each, axis=0) for each in strategy.run(replica)]

        return [each.numpy() for each in tf.function(all_of, autograph=False)()]


def components(variable: Any) -> tuple[Any, ...]:
    """A variable's components in this process, in replica order."""
    return tuple(variable.values) if isinstance(variable, tf.distribute.DistributedValues) else (variable,)
