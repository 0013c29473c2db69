"""Seams into Keras 2 (tested on Keras 2.15 with TensorFlow 2.15, and on tf-keras 2.21): the same small functions as keras3.

Keras 2 asks TensorFlow at every turn whether replicas may communicate. Inside an update of the engine's step the answer is that
they needn't: then its optimizers, and those of tensorflow-addons, are single-device code on each replica's own variables.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.distribute import collective_all_reduce_strategy, mirrored_strategy, values

from keras_mirror.seams import data2, gate, stack
from keras_mirror.seams import tensorflow as tf_seams
from keras_mirror.seams.stack import keras

_base_layer = stack.source("engine.base_layer")
_base_metric = stack.source("metrics.base_metric")
_batch_normalization = stack.source("layers.normalization.batch_normalization")
_compile_utils = stack.source("engine.compile_utils")
_losses = stack.source("losses")
_losses_utils = stack.source("utils.losses_utils")
_lso = stack.source("mixed_precision.loss_scale_optimizer")
_autocast = stack.source("mixed_precision.autocast_variable")
_metrics_utils = stack.source("utils.metrics_utils")
_optimizer = stack.source("optimizers.optimizer")
_legacy = stack.source("optimizers.legacy.optimizer_v2")
_nadam = stack.source("optimizers.nadam")
_saving_lib = stack.source("saving.serialization_lib")
_training = stack.source("engine.training")

Step = Any


def install() -> None:
    """Puts the seams in place. Each is the identity outside a step; `tests/seams` holds every upstream name."""
    data2.install()
    # Plain Keras divides a loss by R; here a loss is a mean over the share.
    gate.gated(_losses_utils, "scale_loss_for_distribution", "scale_loss")
    # Divisors of masks and sums are those of the global batch; a loss of the whole batch is evaluated on gathered outputs.
    _replace(_losses.Loss, "__call__", _loss_call)
    # Within the container a vector of losses is weighed by the share's size, which isn't what one device does.
    _replace(_compile_utils.LossesContainer, "__call__", _container_call)
    # A scalar given to a Mean without a weight counts once per step, not once per replica.
    _replace(_metrics_utils, "ragged_assert_compatible_and_get_flat_values", _metric_values)
    # An added loss may be a sum over the share.
    _replace(_base_layer.Layer, "add_loss", _add_loss)
    # Synchronised BatchNormalization: one reduction instead of three, and no row of an empty replica.
    _replace(_batch_normalization.BatchNormalizationBase, "_sync_calculate_mean_and_var", _moments)
    # The update is single-device code in each replica.
    for owner in (_optimizer.Optimizer, _legacy.OptimizerV2, _lso.LossScaleOptimizer, _lso.LossScaleOptimizerV3):
        _replace(owner, "apply_gradients", _apply_gradients)
    _replace(_legacy.OptimizerV2, "_prepare", _prepare)
    _replace(mirrored_strategy.MirroredExtended, "_use_merge_call", _use_merge_call)
    _replace(collective_all_reduce_strategy.CollectiveAllReduceExtended, "_use_merge_call", _use_merge_call)
    _replace(values, "_on_write_update_replica", _on_write)
    # Which of the model's variables a step writes: those may differ between replicas.
    for owner in (values.DistributedVariable, values.SyncOnReadVariable):
        for name in ("assign", "assign_add", "assign_sub"):
            if name in vars(owner):
                _replace(owner, name, _assign)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces `owner.name` by what `make` makes of the original, once."""
    original = vars(owner).get(name)
    if original is None:
        raise RuntimeError(
            f"keras_mirror: {owner.__name__}.{name} is gone from the installed Keras or TensorFlow.\n"
            "This version of keras_mirror does not know them: install versions from its table of supported stacks."
        )
    if hasattr(original, "_keras_mirror_original"):
        return
    seam = tf.autograph.experimental.do_not_convert(functools.wraps(original)(make(original)))
    seam._keras_mirror_original = original
    setattr(owner, name, seam)


# -- losses ------------------------------------------------------------------------------------------------------------


