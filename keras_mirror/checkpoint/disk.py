"""The calls to the file system that a checkpoint is made of, one method each, so that a test can fail or crash at any of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

PIECE = 4 * 1024 * 1024


class Disk:
    """The real file system. Paths are those of `os`; errors are OSErrors."""

    def make_directory(self, path: str) -> None:
        """Makes a directory, and those above it."""
        os.makedirs(path, exist_ok=True)

    def names(self, path: str) -> list[str]:
        """What lies in a directory, in order."""
        return sorted(os.listdir(path))

    def create(self, path: str) -> Any:
        """A new file to write, without a buffer of Python's; an old one is emptied."""
        return open(path, "wb", buffering=0)

    def write(self, file: Any, data: Any) -> None:
        """Writes all of the data, however little the system takes at a time."""
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]

    def sync(self, file: Any) -> None:
        """Returns once the file's content would survive a power failure."""
        os.fsync(file.fileno())

    def sync_directory(self, path: str) -> None:
        """Returns once the directory's names would survive a power failure. Windows has no such call, and needs none."""
        if os.name == "nt":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Gives a file another name in one step; what had that name is gone."""
        os.replace(old, new)

    def remove(self, path: str) -> None:
        """Removes a file; one that isn't there is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)

    def read(self, path: str) -> bytes:
        """A small file's content."""
        with open(path, "rb") as file:
            return file.read()

    def digest(self, path: str) -> tuple[int, str]:
        """Size in bytes and SHA-256 of a file, read in pieces."""
        total, digest = 0, hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                total += len(piece)
                digest.update(piece)
        return total, digest.hexdigest()

    def link(self, target: str, path: str) -> bool:
        """Makes `path` a symbolic link to `target`, a name in the same directory, in one step; else a hard link.

        False where the file system has neither.
        """
        temporary = f"{path}.tmp"
        self.remove(temporary)
        try:
            os.symlink(target, temporary)
        except (OSError, NotImplementedError):
            try:
                os.link(_beside(path, target), temporary)
            except (OSError, NotImplementedError):
                return False
        os.replace(temporary, path)
        # A rename of one hard link onto another of the same file leaves both.
        self.remove(temporary)
        return True


def _beside(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(path), name)


class Stream:
    """A file being written: counts and hashes what goes through, in pieces that let other threads run.

    It can't seek, and so what is hashed is what is written.
    """

    def __init__(self, disk: Disk, file: Any) -> None:
        self._disk, self._file = disk, file
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Writes and hashes all of the data; returns its size in bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._disk.write(self._file, piece)
            self._digest.update(piece)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def sha256(self) -> str:
        """The checksum of what was written so far, in hex."""
        return self._digest.hexdigest()
