"""Verification: one model on one device and on the replicas, from the same weights, on the same batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_mirror.engine import data, precision
from keras_mirror.engine.core import engine_of
from keras_mirror.seams import generation, loss_scale
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.fitter import MirroredFitter

# How far the replicas may be from one device, as a multiple of how far one device is from itself when the rows of each
# batch are added up in another order.
_ORDER_FACTOR = 10.0
# Above this a comparison says little: the model itself turns rounding into differences of this size.
_TELLING = 1e-2
# Both copies train with a loss scale of at most this, far from what float16 can't hold.
_LOSS_SCALE = 16.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One quantity on one device and on the replicas.

    Attributes:
        name: a log's name or a variable's path.
        difference: largest |a - b| over its elements, relative to max(1, largest |a|).
        one_device: its value on one device, for a scalar; else None.
        replicas: its value on the replicas, for a scalar; else None.
    """

    name: str
    difference: float
    one_device: float | None = None
    replicas: float | None = None


@dataclasses.dataclass(frozen=True)
class EquivalenceReport:
    """What `MirroredFitter.verify` found. `print(report)` shows it as a table.

    Attributes:
        replicas: the number of replicas.
        batch_size: the global batch size.
        steps: how many steps were trained.
        logs: loss and metrics after the last step.
        variables: the model's variables and the optimizer's, the largest difference first.
        tolerance: the largest difference that counts as equal, relative to max(1, |value|).
        tolerance_reason: where the tolerance comes from.
        notes: what was switched off for the comparison, or can't be compared.
    """

    replicas: int
    batch_size: int
    steps: int
    logs: tuple[Comparison, ...]
    variables: tuple[Comparison, ...]
    tolerance: float
    tolerance_reason: str
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """The largest difference of all; not a number where either run's values aren't."""
        differences = [c.difference for c in (*self.logs, *self.variables)]
        return math.nan if any(math.isnan(d) for d in differences) else max(differences, default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every difference is within the tolerance. A NaN isn't."""
        return self.largest <= self.tolerance

    def __bool__(self) -> bool:
        """The same as `passed`."""
        return self.passed

    def __str__(self) -> str:
        """A table: the verdict, loss and metrics side by side, the variables that differ most."""
        replicas = f"{self.replicas} replica{'s' * (self.replicas != 1)}"
        width = max([len(c.name) for c in (*self.logs, *self.variables[:5])], default=0)
        lines = [
            f"{'PASSED' if self.passed else 'FAILED'}: one device and {replicas}, {self.steps} steps at global batch"
            f" {self.batch_size}: largest difference {self.largest:.1e}, tolerance {self.tolerance:.1e}",
            f"  {'':{width}}  {'one device':>14}  {replicas:>14}  {'difference':>10}",
        ]
        for c in self.logs:
            lines.append(f"  {c.name:{width}}  {c.one_device:14.8g}  {c.replicas:14.8g}  {c.difference:10.1e}")
        for c in self.variables[:5]:
            lines.append(f"  {c.name:{width}}  {'':14}  {'':14}  {c.difference:10.1e}")
        if len(self.variables) > 5:
            lines.append(f"  and {len(self.variables) - 5} more variables, none differs more")
        lines.append(f"  tolerance: {self.tolerance_reason}")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)