def _loss_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step: Step = gate.current()
        if step is None:
            return original(self, y_true, y_pred, sample_weight)
        return step.call_loss(_called, self, y_true, y_pred, sample_weight)

    return seam


def _called(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """`Loss.__call__` of Keras 2, with its reduction handed to the step, and without its refusal to reduce under a strategy."""
    step: Step = gate.current()
    with tf.name_scope(loss._name_scope):
        found = _converted(loss.call)(y_true, y_pred)
        masks = [m for m in (_losses_utils.get_mask(y_pred), _losses_utils.get_mask(found)) if m is not None]
        mask = functools.reduce(tf.logical_and, masks) if masks else None
        reduction = "sum_over_batch_size" if loss.reduction == "auto" else loss.reduction
        if isinstance(found, tf.RaggedTensor):
            found = found if reduction == "none" else found.flat_values
        return step.reduce_loss(_reduced, found, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=None)


def _reduced(values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = None, dtype: Any = None) -> Any:
    """Keras 2's mask, weights and reduction. A share may be all padding where the batch isn't, and is then 0, not NaN."""
    if mask is not None:
        mask = tf.cast(mask, values.dtype)
        if reduction == "sum_over_batch_size":
            total = tf.cast(tf.size(mask), values.dtype)
            mask = mask * tf.math.divide_no_nan(total, tf.reduce_sum(mask))
        sample_weight = _losses_utils.apply_mask(values, sample_weight, mask)
    return _losses_utils.compute_weighted_loss(values, sample_weight, reduction=reduction)


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """As Keras calls what a user may have written: in a graph AutoGraph turns its Python control flow into TensorFlow's."""
    if tf.executing_eagerly():
        return function
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(function, tf.__internal__.autograph.control_status_ctx())
    return converted


class _Entry:
    """A loss in compile's container, which multiplies a sum's log by R: inside a step no reduction is a sum to it."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    @property
    def reduction(self) -> Any:
        return self.loss.reduction if gate.current() is None else "auto"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loss(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "loss":
            raise AttributeError(name)
        return getattr(self.loss, name)


def _container_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(self: Any, *args: Any, **kwargs: Any) -> Any:
        step: Step = gate.current()
        if step is None:
            return original(self, *args, **kwargs)
        with step.in_container():
            return original(self, *args, **kwargs)

    return seam


def mask_of(value: Any) -> Any:
    """The mask that Keras attached to an output, or None."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: Any) -> None:
    """Attaches a mask to a tensor as Keras's layers do."""
    value._keras_mask = mask


def masked_mean_epsilon() -> float:
    """Keras 2 adds nothing to the number of valid entries."""
    return 0.0


def merged_weight(values: Any, sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Keras 2 has no `mean_with_sample_weight`."""
    raise NotImplementedError


def is_compile_loss(loss: Any) -> bool:
    """Keras 2's container is no Loss."""
    return False


def epsilon() -> float:
    """Keras's epsilon."""
    return float(keras.backend.epsilon())


@functools.cache
def _losses_of_keras() -> tuple[type, ...]:
    found = [getattr(keras.losses, name) for name in dir(keras.losses)]
    return tuple(c for c in found if isinstance(c, type) and issubclass(c, _losses.Loss) and c is not _losses.Loss)


def treats_rows_alone(loss: Any) -> bool:
    """Whether it is one of Keras's own losses: in Keras 2 the value for a row depends on that row alone in all of them."""
    function = getattr(loss, "fn", None)
    name = getattr(function, "__name__", "")
    return type(loss) in _losses_of_keras() or (function is not None and getattr(keras.losses, name, None) is function)


def looks_at_other_rows(loss: Any) -> bool:
    """Keras 2 has no loss of its own that does."""
    return False


def loss_values(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """A loss's values before any reduction, with targets in the outputs' type as the container gives them."""
    if tf.is_tensor(y_true) and y_true.dtype != y_pred.dtype and y_true.dtype.is_floating:
        y_true = tf.cast(y_true, y_pred.dtype)
    return loss.call(y_true, y_pred)


def _add_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(self: Any, losses: Any, **kwargs: Any) -> Any:
        step: Step = gate.current()
        if step is None or (isinstance(self, keras.Model) and not tf.is_tensor(losses)):
            return original(self, losses, **kwargs)
        made = [v for v in tf.nest.flatten(losses) if v is not None]
        if any(callable(v) or not tf.is_tensor(v) for v in made):
            return original(self, losses, **kwargs)
        return step.add_loss(lambda layer, loss: original(layer, loss, **kwargs), self, losses)

    return seam


def takes_added_losses_itself() -> bool:
    """Whether a layer keeps what `add_loss` adds for each thread by itself: so in Keras 2."""
    return True


def layer_key(layer: Any) -> str:
    """What tells the layers of a model apart, in this process."""
    return f"{layer.name} {id(layer)}"


def layer_path(layer: Any) -> str:
    """What a layer is called in messages."""
    return str(layer.name)


# -- metrics -----------------------------------------------------------------------------------------------------------


def _metric_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(values: Any, mask: Any = None) -> Any:
        step: Step = gate.current()
        if step is not None and isinstance(values, list) and len(values) == 1:
            mask = step.metric_weight(values[0], mask)
        return original(values, mask)

    return seam


def metric_parts(metric: Any) -> list[Any]:
    """The metrics that a metric is made of."""
    return [v for v in vars(metric).values() if isinstance(v, _base_metric.Metric)]


def hidden_metrics(model: Any) -> list[Any]:
    """What compile's containers hold; a model's own `metrics` property need not name it."""
    containers = [getattr(model, name, None) for name in ("compiled_loss", "compiled_metrics")]
    found = [m for c in containers if c is not None for m in c.metrics]
    return [*found, *(c._total_loss_mean for c in containers[:1] if c is not None)]


def observe_results(metrics: Iterable[Any]) -> None:
    """Has a step told of `result` and `update_state` of the metrics, which Keras 2 binds on each instance."""
    for metric in metrics:
        for name, hook in (("result", "metric_result"), ("update_state", "metric_update")):
            bound = getattr(metric, name)
            if not hasattr(bound, "_keras_mirror_original"):
                seam = _result(bound) if name == "result" else _update(bound)
                seam._keras_mirror_original = bound  # type: ignore[attr-defined]
                vars(metric)[name] = functools.partial(seam, metric)
                vars(metric)[name]._keras_mirror_original = bound
            del hook


def _result(bound: Callable[..., Any]) -> Callable[..., Any]:
    def own(metric: Any) -> Any:
        # Not Keras's wrapper, which asks all replicas at every step: the result is read again after the last one.
        found = _converted(type(metric).result.__get__(metric))()
        return tf.nest.map_structure(tf.identity, found)

    def seam(metric: Any, *args: Any, **kwargs: Any) -> Any:
        step: Step = gate.current()
        if step is None or args or kwargs:
            return bound(*args, **kwargs)
        return step.metric_result(own, metric)

    return seam


def _update(bound: Callable[..., Any]) -> Callable[..., Any]:
    def seam(metric: Any, *args: Any, **kwargs: Any) -> Any:
        step: Step = gate.current()
        if step is None:
            return bound(*args, **kwargs)
        if tf.distribute.get_replica_context() is None:
            return None  # A dry run, outside any replica.
        if not isinstance(metric, keras.metrics.MeanMetricWrapper):
            return bound(*args, **kwargs)
        return step.metric_update(lambda _, *a, **k: bound(*a, **k), metric, *args, **kwargs)

    return seam


def metric_result(metric: Any) -> Any:
    """A metric's result, converted by AutoGraph as in Keras's own step."""
    with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED):
        return metric.result()


def metric_variables(model: Any) -> list[Any]:
    """The variables of every metric of the model."""
    return [v for metric in model.metrics for v in metric.variables]


# -- optimizers --------------------------------------------------------------------------------------------------------


def _in_update() -> Any:
    """The step whose update runs in this thread, or None."""
    step: Step = gate.current()
    return step if step is not None and getattr(step, "applying", False) else None


def _use_merge_call(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: False if _in_update() is not None else original(self)


def _on_write(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(var: Any, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if _in_update() is None:
            return original(var, update_fn, value, **kwargs)
        return update_fn(var._get_on_device_or_primary(), value, **kwargs)

    return seam


def _assign(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(self: Any, *args: Any, **kwargs: Any) -> Any:
        step: Step = gate.current()
        if step is None:
            return original(self, *args, **kwargs)
        return step.assign(lambda variable, value: original(variable, value, *args[1:], **kwargs), self, args[0])

    return seam


def _apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        step: Step = gate.current()
        if step is None:
            with _updating():
                return original(self, grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        # The gradients are reduced; whoever calls from within an update must be told so too.
        kwargs["experimental_aggregate_gradients"] = False

        def apply(optimizer: Any, grads: Any, variables: Any) -> Any:
            if isinstance(optimizer, _nadam.Nadam):
                # It counts in Python while it is traced, and one device traces it twice.
                optimizer._u_product_counter = 1 + len(pairs)
            with _updating():
                return original(optimizer, list(zip(grads, variables, strict=True)), *args[:1], **kwargs)

        return step.apply(apply, self, [g for g, _ in pairs], [v for _, v in pairs])

    return seam


_here = threading.local()
_lock = threading.Lock()
_updates: list[int] = []


@contextlib.contextmanager
def _updating() -> Iterator[None]:
    _here.depth = getattr(_here, "depth", 0) + 1
    with _lock:
        _updates.append(1)
    try:
        yield
    finally:
        _here.depth -= 1
        with _lock:
            _updates.pop()


def is_updating() -> bool:
    """Whether an optimizer's update runs in this thread, or across replicas while the replicas' threads wait inside theirs."""
    return getattr(_here, "depth", 0) > 0 or (bool(_updates) and tf.distribute.in_cross_replica_context())


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(self: Any, var_list: Any) -> Any:
        step = _in_update()
        if step is None:
            return original(self, var_list)
        # Else every replica computes the rates for the devices of all, from its own variables.
        return original(self, [tf_seams.local_value(_raw(v), step.local_index) for v in var_list])

    return seam


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer of either family, a wrapper of one included."""
    return isinstance(value, (_optimizer.Optimizer, _legacy.OptimizerV2))


def optimizer_name(optimizer: Any) -> str:
    """What an optimizer (or a metric) is called in messages; a LossScaleOptimizer has no name of its own."""
    own = getattr(optimizer, "_name", "") or getattr(optimizer, "name", "")
    return str(own or optimizer_name(optimizer.inner_optimizer))


def titled(owner: Any) -> str:
    """Name and class of an optimizer or a metric, for messages."""
    return f"{optimizer_name(owner)!r} ({type(owner).__name__})"


def held_optimizers(owner: Any) -> list[Any]:
    """The optimizers that a model or a wrapping optimizer holds, as attributes or in lists and dicts, found by type."""
    return [value for held in vars(owner).values() for value in _members(held) if is_optimizer(value)]


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [m for each in value for m in _members(each)] if isinstance(value, (list, tuple)) else [value]


def accumulation_steps(optimizer: Any) -> int:
    """Keras 2's optimizers don't accumulate."""
    return 1


def accumulators(optimizer: Any) -> list[Any]:
    """None: Keras 2's optimizers don't accumulate."""
    return []


def accumulators_of(optimizer: Any, variables: list[Any]) -> list[Any]:
    """None: Keras 2's optimizers don't accumulate."""
    return []


def raw_iterations(optimizer: Any) -> Any:
    """The variable that counts calls of `apply_gradients`."""
    return optimizer.iterations


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Every variable of an optimizer, those of one inside it and its hyperparameters' too, in order."""
    found: list[Any] = []
    if isinstance(optimizer, _lso.BaseLossScaleOptimizer):
        found = list(getattr(optimizer._loss_scale, "_weights", {}).values())
    elif isinstance(optimizer, _optimizer.Optimizer):
        found = list(optimizer._variables)
        found += [v for v in vars(optimizer).values() if isinstance(v, tf.Variable)]
    else:
        found = [*optimizer._weights, *(v for v in optimizer._hyper.values() if isinstance(v, tf.Variable))]
    for inner in held_optimizers(optimizer):
        found += optimizer_variables(inner)
    return list({id(v): v for v in found}.values())


def strangers(optimizer: Any, variables: list[Any]) -> list[str]:
    """What tells that a built optimizer was built for other variables than these: names, empty where it wasn't."""
    if isinstance(optimizer, _lso.BaseLossScaleOptimizer):
        return []
    if isinstance(optimizer, _optimizer.Optimizer):
        known = {optimizer._var_key(_raw(v)) for v in variables}
        return [str(key) for key in getattr(optimizer, "_index_dict", {}) if key not in known]
    known = {_legacy._var_key(_raw(v)) for v in variables}
    return [str(key) for key in optimizer._slots if key not in known]


_built: weakref.WeakSet[Any] = weakref.WeakSet()


def is_optimizer_built(optimizer: Any) -> bool:
    """Whether the optimizer has its slots."""
    if isinstance(optimizer, _lso.BaseLossScaleOptimizer):
        return is_optimizer_built(optimizer.inner_optimizer)
    return bool(getattr(optimizer, "_built", False)) or optimizer in _built


def build_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Creates the optimizer's slots and hyperparameters as its first update would, but before anything is traced.

    Made while a step is traced they would be missing on the path of a cond, and a wrapper's inner optimizer would count alone.
    """
    if tf.distribute.get_replica_context() is not None and tf.distribute.has_strategy():
        # In a replica's thread every replica would make them: `trace_step` does it afterwards.
        _pending.append((optimizer, list(variables)))
        return
    variables = list(variables)
    if isinstance(optimizer, _lso.BaseLossScaleOptimizer):
        build_optimizer(optimizer.inner_optimizer, variables)
    elif isinstance(optimizer, _optimizer.Optimizer):
        if not is_optimizer_built(optimizer):
            optimizer.build(variables)
    elif getattr(optimizer, "optimizer_specs", None) is not None:
        # tfa's MultiOptimizer tells variables by their names.
        for spec in optimizer.optimizer_specs:
            build_optimizer(spec["optimizer"], [v for v in variables if v.name in spec["weights"]])
    else:
        for inner in held_optimizers(optimizer):
            inner._iterations = optimizer.iterations
        optimizer._create_all_weights(variables)
    if not isinstance(optimizer, _optimizer.Optimizer):
        _built.add(optimizer)


_pending: list[tuple[Any, list[Any]]] = []


def move_into(owner: Any, strategy: tf.distribute.Strategy) -> None:
    """Gives the variables of an optimizer or a metric that was made outside the strategy's scope mirrored ones instead.

    The object stays the one that the user holds.
    """
    _replace_variables(owner, strategy, {})


def _replace_variables(owner: Any, strategy: tf.distribute.Strategy, made: dict[int, Any]) -> None:
    def mirrored(value: Any) -> Any:
        if not isinstance(value, tf.Variable) or tf_seams.is_distributed(_raw(value)):
            return value
        if id(value) not in made:
            with tf.init_scope(), strategy.scope():
                made[id(value)] = tf.Variable(
                    value.numpy(),
                    dtype=value.dtype,
                    name=value.name.split(":")[0],
                    trainable=False,
                    synchronization=value.synchronization,
                    aggregation=value.aggregation,
                )
            # Keeps the old one alive, so that its id isn't given again.
            made[-id(value)] = value
        return made[id(value)]

    for name, held in list(vars(owner).items()):
        if isinstance(held, tf.Variable):
            new = mirrored(held)
            if new is not held:
                vars(owner)[name] = new
                owner._track_trackable(new, name, overwrite=True)
        elif isinstance(held, list) and any(isinstance(v, tf.Variable) for v in held):
            replaced = [mirrored(v) for v in held]
            if type(held) is list:
                held[:] = replaced
            else:
                setattr(owner, name, replaced)
        elif isinstance(held, dict) and any(isinstance(v, tf.Variable) for v in held.values()):
            for key, value in list(held.items()):
                if mirrored(value) is not value:
                    held[key] = mirrored(value)
        elif isinstance(held, _lso._DynamicLossScaleState):
            _replace_variables(held, strategy, made)


def bind_optimizer(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Tells an optimizer of the current family which strategy it belongs to: it asks the scope when it is made."""
    if isinstance(optimizer, _optimizer.Optimizer):
        vars(optimizer)["_distribution_strategy"] = strategy


def is_unscaled(optimizer: Any) -> bool:
    """Whether the optimizer scales no loss."""
    return not isinstance(optimizer, _lso.BaseLossScaleOptimizer)


# -- variables ---------------------------------------------------------------------------------------------------------


def _raw(variable: Any) -> Any:
    """The variable inside one that mixed precision casts."""
    return variable._variable if isinstance(variable, _autocast.AutoCastVariable) else variable


def raw_variable(variable: Any) -> Any:
    """The tf.Variable (a distributed one under a strategy) behind a variable of a model."""
    return _raw(variable)


def variable_path(variable: Any) -> str:
    """What a variable is called in messages."""
    return str(variable.name)


def model_variables(model: Any, which: str = "variables") -> list[Any]:
    """A model's "variables", "trainable_variables" or "non_trainable_variables"; those that are there, where it isn't built."""
    try:
        return list(getattr(model, which))
    except ValueError:  # A model that isn't built refuses to name any.
        return [v for layer in sublayers(model) if layer is not model for v in getattr(layer, which)]


def is_variable(value: Any) -> bool:
    """Whether `value` is a variable."""
    return isinstance(value, (tf.Variable, tf.distribute.DistributedValues))


# -- the trainer -------------------------------------------------------------------------------------------------------


def has_own_step(model: Any, name: str) -> bool:
    """Whether the user's class (or instance) overrides `train_step`, `test_step` or `predict_step`."""
    return name in vars(model) or getattr(type(model), name) is not getattr(_training.Model, name)


def has_own_loop(model: Any, name: str) -> bool:
    """Whether the user's class overrides `fit`, `evaluate` or `predict`, which may then have any signature."""
    return getattr(type(model), name) is not getattr(_training.Model, name)


def step_function(model: Any, name: str) -> Callable[..., Any]:
    """A step of the model as Keras 2 runs it: a user's own is converted by AutoGraph."""
    function: Callable[..., Any] = getattr(model, name)

    def run(data: Any) -> Any:
        if tf.executing_eagerly():
            return function(data)
        context = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
        return tf.__internal__.autograph.tf_convert(function, context)(data)

    return run


def wants_jit(model: Any) -> bool:
    """Whether the user asked compile for `jit_compile=True`."""
    return bool(is_compiled(model) and getattr(model, "_jit_compile", None))


def is_compiled(model: Any) -> bool:
    """Whether compile was called."""
    return bool(model._is_compiled)


def steps_per_execution(model: Any) -> int:
    """How many steps the next execution has: Keras's loop shortens an epoch's last one itself."""
    variable = model._steps_per_execution
    with tf.init_scope():
        return 1 if variable is None else int(variable.numpy())


def count_steps(model: Any, name: str, done: int) -> None:
    """Adds to the counter that callbacks read."""
    counter = {"train_step": "_train_counter", "test_step": "_test_counter", "predict_step": "_predict_counter"}[name]
    getattr(model, counter).assign_add(done)


def model_inputs(model: Any) -> list[Any]:
    """The symbolic inputs of a functional or built Sequential model; empty where the class doesn't say."""
    inputs = getattr(model, "inputs", None) if model.built else None
    return tf.nest.flatten(inputs) if inputs is not None else []


def feed_whole_batches(model: Any, default: tf.distribute.Strategy, listener: Any) -> None:
    """Has Keras's own loop deliver whole global batches, and the listener told of each dataset.

    Args:
        model: the model.
        default: TensorFlow's strategy of no strategy; Keras 2 can't do with it, since its loop enters the model's scope.
        listener: the model's engine.
    """
    vars(model)[data2.LISTENER] = listener


def created_under(model: Any) -> tf.distribute.Strategy | None:
    """The strategy in whose scope the model was made."""
    found: tf.distribute.Strategy | None = model._distribution_strategy
    return found


@contextlib.contextmanager
def dtype_policy(name: str | None) -> Iterator[None]:
    """Keras's dtype policy for a block; None leaves it alone."""
    before = keras.config.dtype_policy()
    try:
        if name is not None:
            keras.config.set_dtype_policy(name)
        yield
    finally:
        keras.config.set_dtype_policy(before)


def is_built(model: Any, step: str = "train_step") -> bool:
    """Whether the model, its layers, and what compile made are all built, as far as it is Keras's own step that uses it.

    A step of the user's builds compile's losses and metrics when it calls them; Keras logs what is built.
    """
    if not all(layer.built for layer in sublayers(model)):
        return False
    if not is_compiled(model):
        return True
    optimizer = getattr(model, "optimizer", None)
    own = has_own_step(model, "train_step")
    return bool(
        (has_own_step(model, step) or (model.compiled_loss.built and model.compiled_metrics.built))
        and (own or optimizer is None or is_optimizer_built(optimizer))
    )


def symbolic_build(model: Any, spec: Any, step: str = "train_step") -> None:
    """Builds layers, losses, metrics and the optimizer from the specs of a batch, as the first step would."""
    x, y, _ = unpack(spec)

    def forward(x: Any, y: Any) -> None:
        outputs = model(x, training=True)
        if is_compiled(model) and y is not None and not has_own_step(model, step):
            if not model.compiled_loss.built:
                model.compiled_loss.build(outputs)
            if not model.compiled_metrics.built:
                model.compiled_metrics.build(outputs, model.compiled_metrics._conform_to_outputs(outputs, y))

    _trace(forward, x, y)
    _finish_build(model)


def _finish_build(model: Any) -> None:
    loss = getattr(model, "compiled_loss", None)
    if loss is not None and loss.built:
        loss._losses = [v if v is None or isinstance(v, _Entry) else _Entry(v) for v in loss._losses]
    optimizer = getattr(model, "optimizer", None)
    if is_compiled(model) and optimizer is not None and not has_own_step(model, "train_step"):
        build_optimizer(optimizer, model.trainable_variables)


def check_model(model: Any, replicas: int) -> None:
    """Refuses what can't be trained on replicas.

    Raises:
        ValueError: a stateful RNN, on more than one replica.
    """
    for layer in sublayers(model) if replicas > 1 else []:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"MirroredFitter: the layer {layer.name!r} ({type(layer).__name__}) is stateful: its state belongs to the rows of"
                " a fixed batch, which replicas share out.\nBuild it with stateful=False, or train it on one device."
            )


def sublayers(model: Any) -> list[Any]:
    """The model's layers, nested ones and the model itself included; metrics, which are layers in Keras 2, not."""
    return [layer for layer in model._flatten_layers() if not isinstance(layer, _base_metric.Metric)]


def keras_tensors(spec: Any) -> Any:
    """A batch's tensors, arrays or specs as specs whose batch dimension is None."""

    def one(value: Any) -> Any:
        if value is None or isinstance(value, (tf.experimental.Optional, tf.OptionalSpec)):
            return None
        value = getattr(value, "_value_specs", [value])[0]
        if not isinstance(value, tf.TypeSpec):
            value = tf.type_spec_from_value(value if tf.is_tensor(value) else tf.convert_to_tensor(value))
        if isinstance(value, tf.TensorSpec) and value.shape.rank:
            return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
        if isinstance(value, tf.SparseTensorSpec) and value.shape.rank:
            return tf.SparseTensorSpec([None, *value.shape[1:]], value.dtype)
        if isinstance(value, tf.RaggedTensorSpec) and value.shape.rank:
            return tf.RaggedTensorSpec([None, *value.shape[1:]], value.dtype, value.ragged_rank, value.row_splits_dtype)
        return value

    return tf.nest.map_structure(one, spec)


class UnknownRank(Exception):
    """Never raised: Keras 2 builds from any spec that its first step could be built from."""


def _trace(function: Callable[..., Any], *args: Any) -> None:
    """Calls `function` on placeholders in a scratch graph; the variables that Keras makes come out initialised."""
    tf.function(lambda *given: function(*given), autograph=False).get_concrete_function(*args)


def trace_symbolically(function: Callable[..., Any], *args: Any) -> None:
    """Calls `function` on placeholders in a scratch graph."""
    _trace(function, *args)


def trace_step(strategy: tf.distribute.Strategy, hooks: Callable[[], Any], model: Any, name: str, spec: Any) -> None:
    """Traces a step of the user's on every replica, as training would, so that it makes its variables; nothing is run.

    Args:
        strategy: the model's.
        hooks: makes what the seams ask in a replica.
        model: the model.
        name: the step.
        spec: a batch's specs.
    """
    function = step_function(model, name)

    def replica(batch: Any) -> None:
        with gate.entered(hooks()):
            function(batch)

    def run(batch: Any) -> None:
        strategy.run(tf.autograph.experimental.do_not_convert(replica), args=(batch,))

    _pending.clear()
    try:
        _trace(run, spec)
    finally:
        pending = list(_pending)
        _pending.clear()
        for optimizer, variables in pending:
            if not is_optimizer_built(optimizer):
                build_optimizer(optimizer, variables)
        _finish_build(model)


@contextlib.contextmanager
def stateless(model: Any) -> Iterator[None]:
    """A block whose writes to the model's variables are undone."""
    raw = [_raw(v) for v in [*model_variables(model), *metric_variables(model)]]
    held = [(c, c.numpy()) for v in raw for c in tf_seams.components(v)]
    try:
        yield
    finally:
        for component, value in held:
            component.assign(value)


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """(x, y, sample_weight) of a batch in any form that Keras takes."""
    if isinstance(data, list):
        data = tuple(data)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    return x, y, weight


def serialize(value: Any) -> Any:
    """Keras's serialised form of an object."""
    return _saving_lib.serialize_keras_object(value)


def to_tensor(value: Any) -> Any:
    """A NumPy array, SciPy sparse matrix or Python value as the tensor that Keras's own loop would make of it."""
    if data2._data_adapter._is_scipy_sparse(value):
        return data2._data_adapter._scipy_sparse_to_sparse_tensor(value)
    return tf.convert_to_tensor(value)


# -- random numbers ----------------------------------------------------------------------------------------------------


def new_seed_generator(seed: int) -> Any:
    """Keras 2 has no global generator to stand in for."""
    return None


def draws_at_random(layer: Any) -> bool:
    """Whether a layer holds a random generator of its own, as Dropout and noise layers do."""
    return hasattr(layer, "_random_generator") or "Random" in type(layer).__name__


def save_random_state() -> tuple[Any, Any]:
    """What a model factory draws from: Python's and NumPy's generators."""
    return random.getstate(), np.random.get_state()


def restore_random_state(state: tuple[Any, Any]) -> None:
    """Puts back what `save_random_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])


def is_seed_state(variable: Any) -> bool:
    """Keras 2 keeps its seeds out of a model's variables."""
    return False


# -- batch normalisation -----------------------------------------------------------------------------------------------


def _moments(original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(self: Any, x: Any, reduction_axes: Any, keep_dims: Any, mask: Any = None) -> Any:
        step: Step = gate.current()

        def keras_own(x: Any, axes: Any, keepdims: Any) -> Any:
            return original(self, x, axes, keepdims, mask=mask)

        if step is None:
            return keras_own(x, reduction_axes, keep_dims)
        wide = tf.cast(x, tf.float32) if x.dtype == tf.float16 else x
        weight = None if mask is None else tf.expand_dims(tf.cast(mask, wide.dtype), -1)
        mean, variance = step.moments(keras_own, wide, reduction_axes, keep_dims, weight)
        return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)

    return seam
