"""The checkpoints in a directory: names, writing one so that it is whole or not there, which to keep, which are damaged.

Knows neither Keras nor TensorFlow. A checkpoint is three files of one stem: the model, the state, and a JSON that is renamed
into place last: it alone makes the three count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from keras_mirror.checkpoint.disk import Disk, Stream

FORMAT = 1
STATE = "state.npz"
_MODELS = ("keras", "weights.h5")
_NAME = re.compile(r"(?P<stem>(?P<number>\d{6,})-step-\d+)\.(?P<kind>keras|weights\.h5|state\.npz|json)(?P<temporary>\.tmp)?")
_LINK = re.compile(r"(?:latest|best)\.(?:keras|weights\.h5|json)(?P<temporary>\.tmp)?")


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """One committed checkpoint.

    Attributes:
        number: counts the checkpoints of a directory upwards; a later one has a greater number, whatever its step.
        stem: the files' common name.
        content: what the JSON says; empty where it can't be read.
        damage: why the JSON itself can't be used; None where it can.
    """

    number: int
    stem: str
    content: dict[str, Any]
    damage: str | None = None

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Size and checksum of each file beside the JSON, by name."""
        found: dict[str, dict[str, Any]] = self.content.get("files", {})
        return found

    @property
    def model_file(self) -> str:
        """The name of the file that Keras loads."""
        return next(name for name in self.files if name.endswith(_MODELS))

    @property
    def step(self) -> int:
        """How many batches had been trained on."""
        return int(self.content.get("global_step", 0))

    @property
    def ends_an_epoch(self) -> bool:
        """Whether it was taken between two epochs."""
        return self.damage is None and self.content.get("batch") == 0

    @property
    def value(self) -> float | None:
        """The monitored value; None where there is none, or where it is no number: NaN is never the best."""
        value = self.content.get("monitor_value")
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None


