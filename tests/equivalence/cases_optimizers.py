"""Rows about optimizers: every built-in one, and every option that plain Keras applies to a replica's share."""

from collections.abc import Callable
from typing import Any

from harness import Case, train
from parts import regression
from stack import keras, layers, optimizers


def constrained() -> keras.Model:
    """Three layers, with a constraint that bites, so that what comes after the update is covered in each row."""
    constraint = keras.constraints.MaxNorm(0.8)
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, "tanh", kernel_constraint=constraint),
            layers.Dense(4, "tanh", kernel_regularizer="l2"),
            layers.Dense(2),
        ]
    )


def schedule() -> optimizers.schedules.LearningRateSchedule:
    return optimizers.schedules.ExponentialDecay(0.05, decay_steps=3, decay_rate=0.8, staircase=True)


def row(name: str, make: Callable[[], Any], **more: Any) -> Case:
    options = {"model": constrained, "data": regression, **more}
    return Case(name=name, compile=lambda: {"optimizer": make(), "loss": "mse"}, **options)


def without_decay_of_biases() -> optimizers.Optimizer:
    optimizer = optimizers.AdamW(0.02, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def has(name: str) -> Callable[[], bool]:
    return lambda: hasattr(optimizers, name)


def muon_works() -> bool:
    """Keras 3.10's Muon fails on TensorFlow on one device already: it asks a tf.Variable for its path."""
    return not keras.__version__.startswith("3.10.")


def train_with_built_optimizer(case: Case, model: Any) -> dict[str, Any]:
    """Plain Keras builds this optimizer while it traces, and loses the copy of the weights that it starts from."""
    if isinstance(model, keras.Model):
        model.optimizer.build(model.trainable_variables)
    return train(case, model)


BUILT_IN = [
    row("optimizer-string", lambda: "rmsprop"),
    row("optimizer-SGD", lambda: optimizers.SGD(0.05)),
    row("optimizer-SGD-momentum", lambda: optimizers.SGD(0.05, momentum=0.9)),
    row("optimizer-SGD-nesterov", lambda: optimizers.SGD(schedule(), momentum=0.9, nesterov=True)),
    row("optimizer-Adam", lambda: optimizers.Adam(0.02), replicas=(2, 3, 4)),
    row("optimizer-Adam-amsgrad", lambda: optimizers.Adam(schedule(), amsgrad=True)),
    row("optimizer-AdamW", lambda: optimizers.AdamW(0.02, weight_decay=0.1)),
    row("optimizer-AdamW-biases-excluded", without_decay_of_biases),
    row("optimizer-RMSprop", lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True)),
    row("optimizer-Adagrad", lambda: optimizers.Adagrad(0.05)),
    row("optimizer-Adadelta", lambda: optimizers.Adadelta(1.0)),
    row("optimizer-Adamax", lambda: optimizers.Adamax(0.02)),
    row("optimizer-Adafactor", lambda: optimizers.Adafactor(0.02)),
    row("optimizer-Nadam", lambda: optimizers.Nadam(0.02)),
    row("optimizer-Ftrl", lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.01, l2_regularization_strength=0.01)),
    row("optimizer-Lion", lambda: optimizers.Lion(0.005, weight_decay=0.1)),
    row("optimizer-Lamb", lambda: optimizers.Lamb(0.02)),
    row("optimizer-Muon", lambda: optimizers.Muon(0.02, weight_decay=0.1), replicas=(2, 3, 4), needs=muon_works),
    row("optimizer-LossScaleOptimizer", lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.02), dynamic_growth_steps=6)),
    row(
        "optimizer-ScheduleFreeAdamW",
        lambda: optimizers.ScheduleFreeAdamW(0.02, weight_decay=0.1, warmup_steps=5),
        drive=train_with_built_optimizer,
        needs=has("ScheduleFreeAdamW"),
    ),
    row(
        "optimizer-MultiOptimizer",
        lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(optimizers.Adam(0.02, clipvalue=0.02), {".*kernel": optimizers.SGD(0.05, clipnorm=0.05)})
        ),
        needs=has("MultiOptimizer"),
    ),
]

# The thresholds bite: the gradients' norms are between 0.1 and 3.
OPTIONS = [
    row("clipnorm", lambda: optimizers.SGD(0.1, clipnorm=0.05), replicas=(2, 3, 4)),
    row("global_clipnorm", lambda: optimizers.Adam(0.02, global_clipnorm=0.05), replicas=(2, 3, 4)),
    row("clipvalue", lambda: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.02), replicas=(2, 3, 4)),
    row("weight_decay", lambda: optimizers.SGD(schedule(), weight_decay=0.2, clipnorm=0.1)),
    row("use_ema", lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8), replicas=(2, 3, 4)),
    row(
        "ema_overwrite_frequency",
        lambda: optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, clipnorm=0.1),
        replicas=(2, 3, 4),
    ),
    row("loss_scale_factor", lambda: optimizers.SGD(0.1, loss_scale_factor=32.0, global_clipnorm=0.1)),
]

# 20 batches: updates of 3 leave two accumulated batches over, updates of 4 none.
ACCUMULATED = [
    row("gradient_accumulation_steps", lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3), replicas=(2, 3, 4)),
    row("gradient_accumulation-clipnorm", lambda: optimizers.Adam(0.02, gradient_accumulation_steps=4, clipnorm=0.05)),
    row(
        "gradient_accumulation-global_clipnorm-schedule",
        lambda: optimizers.SGD(schedule(), momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.05),
    ),
    row(
        "gradient_accumulation-ema-weight_decay",
        lambda: optimizers.AdamW(
            0.02, weight_decay=0.1, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
        ),
    ),
    row(
        "gradient_accumulation-inside-LossScaleOptimizer",
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.1, gradient_accumulation_steps=4, clipnorm=0.05), dynamic_growth_steps=6
        ),
        replicas=(2, 3, 4),
    ),
    row("gradient_accumulation-Nadam", lambda: optimizers.Nadam(0.02, gradient_accumulation_steps=3)),
    row("gradient_accumulation-Muon", lambda: optimizers.Muon(0.02, gradient_accumulation_steps=3), needs=muon_works),
]


# -- sparse gradients: IndexedSlices


def embedding() -> keras.Model:
    """Ids, some of them twice in a row and some never seen, to 2 numbers."""
    return keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(9, 3), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    )


def ids(rng: Any, rows: int) -> tuple[Any, ...]:
    return rng.integers(0, 7, (rows, 4)), rng.normal(size=(rows, 2))


SPARSE = [
    row(f"embedding-{name}", make, model=embedding, data=ids, **more)
    for name, make, more in (
        ("SGD", lambda: optimizers.SGD(0.1), {}),
        ("SGD-clipnorm", lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05), {"replicas": (2, 3, 4)}),
        ("Adam", lambda: optimizers.Adam(0.02), {}),
        ("Adam-global_clipnorm", lambda: optimizers.Adam(0.02, global_clipnorm=0.05), {}),
        ("Adam-clipvalue-accumulation", lambda: optimizers.Adam(0.02, clipvalue=0.01, gradient_accumulation_steps=3), {}),
        ("RMSprop-ema", lambda: optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=3), {}),
        ("Adagrad", lambda: optimizers.Adagrad(0.05), {}),
        ("LossScaleOptimizer", lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1, clipnorm=0.05)), {}),
    )
]

CASES = [*BUILT_IN, *OPTIONS, *ACCUMULATED, *SPARSE]
