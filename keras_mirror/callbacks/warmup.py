"""LinearScalingWarmup: the learning rate follows the global batch, step by step."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from keras_mirror import notices
from keras_mirror.callbacks import curve
from keras_mirror.engine.core import Engine, engine_of
from keras_mirror.seams import generation, learning_rate
from keras_mirror.seams.stack import keras

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
_EPOCHS = 5


class LinearScalingWarmup(keras.callbacks.Callback):
    """Multiplies the learning rate by k, reached gradually: k times the batch wants k times the rate.

    Update t of the optimizer, counted from 0, uses the rate `base(t) * factor(t)` with

        factor(t) = start_factor + (k - start_factor) * t / (T - 1)   for t < T - 1
        factor(t) = k                                                 from update T - 1 on, the last of the warmup

    (linear scaling and gradual warmup: Goyal et al. 2017, arXiv 1706.02677, sections 2.1 and 2.2). The factor is computed in
    the graph from the optimizer's own count of updates. So it is exact for every `steps_per_execution`, under gradient
    accumulation and after float16 steps that were skipped, and a run that is resumed goes on where the curve was.

    `base` is the user's own rate: a number, a schedule, or whatever a callback or an assignment sets it to. Outside the
    update `optimizer.learning_rate` is the base; the rate in effect is in the epoch's logs as `effective_learning_rate`
    (of a further optimizer: `effective_learning_rate_` and the model's attribute that holds it). Put this callback before
    those that read the logs. When training ends, the optimizer is left as Keras would have it: pass the callback to every
    `fit` of a run.

    Example:
        ```python
        model = MirroredFitter(build_model, batch="per_replica")
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=32, epochs=30, callbacks=[LinearScalingWarmup(warmup_epochs=5)])
        ```

    Args:
        warmup_epochs: the length of the warmup in epochs, fractions allowed. An epoch has steps / accumulation updates.
        scale: how many times larger the batch is than the one that the rate was chosen for.
        base_batch_size: the batch that the rate was chosen for, instead of `scale`: the factor is then the global batch of an
            update (accumulated batches included) divided by it. Needs MirroredFitter and data that tells its batch size.
            Without either, the factor is the number of replicas if the batch was given per replica
            (`MirroredFitter(..., batch="per_replica")`); else an error asks for it.
        rule: "linear": k is that factor; "sqrt": its square root, the usual advice for Adam and its relatives; or a function
            from the factor to k.
        momentum_correction: before an update multiply the velocities that contain the rate (SGD's and RMSprop's with
            momentum) by factor(t) / factor(t - 1), as section 3 of the paper asks. A change of the base is left as Keras does it.
        start_factor: the factor of the first update; None: 1, so that the warmup starts from the base.
        verbose: 1: print what was planned and when the warmup is over.
        warmup_steps: the length of the warmup in updates, instead of `warmup_epochs`; 1 scales at once.

    Raises:
        TypeError: an argument is no number, or `rule` is neither a name nor a function.
        ValueError: a number that isn't positive, both `scale` and `base_batch_size`, both lengths. When training begins: the
            factor or the number of steps per epoch can't be known, there is another warmup in the same fit, the model has no
            optimizer whose rate can be scaled.
    """

    def __init__(
        self,
        warmup_epochs: float = _EPOCHS,
        *,
        scale: float | None = None,
        base_batch_size: int | None = None,
        rule: str | Callable[[float], float] = "linear",
        momentum_correction: bool = True,
        start_factor: float | None = None,
        verbose: int = 0,
        warmup_steps: int | None = None,
    ) -> None:
        super().__init__()
        hint = "\nTo scale at once, without a warmup, pass warmup_steps=1."
        self.warmup_epochs = _positive("warmup_epochs", warmup_epochs, hint=hint)
        self.warmup_steps = None if warmup_steps is None else _positive("warmup_steps", warmup_steps, whole=True, hint=hint)
        self.scale = None if scale is None else _positive("scale", scale)
        self.base_batch_size = None if base_batch_size is None else _positive("base_batch_size", base_batch_size)
        self.start_factor = None if start_factor is None else _positive("start_factor", start_factor)
        self.rule = _checked_rule(rule)
        self.momentum_correction = bool(momentum_correction)
        self.verbose = verbose
        if warmup_steps is not None and warmup_epochs != _EPOCHS:
            raise ValueError(
                f"LinearScalingWarmup: warmup_epochs={warmup_epochs!r} and warmup_steps={warmup_steps!r} were given, expected"
                " one of them."
            )
        if scale is not None and base_batch_size is not None:
            raise ValueError(
                f"LinearScalingWarmup: scale={scale!r} and base_batch_size={base_batch_size!r} were given, expected one of"
                " them: each alone says how much larger the batch is."
            )
        self._curves: dict[str, curve.Curve] = {}
        self._length_checked = False
        self._over_said = False

    # -- Keras's hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Scales the rates of the model's optimizers from the first step on."""
        model = self.model
        self._refuse_a_second(model)
        learning_rate.release(model)
        optimizers = _optimizers(model)
        engine = engine_of(model)
        steps = (self.params or {}).get("steps")
        batch_size = None if engine is None or self.base_batch_size is None else engine.batch_size
        per_replica = engine is not None and engine.batch_is_per_replica
        self._curves = {
            name: self._curve(optimizer, engine, steps, batch_size, per_replica) for name, optimizer in optimizers.items()
        }
        self._say_below_one()
        rates = [
            learning_rate.ScaledRate(optimizer, self._curves[name].factor, self._curves[name].updates, self.momentum_correction)
            for name, optimizer in optimizers.items()
        ]
        learning_rate.attach(model, learning_rate.Attachment(rates, self, self.params), guard=engine is None)
        self._length_checked = self._over_said = False
        for name, rate in zip(self._curves, rates, strict=True):
            self._say(_begin(name, self._curves[name], rate.updates_done))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Warns, once, of a warmup that training won't finish."""
        if not self._length_checked:
            self._length_checked = True
            self._warn_if_longer_than_training(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the rate that the last update used into the logs."""
        attachment = learning_rate.attached(self.model)
        if attachment is None or attachment.owner is not self:
            return
        rates = dict(zip(self._curves, attachment.rates, strict=True))
        if logs is not None:
            for i, (name, rate) in enumerate(rates.items()):
                last = rate.last
                if not math.isnan(last):
                    logs["effective_learning_rate" if i == 0 else f"effective_learning_rate_{name}"] = last
        if not self._over_said and all(rate.updates_done >= self._curves[name].updates for name, rate in rates.items()):
            self._over_said = True
            self._say(f"epoch {epoch + 1}: the warmup is over")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leaves the optimizers as Keras would have them."""
        learning_rate.release(self.model)

    # -- what a checkpoint keeps

    def get_state(self) -> dict[str, Any]:
        """The rates that the last updates used, and what was said already; the curve itself follows the optimizer's count."""
        attachment = learning_rate.attached(self.model)
        last = [] if attachment is None else [rate.last for rate in attachment.rates]
        return {"last": last, "over_said": self._over_said}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on with what `get_state` returned; to be called when training has begun."""
        attachment = learning_rate.attached(self.model)
        for rate, last in zip([] if attachment is None else attachment.rates, state["last"], strict=False):
            rate.restore_last(last)
        self._over_said = state["over_said"]

    # -- before a run

    def plot(self, model: Any, *, epochs: int, steps_per_epoch: int, batch_size: int | None = None) -> list[curve.Plan]:
        """The planned curve of each of a model's optimizers, before a long run. Nothing is changed.

        Example:
            ```python
            for plan in warmup.plot(model, epochs=30, steps_per_epoch=45):
                print(plan)
            ```

        Args:
            model: a compiled model, or a MirroredFitter.
            epochs: how many epochs fit will run.
            steps_per_epoch: how many batches an epoch will have.
            batch_size: the `batch_size` that fit will be given; needed with `base_batch_size`.

        Returns:
            A Plan for each optimizer, with some points of the curve as numbers; `print` draws it in text. Rates that other
            callbacks will set aren't known.

        Raises:
            ValueError: as fit would raise; `epochs` or `steps_per_epoch` isn't positive.
        """
        _positive("plot(epochs)", epochs, whole=True)
        _positive("plot(steps_per_epoch)", steps_per_epoch, whole=True)
        model = model if isinstance(model, keras.Model) else model.model
        engine = engine_of(model)
        per_replica = engine is not None and engine.batch == "per_replica"
        if batch_size is not None and engine is not None and per_replica:
            batch_size *= engine.replicas
        plans = []
        for name, optimizer in _optimizers(model).items():
            factors = self._curve(optimizer, engine, steps_per_epoch, batch_size, per_replica)
            updates = max(epochs * steps_per_epoch // generation.accumulation_steps(optimizer), 1)

            def base(update: int, optimizer: Any = optimizer) -> float:
                return learning_rate.base_rate_at(optimizer, update)

            plans.append(curve.plan(name, factors, updates, base))
        return plans

    # -- the factor and the length

    def _curve(
        self, optimizer: Any, engine: Engine | None, steps: int | None, batch_size: int | None, per_replica: bool
    ) -> curve.Curve:
        accumulation = generation.accumulation_steps(optimizer)
        ratio = self._ratio(engine, batch_size, per_replica, accumulation)
        k = self.rule(ratio)
        if isinstance(k, bool) or not isinstance(k, numbers.Real) or not 0 < k < math.inf:
            raise ValueError(f"LinearScalingWarmup: rule({ratio!r}) returned {k!r}, expected a positive number.")
        start = 1.0 if self.start_factor is None else self.start_factor
        if self.start_factor is not None and start > max(k, 1.0):
            raise ValueError(
                f"LinearScalingWarmup: start_factor={start:g} is above the factor {k:g} that the warmup ends with, expected"
                f" at most {max(k, 1.0):g}."
            )
        return curve.Curve(start, float(k), self._updates(steps, accumulation))

    def _ratio(self, engine: Engine | None, batch_size: int | None, per_replica: bool, accumulation: int) -> float:
        """How many times larger the batch of an update is than the one that the rate was chosen for."""
        if self.scale is not None:
            return self.scale
        if self.base_batch_size is not None:
            if batch_size is None:
                why = "data tells its batch size" if engine is not None else "Keras's fit doesn't tell callbacks its batch size"
                raise ValueError(
                    f"LinearScalingWarmup: base_batch_size={self.base_batch_size:g} was given, but the global batch isn't known:"
                    f" {'no ' + why if engine is not None else why}.\n"
                    f"Pass scale=(global batch) / {self.base_batch_size:g} instead."
                )
            return batch_size * accumulation / self.base_batch_size
        if per_replica and engine is not None:
            return float(engine.replicas)
        raise ValueError(
            "LinearScalingWarmup: how much larger the batch is than the one the rate was chosen for isn't known: the batch"
            f" {'was' if engine is not None else 'is'} given for all replicas together, and neither scale nor base_batch_size"
            " was given.\nPass scale=k, or base_batch_size=n to a MirroredFitter's fit, or use"
            ' MirroredFitter(..., batch="per_replica").'
        )

    def _updates(self, steps: int | None, accumulation: int) -> int:
        if self.warmup_steps is not None:
            return int(self.warmup_steps)
        if steps is None:
            raise ValueError(
                f"LinearScalingWarmup: warmup_epochs={self.warmup_epochs:g}, but the number of steps per epoch isn't known: the"
                " data is a generator or a dataset of unknown length.\nPass warmup_steps=(number of updates), or fit's"
                " steps_per_epoch."
            )
        return max(1, round(self.warmup_epochs * steps / accumulation))

    # -- what is said

    def _refuse_a_second(self, model: Any) -> None:
        """Raises where another warmup scales the same fit; what a fit that failed has left is no second warmup."""
        found = learning_rate.attached(model)
        if found is None:
            return
        same_fit = found.fit is self.params if self.params else found.owner is not self
        if same_fit:
            raise ValueError(
                "LinearScalingWarmup: found a second warmup in the same fit, expected one: their factors would be"
                " multiplied.\nOne callback scales all optimizers of the model: drop the other."
            )

    def _say_below_one(self) -> None:
        for name, factors in self._curves.items():
            if factors.end < 1:
                notices.warn(
                    f"LinearScalingWarmup: the factor of {name!r} is {factors.end:g}, below 1: its learning rate goes down"
                    " (right for a batch smaller than the one the rate was chosen for)."
                )

    def _warn_if_longer_than_training(self, first_epoch: int) -> None:
        attachment = learning_rate.attached(self.model)
        params = self.params or {}
        steps, epochs = params.get("steps"), params.get("epochs")
        if attachment is None or not steps or not epochs:
            return
        for (name, factors), rate in zip(self._curves.items(), attachment.rates, strict=True):
            accumulation = generation.accumulation_steps(rate.optimizer)
            last = rate.updates_done + (epochs - first_epoch) * steps // accumulation
            if last < factors.updates:
                notices.warn(
                    f"LinearScalingWarmup: the warmup of {name!r} takes {factors.updates} updates, but training ends after"
                    f" {last}, at a factor of {factors.at(max(last - 1, 0)):g} instead of {factors.end:g}. Shorten the warmup or"
                    " train longer."
                )

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"LinearScalingWarmup: {text}")


def _begin(name: str, factors: curve.Curve, done: int) -> str:
    now = f", now at update {done}" if done else ""
    return (
        f"{name}: learning rate x {factors.start:g} to x {factors.end:g} over the first {factors.updates} updates{now}"
        f" (x {factors.at(done):g})"
    )


def _optimizers(model: Any) -> dict[str, Any]:
    found = learning_rate.optimizers_of(model)
    if not found:
        raise ValueError(
            f"LinearScalingWarmup: the model {model.name!r} has no Keras optimizer, expected one to scale.\n"
            "Compile it with an optimizer, or keep yours as an attribute of the model."
        )
    for name, optimizer in found.items():
        if not learning_rate.is_scalable(optimizer):
            raise ValueError(
                f"LinearScalingWarmup: {name!r} is a {type(optimizer).__name__}, which has a learning_rate property of its own,"
                " so its rate can't be scaled.\nLet the class use keras.optimizers.Optimizer's learning_rate."
            )
    return found


def _checked_rule(rule: Any) -> Callable[[float], float]:
    if isinstance(rule, str) and rule in _RULES:
        return _RULES[rule]
    if callable(rule):
        function: Callable[[float], float] = rule
        return function
    raise (ValueError if isinstance(rule, str) else TypeError)(
        f'LinearScalingWarmup: rule={rule!r}, expected "linear", "sqrt" or a function of the factor.'
    )


def _positive(name: str, value: Any, *, whole: bool = False, hint: str = "") -> float:
    expected = "a whole number of at least 1" if whole else "a positive number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"LinearScalingWarmup: {name}={value!r} is a {type(value).__name__}, expected {expected}.")
    number = float(value)
    if not 0 < number < math.inf or (whole and not number.is_integer()):
        raise ValueError(f"LinearScalingWarmup: {name}={value!r}, expected {expected}.{hint}")
    return int(number) if whole else number
