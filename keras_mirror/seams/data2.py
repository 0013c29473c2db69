"""Seams into Keras 2's data handler (2.15, tf-keras 2.21): it delivers whole global batches, which the engine splits."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from keras_mirror.seams import stack
from keras_mirror.seams.stack import keras

_data_adapter = stack.source("engine.data_adapter")
_losses = stack.source("losses")

LISTENER = "_keras_mirror_listener"


def install() -> None:
    """Puts the seams in place; both leave models without an engine alone."""
    _once(_data_adapter.DataHandler, "_configure_dataset_and_inferred_steps", _configured)
    _once(_data_adapter, "single_batch_iterator", _single_batch)


def _once(owner: Any, name: str, make: Any) -> None:
    original = vars(owner).get(name)
    if original is None:
        raise RuntimeError(f"keras_mirror: {owner.__name__}.{name} is gone from the installed Keras.")
    if not hasattr(original, "_keras_mirror_original"):
        seam = functools.wraps(original)(make(original))
        seam._keras_mirror_original = original  # type: ignore[attr-defined]
        setattr(owner, name, seam)


def _configured(original: Any) -> Any:
    def seam(self: Any, strategy: Any, x: Any, steps_per_epoch: Any, class_weight: Any, distribute: Any) -> None:
        model = self._model
        listener = None if model is None else vars(model).get(LISTENER)
        if listener is None or not distribute:
            original(self, strategy, x, steps_per_epoch, class_weight, distribute)
            return
        times = 1 if _holds_arrays(self._adapter) else listener.batches_to_join
        if times > 1:
            _join(self._adapter, times, listener.join)
        original(self, strategy, x, steps_per_epoch, class_weight, False)
        listener.dataset_opened(self._dataset.element_spec)

    return seam


def _holds_arrays(adapter: Any) -> bool:
    arrays = (_data_adapter.TensorLikeDataAdapter, _data_adapter.GenericArrayLikeDataAdapter)
    return isinstance(adapter, (*arrays, _data_adapter.CompositeTensorDataAdapter, _data_adapter.ListsOfScalarsDataAdapter))


def _join(adapter: Any, times: int, join: Any) -> None:
    """Has an adapter for batches of one replica give global ones: `times` of its batches each."""
    dataset, size = adapter.get_dataset, adapter.get_size

    def get_size() -> int | None:
        batches = size()
        return None if batches is None else -(-batches // times)

    adapter.get_dataset, adapter.get_size = lambda: join(dataset(), times), get_size


def _single_batch(original: Any) -> Any:
    def seam(strategy: Any, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None) -> Any:
        listener = _feeding[-1] if _feeding else None
        if listener is None:
            return original(strategy, x, y, sample_weight, class_weight)
        batches = list(original(_Undistributed, x, y, sample_weight, class_weight))
        listener.dataset_opened(tf.nest.map_structure(tf.type_spec_from_value, batches[0]))
        return iter(batches)

    return seam


class _Undistributed:
    """Stands where `single_batch_iterator` wants a strategy, and leaves the dataset whole."""

    @staticmethod
    def experimental_distribute_dataset(dataset: Any) -> Any:
        return dataset


_feeding: list[Any] = []


class feeding:
    """While entered, batches given to train_on_batch and test_on_batch aren't distributed, and the listener hears of them."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        _feeding.append(self._listener)

    def __exit__(self, *_: object) -> None:
        _feeding.pop()


def length_kind(iterator: Any) -> str:
    """As in data3: what `get_next_as_optional` of a distributed iterator takes for granted in tracing."""
    cardinality = getattr(iterator, "_cardinality", None) if isinstance(iterator, tf.distribute.DistributedIterator) else None
    if cardinality is None:
        return ""
    return {0: "empty", int(tf.data.INFINITE_CARDINALITY): "endless"}.get(int(cardinality), "")


def is_distributed(value: Any) -> bool:
    """Whether it is a dataset that a strategy has distributed."""
    return isinstance(value, tf.distribute.DistributedDataset)


def batches_of(given: Any, steps: int) -> list[Any]:
    """The batches of one call of the predict function: Keras 2 hands it the iterator.

    Raises:
        StopIteration: the data has ended.
    """
    batches: list[Any] = []
    for _ in range(steps):
        batch = next(given, None)
        if batch is None:
            break
        batches.append(batch)
    if not batches:
        raise StopIteration
    return batches


def class_labels(loss: Any, outputs: Any) -> tuple[int, int | None] | None:
    """As in data3: (number of classes, ignored label) of a sparse categorical crossentropy of Keras's; else None."""
    if type(loss) not in (keras.losses.SparseCategoricalCrossentropy, _losses.LossFunctionWrapper):
        return None
    if loss.fn is not _losses.sparse_categorical_crossentropy or outputs.shape.rank in (None, 0):
        return None
    options = loss._fn_kwargs
    classes = outputs.shape[options.get("axis", -1)]
    return None if classes is None else (int(classes), options.get("ignore_class"))


def gives_batches(value: Any) -> bool:
    """Whether it is a generator or a Sequence, which makes batches by itself."""
    return isinstance(value, keras.utils.Sequence) or (hasattr(value, "__next__") and not hasattr(value, "shape"))
