"""Loss scaling on reduced gradients: one decision for all replicas, a scale within bounds, skipped steps counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_mirror import notices
from keras_mirror.seams import gate, generation, loss_scale
from keras_mirror.seams import tensorflow as tf_seams
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.step import Step

# After so many steps in a row whose gradients weren't finite no smaller scale will help.
MAX_SKIPPED_IN_A_ROW = 50
# At its floor the scale doesn't scale any more; one bad batch is passed over there, two in a row are not.
MAX_SKIPPED_AT_FLOOR = 2

_STEPS, _SKIPPED, _IN_A_ROW, _AT_FLOOR, _LAST_BAD, _BAD = range(6)


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """The loss scaling of one optimizer, read from the device when it was asked for.

    Attributes:
        optimizer: the name of the LossScaleOptimizer.
        scale: the loss scale of the next step.
        steps: steps trained since compile gave the model this optimizer, the skipped ones included.
        skipped: steps whose gradients weren't finite; they changed nothing but the scale.
        skipped_in_a_row: how many of the latest steps were skipped.
    """

    optimizer: str
    scale: float
    steps: int
    skipped: int
    skipped_in_a_row: int

    @property
    def skipped_share(self) -> float:
        """The skipped steps as a share of all steps, 0 before the first."""
        return self.skipped / self.steps if self.steps else 0.0


def install() -> None:
    """Puts the seams of loss scaling in place."""
    loss_scale.install(update)


def _scale_of(optimizer: Any) -> Any:
    variable = loss_scale.scale_variable(optimizer)
    if variable is None:
        return loss_scale.initial_scale(optimizer)
    return tf_seams.components(generation.raw_variable(variable))[0].numpy()


def floor_of(optimizer: Any) -> float:
    """The smallest loss scale: 1, or the initial scale where the user chose a smaller one."""
    return min(1.0, float(optimizer.initial_scale))


def update(optimizer: Any, grads: list[Any], variables: Any = None) -> None:
    """What a LossScaleOptimizer does with the gradients of a scaled loss. On N replicas they are already summed.

    With s the scale, c the steps since it last changed, G `dynamic_growth_steps`, and g / s the unscaled gradients:
    if they are finite, the inner optimizer applies them, c' = c + 1, and where c' >= G: c' = 0 and s' = 2 s if that is finite.
    If not, nothing is applied, c' = 0, and s' = max(s / 2, floor), the floor being min(1, initial_scale). The algorithm is
    Keras's (after Micikevicius et al., "Mixed Precision Training", 2018, section 3.2), which has neither bound and tests c' == G.
    A scale that is below the floor or isn't finite (plain Keras can save such) skips one step and becomes `initial_scale`.

    Args:
        optimizer: a built LossScaleOptimizer.
        grads: gradients of the scaled loss, None where there is none.
        variables: the variables that they belong to; None: those that the optimizer was built for.
    """
    step: Step | None = gate.current()  # type: ignore[assignment]
    targets = generation.optimizer_variables_of(optimizer) if variables is None else list(variables)
    scale = tf.convert_to_tensor(optimizer.dynamic_scale)
    given = list(zip(grads, targets, strict=True))
    # Keras's optimizers give the user's own error for gradients that are all None.
    unscaled = [_unscaled(optimizer, g, v, scale) for g, v in given]
    finite = [_is_finite(g) for g in unscaled if g is not None] or [tf.constant(True)]
    counts = None if step is None else step.loss_scale_counts(optimizer)

    def take() -> tf.Tensor:
        optimizer.inner_optimizer.apply(unscaled, trainable_variables=variables)
        _grow(optimizer, scale)
        if counts is not None:
            counts.taken()
        return tf.constant(0)

    def skip() -> tf.Tensor:
        _shrink(optimizer, scale)
        if counts is not None:
            counts.skipped(scale <= floor_of(optimizer), finite, [v for g, v in given if g is not None])
        return tf.constant(0)

    tf.cond(tf.reduce_all(tf.stack(finite)) & _is_usable(optimizer, scale), take, skip)


def _unscaled(optimizer: Any, grad: Any, variable: Any, scale: tf.Tensor) -> Any:
    if grad is None or loss_scale.is_overwritten_by_gradient(optimizer, variable):
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / tf.cast(scale, grad.dtype), grad.indices, grad.dense_shape)
    grad = tf.convert_to_tensor(grad)
    if grad.dtype == tf.float16:
        # The scale itself may be more than float16 holds.
        return tf.cast(tf.cast(grad, tf.float32) / scale, tf.float16)
    return grad / tf.cast(scale, grad.dtype)


def _is_finite(grad: Any) -> tf.Tensor:
    if isinstance(grad, tf.IndexedSlices):
        # An index that comes twice is applied once, with the sum, which may overflow where its parts don't.
        indices, position = tf.unique(grad.indices)
        grad = tf.math.unsorted_segment_sum(grad.values, position, tf.size(indices))
    return tf.reduce_all(tf.math.is_finite(grad))


def _grow(optimizer: Any, scale: tf.Tensor) -> None:
    counter = optimizer.step_counter
    count = tf.convert_to_tensor(counter) + 1
    growth = int(optimizer.dynamic_growth_steps)
    due = (count >= growth) & (growth > 0)
    grown = scale * 2.0
    counter.assign(tf.where(due, tf.zeros_like(count), count))
    optimizer.dynamic_scale.assign(tf.where(due & tf.math.is_finite(grown), grown, scale))


def _shrink(optimizer: Any, scale: tf.Tensor) -> None:
    floor = floor_of(optimizer)
    optimizer.step_counter.assign(tf.zeros_like(tf.convert_to_tensor(optimizer.step_counter)))
    initial = tf.constant(optimizer.initial_scale, scale.dtype)
    optimizer.dynamic_scale.assign(tf.where(_is_usable(optimizer, scale), tf.maximum(scale * 0.5, floor), initial))


def _is_usable(optimizer: Any, scale: tf.Tensor) -> tf.Tensor:
    return tf.math.is_finite(scale) & (scale >= floor_of(optimizer))


class Counts:
    """Steps taken and skipped by one LossScaleOptimizer, counted on the devices; no part of the model's saved state.

    Args:
        optimizer: the optimizer.
        strategy: the strategy, in whose scope the counts are made.
    """

    def __init__(self, optimizer: Any, strategy: tf.distribute.Strategy) -> None:
        self.optimizer = optimizer
        self.paths: list[str] = []
        with tf.init_scope(), strategy.scope():
            self._variable = tf.Variable([0] * 6, dtype=tf.int64, trainable=False, name="loss_scale_counts")
        tf_seams.make_local(self._variable)

    def on_replica(self, index: int) -> ReplicaCounts:
        """The counts as the replica `index` of this process writes them."""
        return ReplicaCounts(self, tf_seams.local_value(self._variable, index))

    def read(self) -> LossScaling:
        """The counts of this process's first replica; every replica has the same."""
        counts = self._values()
        scale = float(_scale_of(self.optimizer))
        return LossScaling(
            generation.optimizer_name(self.optimizer), scale, int(counts[_STEPS]), int(counts[_SKIPPED]), int(counts[_IN_A_ROW])
        )

    @property
    def is_hopeless(self) -> bool:
        """Whether steps were skipped so often in a row that a smaller scale can't help."""
        counts = self._values()
        return bool(counts[_IN_A_ROW] >= MAX_SKIPPED_IN_A_ROW or counts[_AT_FLOOR] >= MAX_SKIPPED_AT_FLOOR)

    @property
    def bad_gradients(self) -> tuple[str, int, int]:
        """Of the last skipped step: the last variable (in the model's order) whose gradient wasn't finite, how many, of how many.

        The backward pass runs from the model's end to its start, so that variable's gradient was the first to go wrong.
        """
        counts = self._values()
        return (self.paths[int(counts[_LAST_BAD])] if self.paths else "", int(counts[_BAD]), len(self.paths))

    def start_again(self) -> None:
        """After the stop: no step counts as skipped in a row, and the scale is looked for from `initial_scale` again."""
        counts = self._values()
        counts[_IN_A_ROW] = counts[_AT_FLOOR] = 0
        for component in tf_seams.components(self._variable):
            component.assign(counts)
        loss_scale.start_again(self.optimizer)

    def _values(self) -> Any:
        return np.array(tf_seams.components(self._variable)[0].numpy())


