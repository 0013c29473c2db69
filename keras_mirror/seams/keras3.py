"""Seams into Keras 3 (tested on 3.10 and 3.15): each a small named function or a gated replacement, with its reason.

Plain Keras divides by the number of replicas, clips before it reduces, and keeps Python state that replica threads share.
The engine's step does none of that; these seams are where it says so to Keras.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.backend.common import global_state, stateless_scope
from keras.src.backend.tensorflow import core as tf_core
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.saving import serialization_lib
from keras.src.trainers import compile_utils, data_adapters
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing, data_adapter_utils

from keras_mirror.seams import gate
from keras_mirror.seams import tensorflow as tf_seams

Step = Any


def install() -> None:
    """Puts the seams in place. Each is the identity outside a step; `tests/seams` holds every upstream name."""
    # Plain Keras divides a loss by R and multiplies it back for the log; here a loss is a mean over the share.
    gate.gated(loss_module, "scale_loss_for_distribution", "scale_loss")
    gate.gated(loss_module, "unscale_loss_for_distribution", "unscale_loss")
    # The divisors of masks, weights and sums are those of the global batch.
    gate.gated(loss_module, "reduce_weighted_values", "reduce_loss")
    # A loss of the whole batch (Dice, a function that returns a scalar) is evaluated on gathered outputs.
    gate.gated(loss_module.Loss, "__call__", "call_loss")
    # `layer._losses` is one list for all replica threads.
    gate.gated(keras.layers.Layer, "add_loss", "add_loss")
    gate.gated(keras.layers.Layer, "_get_own_losses", "own_losses")
    gate.gated(keras.layers.Layer, "_clear_losses", "clear_losses")
    gate.gated(tf_trainer.TensorFlowTrainer, "_aggregate_additional_loss", "additional_loss")
    # A scalar given to a Mean without a weight counts once per step, not once per replica.
    gate.gated(reduction_metrics, "reduce_to_samplewise_values", "metric_values")
    # A metric function that returns a scalar is a function of the whole batch.
    gate.gated(keras.metrics.MeanMetricWrapper, "update_state", "metric_update")
    # Each replica draws its own numbers; the generator's state stays the same everywhere.
    gate.gated(seed_generator.SeedGenerator, "next", "next_seed")
    # Keras keeps the global generator in thread-local state, which a replica's thread hasn't.
    gate.gated(seed_generator, "global_seed_generator", "global_seeds")
    # Which of the model's variables a step writes: those may differ between replicas.
    gate.gated(tf_core.Variable, "_direct_assign", "assign")
    # Synchronised BatchNormalization: one reduction instead of three, and no row of an empty replica.
    gate.gated(tf_nn, "_compute_moments_sync", "moments")
    gate.gated(keras.layers.BatchNormalization, "_moments", "masked_moments")
    # The update is single-device code in each replica.
    gate.gated(base_optimizer.BaseOptimizer, "apply", "apply")
    gate.gated(keras.optimizers.LossScaleOptimizer, "apply", "apply")
    _make_optimizer_local()
    _make_variables_readable()


# -- optimizer ---------------------------------------------------------------------------------------------------------


def _make_optimizer_local() -> None:
    """Replaces, inside a step only, what TFOptimizer does across replicas by what one device does.

    The replacement sits at the level of TFOptimizer, below the user's class: Nadam's own `_backend_update_step` and Muon's
    own `_apply_weight_decay` still run and reach these through `super()`.
    """
    owner = tf_optimizer.TFOptimizer

    def update_step(self: Any, grads: Iterable[Any], variables: Iterable[Any], learning_rate: Any) -> None:
        for grad, variable in zip(grads, variables, strict=True):
            self.update_step(grad, _local(variable), learning_rate)

    def apply_weight_decay(self: Any, variables: Iterable[Any]) -> None:
        if self.weight_decay is None:
            return
        for variable in variables:
            variable = _local(variable)
            if self._use_weight_decay(variable):
                rate = tf.cast(self.learning_rate, variable.dtype)
                decay = tf.cast(self.weight_decay, variable.dtype)
                variable.assign_sub(variable * decay * rate)

    def overwrite_with_average(self: Any, variables: Iterable[Any]) -> None:
        for variable, average in zip(variables, self._model_variables_moving_average, strict=True):
            if average is not None:
                _local(variable).assign(_local(average))

    def increment_accumulators(self: Any, grads: Iterable[Any], accumulators: Iterable[Any]) -> None:
        for grad, accumulator in zip(grads, accumulators, strict=True):
            accumulator = _local(accumulator)
            accumulator.assign(accumulator + grad)

    _inside_step(owner, "_backend_update_step", update_step)
    _inside_step(owner, "_apply_weight_decay", apply_weight_decay)
    _inside_step(owner, "_overwrite_model_variables_with_average_value", overwrite_with_average)
    _inside_step(owner, "_backend_increment_gradient_accumulators", increment_accumulators)


def _inside_step(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    original = owner.__dict__.get(name)
    if original is None:
        raise RuntimeError(f"keras_mirror: {owner.__name__}.{name} is gone from the installed Keras.")
    if hasattr(original, "_keras_mirror_original"):
        return

    @functools.wraps(original)
    def seam(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if gate.current() is None else replacement)(self, *args, **kwargs)

    seam._keras_mirror_original = original  # type: ignore[attr-defined]
    setattr(owner, name, seam)


def _local(variable: Any) -> tf.Variable:
    step: Step = gate.current()
    return tf_seams.local_value(_raw(variable), step.local_index)


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer of Keras, a wrapper of one included."""
    return isinstance(value, base_optimizer.BaseOptimizer)


