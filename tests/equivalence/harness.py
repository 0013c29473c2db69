"""Runs one case with plain Keras on one device and with MirroredFitter on N replicas, and compares everything that is left."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import stack
import tensorflow as tf
from stack import keras

from keras_mirror import MirroredFitter
from keras_mirror.seams import generation
from keras_mirror.seams import tensorflow as tf_seams

# One epoch's global batches: even, uneven, fewer examples than 2, 3 or 4 replicas, and one example.
SIZES = (8, 7, 5, 3, 2, 1, 8, 1, 4, 6)
SEED = 7
# Relative to max(1, |value|). In float64 nothing but the order of additions may differ over 20 steps.
TOLERANCE = {"float64": 1e-10, "float32": 5e-5}
# Replica count -> steps per execution; 10 batches in executions of 4 leave a last part.
# On Keras 2, which CI has less time for, the longer ones are traced at one count alone.
STEPS_PER_EXECUTION = {2: 4 if stack.GENERATION == 3 else 1, 3: 5, 4: 1}


def train(case: "Case", model: Any) -> dict[str, Any]:
    """The usual way to drive a case: `fit`, then `evaluate` and `predict` where the case asks for them."""
    logs: dict[str, Any] = {}
    history = model.fit(case.dataset(), epochs=case.epochs, verbose=0, **case.fit)
    logs.update({f"fit {name}": values for name, values in history.history.items()})
    if case.evaluate:
        result = model.evaluate(case.dataset(), verbose=0, return_dict=True)
        logs.update({f"evaluate {name}": value for name, value in result.items()})
    if case.predict:
        outputs = model.predict(case.inputs(), verbose=0)
        logs.update({f"predict {i}": value for i, value in enumerate(keras.tree.flatten(outputs))})
    return logs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One row of the table.

    Attributes:
        name: what the row is about; the test's id.
        model: builds the model. Called once for each run.
        data: (rng, rows) -> (x, y) or (x, y, sample_weight) or (x,), each a nest of arrays or tensors with that many rows.
        compile: the arguments of compile, as fresh objects for each run, made outside the strategy's scope.
        sizes: the global batches of one epoch.
        epochs: how often they are gone through.
        fit: further arguments of fit.
        fitter: further arguments of MirroredFitter.
        drive: what is done with the compiled model; returns what is logged.
        evaluate: whether `train` goes on with evaluate.
        predict: whether it goes on with predict.
        replicas: the replica counts to compare with one device; empty for one of 2, 3 and 4, in turn.
        dtype: the floating-point type of everything.
        policy: the dtype policy of layers, where it isn't that type's.
        steps_per_execution: instead of `STEPS_PER_EXECUTION`.
        tolerance: instead of `TOLERANCE`.
        needs: whether the installed Keras has what the row is about.
        large_batches: why no batch is so small that a replica goes without an example; in all other rows one has to be.
    """

    name: str
    model: Callable[[], keras.Model]
    data: Callable[[np.random.Generator, int], tuple[Any, ...]]
    compile: Callable[[], dict[str, Any]]
    sizes: tuple[int, ...] = SIZES
    epochs: int = 2
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    fitter: dict[str, Any] = dataclasses.field(default_factory=dict)
    drive: Callable[["Case", Any], dict[str, Any]] = train
    evaluate: bool = False
    predict: bool = False
    replicas: tuple[int, ...] = ()
    dtype: str = "float64"
    policy: str | None = None
    steps_per_execution: int | None = None
    tolerance: float | None = None
    needs: Callable[[], bool] = lambda: True
    large_batches: str = ""

    def arrays(self) -> tuple[Any, ...]:
        """All rows of an epoch."""
        return self.data(np.random.default_rng(SEED), sum(self.sizes))

    def batches(self) -> list[tuple[Any, ...]]:
        """The epoch's batches as nests of arrays (or tensors)."""
        arrays, ends = self.arrays(), np.cumsum(self.sizes)
        return [keras.tree.map_structure(lambda v, a=e - n, b=e: v[a:b], arrays) for n, e in zip(self.sizes, ends, strict=True)]

    def dataset(self) -> tf.data.Dataset:
        """The epoch's batches: length known, batch dimension dynamic."""
        tensors = keras.tree.map_structure(_tensor, self.arrays())
        ends = np.cumsum(self.sizes)
        rows = tf.data.Dataset.from_tensor_slices((ends - np.array(self.sizes), ends))
        return rows.map(lambda first, last: keras.tree.map_structure(lambda v: _rows(v, first, last), tensors))

    def inputs(self) -> tf.data.Dataset:
        """The dataset without targets."""
        return self.dataset().map(lambda x, *_: (x,))