class ReplicaCounts:
    """One replica's own copy of the counts, inside a step."""

    def __init__(self, counts: Counts, variable: tf.Variable) -> None:
        self._counts = counts
        self._variable = variable

    def taken(self) -> None:
        """Counts a step that was applied."""
        kept = tf.constant([1, 1, 0, 0, 1, 1], tf.int64)
        self._variable.assign(self._variable.read_value() * kept + tf.constant([1, 0, 0, 0, 0, 0], tf.int64))

    def decided(self, scale: Any, is_finite: Any, grads: list[Any]) -> None:
        """Counts a step of which the optimizer itself says whether it is applied (Keras 2)."""
        flat = [g for g in tf.nest.flatten(grads) if g is not None]

        def take() -> tf.Tensor:
            self.taken()
            return tf.constant(0)

        def skip() -> tf.Tensor:
            self.skipped(scale <= 1.0, [_is_finite(g) for g in flat], [])
            return tf.constant(0)

        tf.cond(is_finite, take, skip)

    def skipped(self, at_floor: tf.Tensor, finite: list[tf.Tensor], variables: list[Any]) -> None:
        """Counts a step that was skipped, and notes which gradients weren't finite."""
        self._counts.paths = [str(getattr(v, "path", None) or v.name) for v in variables]
        bad = tf.logical_not(tf.stack(finite))
        last = tf.reduce_max(tf.where(bad, tf.range(len(finite), dtype=tf.int64), tf.constant(0, tf.int64)))
        one = tf.constant(1, tf.int64)
        counts = tf.unstack(self._variable.read_value())
        floor = tf.where(at_floor, counts[_AT_FLOOR] + one, tf.constant(0, tf.int64))
        number = tf.reduce_sum(tf.cast(bad, tf.int64))
        self._variable.assign(
            tf.stack([counts[_STEPS] + one, counts[_SKIPPED] + one, counts[_IN_A_ROW] + one, floor, last, number])
        )


