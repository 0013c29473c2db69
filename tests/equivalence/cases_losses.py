"""Rows about losses: what is given as a loss, reductions, masks, weights, losses of the whole batch, added losses."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Case
from parts import (
    dense,
    listed_outputs,
    listed_targets,
    named_targets,
    one_hot,
    regression,
    tagger,
    tokens,
    two_outputs,
    weighted,
)
from stack import keras, layers, losses, ops, regularizers

REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")


def sgd(loss: Callable[[], Any], **more: Any) -> Callable[[], dict[str, Any]]:
    """The arguments of compile: SGD, and the loss made anew for each run."""
    return lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": loss(), **more}


# -- what is given as a loss


def squared(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


class Cubed(losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


KINDS = [
    Case(name="loss-string", model=dense(), data=regression, compile=sgd(lambda: "mse"), evaluate=True, replicas=(2, 3, 4)),
    Case(name="loss-function", model=dense(), data=weighted(regression), compile=sgd(lambda: squared)),
    Case(name="loss-own-class", model=dense(), data=weighted(regression), compile=sgd(Cubed)),
    Case(
        name="loss-list-and-loss_weights",
        model=listed_outputs,
        data=listed_targets,
        compile=sgd(lambda: ["mse", losses.CategoricalCrossentropy()], loss_weights=[0.3, 1.7]),
        evaluate=True,
    ),
    Case(
        name="loss-dict-and-loss_weights",
        model=two_outputs,
        data=named_targets,
        compile=sgd(lambda: {"a": squared, "b": "categorical_crossentropy"}, loss_weights={"a": 0.3, "b": 1.7}),
    ),
    Case(
        name="loss-for-one-output-only",
        model=two_outputs,
        data=named_targets,
        compile=sgd(lambda: {"b": "categorical_crossentropy"}),
    ),
    Case(
        name="loss-dict-of-different-reductions",
        model=two_outputs,
        data=lambda rng, rows: (*named_targets(rng, rows), {"a": rng.uniform(0, 2, rows), "b": rng.uniform(0, 2, rows)}),
        compile=sgd(
            lambda: {
                "a": losses.MeanSquaredError(reduction="sum"),
                "b": losses.CategoricalCrossentropy(reduction="mean_with_sample_weight"),
            }
        ),
    ),
]


# -- every built-in loss: one output each, so that a wrong one is named by its log

_NAMES = {
    "bce": "BinaryCrossentropy",
    "bfce": "BinaryFocalCrossentropy",
    "cce": "CategoricalCrossentropy",
    "cfce": "CategoricalFocalCrossentropy",
    "cgce": "CategoricalGeneralizedCrossEntropy",  # alone of these it takes class ids
    "chinge": "CategoricalHinge",
    "cosine": "CosineSimilarity",
    "hinge": "Hinge",
    "huber": "Huber",
    "kld": "KLDivergence",
    "logcosh": "LogCosh",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
    "poisson": "Poisson",
    "shinge": "SquaredHinge",
    "tversky": "Tversky",
    "dice": "Dice",
}
_OPTIONS = {"cce": {"label_smoothing": 0.1}}
BUILT_IN = {
    short: functools.partial(getattr(losses, name), **_OPTIONS.get(short, {}))
    for short, name in _NAMES.items()
    if hasattr(losses, name)
}


def one_output_for_each_loss() -> keras.Model:
    x = keras.Input((3,))
    return keras.Model(x, {name: layers.Dense(3, "softmax", name=name)(x) for name in BUILT_IN})


def one_hot_for_each_loss(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    x, y = one_hot(rng, rows)
    targets = {**dict.fromkeys(BUILT_IN, y), "cgce": np.argmax(y, axis=-1)}
    return x, {name: targets[name] for name in BUILT_IN}


ALL_BUILT_IN = [
    Case(
        name="loss-every-built-in",
        model=one_output_for_each_loss,
        data=one_hot_for_each_loss,
        compile=sgd(lambda: {name: make() for name, make in BUILT_IN.items()}, loss_weights=dict.fromkeys(BUILT_IN, 0.1)),
    ),
    Case(
        name="loss-sparse-with-ignored-class",
        model=lambda: keras.Sequential([keras.Input((4, 3)), layers.Dense(3, "softmax")]),
        data=lambda rng, rows: (rng.normal(size=(rows, 4, 3)), rng.integers(0, 3, (rows, 4))),
        compile=sgd(lambda: losses.SparseCategoricalCrossentropy(ignore_class=1)),
    ),
]

# -- reductions, with and without masks and weights

REDUCED = [
    Case(
        name=f"reduction-{reduction}{'-weights' * with_weights}",
        model=dense(),
        data=weighted(regression) if with_weights else regression,
        compile=sgd(lambda reduction=reduction: losses.MeanSquaredError(reduction=reduction)),
        evaluate=reduction == "sum",
        replicas=(2, 3, 4) if reduction == "mean_with_sample_weight" else (),
    )
    for reduction in (*REDUCTIONS, None, "none")
    for with_weights in (False, True)
    if with_weights or reduction != "sum_over_batch_size"
]

MASKED = [
    Case(
        name=f"mask-{reduction}-{kind}",
        model=tagger,
        data=data,
        compile=sgd(
            lambda reduction=reduction: losses.MeanSquaredError(reduction=reduction),
            metrics=["mae"],
            weighted_metrics=["mse"],
        ),
        evaluate=kind == "plain",
        replicas=(2, 3, 4) if reduction == "sum_over_batch_size" and kind == "plain" else (),
    )
    for reduction in REDUCTIONS
    for kind, data in (
        ("plain", tokens),
        # One weight for each example: Keras itself fails on weights of shape (batch,) under a mask of (batch, time).
        ("weights", weighted(tokens, (1,))),
        ("weight_of_each_token", weighted(tokens, (4,))),
    )
]

# -- losses of the whole batch


def mean_of_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


def sum_of_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y_true - y_pred))


def root_of_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)) + 1e-3)


def contrastive(y_true: Any, y_pred: Any) -> Any:
    """Each row against every row of the batch."""
    similarity = ops.matmul(y_pred, ops.transpose(y_true))
    rows = ops.shape(y_pred)[0]
    return ops.mean(ops.logsumexp(similarity, axis=1) - ops.sum(similarity * ops.eye(rows, dtype="float64"), axis=1))


class ContrastiveLoss(losses.Loss):
    """As `contrastive`, one value for each row: depends on the whole batch though it looks like a mean."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        similarity = ops.matmul(y_pred, ops.transpose(y_true))
        rows = ops.shape(y_pred)[0]
        return ops.logsumexp(similarity, axis=1) - ops.sum(similarity * ops.eye(rows, dtype="float64"), axis=1)


