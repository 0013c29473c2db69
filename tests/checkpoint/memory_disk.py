"""A file system in memory that crashes at a chosen call, of the process or of the power, or fails with an error."""

import errno
import hashlib
import os

from keras_mirror.checkpoint.disk import Disk


class Crash(BaseException):
    """The process is gone: no handler of its own runs."""


class _File:
    def __init__(self):
        self.content, self.durable = bytearray(), b""

    def close(self):
        """There is no buffer."""


class MemoryDisk(Disk):
    """One directory. A name or a content survives a power failure only once it has been synced.

    Attributes:
        countdown: at which call, counted from now, it crashes; None: never.
        error: raised at that call instead, an errno.
        calls: how many calls there were.
    """

    def __init__(self):
        self.entries, self.durable = {}, {}
        self.countdown, self.error, self.calls = None, None, 0

    def _call(self):
        self.calls += 1
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.countdown = None
                if self.error:
                    raise OSError(self.error, os.strerror(self.error))
                raise Crash

    def make_directory(self, path):
        self._call()

    def names(self, path):
        self._call()
        return sorted(self.entries)

    def create(self, path):
        self._call()
        file = self.entries[os.path.basename(path)] = _File()
        return file

    def write(self, file, data):
        half = len(data) // 2
        file.content += bytes(data[:half])
        self._call()
        file.content += bytes(data[half:])

    def sync(self, file):
        self._call()
        file.durable = bytes(file.content)

    def sync_directory(self, path):
        self._call()
        self.durable = dict(self.entries)

    def rename(self, old, new):
        self._call()
        self.entries[os.path.basename(new)] = self.entries.pop(os.path.basename(old))

    def remove(self, path):
        self._call()
        self.entries.pop(os.path.basename(path), None)

    def _find(self, path):
        try:
            found = self.entries[os.path.basename(path)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "gone", path) from None
        return self._find(found) if isinstance(found, str) else found

    def read(self, path):
        self._call()
        return bytes(self._find(path).content)

    def digest(self, path):
        content = self.read(path)
        return len(content), hashlib.sha256(content).hexdigest()

    def link(self, target, path):
        self._call()
        self.entries[os.path.basename(path)] = target
        return True

    def lose_power(self, survives):
        """What isn't synced is lost, or not, as `survives` says for each name: (its entry, its content)."""
        entries = {}
        for name in {*self.entries, *self.durable}:
            entry, content = survives(name)
            file = (self.entries if entry else self.durable).get(name)
            if file is None:
                continue
            if not isinstance(file, str):
                kept = _File()
                kept.content = bytearray(file.content if content else file.durable)
                kept.durable = bytes(kept.content)
                file = kept
            entries[name] = file
        self.entries, self.durable = entries, dict(entries)
