"""What a warmup attaches to a model for the length of one fit, whichever Keras runs it."""

from __future__ import annotations

import functools
from typing import Any

from keras_mirror.seams import generation

ATTRIBUTE = "_keras_mirror_warmup"


def optimizers_of(model: Any) -> dict[str, Any]:
    """The model's optimizers with a rate of their own, by the attribute that holds them; `optimizer` first.

    A wrapper such as LossScaleOptimizer stands for the optimizer inside it.
    """
    found: dict[str, Any] = {}
    names = sorted((name for name in vars(model) if not name.startswith("_")), key=lambda name: name != "optimizer")
    for name in names:
        value = vars(model)[name]
        several = dict(value) if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}
        for key, each in several.items():
            found[f"{name}_{key}"] = each
        found[name] = value
    out: dict[str, Any] = {}
    for name, value in found.items():
        if generation.is_optimizer(value):
            for optimizer in _innermost(value):
                if not any(optimizer is known for known in out.values()):
                    out[name if name not in out else f"{name}_{len(out)}"] = optimizer
    return out


def _innermost(optimizer: Any) -> list[Any]:
    inner = generation.held_optimizers(optimizer)
    return [innermost for each in inner for innermost in _innermost(each)] if inner else [optimizer]


class Attachment:
    """The scaled rates of a model for the length of one fit.

    Attributes:
        rates: one for each optimizer.
        owner: the callback that scales them.
        fit: Keras gives every callback of one fit the same dictionary of parameters, which tells two fits apart.
    """

    def __init__(self, rates: list[Any], owner: Any, fit: Any) -> None:
        self.rates = rates
        self.owner = owner
        self.fit = fit
        self.fit_before: dict[str, Any] = {}


def attached(model: Any) -> Attachment | None:
    """What is attached to the model now, or was left by a fit that failed."""
    found: Attachment | None = vars(model).get(ATTRIBUTE)
    return found


def attach(model: Any, attachment: Attachment, *, guard: bool) -> None:
    """Scales the rates from the next step on: has the train function made anew, since Keras's fit has made it already.

    Args:
        model: the model whose fit begins.
        attachment: its scaled rates.
        guard: nobody else calls `release` where fit fails: then the model's next fit does it first. (Keras tells no callback
            of a failure.)
    """
    for rate in attachment.rates:
        rate.attach()
    vars(model)[ATTRIBUTE] = attachment
    if guard:
        _release_before_next_fit(model, attachment)
    model.train_function = None
    model.make_train_function()


def release(model: Any) -> None:
    """Leaves the model's optimizers and functions as Keras would have them; does nothing where nothing is attached."""
    attachment = vars(model).pop(ATTRIBUTE, None)
    if attachment is None:
        return
    for rate in attachment.rates:
        rate.detach()
    if hasattr(vars(model).get("fit"), ATTRIBUTE):
        del vars(model)["fit"]
        vars(model).update(attachment.fit_before)
    # Whatever was traced meanwhile has the factor in it.
    model.train_function = None


def _release_before_next_fit(model: Any, attachment: Attachment) -> None:
    original = model.fit
    attachment.fit_before = {"fit": original} if "fit" in vars(model) else {}

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        release(model)
        return original(*args, **kwargs)

    setattr(fit, ATTRIBUTE, True)
    vars(model)["fit"] = fit