class LossScales:
    """The counts of every LossScaleOptimizer of one model."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._counts: dict[int, Counts] = {}
        self._warned: set[int] = set()
        self.stops = True

    def adopt(self, optimizers: Iterable[Any]) -> None:
        """Bounds the scale of the LossScaleOptimizers among the model's optimizers; counts of those gone are dropped."""
        mine = [o for o in optimizers if loss_scale.is_loss_scaled(o)]
        for optimizer in mine:
            loss_scale.bound(optimizer)
        self._counts = {id(o): self._counts.get(id(o)) or Counts(o, self._strategy) for o in mine}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def of(self, optimizer: Any) -> Counts | None:
        """The counts of one optimizer; None where the model doesn't hold it."""
        return self._counts.get(id(optimizer))

    def of_state(self, state: Any) -> Counts | None:
        """The counts of the optimizer that this loss scale belongs to (Keras 2)."""
        return next((c for c in self._counts.values() if loss_scale.scale_state(c.optimizer) is state), None)

    def read(self) -> tuple[LossScaling, ...]:
        """One entry for each built LossScaleOptimizer of the model."""
        return tuple(c.read() for c in self._counts.values() if generation.is_optimizer_built(c.optimizer))

    def hopeless(self) -> Counts | None:
        """The first optimizer for which skipping steps leads nowhere; None where the engine isn't to stop for it."""
        return None if not self.stops else next((c for c in self._counts.values() if c.is_hopeless), None)

    def warn_of_unscaled(self, optimizer: Any) -> None:
        """Says once that a train_step applied gradients of a loss that was never scaled."""
        if id(optimizer) not in self._warned:
            self._warned.add(id(optimizer))
            name = generation.optimizer_name(optimizer)
            notices.warn(
                f"train_step: {name!r} was given gradients without its scale_loss having been called in the step; it"
                " divides them by its loss scale, so that next to nothing is learned.\nTake the gradient of"
                " self.optimizer.scale_loss(loss), as Keras's guide to mixed precision does. (Where the step multiplies by the"
                " optimizer's dynamic_scale itself, all is well.)"
            )

    def warn_of_plain(self, optimizer: Any) -> None:
        """Says once that a train_step trains float16 layers with an optimizer that scales no loss."""
        if id(optimizer) not in self._warned:
            self._warned.add(id(optimizer))
            notices.warn(
                f"train_step: layers compute in float16, and {generation.titled(optimizer)} scales no loss, so"
                " that small gradients become 0: Keras puts a LossScaleOptimizer around the one optimizer that its own compile is"
                " given.\nWrap yours: keras.optimizers.LossScaleOptimizer(optimizer), and take the gradient of its"
                " scale_loss(loss)."
            )


