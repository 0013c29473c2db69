"""Every name of Keras and TensorFlow that the seams touch is there, with the signature that they count on."""

import inspect

import keras
import pytest
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import stateless_scope
from keras.src.backend.tensorflow import core as tf_core
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.saving import serialization_lib
from keras.src.trainers import compile_utils, data_adapters, epoch_iterator
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing, data_adapter_utils
from tensorflow.python.distribute import values

from keras_mirror import seams
from keras_mirror.engine import precision

seams.install()
precision.install()
LSO = keras.optimizers.LossScaleOptimizer

# What a seam replaces: owner, name, the parameters that the replacement takes, the class or module that calls it.
REPLACED = [
    (tf.GradientTape, "gradient", "self target sources output_gradients unconnected_gradients"),
    (values.DistributedVariableTraceType, "__eq__", "self other"),
    (loss_module, "scale_loss_for_distribution", "value"),
    (loss_module, "unscale_loss_for_distribution", "value"),
    (loss_module, "reduce_weighted_values", "values sample_weight mask reduction dtype"),
    (loss_module.Loss, "__call__", "self y_true y_pred sample_weight"),
    (keras.layers.Layer, "add_loss", "self loss"),
    (keras.layers.Layer, "_get_own_losses", "self"),
    (keras.layers.Layer, "_clear_losses", "self"),
    (tf_trainer.TensorFlowTrainer, "_aggregate_additional_loss", "self loss"),
    (reduction_metrics, "reduce_to_samplewise_values", "values sample_weight reduce_fn dtype"),
    (seed_generator.SeedGenerator, "next", "self ordered"),
    (seed_generator, "global_seed_generator", ""),
    (tf_core.Variable, "_direct_assign", "self value"),
    (tf_nn, "_compute_moments_sync", "x axes keepdims"),
    (keras.layers.BatchNormalization, "_moments", "self inputs mask"),
    (base_optimizer.BaseOptimizer, "apply", "self grads trainable_variables"),
    (LSO, "apply", "self grads trainable_variables"),
    (LSO, "_tf_apply", "self grads trainable_variables"),
    (LSO, "scale_loss", "self loss"),
    (
        base_trainer.Trainer,
        "compile",
        "self optimizer loss loss_weights metrics weighted_metrics run_eagerly steps_per_execution jit_compile auto_scale_loss",
    ),
    (tf_optimizer.TFOptimizer, "_backend_update_step", "self grads trainable_variables learning_rate"),
    (tf_optimizer.TFOptimizer, "_apply_weight_decay", "self variables"),
    (tf_optimizer.TFOptimizer, "_overwrite_model_variables_with_average_value", "self trainable_variables"),
    (tf_optimizer.TFOptimizer, "_backend_increment_gradient_accumulators", "self grads acc_grads"),
]
# What a seam calls: owner, name, the arguments that it is called with.
CALLED = [
    (loss_module, "apply_mask", (None, None), {"dtype": None, "reduction": None}),
    (loss_module, "squeeze_or_expand_to_same_rank", (None, None), {}),
    (base_optimizer.BaseOptimizer, "_overwrite_variable_with_gradient", (None, None), {}),
    (base_optimizer.BaseOptimizer, "_use_weight_decay", (None, None), {}),
    (base_optimizer.BaseOptimizer, "build", (None, None), {}),
    (keras.Variable, "_initialize", (None, None), {}),
    (keras.Model, "_symbolic_build", (None,), {"data_batch": None}),
    (keras.Model, "_maybe_symbolic_build", (None,), {"iterator": None, "data_batch": None}),
    (keras.Model, "_flatten_layers", (None,), {}),
    (keras_backend, "compute_output_spec", (None,), {}),
    (keras_backend, "get_keras_mask", (None,), {}),
    (keras_backend, "set_keras_mask", (None, None), {}),
    (keras_backend, "name_scope", (None,), {"caller": None}),
    (keras_backend, "standardize_dtype", (None,), {}),
    (stateless_scope, "StatelessScope", (), {"collect_losses": True}),
    (seed_generator, "SeedGenerator", (), {"seed": 1, "name": "a"}),
    (serialization_lib, "serialize_keras_object", (None,), {}),
    (data_adapters, "get_data_adapter", (None,), {"y": None, "batch_size": 1, "shuffle": True, "class_weight": None}),
    (data_adapter_utils, "unpack_x_y_sample_weight", (None,), {}),
    (data_adapter_utils, "is_scipy_sparse", (None,), {}),
    (data_adapter_utils, "scipy_sparse_to_tf_sparse", (None,), {}),
    (array_data_adapter, "can_convert_arrays", (None,), {}),
    (array_slicing, "convert_to_sliceable", (None,), {"target_backend": "tensorflow"}),
    (array_slicing, "TensorflowSparseWrapper", (None, None, None), {}),
    (data_adapters, "is_tf_dataset", (None,), {}),
    (array_slicing, "train_validation_split", (None,), {"validation_split": 0.5}),
    (array_slicing, "slice_tensorflow_sparse_wrapper", (None, None), {}),
]