@dataclasses.dataclass
class Outcome:
    """What a run leaves: weights, optimizer variables and logs, each as named arrays."""

    weights: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    logs: dict[str, np.ndarray]


def run(case: Case, replicas: int | None) -> Outcome:
    """One run from the same initial weights: `replicas` None is plain Keras, which knows nothing of keras_mirror."""
    with dtype(case.dtype, case.policy):
        keras.utils.set_random_seed(SEED)
        steps = 1
        if replicas is None:
            model = case.model()
        else:
            model = MirroredFitter(case.model, devices=f"cpu:{replicas}", **case.fitter)
            steps = case.steps_per_execution or STEPS_PER_EXECUTION[replicas]
        # XLA would only compile the reference anew for each batch size; the engine doesn't use it.
        model.compile(**{"jit_compile": False, "steps_per_execution": steps, **case.compile()})
        logs = case.drive(case, model)
        own = model if replicas is None else model.model
        if replicas is not None:
            check_replicas_identical(own, replicas)
        return Outcome(
            {f"{i} {path(v)}": v.numpy() for i, v in enumerate(_weights(own))},
            {f"{i} {path(v)}": v.numpy() for i, v in enumerate(_optimizer_variables(own))},
            {name: np.asarray(value) for name, value in logs.items()},
        )


@functools.cache
def reference(case: Case) -> Outcome:
    """The one-device run, once for each case and process."""
    return run(case, None)


def check(case: Case, replicas: int) -> None:
    """Fails unless N replicas leave what one device leaves, and the same on every replica."""
    lacking = stack.lacking(case.name)
    if lacking:
        pytest.skip(lacking)
    if not case.needs():
        pytest.skip(f"Keras {keras.__version__} hasn't what this row is about")
    assert case.large_batches or min(case.sizes) < replicas, "the case has no replica without an example"
    largest = compare(reference(case), run(case, replicas), case.tolerance or TOLERANCE[case.dtype])
    figures = os.environ.get("KERAS_MIRROR_FIGURES")
    if figures:
        with pathlib.Path(figures).open("a") as file:
            file.write(json.dumps({"row": case.name, "replicas": replicas, **largest}) + "\n")


