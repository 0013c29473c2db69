"""The learning rates that a log has, whichever Keras runs."""

from __future__ import annotations

import math
from typing import Any

from keras_mirror.seams import learning_rate, log_seams


class Rates:
    """The learning rates of a model's optimizers, found once and read often.

    Args:
        model: a compiled model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizers = learning_rate.optimizers_of(model)

    def in_effect(self) -> dict[str, float]:
        """The rate of each optimizer's last update, by the attribute that holds the optimizer; the first before any.

        A warmup's factor is in it. An optimizer without a rate (tensorflow-addons' COCOB) is left out. Waits for the device.
        """
        attached = learning_rate.attached(self._model)
        scaled = {} if attached is None else {id(each.optimizer): each.last for each in attached.rates}
        out = {}
        for name, optimizer in self._optimizers.items():
            rate = scaled.get(id(optimizer))
            if rate is None or math.isnan(rate):
                rate = log_seams.own_rate(optimizer)
            if rate is not None:
                out[name] = rate
        return out