def name_of(row):
    return f"{row[0].__name__.removeprefix('keras.src.')}.{row[1]}"


@pytest.mark.parametrize("row", REPLACED, ids=name_of)
def test_what_is_replaced_has_the_parameters_of_the_replacement(row):
    owner, name, parameters = row
    assert name in vars(owner), f"{name_of(row)} is gone from Keras {keras.__version__}: the seam replaces nothing"
    seam = vars(owner)[name]
    original = getattr(seam, "_keras_mirror_original", None)
    assert original is not None, f"{name_of(row)} isn't replaced: install() leaves it out"
    assert not hasattr(original, "_keras_mirror_original"), f"{name_of(row)} is replaced twice"
    found = " ".join(inspect.signature(original).parameters)
    assert found == parameters, f"{name_of(row)} takes ({found}) in Keras {keras.__version__}, the seam expects ({parameters})"
    assert inspect.signature(seam) == inspect.signature(original)


def test_nothing_else_is_replaced():
    listed = {(owner, name) for owner, name, _ in REPLACED}
    owners = {owner for owner, _ in listed} | {base for owner, _ in listed if isinstance(owner, type) for base in owner.__mro__}
    found = {(owner, name) for owner in owners for name, value in vars(owner).items() if hasattr(value, "_keras_mirror_original")}
    assert found - listed <= {(owner, name) for owner in owners for name in ("__float__", "__int__", "numpy", "result")}


@pytest.mark.parametrize("row", CALLED, ids=name_of)
def test_what_is_called_takes_the_arguments_of_the_call(row):
    owner, name, args, kwargs = row
    function = getattr(owner, name, None)
    assert function is not None, f"{name_of(row)} is gone from Keras {keras.__version__}"
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise AssertionError(f"{name_of(row)} can't be called as the seam does in Keras {keras.__version__}: {error}") from None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (loss_module, "reduce_weighted_values"),
        (loss_module, "scale_loss_for_distribution"),
        (reduction_metrics, "reduce_to_samplewise_values"),
        (seed_generator, "global_seed_generator"),
        (tf_nn, "_compute_moments_sync"),
    ],
)
def test_no_module_of_keras_holds_a_replaced_function_under_a_name_of_its_own(module, name):
    import sys

    original = getattr(module, name)._keras_mirror_original
    holders = [
        f"{key}.{attribute}"
        for key, other in list(sys.modules.items())
        if key.startswith("keras.") and other is not None
        for attribute, value in list(vars(other).items())
        if value is original
    ]
    assert holders == [], f"{name} is imported by name, so that module calls the original in a step as well"


# -- attributes that the seams read or write ----------------------------------------------------------------------------


def built():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=2, use_ema=True), "mse", metrics=["mae"])
    model.train_on_batch(tf.ones((1, 3)), tf.ones((1, 1)))
    return model


