"""A lock on a directory that a dead process doesn't hold, and that a second run is refused by."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

NAME = ".lock"

# One process may hold a lock once only: POSIX locks don't stop a process from locking again what it has locked.
_held: dict[str, Lock] = {}
_guard = threading.Lock()


class Locked(RuntimeError):
    """Another run uses the directory."""


class Lock:
    """Held from `acquire` to `release`, or to the death of the process.

    A POSIX record lock (`fcntl.lockf`): the system drops it with the process, and a forked child (a data worker that outlives
    its parent) doesn't inherit it.

    Args:
        directory: the directory; the lock is the file `.lock` in it.
        in_use: whether whoever acquired the lock in this process still uses it; a fit that failed doesn't.
    """

    def __init__(self, directory: str, in_use: Callable[[], bool] = lambda: True) -> None:
        self._path = os.path.join(directory, NAME)
        self._key = os.path.realpath(directory)
        self._in_use = in_use
        self._file: Any = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            Locked: another process, or another run in this one, holds it.
            OSError: the directory can't be written to.
        """
        with _guard:
            holder = _held.get(self._key)
            if holder is not None and holder is not self:
                if holder._in_use():
                    raise Locked("another fit of this process")
                holder._release()
            if self._file is not None:
                return
            self._file = self._open()
            _held[self._key] = self

    def _open(self) -> Any:
        while True:
            file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115
            try:
                if not _lock(file):
                    file.seek(0)
                    raise Locked(file.read().strip() or "another process")
                # The last holder may have removed the name between our opening it and our locking it.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                        file.truncate(0)
                        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                        file.flush()
                        return file
            except BaseException:
                file.close()
                raise
            file.close()

    def release(self) -> None:
        """Gives the lock back; nothing happens where it isn't held."""
        with _guard:
            self._release()

    def _release(self) -> None:
        if self._file is None:
            return
        # The name goes while the lock is held, so nobody else's lock loses its name.
        with contextlib.suppress(OSError):
            os.remove(self._path)
        self._file.close()
        self._file = None
        if _held.get(self._key) is self:
            del _held[self._key]


def _lock(file: Any) -> bool:
    """Tries to lock an open file; True where the file system knows no locks."""
    try:
        import fcntl
    except ImportError:
        return _lock_on_windows(file)
    import errno

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def _lock_on_windows(file: Any) -> bool:
    import importlib

    msvcrt: Any = importlib.import_module("msvcrt")
    try:
        # A byte far behind the content: on Windows a locked byte can't be read by others.
        file.seek(1 << 20)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    return True
