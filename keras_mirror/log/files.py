"""The files of a log: JSON lines and CSV. Appended to by the run that wrote them, flushed line by line, never mixed."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

WHO = "RankZeroLogger"
_MARK = "# keras_mirror log"
# The columns of every CSV; the metrics come between the first and the second part.
_FIRST = ("event", "step", "epoch", "batch", "time", "elapsed")
_SECOND = (
    "learning_rate",
    "loss_scale",
    "skipped_steps",
    "examples_per_second",
    "examples_per_second_per_replica",
    "step_ms",
    "step_ms_p95",
    "waiting_share",
    "seconds",
    "first_step_seconds",
)
_OWN = frozenset({*_FIRST, *_SECOND})
_OTHERS = ("memory_mb", "device_ms")
_EVENTS = ("step", "epoch")


class LogFile:
    """A file that belongs to one run.

    Args:
        path: where it lies; the directory is made where it isn't there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file: Any = None

    def check(self) -> None:
        """To be called before training begins.

        Raises:
            OSError: it can't be written to.
            ValueError: it is there, and no log of ours.
        """
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with open(self.path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise OSError(
                error.errno,
                f"{WHO}: the file {self.path} can't be written to: {error.strerror}.\nMake it writable, or pass another.",
            ) from error
        with open(self.path, encoding="utf-8", errors="replace") as file:
            beginning = file.read(4096)
        if beginning and not self._is_ours(beginning):
            raise ValueError(
                f"{WHO}: {self.path} is there already and isn't a log of this kind; it begins {beginning[:40]!r}.\n"
                "Pass another file name, or move it away."
            )

    def open(self, run: str, step: int | None) -> str | None:
        """Opens it for a run.

        Args:
            run: the run's name.
            step: the run goes on after this step: what the file has of later ones was trained again. None: nothing is
                dropped.

        Returns:
            Where a log of another run was moved to, that was in the way; None where there was none.
        """
        moved = None
        if os.path.exists(self.path) and os.path.getsize(self.path):
            if self._run_of() != run:
                moved = _free_name(self.path)
                os.replace(self.path, moved)
            else:
                self._rewrite(lambda lines: self._kept(lines, step))
        self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        return moved

    def close(self) -> None:
        """Gives the file back."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
            self._file.flush()

    def _rewrite(self, change: Callable[[Any], Iterator[str]]) -> None:
        """Writes the file anew, whole or not at all."""
        temporary = f"{self.path}.tmp"
        with (
            open(self.path, encoding="utf-8", errors="replace", newline="") as source,
            open(temporary, "w", encoding="utf-8", newline="") as target,
        ):
            target.writelines(change(source))
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, self.path)

    def _is_ours(self, beginning: str) -> bool:
        raise NotImplementedError

    def _run_of(self) -> str | None:
        raise NotImplementedError

    def _kept(self, source: Any, step: int | None) -> Iterator[str]:
        raise NotImplementedError


class JsonLines(LogFile):
    """A line of JSON for each record; `{"event": "start", ...}` with the run's facts comes first."""

    def begin(self, run: str, facts: dict[str, Any], when: float) -> None:
        """Writes the run's facts."""
        self.write({"event": "start", "log": "keras_mirror", "run": run, "time": when, **facts})

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record. NaN and infinities are the strings "nan", "inf" and "-inf": JSON has no such numbers."""
        self._write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def _is_ours(self, beginning: str) -> bool:
        line = beginning.split("\n")[0]
        return line.startswith('{"event"') and '"keras_mirror"' in line

    def _run_of(self) -> str | None:
        with open(self.path, encoding="utf-8", errors="replace") as file:
            try:
                run: str | None = json.loads(file.readline()).get("run")
            except ValueError:
                return None
            return run

    def _kept(self, source: Any, step: int | None) -> Iterator[str]:
        for line in source:
            try:
                record = json.loads(line)
            except ValueError:  # A crash has torn it.
                continue
            if step is None or record["event"] not in _EVENTS or record["step"] <= step:
                yield line


class Csv(LogFile):
    """A row for each record, under the run's facts as comments (`pandas.read_csv(path, comment="#")`)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._columns: list[str] = []
        self._known: frozenset[str] = frozenset()

    def begin(self, run: str, facts: dict[str, Any], when: float) -> None:
        """Writes the run's facts, where the file is new."""
        self._columns = self._columns_there()
        self._known = frozenset(self._columns)
        if self._columns:
            return
        lines = [f"{_MARK}, run {run}"]
        for name, value in facts.items():
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            shown = ", ".join(map(str, value)) if isinstance(value, list) else shown
            lines.append(f"# {name}: {shown}".replace("\n", " ").replace("\r", " "))
        self._write("\n".join(lines) + "\n")

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record; where it has a value that there is no column for, the file gets one."""
        row = flat(record)
        new = [name for name in row if name not in self._known]
        if new:
            first = not self._columns
            self._columns = _ordered([*self._columns, *new]) if first else [*self._columns, *new]
            if first:
                self._write(_row(self._columns))
            else:
                self._file.close()
                self._rewrite(self._widened)
                self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115
            self._known = frozenset(self._columns)
        self._write(_row([_text(row.get(name)) for name in self._columns]))

    def _is_ours(self, beginning: str) -> bool:
        return beginning.startswith(_MARK)

    def _run_of(self) -> str | None:
        with open(self.path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip().rpartition(" run ")[2]

    def _columns_there(self) -> list[str]:
        with open(self.path, encoding="utf-8", errors="replace", newline="") as file:
            return next(csv.reader(_without_comments(file)), [])

    def _widened(self, source: Any) -> Iterator[str]:
        comments = _Comments(source)
        rows = csv.reader(comments)
        for number, row in enumerate(rows):
            if not number:
                yield from comments.seen
            yield _row(self._columns if not number else row + [""] * (len(self._columns) - len(row)))

    def _kept(self, source: Any, step: int | None) -> Iterator[str]:
        comments = _Comments(source)
        columns: list[str] | None = None
        for row in csv.reader(comments):
            if columns is None:
                columns = row
                yield from comments.seen
                yield _row(row)
                continue
            if len(row) != len(columns) or "step" not in columns:  # A crash has torn it.
                continue
            number = row[columns.index("step")]
            if number.isdigit() and (step is None or int(number) <= step):
                yield _row(row)
        if columns is None:
            yield from comments.seen


class _Comments:
    """The lines of a file that are no comments; those before the first are kept."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.seen: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for line in self._source:
            if line.startswith("#"):
                self.seen.append(line)
            else:
                yield line


def _without_comments(source: Any) -> Iterator[str]:
    return iter(_Comments(source))


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """A record as a row: metrics and memory under names of their own."""
    out = {key: value for key, value in record.items() if not isinstance(value, dict)}
    for name, value in record.get("logs", {}).items():
        # A metric may be called as a column of ours.
        out[f"metric_{name}" if name in _OWN else name] = value
    for kind in _OTHERS:
        for name, value in record.get(kind, {}).items():
            out[f"{kind}_{name}"] = value
    return out


def _ordered(names: list[str]) -> list[str]:
    own = [name for name in names if name not in _OWN and not name.startswith(_OTHERS)]
    memory = [name for name in names if name.startswith(_OTHERS)]
    return [*_FIRST, *own, *_SECOND, *memory]


def _row(values: list[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(values)
    return out.getvalue()


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return json.dumps(value)
    return repr(value) if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value


def _free_name(path: str) -> str:
    stem, end = os.path.splitext(path)
    number = 1
    while os.path.exists(f"{stem}.{number}{end}"):
        number += 1
    return f"{stem}.{number}{end}"


class TensorBoard:
    """Scalars for TensorBoard: `batch/...` at each line, `epoch/...` at each epoch's end.

    Args:
        directory: where its event files lie, in a folder of their own for each run.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = os.fspath(directory)
        self._writer: Any = None

    def check(self) -> None:
        """To be called before training begins.

        Raises:
            ImportError: tensorboard isn't installed, without which TensorFlow writes no summaries.
            OSError: the directory can't be written to.
        """
        # TensorFlow installed it up to 2.20, and says that it is missing only when the first scalar is written.
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                f'{WHO}: tensorboard="{self.path}" needs the package tensorboard, which isn\'t installed.\n'
                'Install it: pip install tensorboard, or pip install "keras-mirror[log]".'
            )
        try:
            os.makedirs(self.path, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "permission denied")
        except OSError as error:
            raise OSError(
                error.errno,
                f"{WHO}: the directory {self.path} can't be written to: {error.strerror}.\nMake it writable, or pass another.",
            ) from error

    def open(self, run: str, step: int | None) -> None:
        """Opens a new event file."""
        import tensorflow as tf

        self._writer = tf.summary.create_file_writer(os.path.join(self.path, run))

    def begin(self, run: str, facts: dict[str, Any], when: float) -> None:
        """Writes the run's facts as text."""
        import tensorflow as tf

        with self._writer.as_default(step=0):
            tf.summary.text("run", "\n".join(f"    {name}: {value}" for name, value in facts.items()))

    def write(self, record: dict[str, Any]) -> None:
        """Writes the numbers of one record."""
        import tensorflow as tf

        prefix = "epoch" if record["event"] == "epoch" else "batch"
        step = record["epoch"] if record["event"] == "epoch" else record["step"]
        if record["event"] not in _EVENTS:
            return
        with self._writer.as_default(step=step):
            for name, value in flat(record).items():
                if isinstance(value, (int, float)) and name not in _FIRST:
                    tf.summary.scalar(f"{prefix}/{name}", float(value))
        self._writer.flush()

    def close(self) -> None:
        """Gives the file back."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