WHOLE_BATCH = [
    Case(name="scalar-mean", model=dense(), data=regression, compile=sgd(lambda: mean_of_batch), evaluate=True),
    Case(name="scalar-sum", model=dense(), data=regression, compile=sgd(lambda: sum_of_batch), replicas=(2, 3, 4)),
    Case(name="scalar-root-mean-square", model=dense(), data=regression, compile=sgd(lambda: root_of_batch), evaluate=True),
    Case(name="scalar-contrastive", model=dense(), data=regression, compile=sgd(lambda: contrastive), replicas=(2, 3, 4)),
    Case(name="scalar-mean-with-weights", model=dense(), data=weighted(regression), compile=sgd(lambda: mean_of_batch)),
    Case(name="contrastive-value-for-each-row", model=dense(), data=regression, compile=sgd(ContrastiveLoss)),
    Case(
        name="circle",
        model=lambda: keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.UnitNormalization()]),
        data=lambda rng, rows: (rng.normal(size=(rows, 3)), rng.integers(0, 3, rows)),
        compile=sgd(lambda: losses.Circle(gamma=2.0)),
    ),
    Case(
        name="dice",
        model=dense(3, "softmax"),
        data=one_hot,
        compile=sgd(lambda: losses.Dice()),
        evaluate=True,
        replicas=(2, 3, 4),
    ),
    Case(name="tversky", model=dense(3, "softmax"), data=one_hot, compile=sgd(lambda: losses.Tversky(alpha=0.3, beta=0.7))),
    Case(name="dice-with-weights", model=dense(3, "softmax"), data=weighted(one_hot), compile=sgd(lambda: losses.Dice(axis=-1))),
    Case(
        name="scalar-function-beside-a-mean",
        model=two_outputs,
        data=named_targets,
        compile=sgd(lambda: {"a": root_of_batch, "b": "categorical_crossentropy"}, loss_weights={"a": 0.3, "b": 1.7}),
    ),
    Case(name="scalar-function-under-a-mask", model=tagger, data=tokens, compile=sgd(lambda: root_of_batch)),
]

