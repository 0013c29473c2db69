"""Seams into Keras 3's data adapters (tested on 3.10 and 3.15): whatever fit takes becomes a `tf.data.Dataset` through them.

The adapters do the work. The seams stand where an adapter would lose a batch, see one twice, hide the user's exception or copy
a big array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import losses as losses_module
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

# What Keras's loop asks for batches: an object of a subclass is taken by fit as it is.
DataAdapter: type = data_adapters.data_adapter.DataAdapter


def kind_of(adapter: Any) -> str:
    """What the adapter was made for: "arrays", "dataset", "generator", "pydataset", "torch" or "other"."""
    kinds = {
        "arrays": data_adapters.ArrayDataAdapter,
        "dataset": data_adapters.TFDatasetAdapter,
        "generator": data_adapters.GeneratorDataAdapter,
        "pydataset": data_adapters.PyDatasetAdapter,
        "torch": data_adapters.TorchDataLoaderAdapter,
    }
    return next((kind for kind, owner in kinds.items() if isinstance(adapter, owner)), "other")


def is_distributed(value: Any) -> bool:
    """Whether it is a dataset that a strategy has distributed, from a dataset or from a function."""
    return bool(data_adapters.is_tf_dataset(value)) and not isinstance(value, tf.data.Dataset)


def length_kind(iterator: Any) -> str:
    """What `get_next_as_optional` of a distributed iterator takes for granted in tracing: that it is "empty", "endless" or "".

    TensorFlow doesn't tell the traces for these apart: reused, one gives no batch at all, the other an error at the end.
    """
    cardinality = getattr(iterator, "_cardinality", None) if isinstance(iterator, tf.distribute.DistributedIterator) else None
    if cardinality is None:
        return ""
    return {0: "empty", int(tf.data.INFINITE_CARDINALITY): "endless"}.get(int(cardinality), "")


# -- batches that Python makes -----------------------------------------------------------------------------------------


def peeked(adapter: Any) -> list[Any]:
    """The batches that a generator's adapter drew to learn their form. Keras trains on them again in every epoch."""
    return list(adapter._first_batches)


def replace_generator(adapter: Any, generator: Callable[[], Iterable[Any]]) -> None:
    """Makes a generator's adapter call `generator` for the batches of a pass."""
    adapter.generator = generator


def wrap_passes(adapter: Any, wrapper: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
    """Puts `wrapper` around the batches of each pass over a PyDataset or a torch DataLoader."""
    name = "_get_iterator" if kind_of(adapter) == "pydataset" else "get_numpy_iterator"
    original = getattr(adapter, name)
    setattr(adapter, name, lambda: wrapper(original()))


def before_each_pass(adapter: Any, function: Callable[[], None]) -> None:
    """Calls `function` before a pass over a PyDataset begins to ask for batches, also where workers make them ahead."""
    enqueuer = adapter.enqueuer
    owner, name = (adapter, "_get_iterator") if enqueuer is None else (enqueuer, "start")
    original = getattr(owner, name)

    def begin() -> Any:
        # Keras starts workers twice for a pass; the second time does nothing.
        if enqueuer is None or not enqueuer.is_running():
            function()
        return original()

    setattr(owner, name, begin)


def signature(adapter: Any) -> Any:
    """The specs that the batches of a generator, PyDataset or torch DataLoader have to match; None before its dataset is made."""
    return adapter._output_signature


def set_feed(epoch_iterator: Any, feed: Any) -> None:
    """Feeds an epoch iterator that Keras has made from another adapter; nothing may have been drawn from it."""
    epoch_iterator.data_adapter = feed
    epoch_iterator._distributed_dataset = feed.get_tf_dataset()


# -- arrays ------------------------------------------------------------------------------------------------------------


def array_parts(adapter: Any) -> tuple[Any, int, int]:
    """What an array adapter holds: its nest of arrays as the user gave them, number of examples, batch size."""
    return adapter._inputs, adapter._num_samples, adapter._batch_size


def to_gather_from(value: Any) -> Any:
    """An array in the form that batches are gathered from: a tensor, a NumPy array or Keras's wrapper of a sparse tensor.

    Floating-point numbers come out in Keras's floatx. Keras 3.10 loses empty rows at the end of a sparse tensor, so the wrapper
    is made here.
    """
    if data_adapter_utils.is_scipy_sparse(value):
        value = data_adapter_utils.scipy_sparse_to_tf_sparse(value.tocsr())
    if isinstance(value, np.ndarray) and value.dtype.kind in "USO":  # Keras takes strings as objects in one dimension alone.
        return tf.convert_to_tensor(value, tf.string if value.dtype.kind != "O" else None)
    if not isinstance(value, tf.SparseTensor):
        return array_slicing.convert_to_sliceable(value, target_backend="tensorflow")
    if value.dtype.is_floating:
        value = tf.cast(value, keras.config.floatx())
    value = tf.sparse.reorder(value)
    nrows = value.dense_shape[0]
    indices = tf.RaggedTensor.from_value_rowids(value.indices, value.indices[:, 0], nrows)
    values = tf.RaggedTensor.from_value_rowids(value.values, value.indices[:, 0], nrows)
    return array_slicing.TensorflowSparseWrapper(value, indices, values)


def is_sparse_wrapper(value: Any) -> bool:
    """Whether it is what `to_gather_from` makes of a sparse tensor."""
    return isinstance(value, array_slicing.TensorflowSparseWrapper)


def gather_sparse(wrapper: Any, indices: Any) -> Any:
    """The rows `indices` of a wrapped sparse tensor, as a sparse tensor."""
    return array_slicing.slice_tensorflow_sparse_wrapper(wrapper, indices)


def dtype_when_fed(array: np.ndarray) -> np.dtype[Any]:
    """The dtype that Keras gives the batches of an array of numbers: floatx for floating-point numbers, else its own."""
    return np.dtype(keras.config.floatx()) if array.dtype.kind == "f" else array.dtype


def batches_of(given: Any, steps: int) -> list[Any]:
    """The batches of one call of the predict function: Keras 3 hands it a list."""
    return list(given)


# -- labels ------------------------------------------------------------------------------------------------------------


def class_labels(loss: Any, outputs: Any) -> tuple[int, int | None] | None:
    """(number of classes, label that is ignored or None) where a loss of Keras's takes labels as class numbers.

    None for every other loss, a subclass of the user's included, and where the number of classes isn't known in tracing.
    """
    wrapper = losses_module.LossFunctionWrapper
    if type(loss) not in (keras.losses.SparseCategoricalCrossentropy, wrapper):
        return None
    if loss.fn is not losses_module.sparse_categorical_crossentropy or outputs.shape.rank in (None, 0):
        return None
    options = loss._fn_kwargs
    classes = outputs.shape[options.get("axis", -1)]
    return None if classes is None else (int(classes), options.get("ignore_class"))