def verify(
    fitter: MirroredFitter, x: Any, y: Any = None, *, sample_weight: Any = None, batch_size: int = 32, steps: int = 5
) -> EquivalenceReport:
    """See `MirroredFitter.verify`."""
    live = fitter.model
    if not live.compiled:
        raise RuntimeError("verify: the model isn't compiled, expected a loss and an optimizer.\nCall compile(...) first.")
    if steps < 1 or batch_size < 1:
        raise ValueError(f"verify: steps={steps} and batch_size={batch_size}, expected at least 1 of each.")
    batches = _batches(x, y, sample_weight, batch_size, steps)
    notes: list[str] = []
    # One device first: with a factory that draws its weights, both copies then start from this one's.
    reference = _Copy(fitter, batches, None, notes)
    mirrored = _Copy(fitter, batches, fitter.strategy, [])
    start = reference.state() if not live.built else _state_of(live)
    reference.start_from(start)
    mirrored.start_from(start)
    one = reference.run(batches)
    many = mirrored.run(batches)
    reference.start_from(start)
    reordered = reference.run([_reversed_rows(batch) for batch in batches])

    logs, variables = _compare(one, many)
    own_logs, own_variables = _compare(one, reordered)
    measured = max((c.difference for c in (*own_logs, *own_variables)), default=0.0)
    tolerance, reason = _tolerance(live, batch_size, steps, measured)
    if reference.iterations() != mirrored.iterations():
        notes.append(
            "one device and the replicas skipped different steps: sums in float16 overflow on one device sooner than on shares,"
            " so the weights differ by a step; a smaller learning rate or batch tells more"
        )
    if max(tolerance, _ORDER_FACTOR * measured) > _TELLING and measured > 0.1 * tolerance / _ORDER_FACTOR:
        notes.append(
            f"one device alone differs by {measured:.1e} when the rows of a batch change places: this model, or its loss,"
            " depends on their order or amplifies rounding, so the comparison tells little; fewer steps tell more"
        )
    if all(np.array_equal(a, b) for a, b in zip(start.weights, many.weights, strict=True)):
        notes.append("no weight moved in these steps (a learning rate of 0?), so the comparison tells little")
    return EquivalenceReport(
        replicas=fitter.num_replicas,
        batch_size=max(int(data.rows(data.batch_leaves(batch)[0])) for batch in batches),
        steps=len(batches),
        logs=tuple(logs),
        variables=tuple(sorted(variables, key=lambda c: -np.nan_to_num(c.difference, nan=np.inf))),
        tolerance=tolerance,
        tolerance_reason=reason,
        notes=tuple(notes),
    )


def _tolerance(model: keras.Model, batch_size: int, steps: int, measured: float) -> tuple[float, str]:
    """The tolerance for sums of `batch_size` terms in the model's dtype, over `steps` updates, and its derivation.

    A sum of n terms in another order differs by about sqrt(n) units of rounding (random walk), an update adds one such
    error, and an optimizer that divides by a small number amplifies it. The last part isn't known beforehand, so it is
    measured on one device: the same batches, their rows in reverse.
    """
    kinds = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in generation.sublayers(model)}
    names = [k for k in kinds if k in ("float16", "bfloat16", "float32", "float64")]
    epsilon, name = max((float(tf.experimental.numpy.finfo(tf.as_dtype(n).as_numpy_dtype).eps), n) for n in names or ["float32"])
    floor = epsilon * math.sqrt(batch_size) * steps
    order = _ORDER_FACTOR * measured
    if order > floor:
        return order, (
            f"{_ORDER_FACTOR:g} times the {measured:.1e} by which one device differs from itself when the rows of each batch"
            f" are added up in another order ({name})"
        )
    return floor, f"rounding of {name} ({epsilon:.1e}) x sqrt(batch size {batch_size}) x {steps} steps"


class _State:
    """The values of a model's and its optimizers' variables."""

    def __init__(self, weights: list[np.ndarray], optimizers: dict[str, list[np.ndarray]]) -> None:
        self.weights = weights
        self.optimizers = optimizers


def _state_of(model: keras.Model) -> _State:
    engine = engine_of(model)
    if engine is not None:
        engine.settle()
    optimizers = {n: [v.numpy() for v in o.variables] for n, o in vars(model).items() if generation.is_optimizer(o) and o.built}
    return _State(model.get_weights(), optimizers)


class _Run:
    """What one training run left behind."""

    def __init__(self, logs: dict[str, float], weights: list[np.ndarray], variables: dict[str, np.ndarray]) -> None:
        self.logs = logs
        self.weights = weights
        self.variables = variables