class Store:
    """The checkpoints of one directory.

    Args:
        directory: where they lie; made where it isn't there.
        disk: the file system.
    """

    def __init__(self, directory: str, disk: Disk | None = None) -> None:
        self.directory = directory
        self._disk = disk or Disk()
        self.checkpoints: list[Checkpoint] = []
        # Stems whose JSON is gone, and whose other files couldn't be removed yet.
        self._orphans: list[str] = []

    def path(self, name: str) -> str:
        """The path of a file in the directory."""
        return os.path.join(self.directory, name)

    def make_directory(self) -> None:
        """Makes the directory, where it isn't there."""
        self._disk.make_directory(self.directory)

    def read(self) -> None:
        """Finds out which checkpoints there are. Nothing is changed, no lock is needed."""
        found = []
        for name in self._disk.names(self.directory):
            match = _NAME.fullmatch(name)
            if match and match["kind"] == "json" and not match["temporary"]:
                found.append(self._read(int(match["number"]), match["stem"]))
        self.checkpoints = sorted(found, key=lambda each: each.number)

    def _read(self, number: int, stem: str) -> Checkpoint:
        try:
            content = json.loads(self._disk.read(self.path(f"{stem}.json")))
            checksum = content.pop("checksum")
        except (ValueError, KeyError, AttributeError, TypeError):
            return Checkpoint(number, stem, {}, "its JSON can't be read")
        if checksum != _checksum(content):
            return Checkpoint(number, stem, {}, "its JSON doesn't have the checksum that it names")
        if content.get("format", 0) > FORMAT:
            raise ValueError(
                f"SingleCopyCheckpoint: {self.path(stem)}.json has format {content['format']}, expected {FORMAT} at most: it was"
                " written by a later version of keras_mirror.\nInstall that version, or pass another directory."
            )
        return Checkpoint(number, stem, content)

    def clean(self) -> None:
        """Removes what a crash left over: temporary files, and files that no JSON makes count. Needs the lock."""
        committed = {each.stem for each in self.checkpoints}
        for name in self._disk.names(self.directory):
            match, link = _NAME.fullmatch(name), _LINK.fullmatch(name)
            left_over = match and (match["temporary"] or match["stem"] not in committed)
            if left_over or (link and link["temporary"]):
                self._disk.remove(self.path(name))
        # What the crashed run has renamed last counts from here on, whatever fails next.
        self._disk.sync_directory(self.directory)

    def damage(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with a checkpoint, found by size and checksum before anybody opens the files; None: it is whole."""
        if checkpoint.damage is not None:
            return checkpoint.damage
        for name, wanted in checkpoint.files.items():
            try:
                size, digest = self._disk.digest(self.path(name))
            except FileNotFoundError:
                return f"{name} is missing"
            if size != wanted["size"]:
                return f"{name} has {size} bytes, expected {wanted['size']}"
            if digest != wanted["sha256"]:
                return f"{name} doesn't have the checksum that its JSON names"
        return None

    def newest_whole(self, suits: Callable[[Checkpoint], bool]) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that suits and is whole; what was passed over because it is damaged is remembered as such.

        Returns:
            The checkpoint, None where there is none, and a sentence for each damaged one that was met on the way.
        """
        met: list[str] = []
        for each in reversed(list(self.checkpoints)):
            if each.damage is None and not suits(each):
                continue
            damage = self.damage(each)
            if damage is None:
                return each, met
            met.append(f"{self.path(each.stem)}: {damage}")
            self.checkpoints[self.checkpoints.index(each)] = dataclasses.replace(each, damage=damage)
        return None, met

    def write(self, step: int, content: dict[str, Any], parts: dict[str, Callable[[Stream], None]]) -> Checkpoint:
        """Writes a checkpoint: after an error or a crash at any moment it is either there and whole, or not there.

        Args:
            step: the number of batches trained on; it is in the names.
            content: what the JSON says beside format, sizes and checksums; nothing but JSON's types.
            parts: for each file beside the JSON its kind ("keras", "weights.h5", "state.npz") and the function that writes it.

        Returns:
            The new checkpoint. It is not in `checkpoints` before it has been committed.

        Raises:
            Exception: whatever a part or the file system raises; what was written of the new checkpoint is removed.
        """
        number = max((each.number for each in self.checkpoints), default=0) + 1
        stem = f"{number:06d}-step-{step}"
        names = [f"{stem}.{kind}" for kind in parts]
        try:
            files = {}
            for name, part in zip(names, parts.values(), strict=True):
                files[name] = self._write_file(name, part)
            content = {"format": FORMAT, **content, "files": files}
            text = json.dumps({**content, "checksum": _checksum(content)}, indent=1, allow_nan=False)
            self._write_file(f"{stem}.json", lambda stream: _write_text(stream, text))
            for name in names:
                self._disk.rename(self.path(f"{name}.tmp"), self.path(name))
            # The JSON's name must not survive a power failure that the other names don't.
            self._disk.sync_directory(self.directory)
            self._disk.rename(self.path(f"{stem}.json.tmp"), self.path(f"{stem}.json"))
        except Exception:
            self._discard([*names, f"{stem}.json"])
            raise
        checkpoint = Checkpoint(number, stem, content)
        self.checkpoints.append(checkpoint)
        self._disk.sync_directory(self.directory)
        return checkpoint

    def _write_file(self, name: str, part: Callable[[Stream], None]) -> dict[str, Any]:
        file = self._disk.create(self.path(f"{name}.tmp"))
        try:
            stream = Stream(self._disk, file)
            part(stream)
            self._disk.sync(file)
        finally:
            file.close()
        return {"size": stream.size, "sha256": stream.sha256}

    def _discard(self, names: list[str]) -> None:
        for name in names:
            for path in (f"{name}.tmp", name):
                try:
                    self._disk.remove(self.path(path))
                except OSError:
                    # The directory may be gone or read-only, which is what the caller is about to hear.
                    continue

    def keep(self, kept: Iterable[Checkpoint], best: Checkpoint | None) -> None:
        """Points `latest` and `best` at their checkpoints and removes all that isn't kept. Needs the lock.

        Args:
            kept: the checkpoints that stay; at least the latest.
            best: the one that `best` names; None: no such name.
        """
        stay = {each.number for each in kept}
        whole = [each for each in self.checkpoints if each.number in stay and each.damage is None]
        self._point("latest", whole[-1] if whole else None)
        self._point("best", best)
        for each in list(self.checkpoints):
            if each.number not in stay:
                # The JSON goes first: without it the rest is a leftover, which the next save or start removes.
                self._disk.remove(self.path(f"{each.stem}.json"))
                self.checkpoints.remove(each)
                self._orphans.append(each.stem)
        if self._orphans:
            # A power failure must not bring a JSON back whose files are gone.
            self._disk.sync_directory(self.directory)
        while self._orphans:
            for kind in (*_MODELS, STATE):
                self._disk.remove(self.path(f"{self._orphans[0]}.{kind}"))
            del self._orphans[0]

    def _point(self, name: str, checkpoint: Checkpoint | None) -> None:
        there = self._disk.names(self.directory)
        wanted = {} if checkpoint is None else {f"{name}.json": f"{checkpoint.stem}.json"}
        if checkpoint is not None:
            kind = checkpoint.model_file.removeprefix(f"{checkpoint.stem}.")
            wanted[f"{name}.{kind}"] = checkpoint.model_file
        for link, target in list(wanted.items()):
            if not self._disk.link(target, self.path(link)):
                del wanted[link]
        for link in (f"{name}.{kind}" for kind in (*_MODELS, "json")):
            if link not in wanted and link in there:
                self._disk.remove(self.path(link))


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        keep_last: how many of the newest; None: all.
        keep_best: how many of the best, beside those.
        mode: "min" or "max", what is better.
        keep_epoch_end: the newest that ended an epoch stays too (plain fit can go on from no other).
    """

    keep_last: int | None
    keep_best: int
    mode: str = "min"
    keep_epoch_end: bool = False

    def ranked(self, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
        """Those with a monitored value, the best first; of two that are equal the earlier."""
        sign = 1 if self.mode == "min" else -1
        valued = [each for each in checkpoints if each.value is not None]
        return sorted(valued, key=lambda each: (sign * float(each.value or 0.0), each.number))

    def best(self, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
        """The best one; None where none is wanted or none has a value."""
        ranked = self.ranked(checkpoints) if self.keep_best else []
        return ranked[0] if ranked else None

    def would_be_kept(self, value: float | None, checkpoints: Iterable[Checkpoint]) -> bool:
        """Whether a new checkpoint with this value would be among the best."""
        if not self.keep_best or value is None or not math.isfinite(value):
            return False
        ranked = self.ranked(checkpoints)
        if len(ranked) < self.keep_best:
            return True
        worst = float(ranked[self.keep_best - 1].value or 0.0)
        return value < worst if self.mode == "min" else value > worst

    def kept(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Those that stay, in order. A damaged one isn't kept: the last one written is whole."""
        whole = [each for each in checkpoints if each.damage is None]
        stay = set(whole if self.keep_last is None else whole[-self.keep_last :])
        stay.update(self.ranked(whole)[: self.keep_best])
        if self.keep_epoch_end:
            stay.update([each for each in whole if each.ends_an_epoch][-1:])
        return [each for each in whole if each in stay]


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _write_text(stream: Stream, text: str) -> None:
    stream.write(f"{text}\n".encode())