def optimizer_name(optimizer: Any) -> str:
    """What an optimizer (or a metric) is called in messages."""
    return str(optimizer.name)


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
    """`gradient_accumulation_steps` of the optimizer itself; 1 where it doesn't accumulate."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def accumulators(optimizer: Any) -> list[Any]:
    """The optimizer's gradient accumulators (keras Variables), empty before build or without accumulation."""
    return [v for v in getattr(optimizer, "_accumulated_gradients", None) or [] if v is not None]


def accumulators_of(optimizer: Any, variables: list[Any]) -> list[Any]:
    """The gradient accumulators that belong to these model variables, in their order."""
    return [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables]


def raw_iterations(optimizer: Any) -> Any:
    """The variable that counts calls of `apply`: unlike `iterations` it counts each accumulated batch."""
    return optimizer._iterations


def optimizer_variables_of(optimizer: Any) -> list[Any]:
    """The model's variables that a built optimizer was built for. Keras 3.10's LossScaleOptimizer leaves it to the inner one."""
    found = list(getattr(optimizer, "_trainable_variables", []))
    inner = getattr(optimizer, "inner_optimizer", None)
    return found if found or inner is None else optimizer_variables_of(inner)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Every variable of an optimizer, those of one inside it too."""
    return list(optimizer.variables)


def strangers(optimizer: Any, variables: list[Any]) -> list[str]:
    """Paths of the variables that a built optimizer was built for and that aren't among these."""
    known = {id(v) for v in variables}
    return [v.path for v in optimizer_variables_of(optimizer) if id(v) not in known]


def is_optimizer_built(optimizer: Any) -> bool:
    """Whether the optimizer has its variables."""
    return bool(optimizer.built)


def is_unscaled(optimizer: Any) -> bool:
    """Whether the optimizer scales no loss."""
    return not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not optimizer.loss_scale_factor


def build_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Creates the optimizer's variables as its first `apply` would."""
    if not optimizer.built:
        with keras_backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
        optimizer.built = True


# -- variables ---------------------------------------------------------------------------------------------------------


def _raw(variable: Any) -> Any:
    """The tf.Variable (a distributed one under a strategy) of a keras Variable."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def raw_variable(variable: Any) -> Any:
    """The tf.Variable behind a keras Variable, None while it isn't initialised."""
    return _raw(variable)


def variable_path(variable: Any) -> str:
    """What a variable is called in messages."""
    return str(variable.path)


def model_variables(model: Any, which: str = "variables") -> list[Any]:
    """A model's "variables", "trainable_variables" or "non_trainable_variables"; those that are there, where it isn't built."""
    return list(getattr(model, which))


def is_variable(value: Any) -> bool:
    """Whether `value` is a variable of Keras or of TensorFlow."""
    return isinstance(value, (keras.Variable, tf.Variable, tf.distribute.DistributedValues))