def test_a_model_has_the_attributes_that_the_engine_uses():
    model = built()
    for name in ("_distribute_strategy", "_compile_metrics", "_compile_loss", "_compile_config", "_loss_tracker"):
        assert hasattr(model, name), f"Model.{name} is gone from Keras {keras.__version__}"
    assert isinstance(model._compile_loss, compile_utils.CompileLoss)
    assert model.distribute_strategy is tf.distribute.get_strategy()
    other = tf.distribute.MirroredStrategy(["CPU:0"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    model._distribute_strategy = other
    assert model.distribute_strategy is other, "Model.distribute_strategy no longer reads _distribute_strategy"


def test_keras_calls_the_functions_that_the_engine_puts_on_the_instance():
    model, called = built(), []
    for name in ("_maybe_symbolic_build", "make_train_function", "make_test_function", "make_predict_function"):
        original = getattr(model, name)

        def noted(*args, _name=name, _original=original, **kwargs):
            called.append(_name)
            return _original(*args, **kwargs)

        setattr(model, name, noted)
    x, y = tf.ones((1, 3)), tf.ones((1, 1))
    for call, wanted in (
        (lambda: model.fit(x, y, verbose=0), ["_maybe_symbolic_build", "make_train_function"]),
        (lambda: model.evaluate(x, y, verbose=0), ["_maybe_symbolic_build", "make_test_function"]),
        (lambda: model.predict(x, verbose=0), ["make_predict_function"]),
        (lambda: model.train_on_batch(x, y), ["_maybe_symbolic_build", "make_train_function"]),
        (lambda: model.test_on_batch(x, y), ["_maybe_symbolic_build", "make_test_function"]),
        (lambda: model.predict_on_batch(x), ["make_predict_function"]),
    ):
        called.clear()
        call()
        assert called == wanted, f"Keras {keras.__version__} builds and compiles its loop in another way: {called}"


def test_an_optimizer_has_the_attributes_that_the_engine_uses():
    optimizer = built().optimizer
    for name in (
        "_distribution_strategy",
        "_iterations",
        "_trainable_variables",
        "_accumulated_gradients",
        "_model_variables_moving_average",
    ):
        assert hasattr(optimizer, name), f"Optimizer.{name} is gone from Keras {keras.__version__}"
    assert optimizer.iterations is not optimizer._iterations, "iterations no longer counts updates apart from batches"


def test_a_keras_variable_keeps_its_tensorflow_variable_in_value():
    variable = keras.Variable([1.0, 2.0])
    assert isinstance(variable._value, tf.Variable), f"Variable._value isn't a tf.Variable in Keras {keras.__version__}"
    assert keras.random.SeedGenerator(1).state.name == "seed_generator_state"


def test_a_distributed_variable_takes_its_aggregation_from_one_attribute():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    variable._aggregation = tf.VariableAggregation.NONE
    assert variable.aggregation == tf.VariableAggregation.NONE, "DistributedVariable.aggregation no longer reads _aggregation"
    assert variable._distribute_strategy is strategy


def test_tensorflow_says_whether_its_devices_are_fixed():
    from tensorflow.python.eager import context

    assert hasattr(context.context(), "_context_handle"), "context()._context_handle is gone from TensorFlow"
    tf.constant(1)
    assert seams.tensorflow.devices_started()


def test_an_array_adapter_and_an_epoch_iterator_hold_what_the_engine_reads():
    iterator = tf_trainer.TFEpochIterator(
        x=tf.ones((5, 3)), y=tf.ones((5, 1)), batch_size=2, distribute_strategy=tf.distribute.get_strategy()
    )
    assert isinstance(iterator, epoch_iterator.EpochIterator)
    assert isinstance(iterator._distributed_dataset, tf.data.Dataset)
    adapter = iterator.data_adapter
    assert (adapter._num_samples, adapter._batch_size) == (5, 2)
    assert len(adapter._inputs) >= 2


def test_a_generators_adapter_keeps_the_batches_that_it_peeked_at():
    adapter = data_adapters.get_data_adapter((tf.ones((2, 3)), tf.ones((2, 1))) for _ in range(3))
    assert len(adapter._first_batches) >= 1, "the peeked batches are gone: the engine would draw one and lose it"
