"""One replica's part of one step: what the seams ask while Keras's own code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror.engine import loss, optimizer, state
from keras_mirror.engine.data import Share
from keras_mirror.seams import generation

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine


class Step:
    """A replica's step. Lives while its function is traced (or, run eagerly, while it runs), in the replica's thread.

    Args:
        engine: the model's engine.
        replica: index over all replicas of all workers.
        share: this replica's rows of the global batch.
        own: whether the user wrote the step (`train_step` and so on are overridden).
        siblings: the steps of all replicas of this process by index; this one adds itself.
    """

    def __init__(self, engine: Engine, replica: int, share: Share, own: bool, siblings: dict[int, Step]) -> None:
        self.engine = engine
        self.replica = replica
        self.replicas = engine.replicas
        self.local_index = replica % engine.local_replicas
        self.share = share
        self.own = own
        self.siblings = siblings
        siblings[replica] = self
        self.sums = engine.step_sums and own
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.applying = False
        self.contained = False
        self.whole_batch = False
        self.scalar_means_whole_batch = False
        self.losses: dict[int, list[Any]] = {}
        self.written: dict[int, Any] = {}
        self.results: dict[int, tuple[Any, str | None, Any]] = {}
        self.scaled_by: set[int] = set()
        # The model's function that is run, the global batch, and this replica's part of it.
        self.name = "train_step"
        self.batch: Any = None
        self.part: Any = None

    # -- arithmetic shared by the rooms

    @property
    def alone(self) -> bool:
        """One replica: every weight is 1 and nothing is reduced."""
        return self.replicas == 1

    def weight(self, dtype: Any) -> Any:
        """The share n / N: what this replica's mean counts in the mean over the global batch."""
        return tf.cast(self.share.count, dtype) / tf.cast(self.share.total, dtype)

    def inverse_weight(self, dtype: Any) -> Any:
        """The inverse N / n, with 1 for n where the replica has no example (its weight is 0 anyway)."""
        return tf.cast(self.share.total, dtype) / tf.cast(tf.maximum(self.share.count, 1), dtype)

    def has_examples(self, dtype: Any = tf.bool) -> Any:
        """Whether any row is the replica's own, as a scalar of `dtype`."""
        return tf.cast(self.share.count > 0, dtype)

    def all_reduce(self, values: list[Any], why: str) -> list[Any]:
        """Sums each value over the replicas, in one call for each dtype.

        Args:
            values: tensors or IndexedSlices, of the same shapes on every replica (IndexedSlices may differ in length).
            why: what is reduced, for the message where the place allows no communication.

        Raises:
            RuntimeError: called inside a `tf.cond`, a loop or a `tf.function` of the user's.
        """
        if self.alone or not values:
            return values
        if self.nested:
            raise RuntimeError(
                f"MirroredFitter: {why} inside a tf.function, tf.cond or loop within the step, where replicas can't"
                " communicate.\nMove that call to the top level of the step (take the @tf.function off the helper):"
                " fit compiles the whole step anyway."
            )
        context = tf.distribute.get_replica_context()
        out: list[Any] = [None] * len(values)
        for dtype in dict.fromkeys(v.dtype for v in values):
            where = [i for i, v in enumerate(values) if v.dtype == dtype]
            reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [values[i] for i in where])
            for i, value in zip(where, reduced, strict=True):
                out[i] = value
        return out

    @property
    def nested(self) -> bool:
        """Whether the code runs in a graph within the step's own: a cond, a loop, a tf.function."""
        return self.graph is not None and tf.compat.v1.get_default_graph() is not self.graph

    def is_per_row(self, value: Any) -> bool:
        """Whether a tensor has one entry for each row of the share: its first dimension is open or, run eagerly, the rows."""
        if len(value.shape) == 0:
            return False
        if value.shape[0] is None:
            return True
        return self.graph is None and int(value.shape[0]) == max(int(self.share.count), 1)

    # -- what the seams ask (gate.Hooks)

    def scale_loss(self, original: Callable[..., Any], value: Any) -> Any:
        return value

    def unscale_loss(self, original: Callable[..., Any], value: Any) -> Any:
        return value

    def call_loss(self, original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
        return loss.call(self, original, instance, *args, **kwargs)

    def reduce_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return loss.reduce(self, original, *args, **kwargs)

    def additional_loss(self, original: Callable[..., Any], model: Any, loss_value: Any) -> Any:
        return loss.additional(self, original, model, loss_value)

    def add_loss(self, original: Callable[..., Any], layer: Any, loss_value: Any) -> Any:
        loss.added(self, original, layer, loss_value)

    def own_losses(self, original: Callable[..., Any], layer: Any) -> Any:
        return list(self.losses.get(id(layer), []))

    def clear_losses(self, original: Callable[..., Any], layer: Any) -> Any:
        for each in [layer, *generation.sublayers(layer)]:
            self.losses.pop(id(each), None)

    def metric_update(self, original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
        return loss.metric_update(self, original, metric, *args, **kwargs)

    def metric_values(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return loss.metric_values(self, original, *args, **kwargs)

    def metric_weight(self, value: Any, sample_weight: Any) -> Any:
        return loss.metric_weight(self, value, sample_weight)

    @contextlib.contextmanager
    def in_container(self) -> Iterator[None]:
        """While compile's container of losses runs: it weighs the values it logs by the rows of the share."""
        self.contained = True
        try:
            yield
        finally:
            self.contained = False

    def metric_result(self, original: Callable[..., Any], metric: Any) -> Any:
        return state.metric_result(self, original, metric)

    def next_seed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return state.next_seed(self, original, *args, **kwargs)

    def global_seeds(self, original: Callable[..., Any]) -> Any:
        return self.engine.global_seeds()

    def assign(self, original: Callable[..., Any], variable: Any, value: Any) -> Any:
        if not self.applying:
            self.written[id(variable)] = variable
        return original(variable, value)

    def moments(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return state.moments(self, original, *args, **kwargs)

    def masked_moments(self, original: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any:
        return state.masked_moments(self, original, layer, inputs, mask)

    def gradient(self, original: Callable[..., Any], tape: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.gradient(self, original, tape, *args, **kwargs)

    def optimizer_scale_loss(self, original: Callable[..., Any], optimizer: Any, loss_value: Any) -> Any:
        self.scaled_by.add(id(optimizer))
        return original(optimizer, loss_value)

    def loss_scale_counts(self, optimizer: Any) -> Any:
        """Where this replica counts the steps of a LossScaleOptimizer (asked for as it is given gradients); None: nowhere."""
        if self.own and id(optimizer) not in self.scaled_by:
            self.engine.loss_scales.warn_of_unscaled(optimizer)
        counts = self.engine.loss_scales.of(optimizer)
        return None if counts is None else counts.on_replica(self.local_index)

    def loss_scale_decided(self, state: Any, scale: Any, is_finite: Any, grads: Any) -> None:
        """Keras 2: the step of the optimizer whose loss scale is `state` was found to be finite or not."""
        counts = self.engine.loss_scales.of_state(state)
        if counts is not None:
            counts.on_replica(self.local_index).decided(scale, is_finite, grads)

    def apply(self, original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
        if self.own and not self.applying:
            self.engine.warn_of_unscaled_half(instance)
        return optimizer.apply(self, original, instance, *args, **kwargs)
