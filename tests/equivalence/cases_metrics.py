"""Rows about metrics: built-in ones with state of every kind, functions and classes of the user's, weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Case
from parts import dense, listed_outputs, listed_targets, named_targets, one_hot, regression, two_outputs, weighted
from stack import GENERATION, keras, metrics, ops


def row(name: str, given: Callable[[], dict[str, Any]], **more: Any) -> Case:
    """A classifier with the metrics `given`, as arguments of compile; evaluate too."""
    options: dict[str, Any] = {"model": dense(3, "softmax"), "data": one_hot, "evaluate": True, **more}
    loss = options.pop("loss", "categorical_crossentropy")
    return Case(name=name, compile=lambda: {"optimizer": keras.optimizers.SGD(0.3), "loss": loss, **given()}, **options)


def largest_error(y_true: Any, y_pred: Any) -> Any:
    """One value for each row."""
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


def mean_of_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred))


def sum_of_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.abs(y_true - y_pred))


def root_of_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class Spread(metrics.Metric):
    """A user's own: mean and variance of the outputs, as a dictionary."""

    def __init__(self, name: str = "spread", **more: Any) -> None:
        super().__init__(name=name, **more)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.squares = self.add_weight(name="squares", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        weight = ops.ones(ops.shape(y_pred)[:1], y_pred.dtype) if sample_weight is None else ops.cast(sample_weight, y_pred.dtype)
        weight, values = ops.reshape(weight, (-1,)), ops.max(y_pred, axis=-1)  # Keras 2 gives weights of shape (rows, 1).
        self.total.assign_add(ops.sum(values * weight))
        self.squares.assign_add(ops.sum(ops.square(values) * weight))
        self.count.assign_add(ops.sum(weight))

    def result(self) -> dict[str, Any]:
        mean = self.total / self.count
        return {"mean": mean, "variance": self.squares / self.count - ops.square(mean)}


class Hits(metrics.Metric):
    """A user's own with one number: how many rows are right, counted in integers."""

    def __init__(self, name: str = "hits", **more: Any) -> None:
        super().__init__(name=name, **more)
        self.right = self.add_weight(name="right", initializer="zeros", dtype="int64")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        right = ops.equal(ops.argmax(y_true, axis=-1), ops.argmax(y_pred, axis=-1))
        self.right.assign_add(ops.cast(ops.sum(ops.cast(right, "int32")), "int64"))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.right)


def classification() -> list[Any]:
    return [
        "accuracy",
        metrics.AUC(num_thresholds=20, multi_label=True, name="auc"),
        metrics.Precision(name="precision"),
        metrics.Recall(class_id=1, name="recall"),
        *([metrics.F1Score(average="macro", name="f1")] if GENERATION == 3 else []),  # Keras 2's is for float32 alone.
        metrics.OneHotMeanIoU(num_classes=3, name="iou"),
        metrics.CategoricalCrossentropy(name="cce"),
        metrics.TruePositives(name="tp"),
        metrics.SpecificityAtSensitivity(0.5, num_thresholds=20, name="spec"),
        metrics.CosineSimilarity(name="cosine"),
    ]


def regressive() -> list[Any]:
    more = [metrics.R2Score(name="r2")] if GENERATION == 3 else []  # Keras 2's is for float32 alone.
    return [*more, "mae", metrics.RootMeanSquaredError(name="rmse"), metrics.MeanSquaredError(name="mse")]


CASES = [
    row("metrics-classification", lambda: {"metrics": classification()}, replicas=(2, 3, 4)),
    row("metrics-classification-weighted", lambda: {"weighted_metrics": classification()}, data=weighted(one_hot)),
    row("metrics-regression", lambda: {"metrics": regressive()}, model=dense(), data=regression, loss="mse"),
    row(
        "metrics-and-weighted_metrics",
        lambda: {"metrics": ["mae", largest_error], "weighted_metrics": [metrics.MeanSquaredError(name="m"), largest_error]},
        model=dense(),
        data=weighted(regression),
        loss="mse",
    ),
    row(
        "metrics-MeanIoU-sparse",
        lambda: {"metrics": [metrics.MeanIoU(3, sparse_y_pred=False, name="iou"), "sparse_categorical_accuracy"]},
        data=lambda rng, rows: (rng.normal(size=(rows, 3)), rng.integers(0, 3, rows)),
        loss="sparse_categorical_crossentropy",
    ),
    row("metrics-own-function", lambda: {"metrics": [largest_error]}),
    row("metrics-own-class", lambda: {"metrics": [Hits()]}),
    row("metrics-own-class-with-dict-result", lambda: {"metrics": [Spread()]}, replicas=(2, 3, 4)),
    row("metrics-own-class-with-dict-result-weighted", lambda: {"weighted_metrics": [Spread()]}, data=weighted(one_hot)),
    row("metrics-scalar-function-mean", lambda: {"metrics": [mean_of_batch]}),
    row("metrics-scalar-function-sum", lambda: {"metrics": [sum_of_batch]}),
    row("metrics-scalar-function-root-mean-square", lambda: {"metrics": [root_of_batch]}),
    row(
        "metrics-of-several-outputs-dict",
        lambda: {"metrics": {"a": ["mae", metrics.RootMeanSquaredError()], "b": "accuracy"}},
        model=two_outputs,
        data=named_targets,
        loss={"a": "mse", "b": "categorical_crossentropy"},
    ),
    row(
        "metrics-of-several-outputs-list",
        lambda: {"metrics": [["mae"], ["accuracy"]], "weighted_metrics": [["mse"], []]},
        model=listed_outputs,
        data=lambda rng, rows: (*listed_targets(rng, rows), (rng.uniform(0, 2, rows), np.ones(rows))),
        loss=["mse", "categorical_crossentropy"],
    ),
]
