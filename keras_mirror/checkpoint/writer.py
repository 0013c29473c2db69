"""Writes behind training, one job at a time; what goes wrong is told to whoever asks next."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable


class Writer:
    """One thread for one job; the next job waits for the last.

    Args:
        background: False: `submit` returns when the job is done.
    """

    def __init__(self, background: bool) -> None:
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Starts a job; to be called after `wait`."""
        if not self._background:
            self._run(job)
            return

        def run() -> None:
            # Training comes first. On Linux the priority is a thread's own.
            with contextlib.suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
            self._run(job)

        # No daemon: the interpreter doesn't end before the file is written.
        self._thread = threading.Thread(target=run, name="keras_mirror-checkpoint", daemon=False)
        self._thread.start()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self._error = error

    def wait(self) -> BaseException | None:
        """Waits for the last job; returns what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error


def system_error(error: BaseException) -> OSError | None:
    """The operating system's error behind an error: HDF5 and zipfile put others around it."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, OSError) and at.errno is not None:
            return at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return None
