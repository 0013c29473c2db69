"""Rows about Keras 2's legacy optimizers, which tensorflow-addons builds on, and every option that they have."""

from collections.abc import Callable
from typing import Any

from cases_optimizers import constrained, embedding, ids
from harness import Case
from parts import regression
from stack import keras, optimizers

legacy = keras.optimizers.legacy


def row(name: str, make: Callable[[], Any], **more: Any) -> Case:
    options = {"model": constrained, "data": regression, **more}
    return Case(name=f"legacy-{name}", compile=lambda: {"optimizer": make(), "loss": "mse"}, **options)


def schedule() -> Any:
    return optimizers.schedules.ExponentialDecay(0.05, decay_steps=3, decay_rate=0.8, staircase=True)


CASES = [
    row("SGD-nesterov-schedule", lambda: legacy.SGD(schedule(), momentum=0.9, nesterov=True)),
    row("SGD-clipnorm", lambda: legacy.SGD(0.1, clipnorm=0.05)),
    row("SGD-clipvalue-decay", lambda: legacy.SGD(0.1, momentum=0.9, clipvalue=0.02, decay=0.1)),
    row("Adam-global_clipnorm-amsgrad", lambda: legacy.Adam(0.02, amsgrad=True, global_clipnorm=0.05)),
    row("RMSprop", lambda: legacy.RMSprop(0.01, momentum=0.9, centered=True)),
    row("Adagrad", lambda: legacy.Adagrad(0.05)),
    row("Adadelta", lambda: legacy.Adadelta(1.0)),
    row("Adamax", lambda: legacy.Adamax(0.02)),
    row("Nadam", lambda: legacy.Nadam(0.02)),
    row("Ftrl", lambda: legacy.Ftrl(0.05, l1_regularization_strength=0.01, l2_regularization_strength=0.01)),
    row("LossScaleOptimizer", lambda: optimizers.LossScaleOptimizer(legacy.Adam(0.02, clipnorm=0.05), dynamic_growth_steps=6)),
    row("Adam-embedding", lambda: legacy.Adam(0.02), model=embedding, data=ids),
]
