"""Batches of rows of NumPy arrays that are too big to be copied: read where they are, into memory that is used again."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mirror.seams import data_seams

# Bytes from which on an array of numbers is read in place. TensorFlow gets a copy of smaller ones, and gathers without Python.
BIG_ARRAY = 2**27
# TensorFlow takes over an array's memory without a copy if it begins at a multiple of this.
_ALIGNMENT = 64


def is_big(value: Any) -> bool:
    """Whether it is an array of numbers of `BIG_ARRAY` bytes or more."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.nbytes >= BIG_ARRAY


class Reader:
    """Takes batches of rows from arrays, in a dataset; cast as Keras would cast the whole.

    Args:
        arrays: NumPy arrays of the same number of rows. They aren't copied: what is written to them is seen by later batches.
    """

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays
        self._dtypes = [data_seams.dtype_when_fed(array) for array in arrays]
        self._memory = _Memory()

    def __call__(self, first: Any, stop: Any = None) -> list[Any]:
        """Tensors of the rows at the indices `first`, or from `first` to `stop`, one for each array."""
        if not self._arrays:
            return []
        chosen = [first] if stop is None else [first, stop]
        values = tf.numpy_function(self._take, chosen, [tf.as_dtype(dtype) for dtype in self._dtypes])
        return [tf.ensure_shape(v, [None, *array.shape[1:]]) for v, array in zip(values, self._arrays, strict=True)]

    def _take(self, first: np.ndarray, stop: Any = None) -> list[np.ndarray]:
        out = []
        for array, dtype in zip(self._arrays, self._dtypes, strict=True):
            if stop is None:
                rows = self._memory.array((len(first), *array.shape[1:]), array.dtype)
                # The indices are in range; without "clip" NumPy would copy once more.
                np.take(array, first, axis=0, out=rows, mode="clip")
            else:
                rows = array[first:stop]
            if stop is not None or dtype != array.dtype:
                rows, given = self._memory.array(rows.shape, dtype), rows
                np.copyto(rows, given, casting="same_kind")
            out.append(rows)
        return out


class _Memory:
    """Memory for batches, given again once nothing refers to it: fresh memory costs more than filling it."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An uninitialised array that begins where TensorFlow wants it to."""
        size = int(np.prod(shape)) * dtype.itemsize
        with self._lock:
            block = next((self._blocks[i] for i in range(len(self._blocks)) if self._is_free(i, size)), None)
            if block is None:
                block = np.empty(size + _ALIGNMENT, np.uint8)
                self._blocks.append(block)
            start = -block.ctypes.data % _ALIGNMENT
            return block[start : start + size].view(dtype).reshape(shape)

    def _is_free(self, index: int, size: int) -> bool:
        # Views refer to their block, and TensorFlow to the view whose memory it has taken over. Two references are left
        # without any: the list's, and that of the call.
        return self._blocks[index].nbytes >= size + _ALIGNMENT and sys.getrefcount(self._blocks[index]) <= 2
