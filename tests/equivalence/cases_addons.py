"""Rows about tensorflow-addons 0.23: every optimizer and wrapper in float32 and mixed_float16; losses, metrics, layers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow_addons as tfa
from cases_optimizers import constrained, embedding, ids
from harness import SIZES, Case
from parts import dense, one_hot, regression
from stack import keras, layers

legacy = keras.optimizers.legacy
_last: list[keras.Model] = []


def remembered() -> keras.Model:
    """The constrained model, kept for MultiOptimizer, which is given layers."""
    _last[:] = [constrained()]
    return _last[0]


def for_each_layer() -> Any:
    first, *others = _last[0].layers
    return tfa.optimizers.MultiOptimizer([(legacy.Adam(0.02), first), (legacy.SGD(0.05, momentum=0.5), others)])


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "LAMB": lambda: tfa.optimizers.LAMB(0.02, weight_decay=0.1),
    "LazyAdam": lambda: tfa.optimizers.LazyAdam(0.02),
    "RectifiedAdam": lambda: tfa.optimizers.RectifiedAdam(0.02, weight_decay=0.01, total_steps=20, warmup_proportion=0.2),
    "NovoGrad": lambda: tfa.optimizers.NovoGrad(0.02, weight_decay=0.01),
    "SGDW": lambda: tfa.optimizers.SGDW(weight_decay=0.01, learning_rate=0.05, momentum=0.9),
    "AdamW": lambda: tfa.optimizers.AdamW(weight_decay=0.01, learning_rate=0.02, clipnorm=0.05),
    "Yogi": lambda: tfa.optimizers.Yogi(0.02),
    "AdaBelief": lambda: tfa.optimizers.AdaBelief(0.02),
    "COCOB": lambda: tfa.optimizers.COCOB(),
    "ConditionalGradient": lambda: tfa.optimizers.ConditionalGradient(0.99, lambda_=1.0),
    "ProximalAdagrad": lambda: tfa.optimizers.ProximalAdagrad(
        0.05, l1_regularization_strength=0.01, l2_regularization_strength=0.01
    ),
    "MultiOptimizer": for_each_layer,
    "Lookahead": lambda: tfa.optimizers.Lookahead(legacy.Adam(0.02), sync_period=3),
    "Lookahead-RectifiedAdam": lambda: tfa.optimizers.Lookahead(tfa.optimizers.RectifiedAdam(0.02), sync_period=3),
    "MovingAverage": lambda: tfa.optimizers.MovingAverage(legacy.Adam(0.02), average_decay=0.8, start_step=4, dynamic_decay=True),
    "SWA": lambda: tfa.optimizers.SWA(legacy.SGD(0.05, momentum=0.9), start_averaging=4, average_period=3),
}


def optimizer_row(name: str, half: bool) -> Case:
    return Case(
        name=f"addons-{name}-{'mixed_float16' if half else 'float32'}",
        model=remembered,
        data=regression,
        compile=lambda: {"optimizer": OPTIMIZERS[name](), "loss": "mse"},
        dtype="float32",
        policy="mixed_float16" if half else None,
        # Where gradients are normalised, float16's rounding of the smallest of them comes out at full size.
        tolerance=2e-2 if half else 5e-5,
        replicas=(2,) if half else (3,),
    )


EMBEDDING = [
    Case(
        name=f"addons-{name}-embedding",
        model=embedding,
        data=ids,
        compile=lambda make=OPTIMIZERS[name]: {"optimizer": make(), "loss": "mse"},
        dtype="float32",
        replicas=(2,),
    )
    for name in ("LazyAdam", "MovingAverage")
]


# -- losses


def single(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return rng.normal(size=(rows, 3)), rng.integers(0, 3, rows)


def embedded() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Lambda(lambda x: x / (1.0 + keras.backend.abs(x)))])


LOSSES = [
    Case(
        name=f"addons-loss-{name}",
        model=model,
        data=data,
        compile=lambda make=make: {"optimizer": "sgd", "loss": make()},
        # The triplet losses add float32 numbers to the outputs.
        dtype="float32" if name.startswith("Triplet") else "float64",
        sizes=(8, 7, 5, 4, 6, 8, 5, 9, 4, 6) if name.startswith("Triplet") else SIZES,
        large_batches="NaN on one device too without two rows of one class" if name.startswith("Triplet") else "",
    )
    for name, model, data, make in (
        ("SigmoidFocalCrossEntropy", dense(3, "sigmoid"), one_hot, lambda: tfa.losses.SigmoidFocalCrossEntropy(reduction="auto")),
        ("PinballLoss", dense(2), regression, lambda: tfa.losses.PinballLoss(0.2)),
        ("TripletSemiHardLoss", embedded, single, tfa.losses.TripletSemiHardLoss),
        ("TripletHardLoss", embedded, single, tfa.losses.TripletHardLoss),
    )
]

# -- metrics

METRICS = [
    Case(
        name=f"addons-metric-{name}",
        model=dense(3, "softmax"),
        data=one_hot,
        compile=lambda make=make: {"optimizer": "sgd", "loss": "categorical_crossentropy", "metrics": [make()]},
        dtype="float32",
        evaluate=True,
    )
    for name, make in (
        ("F1Score", lambda: tfa.metrics.F1Score(3, average="macro")),
        ("CohenKappa", lambda: tfa.metrics.CohenKappa(3, sparse_labels=False)),
        ("MatthewsCorrelationCoefficient", lambda: tfa.metrics.MatthewsCorrelationCoefficient(3)),
        ("HammingLoss", lambda: tfa.metrics.HammingLoss(mode="multiclass", threshold=0.5)),
    )
]

# -- layers

LAYERS = [
    Case(
        name=f"addons-layer-{name}",
        model=lambda made=made: keras.Sequential([keras.Input((4,)), made(), layers.Dense(2)]),
        data=lambda rng, rows: (rng.normal(size=(rows, 4)), rng.normal(size=(rows, 2))),
        compile=lambda: {"optimizer": "adam", "loss": "mse"},
        dtype="float32",
        predict=True,
    )
    for name, made in (
        ("WeightNormalization", lambda: tfa.layers.WeightNormalization(layers.Dense(4), data_init=False)),
        ("GroupNormalization", lambda: tfa.layers.GroupNormalization(2)),
        ("Maxout", lambda: tfa.layers.Maxout(2)),
        ("Sparsemax", tfa.layers.Sparsemax),
        ("SpectralNormalization", lambda: tfa.layers.SpectralNormalization(layers.Dense(4))),
    )
]

FLOAT32 = [optimizer_row(name, half=False) for name in OPTIMIZERS]
MIXED = [optimizer_row(name, half=True) for name in OPTIMIZERS]
CASES = [*FLOAT32, *MIXED, *EMBEDDING, *LOSSES, *METRICS, *LAYERS]