class _Copy:
    """A fresh copy of the fitter's model, plain on one device or mirrored, with random draws switched off."""

    def __init__(
        self, fitter: MirroredFitter, batches: list[Any], strategy: tf.distribute.Strategy | None, notes: list[str]
    ) -> None:
        from keras_mirror import fitter as home

        factory: Callable[[], keras.Model] = vars(fitter)["_factory"]
        live = fitter.model
        random_state = generation.save_random_state()
        try:
            model = home.build(factory, strategy, vars(fitter)["_precision"])
        finally:
            generation.restore_random_state(random_state)
        if model is live or engine_of(model) is not None:
            raise ValueError(
                "verify: model_factory returned the same model again, expected a new one.\n"
                "Build the model inside the function that MirroredFitter is given."
            )
        live_engine = engine_of(live)
        if live_engine is None:
            raise RuntimeError("verify: the model lost its engine; make a new MirroredFitter.")
        self.model = model
        if strategy is not None:
            from keras_mirror.engine.core import Engine

            engine = Engine(model, strategy, seed=live_engine.seed)
            engine.step_sums = live_engine.step_sums
            engine.attach()
        if live_engine.compile_arguments is not None:
            args, kwargs = _renewed(live_engine.compile_arguments)
            model.compile(*args, **kwargs)
        self._spec = generation.keras_tensors(batches[0])
        self._build(strategy, batches)
        if strategy is None and live_engine.loss_scales and precision.scale_where_needed(model):
            # Where only layers are in float16 it is the engine that put a LossScaleOptimizer around the live optimizer.
            generation.build_optimizer(model.optimizer, model.trainable_variables)
        _switch_off_draws(model, notes)
        if fitter.num_replicas > 1:
            _synchronise(model, notes)

    def _build(self, strategy: tf.distribute.Strategy | None, batches: list[Any]) -> None:
        """Makes the variables. A model whose step is its own may only have them after a step: then one is run."""
        if strategy is not None:
            engine = engine_of(self.model)
            if engine is not None:
                engine.build(self._spec)
        elif not generation.has_own_step(self.model, "train_step"):
            generation.symbolic_build(self.model, self._spec)
        else:
            self.model.fit(_dataset(batches[:1]), epochs=1, shuffle=False, verbose=0)

    def state(self) -> _State:
        return _state_of(self.model)

    def iterations(self) -> list[int]:
        """The updates that each optimizer made."""
        return [int(o.iterations) for o in vars(self.model).values() if generation.is_optimizer(o) and o.built]

    def start_from(self, state: _State) -> None:
        """Sets weights and optimizer state; an optimizer of which the state says nothing starts from zeros."""
        self.model.set_weights(state.weights)
        for name, optimizer in vars(self.model).items():
            if not generation.is_optimizer(optimizer):
                continue
            values = state.optimizers.get(name)
            if values is None:
                self._fresh = getattr(self, "_fresh", {})
                values = self._fresh.setdefault(name, _fresh_values(optimizer))
            for variable, value in zip(optimizer.variables, values, strict=True):
                variable.assign(value)
            if loss_scale.is_loss_scaled(optimizer):
                # Its search for the largest scale skips steps at one device's overflow or at the replicas', seldom at both.
                optimizer.dynamic_scale.assign(min(float(optimizer.dynamic_scale), _LOSS_SCALE))
        engine = engine_of(self.model)
        if engine is not None:
            engine.loss_scales.stops = False
            engine.restart_accumulation()
        self.model.reset_metrics()

    def run(self, batches: list[Any]) -> _Run:
        """Trains on the batches, in order, as fit does."""
        history = self.model.fit(_dataset(batches), epochs=1, shuffle=False, verbose=0)
        variables = {f"{i}:{v.path}": v.numpy() for i, v in enumerate(self.model.weights)}
        for name, optimizer in vars(self.model).items():
            if generation.is_optimizer(optimizer):
                variables.update({f"{name}:{i}:{v.path}": v.numpy() for i, v in enumerate(optimizer.variables)})
        logs = {name: float(values[-1]) for name, values in history.history.items()}
        return _Run(logs, self.model.get_weights(), variables)


