"""What is drawn while a fit runs: a bar on a terminal or in a notebook, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from keras_mirror.log import text

# How often a bar is drawn at most: one drawing by rich costs about a millisecond.
_DRAW_S = 0.1
# How often a plain console says within an epoch where training stands.
_PLAIN_S = 10.0


class Progress(Protocol):
    """Where a fit stands: what a console draws from."""

    epoch: int
    epochs: int
    step: int
    steps: int | None
    epoch_left: float | None
    run_left: float | None
    record: dict[str, Any]


class Plain:
    """Lines, for a pipe, a file, CI: one for an epoch, and one each ten seconds within it."""

    every_s = _PLAIN_S

    def begin(self, facts: dict[str, Any]) -> None:
        """Says what runs."""
        self._facts = facts
        for line in text.header(facts):
            self.say(line)

    def say(self, line: str) -> None:
        """A line that stays."""
        print(line, flush=True)

    def draw(self, progress: Progress) -> None:
        """Says where training stands."""
        self.say("  " + "  ".join([_where(progress), *_left(progress), *_pairs(progress.record), *text.speed(progress.record)]))

    def epoch(self, progress: Progress) -> None:
        """The line of an epoch that is over."""
        self.say("  ".join(_epoch_parts(progress)))

    def close(self) -> None:
        """Nothing is drawn any more."""


class Terminal(Plain):
    """A bar, drawn by rich, above which an epoch's line stays."""

    every_s = _DRAW_S

    def __init__(self, redirect: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live: Any = None
        self._make: Callable[[], Any] = lambda: Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=redirect,
            redirect_stderr=redirect,
        )

    def begin(self, facts: dict[str, Any]) -> None:
        first, *others = text.header(facts)
        self._console.print(f"[bold]{_escaped(first)}[/]")
        for line in others:
            self._console.print(f"[dim]{_escaped(line)}[/]")

    def say(self, line: str) -> None:
        self._console.print(_escaped(line))

    def draw(self, progress: Progress) -> None:
        if self._live is None:
            self._live = self._make()
            self._live.start()
            # A fit that fails tells no callback: the cursor would stay hidden.
            self._console.show_cursor(True)
        self._live.update(_bar(progress), refresh=True)

    def epoch(self, progress: Progress) -> None:
        record = progress.record
        head, *_ = _epoch_parts(progress)
        pairs = "  ".join(f"[dim]{_escaped(name)}[/] [bold]{value}[/]" for name, value in text.values(record))
        # The bar below has the rest.
        speed = record.get("examples_per_second")
        rest = [f"{text.count(speed)} examples/s"] if speed else []
        self._console.print(f"[cyan]{head}[/]  {pairs}  [dim]{'  '.join([*rest, text.duration(record['seconds'])])}[/]")

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.update("", refresh=True)
            live.stop()


class Notebook(Plain):
    """One display in a notebook, which is drawn anew: a bar above the lines of the last epochs."""

    every_s = 0.5

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html, self._display = HTML, display
        self._lines: list[str] = []
        self._bar = ""
        self._handle: Any = None

    def begin(self, facts: dict[str, Any]) -> None:
        self._header = "<br>".join(html.escape(line) for line in text.header(facts))
        self._handle = self._display(self._html(self._page()), display_id=True)

    def say(self, line: str) -> None:
        self._lines.append(html.escape(line))
        self._show()

    def draw(self, progress: Progress) -> None:
        share = min(1.0, progress.step / progress.steps) if progress.steps else 0.0
        words = "&ensp;".join(
            html.escape(part)
            for part in [_where(progress), *_pairs(progress.record), *text.speed(progress.record), *_left(progress)]
        )
        self._bar = f'<progress value="{share:.4f}" max="1" style="width:20em"></progress><br>{words}'
        self._show()

    def epoch(self, progress: Progress) -> None:
        self._bar = ""
        self.say("  ".join(_epoch_parts(progress)))

    def close(self) -> None:
        self._bar = ""
        self._show()

    def _page(self) -> str:
        lines = "<br>".join(self._lines[-100:])
        return f'<div style="font-family:monospace;line-height:1.5">{self._header}<br>{lines}<br>{self._bar}</div>'

    def _show(self) -> None:
        if self._handle is not None:
            self._handle.update(self._html(self._page()))


def choose(redirect: bool) -> Plain:
    """The console that suits where the process runs; without rich, plain lines.

    Args:
        redirect: whether what others print may be put above the bar; only where somebody surely ends that.
    """
    if "ipykernel" in sys.modules:
        with contextlib.suppress(ImportError):
            return Notebook()
    if sys.stdout.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(ImportError):
            return Terminal(redirect)
    return Plain()


class Throttle:
    """Lets something be done once in so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.perf_counter() + seconds

    def due(self, now: float) -> bool:
        """Whether it may be done now; then not before so many seconds from now on."""
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


def _where(progress: Progress) -> str:
    width = len(str(progress.epochs))
    done = f"{progress.step}/{progress.steps}" if progress.steps else f"{progress.step} steps"
    return f"epoch {progress.epoch:>{width}}/{progress.epochs}  {done}"


def _pairs(record: dict[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in text.values(record)]


def _left(progress: Progress) -> list[str]:
    found = []
    if progress.epoch_left is not None:
        found.append(f"{text.duration(progress.epoch_left)} left")
    if progress.run_left is not None and progress.epochs > 1:
        found.append(f"{text.duration(progress.run_left)} of the run")
    return found


def _epoch_parts(progress: Progress) -> list[str]:
    width = len(str(progress.epochs))
    left = [] if progress.run_left is None else [f"{text.duration(progress.run_left)} left"]
    took = text.duration(progress.record["seconds"])
    return [
        f"epoch {progress.epoch:>{width}}/{progress.epochs}",
        *_pairs(progress.record),
        *text.speed(progress.record),
        took,
        *left,
    ]


def _escaped(line: str) -> str:
    from rich.markup import escape

    return str(escape(line))


def _bar(progress: Progress) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    top = Table.grid(padding=(0, 2, 0, 0))
    width = len(str(progress.epochs))
    bar = ProgressBar(total=progress.steps, completed=progress.step, width=32, pulse=not progress.steps)
    done = f"{progress.step}/{progress.steps}" if progress.steps else f"{progress.step} steps"
    times = "  ".join(_left(progress))
    top.add_row(
        Text(f"epoch {progress.epoch:>{width}}/{progress.epochs}", "bold cyan"),
        bar,
        Text(done, "bold"),
        Text(times, "green"),
    )
    line = Text()
    for name, value in text.values(progress.record):
        line.append(f"{name} ", "dim").append(f"{value}  ", "bold")
    return Group(top, line, Text("  ".join(text.speed(progress.record)), "dim"))
