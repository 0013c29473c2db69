"""Keras's `.keras` and `.weights.h5`, and our file of arrays, written front to back from arrays that are already in memory.

HDF5 writes back and forth, into memory at that, and holds Python's lock while it copies. So HDF5 only lays the file out here
(space allocated, nothing filled in), and the arrays' bytes go straight from where they are to where they belong. Front to
back, so that the checksum is that of what was written; in pieces, so that training isn't held up.
"""

from __future__ import annotations

import dataclasses
import zipfile
from typing import Any, Protocol

import h5py
import numpy as np

WEIGHTS = "model.weights.h5"
# Where HDF5's own way is as good, and keeps every type that it knows.
_SMALL = 1024


class Output(Protocol):
    """What is written to: a Stream, a zip entry."""

    def write(self, data: Any, /) -> int:
        """Writes all of the data."""


@dataclasses.dataclass
class Group:
    """The variables of one layer or optimizer, as Keras's saving visits them.

    Attributes:
        path: where in the file; "" for the model itself.
        metadata: attributes of the group.
        entries: name and value: an array, or what has `numpy()`.
    """

    path: str
    metadata: dict[str, Any] | None
    entries: list[tuple[str, Any]]


@dataclasses.dataclass
class ModelRecord:
    """All that Keras writes into a `.keras` file.

    Attributes:
        config: the model's configuration, JSON.
        metadata: Keras's version and the date, JSON.
        groups: the variables.
        assets: further files (vocabularies) by their path.
    """

    config: str
    metadata: str
    groups: list[Group]
    assets: dict[str, bytes]


def write_keras(output: Output, record: ModelRecord) -> None:
    """Writes a `.keras` file: what `keras.models.load_model` reads."""
    with zipfile.ZipFile(_Unseekable(output), "w") as archive:  # type: ignore[call-overload]
        archive.writestr("metadata.json", record.metadata)
        archive.writestr("config.json", record.config)
        with archive.open(WEIGHTS, "w", force_zip64=True) as entry:
            write_weights(entry, record)
        for path, content in record.assets.items():
            archive.writestr(f"assets/{path}", content)


def write_weights(output: Output, record: ModelRecord) -> None:
    """Writes a `.weights.h5` file: what `model.load_weights` reads."""
    skeleton = _Sparse()
    placed: list[tuple[int, np.ndarray]] = []
    with h5py.File(skeleton, "w") as file:
        for each in record.groups:
            _lay_out(file, each, placed)
    at = 0
    for offset, array in sorted(placed, key=lambda pair: pair[0]):
        skeleton.copy(output, at, offset)
        _write_array(output, array)
        at = offset + array.nbytes
    skeleton.copy(output, at, max(skeleton.size, at))


def _lay_out(file: Any, group: Group, placed: list[tuple[int, np.ndarray]]) -> None:
    if not group.metadata and not group.entries:
        return
    target = file.create_group("vars") if not group.path else file.create_group(group.path).create_group("vars")
    for name, text in (group.metadata or {}).items():
        target.attrs[name] = text
    for key, value in group.entries:
        array = _array(value)
        if array.nbytes < _SMALL or array.dtype.kind not in "biufc" or "/" in key:
            dataset = target.create_dataset(key, data=array)
            if array.dtype.name == "bfloat16":
                dataset.attrs["dtype"] = "bfloat16"
        else:
            placed.append((_allocate(target, key, array), array))


def _allocate(group: Any, key: str, array: np.ndarray) -> int:
    """Makes a dataset with its space reserved and not filled; returns where in the file it lies."""
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    options.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(array.dtype, logical=True)
    space = h5py.h5s.create_simple(array.shape)
    offset = h5py.h5d.create(group.id, key.encode(), kind, space, options).get_offset()
    if offset is None:
        raise RuntimeError(f"keras_mirror: HDF5 {h5py.version.hdf5_version} reserved no space for {key!r}")
    return int(offset)


def write_arrays(output: Output, arrays: dict[str, Any]) -> None:
    """Writes arrays by name: an uncompressed `.npz`. Types that NumPy has no name for are written as unsigned integers."""
    with zipfile.ZipFile(_Unseekable(output), "w") as archive:  # type: ignore[call-overload]
        for name, value in arrays.items():
            array = _native(_array(value))
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, np.lib.format.header_data_from_array_1_0(array))
                _write_array(entry, array)


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """What `write_arrays` wrote."""
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """An array that was read, in the type that it had: bfloat16 and its like were written as unsigned integers."""
    dtype = np.dtype(dtype)
    return array.view(dtype) if dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize else array


def _native(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _array(value: Any) -> np.ndarray:
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    return array if array.flags.c_contiguous else np.array(array, order="C")


def _write_array(output: Output, array: np.ndarray) -> None:
    # By way of bytes where there is no dimension to view; a view costs no copy.
    flat: Any = array.reshape(-1).view(np.uint8) if array.size else b""
    data = memoryview(flat)
    for start in range(0, len(data), 4 << 20):
        output.write(data[start : start + (4 << 20)])


class _Unseekable:
    """Hides all but writing, so that `zipfile` goes front to back."""

    def __init__(self, output: Output) -> None:
        self.write = output.write

    def flush(self) -> None:
        """Nothing is held back."""


class _Sparse:
    """A file in memory of which only the pages that were written take space."""

    _PAGE = 4096

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._at = 0
        self.size = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def flush(self) -> None:
        """Nothing is held back."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            page, start = divmod(self._at, self._PAGE)
            count = min(self._PAGE - start, len(view) - done)
            self._pages.setdefault(page, bytearray(self._PAGE))[start : start + count] = view[done : done + count]
            done += count
            self._at += count
        self.size = max(self.size, self._at)
        return done

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.size - self._at))
        view[:count] = self._bytes(self._at, self._at + count)
        self._at += count
        return count

    def read(self, count: int = -1) -> bytes:
        end = self.size if count < 0 else min(self.size, self._at + count)
        data = self._bytes(self._at, end)
        self._at += len(data)
        return data

    def _bytes(self, start: int, end: int) -> bytes:
        out = bytearray()
        while start < end:
            page, first = divmod(start, self._PAGE)
            count = min(self._PAGE - first, end - start)
            found = self._pages.get(page)
            out += bytes(count) if found is None else found[first : first + count]
            start += count
        return bytes(out)

    def copy(self, output: Output, start: int, end: int) -> None:
        """Writes the bytes from start to end."""
        for at in range(start, end, 4 << 20):
            output.write(self._bytes(at, min(end, at + (4 << 20))))