def _fresh_values(optimizer: Any) -> list[np.ndarray]:
    """The values that the optimizer's variables have before the first update."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(generation.optimizer_variables_of(optimizer))
    return [v.numpy() for v in fresh.variables]


def _renewed(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Compile's arguments with optimizers and metrics made anew from their configs."""

    def one(value: Any) -> Any:
        if generation.is_optimizer(value) or isinstance(value, keras.metrics.Metric):
            return type(value).from_config(value.get_config())
        return value

    return keras.tree.map_structure(one, arguments)


def _batches(x: Any, y: Any, sample_weight: Any, batch_size: int, steps: int) -> list[Any]:
    given = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size, "shuffle": False}
    adapter = generation.data_adapter(**{name: value for name, value in given.items() if value is not None})
    dataset = adapter.get_tf_dataset()
    found = [data.without_optionals(batch) for batch in dataset.repeat().take(steps)]
    if not found:
        raise ValueError("verify: the data holds no batch, expected at least one.")
    return found


def _dataset(batches: list[Any]) -> tf.data.Dataset:
    """The batches as a dataset of known length whose batch dimension is open."""
    parts = [tf.data.Dataset.from_tensors(batch) for batch in batches]
    dataset = parts[0]
    for part in parts[1:]:
        dataset = dataset.concatenate(part)
    return dataset


def _reversed_rows(batch: Any) -> Any:
    def one(value: Any) -> Any:
        if value is None or value.shape.rank == 0 or isinstance(value, tf.SparseTensor):
            return value
        if isinstance(value, tf.RaggedTensor):
            return tf.gather(value, tf.range(value.nrows() - 1, -1, -1))
        return tf.reverse(value, [0])

    if any(isinstance(v, tf.SparseTensor) for v in keras.tree.flatten(batch)):
        return batch
    return keras.tree.map_structure(one, batch)


def _compare(a: _Run, b: _Run) -> tuple[list[Comparison], list[Comparison]]:
    names = sorted(a.logs, key=lambda name: name != "loss")
    logs = [Comparison(n, _difference(np.asarray(a.logs[n]), np.asarray(b.logs[n])), a.logs[n], b.logs[n]) for n in names]
    variables = [
        Comparison(name.rsplit(":", 1)[1], _difference(value, other))
        for (name, value), other in zip(a.variables.items(), b.variables.values(), strict=True)
        if np.issubdtype(value.dtype, np.floating)
    ]
    return logs, variables


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.size == 0:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(a)))))


def _switch_off_draws(model: keras.Model, notes: list[str]) -> None:
    """Turns off dropout and noise in a copy; names the layers that draw and can't be turned off."""
    off, drawing = [], []
    for layer in generation.sublayers(model):
        if not generation.draws_at_random(layer):
            continue
        for name in ("rate", "stddev"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
                off.append(layer.name)
                break
        else:
            drawing.append(layer.name)
    if off:
        notes.append(f"random draws switched off in the copies: {', '.join(off)}")
    if drawing:
        notes.append(
            f"these layers draw at random, each replica its own numbers, so a difference is to be expected: {', '.join(drawing)}"
        )


def _synchronise(model: keras.Model, notes: list[str]) -> None:
    """Synchronises BatchNormalization in a copy; without that its statistics are a share's, not the batch's."""
    changed = []
    for layer in generation.sublayers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
            layer.synchronized = True
            changed.append(layer.name)
    if changed:
        notes.append(
            f"BatchNormalization synchronised in the copies: {', '.join(changed)}; your model normalises by each replica's"
            " share (pass synchronized=True to the layer for the batch's statistics)"
        )
