"""Keras as the tests of every stack name it: Keras 3's public names, on Keras 2 with what they are there."""

import types
from typing import Any

import tensorflow as tf

from keras_mirror import requirements
from keras_mirror.seams.stack import keras

GENERATION = requirements.keras_generation()


class _With(types.SimpleNamespace):
    """A module of Keras 2 with further names."""

    def __init__(self, module: Any, **more: Any) -> None:
        super().__init__(**more)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __dir__(self) -> list[str]:
        return [*dir(vars(self)["_module"]), *vars(self)]


if GENERATION == 2:
    ops = _With(
        keras.ops,
        abs=tf.abs,
        argmax=tf.argmax,
        concatenate=tf.concat,
        copy=tf.identity,
        equal=tf.equal,
        exp=tf.exp,
        eye=lambda n, dtype: tf.eye(n, dtype=dtype),
        logsumexp=tf.reduce_logsumexp,
        matmul=tf.matmul,
        max=tf.reduce_max,
        mean=tf.reduce_mean,
        ones=lambda shape, dtype=None: tf.ones(shape, dtype or keras.config.floatx()),
        reshape=tf.reshape,
        shape=tf.shape,
        split=tf.split,
        sqrt=tf.sqrt,
        square=tf.square,
        sum=lambda values, axis=None: tf.reduce_sum(tf.add_n(values) if isinstance(values, list) else values, axis),
        transpose=tf.transpose,
        zeros=lambda shape, dtype=None: tf.zeros(shape, dtype or keras.config.floatx()),
    )
    optimizers = _With(keras.optimizers, LossScaleOptimizer=keras.mixed_precision.LossScaleOptimizer)
    keras.ops, keras.optimizers = ops, optimizers
else:
    ops, optimizers = keras.ops, keras.optimizers

layers, losses, metrics, regularizers = keras.layers, keras.losses, keras.metrics, keras.regularizers

# Rows that name what Keras 2 hasn't: by a part of their name, with the reason.
_NOT_IN_KERAS_2 = {
    "mean_with_sample_weight": "no reduction mean_with_sample_weight",
    "reduction-mean": "no reduction mean, but for sum_over_batch_size",
    "mask-mean": "no reduction mean, but for sum_over_batch_size",
    "reduction-None": "reduction None is called none",
    "loss-dict-of-different-reductions": "no reduction mean_with_sample_weight",
    "dice": "no Dice loss",
    "tversky": "no Tversky loss",
    "circle": "no Circle loss",
    "gradient_accumulation": "its optimizers don't accumulate gradients",
    "accumulation": "its optimizers don't accumulate gradients",
    "steps_per_execution-": "its optimizers don't accumulate gradients",
    "loss_scale_factor": "no loss_scale_factor",
    "optimizer-Lamb": "no Lamb",
    "optimizer-Muon": "no Muon",
    "optimizer-ScheduleFreeAdamW": "no ScheduleFreeAdamW",
    "optimizer-MultiOptimizer": "no MultiOptimizer (tensorflow-addons has one)",
    "train_step-with-a-persistent-tape": "its variables have no .value to differentiate by",
    "add_loss-value-for-each-row": "it can't add a loss of each row to a mean",
}


def clear_session(collect: bool) -> None:
    """Keras's clear_session; whether garbage is collected too, where Keras lets one say so."""
    if GENERATION == 3:
        keras.backend.clear_session(free_memory=collect)
    else:
        keras.backend.clear_session()


def lacking(name: str) -> str | None:
    """Why a row of the table can't be run on this Keras; None where it can."""
    if GENERATION == 3:
        return None
    return next((f"Keras 2: {why}" for part, why in _NOT_IN_KERAS_2.items() if part in name), None)


# Rows that CI runs on Keras 2 too: one for each of its mechanisms, since there is no time for all.
_IN_CI = {
    *("loss-function", "loss-list-and-loss_weights", "reduction-sum-weights", "reduction-none-weights", "class_weight"),
    *("mask-sum_over_batch_size-weights", "mask-sum-plain", "scalar-contrastive", "scalar-mean", "add_loss-sum"),
    *("regularizers-of-kernel-and-bias", "regularizer-of-activity"),
    *("metrics-and-weighted_metrics", "metrics-own-class-with-dict-result", "metrics-scalar-function-sum"),
    *("optimizer-Nadam", "optimizer-AdamW", "clipnorm", "ema_overwrite_frequency", "optimizer-LossScaleOptimizer"),
    *("embedding-Adam", "optimizer-SGD-nesterov", "Sequential-unbuilt", "functional-nested-shared-dict-of-inputs"),
    *("BatchNormalization-synchronized-activity_regularizer", "layer-with-state-of-its-own", "inputs-ragged"),
    *("train_step-of-the-guide", "train_step-that-clips-its-gradients", "train_step-with-root-of-compute_loss"),
    *("train_step-of-a-VAE", "train_step-of-a-GAN", "train_step-that-sums"),
    *("train_on_batch-test_on_batch-predict_on_batch", "arrays-and-validation_data"),
    *("legacy-SGD-clipvalue-decay", "legacy-Adam-global_clipnorm-amsgrad", "legacy-LossScaleOptimizer", "legacy-Nadam"),
    *("addons-Lookahead-mixed_float16", "addons-MovingAverage-mixed_float16", "addons-NovoGrad-mixed_float16"),
    *("addons-loss-TripletSemiHardLoss", "addons-metric-CohenKappa", "addons-layer-WeightNormalization"),
}


def in_ci(name: str) -> bool:
    """Whether CI runs a row on Keras 2: these, and every optimizer of tensorflow-addons in float32."""
    return name in _IN_CI or (name.startswith("addons-") and name.endswith("-float32"))
