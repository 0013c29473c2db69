"""Seams of checkpoints and of resuming (Keras 3.10 and 3.15): what Keras's saving visits, and where its fit goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.optimizers import base_optimizer
from keras.src.saving import saving_lib

from keras_mirror.checkpoint.formats import Group, ModelRecord
from keras_mirror.seams import keras3

# -- saving --------------------------------------------------------------------------------------------------------------


class _Recorder(saving_lib.H5IOStore):
    """Stands where Keras's saving has an HDF5 file, and notes what would go into it.

    Keras's saving takes only instances of its own stores. Layout, custom `save_own_variables` and names are Keras's own.
    """

    def __init__(self, take: Callable[[Any], Any]) -> None:
        self.mode = "w"
        self.groups: list[Group] = []
        self._take = take

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: dict[str, Any] | None = None) -> _Recorder:
        self.groups.append(Group(path, metadata, []))
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        self.groups[-1].entries.append((key, self._take(value)))

    def __getitem__(self, key: str) -> Any:
        return dict(self.groups[-1].entries)[key]

    def __contains__(self, key: str) -> bool:
        return key in dict(self.groups[-1].entries)

    def keys(self) -> list[str]:
        return [key for key, _ in self.groups[-1].entries]

    def __len__(self) -> int:
        return len(self.groups[-1].entries)

    def close(self) -> None:
        """There is no file."""


class _Assets(saving_lib.DiskIOStore):
    """Takes the files of layers that have some (vocabularies). Keras's own store makes two folders even where none has."""

    def __init__(self) -> None:
        self.mode = "w"
        self._folder: str | None = None

    def make(self, path: str) -> str:
        if self._folder is None:
            self._folder = tempfile.mkdtemp()
        folder = os.path.join(self._folder, *path.split("/"))
        os.makedirs(folder, exist_ok=True)
        return folder

    def collect(self) -> dict[str, bytes]:
        found = {}
        for root, _, names in os.walk(self._folder) if self._folder else ():
            for name in names:
                path = os.path.join(root, name)
                with open(path, "rb") as file:
                    found[os.path.relpath(path, self._folder).replace(os.sep, "/")] = file.read()
        return found

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def record_model(model: Any, take: Callable[[Any], Any], config: bool = True) -> ModelRecord:
    """What `model.save` would write, noted instead of written.

    Args:
        model: a built model.
        take: what is noted for a value that Keras's saving meets (a keras Variable, an array): a copy or a snapshot.
        config: note the configuration too; without it the record is that of `save_weights`.
    """
    described, metadata = saving_lib._serialize_model_as_json(model) if config else ("", "")
    recorder, assets = _Recorder(take), _Assets()
    try:
        with _variables_as_they_are(model):
            saving_lib._save_state(model, weights_store=recorder, assets_store=assets, inner_path="", visited_saveables=set())
        return ModelRecord(described, metadata, recorder.groups, assets.collect())
    finally:
        assets.close()


@contextlib.contextmanager
def _variables_as_they_are(model: Any) -> Iterator[None]:
    """Has optimizers hand over their variables: Keras's own way copies each to the host first, in the training thread."""
    plain = base_optimizer.BaseOptimizer.save_own_variables
    found = [each for each in all_optimizers(model) if type(each).save_own_variables is plain]

    def hand_over(optimizer: Any, store: Any) -> None:
        for i, variable in enumerate(optimizer.variables):
            store[str(i)] = variable

    for each in found:
        vars(each)["save_own_variables"] = lambda store, optimizer=each: hand_over(optimizer, store)
    try:
        yield
    finally:
        for each in found:
            del vars(each)["save_own_variables"]


def all_optimizers(model: Any) -> list[Any]:
    """The model's optimizers, those inside a wrapper (LossScaleOptimizer) too."""
    found: list[Any] = []
    queue = list(keras3.held_optimizers(model))
    while queue:
        optimizer = queue.pop(0)
        if not any(optimizer is each for each in found):
            found.append(optimizer)
            queue.extend(keras3.held_optimizers(optimizer))
    return found


def check_serializable(model: Any) -> None:
    """Raises what `model.save` would raise for the model's configuration."""
    saving_lib._serialize_model_as_json(model)


def global_seed_state() -> Any:
    """The state from which unseeded `keras.random` calls draw in this thread; None before the first such call."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


# -- where fit goes on ---------------------------------------------------------------------------------------------------


def start_at_epoch(model: Any, epoch: int | None) -> None:
    """Has fit, which reads this after on_train_begin, start at a later epoch. It sticks to the model: set None afterwards."""
    model._initial_epoch = epoch


def use_logs_where_no_step_ran(model: Any, logs: dict[str, Any]) -> None:
    """Gives the epoch `logs` where all its steps were done before the resume, so that none of them returns logs now.

    For one epoch: the function on the instance removes itself.
    """
    original = model._get_metrics_result_or_logs

    def once(found: Any) -> Any:
        vars(model).pop("_get_metrics_result_or_logs", None)
        return original(found or dict(logs))

    vars(model)["_get_metrics_result_or_logs"] = once


def forget_logs(model: Any) -> None:
    """Takes back `use_logs_where_no_step_ran`, where the epoch didn't come to its end."""
    vars(model).pop("_get_metrics_result_or_logs", None)


def strategy_of(model: Any) -> tf.distribute.Strategy | None:
    """The strategy that plain Keras trains the model under; None for one device."""
    found: tf.distribute.Strategy | None = keras3.created_under(model)
    return found if found is not None and found.num_replicas_in_sync > 1 else None


def better(model: Any, monitor: str) -> str:
    """What is better, "min" or "max": Keras's own "auto", which asks the metric of that name.

    Raises:
        ValueError: Keras doesn't know.
    """
    asked = keras.callbacks.EarlyStopping(monitor=monitor)
    asked.set_model(model)
    try:
        asked._set_monitor_op()
    except ValueError:
        raise ValueError(
            f"SingleCopyCheckpoint: whether a greater {monitor!r} is better can't be told from its name.\n"
            'Pass mode="min" or mode="max".'
        ) from None
    return "min" if asked.monitor_op is keras.ops.less else "max"


def build_for_fit(model: Any, epoch_iterator: Any) -> None:
    """Builds model and optimizer from the data that fit was given, before the first step, where Keras would build in it."""
    if not keras3.is_built(model):
        try:
            spec = keras3.keras_tensors(keras3.epoch_dataset(epoch_iterator).element_spec)
        except keras3.UnknownRank:
            spec = keras3.keras_tensors(keras3.example_batch(epoch_iterator))
        keras3.symbolic_build(model, spec)
