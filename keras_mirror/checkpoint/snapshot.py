"""The state of a model in training: taken into host memory while training waits, put back into a live model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mirror.checkpoint import formats
from keras_mirror.checkpoint.formats import ModelRecord
from keras_mirror.checkpoint.workers import Workers, components
from keras_mirror.engine.core import Engine
from keras_mirror.seams import checkpoint3, keras3

Arrays = dict[str, Any]


class ModelState:
    """Takes and restores what one model's training depends on.

    Args:
        model: the model; built.
        engine: its engine, None in plain Keras.
        workers: all of them take the state together.
        config: whether the model file holds the configuration (`.keras`) or weights alone.
    """

    def __init__(self, model: Any, engine: Engine | None, workers: Workers, config: bool) -> None:
        self._model = model
        self._engine = engine
        self._workers = workers
        self._config = config

    def metrics(self) -> list[np.ndarray]:
        """The metrics' state: for each variable its value on every replica."""
        if self._engine is None:
            return []
        return self._workers.gather([keras3.raw_variable(each) for each in self._engine.metric_variables()])

    def take(self, metrics: list[np.ndarray]) -> tuple[ModelRecord, Arrays]:
        """The state now: what Keras saves, and the arrays that it doesn't. Nothing in the model changes.

        On a CPU values are shared until training writes a variable anew; on other devices they are copied to the host.

        Args:
            metrics: the metrics' state that belongs to the position.
        """
        engine = self._engine
        arrays: Arrays = {f"metrics/{i}": value for i, value in enumerate(metrics)}
        summed = {}
        for i, (variable, parts) in enumerate(self._accumulators()):
            # Each replica's own goes beside; the model file has what one device would have, their sum.
            arrays[f"accumulators/{i}"] = parts
            summed[id(variable)] = parts.sum(axis=0, dtype=parts.dtype)
        recorded: set[int] = set()

        def value(found: Any) -> Any:
            recorded.add(id(found))
            return summed[id(found)] if id(found) in summed else shared_value(found)

        if engine is not None:
            engine.settles = False
        try:
            record = checkpoint3.record_model(self._model, value, self._config)
        finally:
            if engine is not None:
                engine.settles = True
        for name, variable in self._unsaved(recorded):
            arrays[f"variables/{name}"] = shared_value(variable)
        for name, variable in self._different():
            arrays[f"replicas/{name}"] = np.stack([part.numpy() for part in components(keras3.raw_variable(variable))])
        seeds = self._seeds()
        if seeds is not None:
            arrays["seeds"] = shared_value(seeds)
        return record, arrays

    def restore(self, path: str, arrays: dict[str, np.ndarray]) -> None:
        """Puts a state back into the live model, but for the metrics, which fit resets when an epoch begins.

        Args:
            path: the model file.
            arrays: the state file's.

        Raises:
            ValueError: the model isn't the one that was saved.
        """
        for optimizer in keras3.held_optimizers(self._model):
            # Keras would load the weights, and leave an optimizer that isn't built without its state.
            keras3.build_optimizer(optimizer, self._model.trainable_variables)
        try:
            self._model.load_weights(path)
        except Exception as error:
            raise ValueError(
                f"SingleCopyCheckpoint: {path} doesn't fit this model: {error}\n"
                "Build and compile the model as in the run that wrote it, or pass another directory to begin anew."
            ) from error
        named = dict(self._all_variables())
        for key, found in arrays.items():
            kind, _, name = key.partition("/")
            if kind in ("variables", "replicas"):
                variable = named.get(name)
                if variable is None or tuple(variable.shape) != found.shape[kind == "replicas" :]:
                    mine = "isn't there" if variable is None else f"is {variable.path} of shape {tuple(variable.shape)}"
                    raise ValueError(
                        f"SingleCopyCheckpoint: the checkpoint has shape {found.shape} for the model's variable {name},"
                        f" which {mine}.\nBuild the model as in the run that wrote it."
                    )
                self._assign(variable, found, each=kind == "replicas")
        for i, (variable, _) in enumerate(self._accumulators(values=False)):
            parts = arrays.get(f"accumulators/{i}")
            if parts is not None and len(parts) == self._replicas:
                self._assign(variable, parts, each=True)
        seeds = self._seeds()
        if seeds is not None and "seeds" in arrays:
            self._assign(seeds, arrays["seeds"], each=False)

    def restore_metrics(self, arrays: dict[str, np.ndarray]) -> None:
        """Puts the metrics' state back: each replica's own, or on another number of replicas the sum on the first."""
        if self._engine is None:
            return
        for i, variable in enumerate(self._engine.metric_variables()):
            found = arrays.get(f"metrics/{i}")
            if found is None:
                continue
            if len(found) != self._replicas:
                whole = np.zeros((self._replicas, *found.shape[1:]), found.dtype)
                whole[0] = found.sum(axis=0, dtype=found.dtype)
                found = whole
            self._assign(variable, found, each=True)

    # -- variables

    @property
    def _replicas(self) -> int:
        return 1 if self._engine is None else self._engine.replicas

    def _accumulators(self, values: bool = True) -> list[tuple[Any, np.ndarray]]:
        """The gradient accumulators that differ between replicas, each with its value on every replica."""
        if self._engine is None or not self._engine.accumulates_locally:
            return []
        found = keras3.accumulators(self._model.optimizer)
        gathered = self._workers.gather([keras3.raw_variable(each) for each in found]) if values else [np.zeros(0)] * len(found)
        return list(zip(found, gathered, strict=True))

    def _all_variables(self) -> Iterator[tuple[str, Any]]:
        for i, variable in enumerate(self._model.variables):
            # By position: Keras numbers names anew in every model of a process.
            yield str(i), variable

    def _unsaved(self, recorded: set[int]) -> Iterator[tuple[str, Any]]:
        """The model's variables that Keras doesn't save: the layers' random states."""
        metrics = {id(each) for each in self._model.metrics_variables}
        for optimizer in checkpoint3.all_optimizers(self._model):
            metrics.update(id(each) for each in optimizer.variables)
        return ((name, each) for name, each in self._all_variables() if id(each) not in recorded and id(each) not in metrics)

    def _different(self) -> Iterator[tuple[str, Any]]:
        """The layers' variables whose replicas in this process have come apart, as BatchNormalization's do in plain Keras."""
        trained = {id(each) for each in self._model.trainable_variables}
        for name, variable in self._all_variables():
            parts = components(keras3.raw_variable(variable))
            if id(variable) not in trained and len(parts) > 1:
                first = parts[0].numpy()
                if any(not _equal(first, part.numpy()) for part in parts[1:]):
                    yield name, variable

    def _seeds(self) -> Any:
        """What unseeded `keras.random` calls draw from."""
        return checkpoint3.global_seed_state() if self._engine is None else self._engine.global_seeds().state

    def _assign(self, variable: Any, value: np.ndarray, *, each: bool) -> None:
        """Writes every component in this process: the same value, or with `each` its own of all replicas' values."""
        parts = components(keras3.raw_variable(variable))
        first = 0
        if each and len(value) > len(parts) and self._engine is not None:
            first = first_replica(self._engine.strategy)
        elif each and len(value) != len(parts):
            return
        for i, part in enumerate(parts):
            found = value[first + i] if each else value
            part.assign(tf.constant(formats.as_dtype(np.asarray(found), part.dtype.as_numpy_dtype)))


def first_replica(strategy: tf.distribute.Strategy) -> int:
    """The number of this process's first replica among those of all workers."""
    resolver = strategy.cluster_resolver
    index = resolver.task_id if resolver is not None and resolver.cluster_spec().as_dict() else 0
    return int(index or 0) * len(strategy.extended.worker_devices)


def shared_value(found: Any) -> Any:
    """A value as it is now, whatever training does next: of the first replica, where there are several.

    On a CPU the tensor shares the variable's memory until the variable is written, so nothing is copied while training waits.
    """
    raw = keras3.raw_variable(found)
    if not isinstance(raw, (tf.Variable, tf.distribute.DistributedValues)):
        return np.array(raw) if not tf.is_tensor(raw) else tf.identity(raw)
    part = components(raw)[0]
    with tf.device(part.device):
        value = tf.identity(part.read_value())
    return value if "CPU" in part.device.upper() else value.numpy()


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()