def scale_where_needed(model: Any) -> bool:
    """Puts a LossScaleOptimizer around a compiled model's optimizer where layers, not the model, have a float16 policy.

    Keras looks at the model's own policy alone and leaves such a model unscaled. A model with its own train_step is left
    alone: whether the step scales its loss isn't known.

    Args:
        model: a model; one that isn't compiled, or was with `auto_scale_loss=False`, is left as it is.

    Returns:
        Whether it was done.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or loss_scale.is_loss_scaled(optimizer) or not loss_scale.auto_scales(model):
        return False
    if generation.has_own_step(model, "train_step") or not computes_in_half(model):
        return False
    model.optimizer = loss_scale.wrap(optimizer)
    return True


def computes_in_half(model: Any) -> bool:
    """Whether any layer computes in float16 and keeps its weights in a larger type."""
    return any(layer.compute_dtype == "float16" and layer.variable_dtype != "float16" for layer in generation.sublayers(model))


def half_precision_traps(model: Any, metrics: Iterable[Any]) -> list[str]:
    """What Keras's guide to mixed precision advises against, a message for each: a softmax output or a metric in float16."""
    found = []
    for layer in _output_layers(model):
        if layer.compute_dtype == "float16" and _is_softmax(layer):
            found.append(
                f"MirroredFitter: the model's output {layer.name!r} is a softmax in float16, which holds no probability below"
                ' 6e-8 and is unstable in the loss.\nGive that layer dtype="float32"; the others may stay in float16.'
            )
    for metric in metrics:
        if str(metric.dtype) == "float16":
            found.append(
                f"MirroredFitter: the metric {metric.name!r} is computed in float16, which can't count beyond 2048.\n"
                'Give it dtype="float32", or none.'
            )
    return found


def _output_layers(model: Any) -> list[Any]:
    """The layers that make the model's outputs; of a subclassed model, whose outputs aren't known, its last layer if Dense."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or []) if model.built else []
    is_known = bool(outputs) or isinstance(model, keras.Sequential)
    last = [layer for layer in model.layers[-1:] if is_known or isinstance(layer, keras.layers.Dense)]
    makers = [layer for layer in model.layers if _makes_one_of(layer, outputs)] if outputs else last
    nested = [_output_layers(layer) if isinstance(layer, keras.Model) else [layer] for layer in makers]
    return [layer for layers in nested for layer in layers]


def _makes_one_of(layer: Any, outputs: list[Any]) -> bool:
    try:
        made = keras.tree.flatten(layer.output)
    except (AttributeError, ValueError):  # Never called, or called more than once.
        return False
    return any(a is b for a in made for b in outputs)


def _is_softmax(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Softmax) or getattr(layer, "activation", None) is keras.activations.softmax
