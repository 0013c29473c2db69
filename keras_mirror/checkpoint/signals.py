"""SIGTERM and SIGINT while a fit runs: the first is noted, a second does what it would have done without us."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any


class Interrupts:
    """Handlers for the length of a fit.

    Args:
        signals: those to note.
        is_running: whether the fit still runs. Keras tells nobody that fit has raised, so a handler that was left behind by one
            that did asks, puts the old handlers back and passes the signal on.
    """

    def __init__(self, signals: Iterable[signal.Signals], is_running: Callable[[], bool]) -> None:
        self._signals = list(signals)
        self._is_running = is_running
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def install(self) -> None:
        """Puts the handlers in place; only the main thread can, and a signal that is ignored stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for each in self._signals:
            left_behind = getattr(signal.getsignal(each), "__self__", None)
            if isinstance(left_behind, Interrupts) and not left_behind._is_running():
                left_behind.restore()
            before = signal.getsignal(each)
            # None: a handler that isn't Python's, which can't be put back.
            if before not in (signal.SIG_IGN, None):
                self._before[each] = before
                signal.signal(each, self._handle)

    def restore(self) -> None:
        """Puts the old handlers back, where nobody else has put his own in place meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for each, before in self._before.items():
            if signal.getsignal(each) == self._handle:
                signal.signal(each, before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        if self.received is None and self._is_running():
            self.received = which
            # Not print: the signal may have come in the middle of one.
            with contextlib.suppress(OSError):
                os.write(2, f"\nSingleCopyCheckpoint: {which.name}: saving at the end of this step.\n".encode())
            return
        before = self._before.get(which, signal.SIG_DFL)
        self.restore()
        pass_on(which, before, frame)

    def stop(self, which: signal.Signals, message: str) -> None:
        """Ends the process, or the call, as the signal would have done without us. Doesn't return.

        Raises:
            KeyboardInterrupt: for SIGINT.
            SystemExit: for any other signal, with the status that a shell gives it.
        """
        before = self._before.get(which)
        self.restore()
        if which == signal.SIGINT and before in (signal.default_int_handler, None):
            raise KeyboardInterrupt(message)
        if callable(before):
            before(which, None)
        if which == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise SystemExit(128 + which)


def pass_on(which: signal.Signals, handler: Any, frame: FrameType | None) -> None:
    """Does with a signal what a handler would have done."""
    if callable(handler):
        handler(which, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(which, signal.SIG_DFL)
        os.kill(os.getpid(), which)