def compare(expected: Outcome, found: Outcome, tolerance: float) -> dict[str, float]:
    """Raises AssertionError that names every value which differs by more than `tolerance` times max(1, |value|).

    Returns the largest difference of weights, optimizer state and logs.
    """
    wrong, largest = [], {"weights": 0.0, "state": 0.0, "logs": 0.0}
    for part in ("weights", "state", "logs"):
        left, right = getattr(expected, part), getattr(found, part)
        if part == "logs":
            assert sorted(left) == sorted(right), f"logs: expected {sorted(left)}, found {sorted(right)}"
            pairs = [(name, left[name], right[name]) for name in left]
        else:  # names count up from run to run, the order doesn't change
            assert len(left) == len(right), f"{part}: expected {list(left)}, found {list(right)}"
            pairs = [(name, a, b) for (name, a), b in zip(left.items(), right.values(), strict=True)]
        for name, a, b in pairs:
            assert a.shape == b.shape, f"{part} {name}: expected shape {a.shape}, found {b.shape}"
            error = difference(a, b)
            largest[part] = max(largest[part], error)
            if not error <= tolerance:
                wrong.append(f"{part} {name}: off by {error:.1e} of {_short(a)}, found {_short(b)}")
    assert not wrong, "not as on one device:\n  " + "\n  ".join(wrong)
    assert all(np.all(np.isfinite(v)) for v in expected.weights.values()), "the reference itself isn't finite"
    return largest


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest |a - b| / max(1, |a|); anything not a number is infinite."""
    if a.size == 0:
        return 0.0
    if a.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(a, b) else np.inf
    a, b = a.astype("float64"), b.astype("float64")
    error = np.max(np.abs(a - b) / np.maximum(1.0, np.abs(a)))
    return float(error) if np.isfinite(error) else np.inf


def check_replicas_identical(model: keras.Model, replicas: int) -> None:
    """Fails unless each weight and optimizer variable is a mirrored one with `replicas` bit-identical components.

    Between updates a gradient accumulator may be the exception: then what was accumulated is the sum over the replicas, and
    all of it has to be where it is read (and saved) from.
    """
    accumulators = {id(a) for optimizer in _with_inner(optimizers(model)) for a in generation.accumulators(optimizer)}
    for variable in [*_weights(model), *_optimizer_variables(model)]:
        components = tf_seams.components(generation.raw_variable(variable))
        assert len(components) == replicas, f"{path(variable)} has {len(components)} components, expected {replicas}"
        first = components[0].numpy()
        total = np.sum([c.numpy() for c in components], axis=0)
        if id(variable) in accumulators and np.any(total != replicas * first):
            np.testing.assert_array_equal(total, variable.numpy(), f"{path(variable)}: not all of it is read")
            continue
        for i, other in enumerate(components[1:], start=1):
            np.testing.assert_array_equal(other.numpy(), first, f"{path(variable)}: replica {i} left the others")


@contextlib.contextmanager
def dtype(name: str, policy: str | None = None) -> Iterator[None]:
    """Everything in floating-point type `name`: Keras's default, and the policy that layers take unless `policy` is given."""
    floatx, before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(policy or name)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(before)


def parametrised(cases: list[Case]) -> Any:
    """`pytest.mark.parametrize` over case x replicas.

    A row that names no replica counts runs at one of 2, 3 and 4, in turn. With KERAS_MIRROR_REPLICAS=2,3,4 in the environment
    every row runs at each of these.
    """
    asked = os.environ.get("KERAS_MIRROR_REPLICAS")

    def counts(index: int, case: Case) -> tuple[int, ...]:
        if asked:
            return tuple(int(n) for n in asked.split(","))
        return case.replicas or (2 + index % 3,)

    names = [case.name for case in cases]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"two rows have the same name: {twice}"

    def marks(case: Case) -> list[Any]:
        return [pytest.mark.table, *([pytest.mark.keras2] if stack.in_ci(case.name) else [])]

    rows = [
        pytest.param(case, n, id=f"{case.name}-{n}", marks=marks(case)) for i, case in enumerate(cases) for n in counts(i, case)
    ]
    return pytest.mark.parametrize(("case", "replicas"), rows)


def path(variable: Any) -> str:
    """What a variable is called in messages."""
    return str(generation.variable_path(variable))


def optimizers(model: keras.Model) -> list[Any]:
    """Every optimizer that the model holds, in order."""
    return [value for value in vars(model).values() if generation.is_optimizer(value)]


def _with_inner(found: list[Any]) -> list[Any]:
    return found + [o for outer in found for o in _with_inner(generation.held_optimizers(outer))]


def _optimizer_variables(model: keras.Model) -> list[Any]:
    return [v for optimizer in optimizers(model) for v in generation.optimizer_variables(optimizer)]


def _weights(model: keras.Model) -> list[Any]:
    """The model's weights; Keras 2 counts the state of metrics that the model holds among them, a sum over the replicas."""
    state = {id(v) for v in generation.metric_variables(model)}
    return [v for v in model.weights if id(v) not in state]


def _tensor(value: Any) -> Any:
    return value if tf.is_tensor(value) else tf.constant(value)


def _rows(value: Any, first: Any, last: Any) -> Any:
    if not isinstance(value, tf.SparseTensor):
        return value[first:last]
    width = value.dense_shape[1]
    cut = tf.sparse.slice(value, tf.stack([tf.cast(first, tf.int64), 0]), tf.stack([tf.cast(last - first, tf.int64), width]))
    return tf.SparseTensor(cut.indices, cut.values, tf.stack([tf.cast(last - first, tf.int64), width]))


def _short(value: np.ndarray) -> str:
    return np.array2string(value.reshape(-1)[:4], precision=6)