def move_into(owner: Any, strategy: tf.distribute.Strategy) -> None:
    """Gives the variables of an optimizer or a metric that was made outside the strategy's scope mirrored values, in place.

    Every reference to a keras Variable, the user's included, stays the live object.
    """
    for variable in owner.variables:
        _move(variable, strategy)


def _move(variable: Any, strategy: tf.distribute.Strategy) -> None:
    value = _raw(variable)
    if value is None or tf_seams.owner_of(value) is strategy:
        return
    host = value.numpy()
    with tf.init_scope(), strategy.scope():
        variable._initialize(host)


def bind_optimizer(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Tells a TFOptimizer which strategy it belongs to: it asks the scope when it is made."""
    optimizer._distribution_strategy = strategy


def _make_variables_readable() -> None:
    """`float(optimizer.learning_rate)` raises TypeError for a mirrored variable; a host read is what the user means."""
    for name, convert in (("__float__", float), ("__int__", int)):
        original = keras.Variable.__dict__.get(name) or getattr(keras.Variable, name)
        if hasattr(original, "_keras_mirror_original"):
            continue

        def seam(self: Any, _original: Any = original, _convert: Any = convert) -> Any:
            if tf_seams.is_distributed(_raw(self)) and self.ndim == 0 and tf.executing_eagerly():
                return _convert(self.numpy())
            return _original(self)

        seam._keras_mirror_original = original  # type: ignore[attr-defined]
        setattr(keras.Variable, name, seam)
    _make_numpy_readable()


def _make_numpy_readable() -> None:
    """`variable.numpy()` in another strategy's scope (cloning a mirrored model in a second factory) is no mixing of both."""
    original = tf_core.Variable.__dict__["numpy"]
    if hasattr(original, "_keras_mirror_original"):
        return

    @functools.wraps(original)
    def numpy(self: Any) -> Any:
        owner = tf_seams.owner_of(_raw(self))
        foreign = owner is not None and tf.distribute.has_strategy() and tf.distribute.get_strategy() is not owner
        if foreign and tf.executing_eagerly() and tf_seams.is_mirrored(_raw(self)):
            return tf_seams.components(_raw(self))[0].numpy()
        return original(self)

    numpy._keras_mirror_original = original  # type: ignore[attr-defined]
    tf_core.Variable.numpy = numpy


# -- losses ------------------------------------------------------------------------------------------------------------


def mask_of(value: Any) -> Any:
    """The mask that Keras attached to an output, or None."""
    return keras_backend.get_keras_mask(value)


def set_mask(value: Any, mask: Any) -> None:
    """Attaches a mask to a tensor as Keras's layers do."""
    keras_backend.set_keras_mask(value, mask)


def masked_mean_epsilon() -> float:
    """What this Keras adds to the number of valid entries before it divides a masked mean by it: epsilon in 3.10, else 0."""
    return epsilon() if _mask_has_epsilon() else 0.0


@functools.cache
def _mask_has_epsilon() -> bool:
    """Asks Keras itself: with one valid entry of two, the weight is 2, or 2 / (1 + epsilon)."""
    with tf.init_scope():
        weight = loss_module.apply_mask(None, tf.constant([True, False]), dtype="float64", reduction="mean")
        return bool(abs(float(weight[0]) - 2.0) > 1e-12)


def merged_weight(values: Any, sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Sample weight times mask in the shape in which Keras sums it for `mean_with_sample_weight`; None without either."""
    values = tf.convert_to_tensor(values)
    if sample_weight is not None:
        sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
    weight = loss_module.apply_mask(sample_weight, mask, dtype=values.dtype, reduction=reduction)
    if weight is None:
        return None
    weight = keras.ops.cast(weight, values.dtype)
    return loss_module.squeeze_or_expand_to_same_rank(values, weight)[1]


def is_compile_loss(loss: Any) -> bool:
    """Whether it is the container that compile makes: its parts are Losses themselves."""
    return isinstance(loss, compile_utils.CompileLoss)


def epsilon() -> float:
    """Keras's epsilon, which it adds to some divisors."""
    return float(keras.config.epsilon())


def metric_parts(metric: Any) -> list[Any]:
    """The metrics that a metric is made of; compile's container holds the user's."""
    return list(getattr(metric, "metrics", None) or metric._metrics)


def observe_results(metrics: Iterable[Any]) -> None:
    """Gates `result` of the metrics' classes (a user's own included): inside a step the engine notes whose result it is.

    `result` is overridden in every class, so a gate on the base class alone would see nothing.
    """
    for metric in metrics:
        for owner in type(metric).__mro__:
            if issubclass(owner, keras.metrics.Metric) and "result" in vars(owner):
                gate.gated(owner, "result", "metric_result")


@functools.cache
def _losses_of_single_rows() -> tuple[type, ...]:
    whole_batch = {"Dice", "Tversky", "Circle"}
    found = [getattr(keras.losses, name) for name in dir(keras.losses) if name not in whole_batch]
    return tuple(c for c in found if isinstance(c, type) and issubclass(c, keras.losses.Loss) and c is not keras.losses.Loss)


def treats_rows_alone(loss: Any) -> bool:
    """Whether it is one of Keras's own losses whose value for a row depends on that row alone.

    A string or a function of Keras's given to compile becomes a wrapper around that function.
    """
    name = _keras_function(loss)
    return type(loss) in _losses_of_single_rows() or (name is not None and name not in ("dice", "tversky", "circle"))


def looks_at_other_rows(loss: Any) -> bool:
    """Whether it is Keras's Circle loss, whose value for a row compares that row with all others."""
    return type(loss) is keras.losses.Circle or _keras_function(loss) == "circle"


def _keras_function(loss: Any) -> str | None:
    """The name of the function of Keras's own that a loss wraps; None for anything else."""
    function = getattr(loss, "fn", None)
    name = getattr(function, "__name__", "")
    return name if function is not None and getattr(keras.losses, name, None) is function else None


# -- the trainer -------------------------------------------------------------------------------------------------------


def has_own_step(model: Any, name: str) -> bool:
    """Whether the user's class (or instance) overrides `train_step`, `test_step` or `predict_step`."""
    return name in vars(model) or getattr(type(model), name) is not getattr(tf_trainer.TensorFlowTrainer, name)


def has_own_loop(model: Any, name: str) -> bool:
    """Whether the user's class overrides `fit`, `evaluate` or `predict`, which may then have any signature."""
    return getattr(type(model), name) is not getattr(tf_trainer.TensorFlowTrainer, name)


def wants_jit(model: Any) -> bool:
    """Whether the user asked compile for `jit_compile=True` ("auto" is no under a strategy)."""
    return bool(model.compiled and model._jit_compile)


def model_inputs(model: Any) -> list[Any]:
    """The symbolic inputs of a functional or built Sequential model; empty where the class doesn't say."""
    inputs = getattr(model, "inputs", None) if model.built else None
    return tree.flatten(inputs) if inputs is not None else []


def feed_whole_batches(model: Any, default: tf.distribute.Strategy, listener: Any) -> None:
    """Has Keras's own loop deliver whole global batches, which the engine splits inside the compiled step.

    Args:
        model: the model.
        default: TensorFlow's strategy of no strategy, for which the loop shares nothing out.
        listener: not needed: Keras asks the model's `_maybe_symbolic_build`.
    """
    model._distribute_strategy = default


def step_function(model: Any, name: str) -> Callable[..., Any]:
    """A step of the model as Keras runs it."""
    function: Callable[..., Any] = getattr(model, name)
    return function


def is_compiled(model: Any) -> bool:
    """Whether compile was called."""
    return bool(model.compiled)


def steps_per_execution(model: Any) -> int:
    """How many steps compile was told to run in one call."""
    return int(model.steps_per_execution)


def count_steps(model: Any, name: str, done: int) -> None:
    """Keras 3 keeps no count."""


def check_model(model: Any, replicas: int) -> None:
    """Nothing is refused."""


def layer_key(layer: Any) -> str:
    """What tells the layers of a model apart, in this process."""
    return str(layer.path)


def layer_path(layer: Any) -> str:
    """What a layer is called in messages."""
    return str(layer.path)


def takes_added_losses_itself() -> bool:
    """Whether a layer keeps what `add_loss` adds for each thread by itself: not so in Keras 3."""
    return False


def loss_values(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """A loss's values before any reduction, from targets and outputs in its own type."""
    y_true, y_pred = tree.map_structure(lambda v: keras.ops.convert_to_tensor(v, dtype=loss.dtype), (y_true, y_pred))
    return loss.call(y_true, y_pred)


def metric_result(metric: Any) -> Any:
    """A metric's result, from the state of all replicas."""
    return metric.result()


def metric_variables(model: Any) -> list[Any]:
    """The variables of every metric of the model."""
    return list(model.metrics_variables)


def hidden_metrics(model: Any) -> list[Any]:
    """Metrics of the model that its own `metrics` property need not name: none that matter in Keras 3."""
    return []


def created_under(model: Any) -> tf.distribute.Strategy | None:
    """The strategy in whose scope the model was made."""
    found: tf.distribute.Strategy | None = model._distribute_strategy
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
    """Whether the model, its layers, and what compile made are all built; Keras 3 builds the same for every step."""
    return (
        all(layer.built for layer in model._flatten_layers())
        and (model._compile_metrics is None or model._compile_metrics.built)
        and (model._compile_loss is None or model._compile_loss.built)
        and (getattr(model, "optimizer", None) is None or model.optimizer.built)
    )


def symbolic_build(model: Any, spec: Any, step: str = "train_step") -> None:
    """Builds layers, losses, metrics and the optimizer from a batch of KerasTensors, as Keras does under a strategy.

    An error of the user's own code is raised as it is, without the two RuntimeErrors that Keras puts around it.
    """
    try:
        model._symbolic_build(data_batch=spec)
    except RuntimeError as error:
        inner: BaseException = error
        while isinstance(inner, RuntimeError) and any(text in str(inner) for text in _BUILD_WRAPPERS) and inner.__context__:
            inner = inner.__context__
        raise inner from None


_BUILD_WRAPPERS = ("Unable to automatically build the model", "Could not automatically infer the output shape")


def sublayers(model: Any) -> list[Any]:
    """The model's layers, nested ones and the model itself included."""
    return list(model._flatten_layers())


def keras_tensors(spec: Any) -> Any:
    """A batch's tensors, arrays or TensorSpecs as KerasTensors whose batch dimension is None."""

    def one(value: Any) -> Any:
        if value is None or isinstance(value, _MISSING):
            return None
        # A dataset that the user distributed already has one spec per replica.
        value = getattr(value, "_value_specs", [value])[0]
        if isinstance(value, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            shape, dtype = value.shape, value.dtype
        else:
            value = value if hasattr(value, "shape") and hasattr(value, "dtype") else tf.convert_to_tensor(value)
            shape, dtype = tf.TensorShape(value.shape), value.dtype
        if shape.rank is None:
            raise UnknownRank
        shape = tuple(shape.as_list())
        shape = (None, *shape[1:]) if shape else shape
        dtype = keras_backend.standardize_dtype(getattr(dtype, "name", dtype))
        sparse = isinstance(value, (tf.SparseTensorSpec, tf.SparseTensor))
        ragged = {"ragged": True} if isinstance(value, (tf.RaggedTensorSpec, tf.RaggedTensor)) else {}
        try:
            return keras.KerasTensor(shape, dtype, sparse=sparse, **ragged)
        except TypeError:
            return keras.KerasTensor(shape, dtype, sparse=sparse)

    return tree.map_structure(one, spec)


# How a dataset says that an element is missing. `tf.NoneTensorSpec` is no public name in every supported TensorFlow.
_MISSING = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))


class UnknownRank(Exception):
    """A dataset's element has no known rank, so nothing can be built from its spec."""


def trace_symbolically(function: Callable[..., Any], *args: Any) -> None:
    """Calls `function` on placeholders in a scratch graph; variables that it makes come out initialised."""
    keras_backend.compute_output_spec(function, *args)


def trace_step(strategy: tf.distribute.Strategy, hooks: Callable[[], Any], model: Any, name: str, spec: Any) -> None:
    """Traces a step of the user's on placeholders, so that it makes its variables; nothing is run."""
    with gate.entered(hooks()):
        trace_symbolically(getattr(model, name), spec)


def stateless(model: Any) -> contextlib.AbstractContextManager[Any]:
    """A scope in which variables (all, not only the model's) are read but not written, and added losses are collected."""
    scope: contextlib.AbstractContextManager[Any] = stateless_scope.StatelessScope(collect_losses=True)
    return scope


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """(x, y, sample_weight) of a batch in any form that Keras takes."""
    x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(data)
    return x, y, weight


def serialize(value: Any) -> Any:
    """Keras's serialised form of an object."""
    return serialization_lib.serialize_keras_object(value)


# -- random numbers ----------------------------------------------------------------------------------------------------


def new_seed_generator(seed: int) -> Any:
    """A SeedGenerator that stands in for Keras's global one inside a replica's thread."""
    return seed_generator.SeedGenerator(seed=seed, name="keras_mirror_seed_generator")


def draws_at_random(layer: Any) -> bool:
    """Whether a layer holds a SeedGenerator of its own, as Dropout, noise and augmentation layers do."""
    return any(isinstance(value, seed_generator.SeedGenerator) for value in vars(layer).values())


def save_random_state() -> tuple[Any, Any, Any]:
    """What a model factory draws from: Python's and NumPy's generators and Keras's global seed generator."""
    return random.getstate(), np.random.get_state(), global_state.get_global_attribute("global_seed_generator")


def restore_random_state(state: tuple[Any, Any, Any]) -> None:
    """Puts back what `save_random_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    global_state.set_global_attribute("global_seed_generator", state[2])


# -- data --------------------------------------------------------------------------------------------------------------


def data_adapter(**arguments: Any) -> Any:
    """Keras's adapter for whatever the user gave to fit."""
    return data_adapters.get_data_adapter(**arguments)


def is_data_adapter(value: Any) -> bool:
    """Whether it is an adapter already, which `fit` takes as it is."""
    return isinstance(value, data_adapters.data_adapter.DataAdapter)


def holds_arrays(given: dict[str, Any]) -> bool:
    """Whether fit's `x` is arrays (whose order is ours to draw) rather than a dataset, generator, PyDataset or loader."""
    arrays = (given.get("x"), given.get("y"), given.get("sample_weight"))
    return bool(array_data_adapter.can_convert_arrays(arrays))


def train_validation_split(arrays: Any, validation_split: float) -> tuple[Any, Any]:
    """Keras's own split: the last part of the arrays, taken before any shuffling.

    NumPy arrays are cut into views, where Keras would cast the whole of one that isn't floatx. Where to cut is asked of Keras.
    """
    flat = tree.flatten(arrays)
    given = [np.arange(len(value)) if isinstance(value, np.ndarray) else value for value in flat]
    halves = array_slicing.train_validation_split(given, validation_split=validation_split)
    train, validation = (
        [_rows_at(whole, part) if isinstance(whole, np.ndarray) else part for whole, part in zip(flat, half, strict=True)]
        for half in halves
    )
    return tree.pack_sequence_as(arrays, train), tree.pack_sequence_as(arrays, validation)


def _rows_at(array: np.ndarray, part: Any) -> np.ndarray:
    """The view of the consecutive rows whose indices Keras's split returned."""
    indices = np.asarray(getattr(part, "array", part))
    return array[indices[0] : indices[-1] + 1] if len(indices) else array[:0]


def epoch_dataset(epoch_iterator: Any) -> tf.data.Dataset:
    """The dataset behind fit's epoch iterator; reading its spec draws no batch."""
    return epoch_iterator._distributed_dataset


def example_batch(epoch_iterator: Any) -> Any:
    """One batch that training won't miss: a generator's peeked one, or the first of a fresh iterator."""
    adapter = epoch_iterator.data_adapter
    peeked = getattr(adapter, "_first_batches", None)
    if peeked:
        return peeked[0]
    return next(iter(epoch_dataset(epoch_iterator)))


def to_tensor(value: Any) -> Any:
    """A NumPy array, SciPy sparse matrix or Python value as the tensor that Keras's own loop would make of it."""
    if isinstance(value, keras.Variable):
        return tf.convert_to_tensor(value.value)
    if data_adapter_utils.is_scipy_sparse(value):
        return data_adapter_utils.scipy_sparse_to_tf_sparse(value)
    return tf.convert_to_tensor(value)


def is_seed_state(variable: Any) -> bool:
    """Whether the variable is a SeedGenerator's state, which every replica advances alike."""
    return bool(variable.name == "seed_generator_state")