# -- weights of classes


CLASS_WEIGHTS = [
    Case(
        name="class_weight",
        model=dense(3, "softmax"),
        data=lambda rng, rows: (rng.normal(size=(rows, 3)), rng.integers(0, 3, rows)),
        compile=sgd(lambda: "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"]),
        fit={"class_weight": {0: 0.5, 1: 2.0, 2: 0.0}},
        replicas=(2, 3, 4),
    ),
    Case(
        name="class_weight-one_hot-mean_with_sample_weight",
        model=dense(3, "softmax"),
        data=one_hot,
        compile=sgd(lambda: losses.CategoricalCrossentropy(reduction="mean_with_sample_weight")),
        fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
    ),
]

# -- regularisers and add_loss


class Absolute(regularizers.Regularizer):
    """One of the user's own (Keras 3.10's L1 takes no float64)."""

    def __call__(self, weight: Any) -> Any:
        return 0.03 * ops.sum(ops.abs(weight))


def regularised() -> keras.Model:
    hidden = layers.Dense(4, "tanh", kernel_regularizer=regularizers.L2(0.05), bias_regularizer=Absolute())
    return keras.Sequential([keras.Input((3,)), hidden, layers.Dense(2, kernel_regularizer=regularizers.L2(0.02))])


def activity() -> keras.Model:
    hidden = layers.Dense(4, "tanh", activity_regularizer=regularizers.L2(0.05))
    return keras.Sequential([keras.Input((3,)), hidden, layers.ActivityRegularization(l2=0.02), layers.Dense(2)])


class Adds(layers.Layer):
    """Adds what `loss` makes of its inputs."""

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.loss = loss

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.loss(inputs))
        return inputs


class AddsSeveral(layers.Layer):
    """A mean, a sum and a term of its own weight, in one layer that is called twice."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        out = inputs * self.scale
        self.add_loss(0.1 * ops.mean(ops.square(out)))
        self.add_loss(0.01 * ops.sum(ops.abs(out)))
        self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
        return out


def adds(loss: Callable[[Any], Any]) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), Adds(loss), layers.Dense(2)])


def adds_several_twice() -> keras.Model:
    x, adding = keras.Input((3,)), AddsSeveral()
    return keras.Model(x, layers.Dense(2)(adding(layers.Dense(3)(adding(x)))))


def added(name: str, model: Callable[[], keras.Model], **more: Any) -> Case:
    return Case(name=name, model=model, data=regression, compile=sgd(lambda: "mse"), **more)


ADDED = [
    added("regularizers-of-kernel-and-bias", regularised, evaluate=True, replicas=(2, 3, 4)),
    added("regularizer-of-activity", activity, evaluate=True, replicas=(2, 3, 4)),
    added("add_loss-mean", adds(lambda x: 0.1 * ops.mean(ops.square(x))), evaluate=True),
    added("add_loss-sum", adds(lambda x: 0.1 * ops.sum(ops.square(x))), evaluate=True),
    added("add_loss-value-for-each-row", adds(lambda x: 0.1 * ops.sum(ops.square(x), axis=-1))),
    added("add_loss-several-in-a-layer-called-twice", adds_several_twice, replicas=(2, 3, 4)),
    Case(
        name="add_loss-alone",
        model=adds(lambda x: ops.mean(ops.square(x - 0.5))),
        data=lambda rng, rows: (rng.normal(size=(rows, 3)),),
        compile=lambda: {"optimizer": keras.optimizers.SGD(0.05)},
    ),
]

CASES = [*KINDS, *ALL_BUILT_IN, *REDUCED, *MASKED, *WHOLE_BATCH, *CLASS_WEIGHTS, *ADDED]
