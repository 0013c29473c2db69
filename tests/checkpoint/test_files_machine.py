"""Saving, crashing at any call to the file system, resuming and retention, against a model of a few lines."""

import errno
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_disk import Crash, MemoryDisk

from keras_mirror.checkpoint.files import Retention, Store

VALUES = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0]), st.integers(-3, 3).map(float))


class Files(RuleBasedStateMachine):
    """`saved` holds (number, step, value, ends an epoch) of every checkpoint that should be there.

    `unsure`: the numbers of those whose save told of an error, and which a power failure may take.
    """

    @initialize(
        keep_last=st.integers(1, 3),
        keep_best=st.integers(0, 2),
        mode=st.sampled_from(["min", "max"]),
        epoch_end=st.booleans(),
    )
    def begin(self, keep_last, keep_best, mode, epoch_end):
        self.disk = MemoryDisk()
        self.retention = Retention(keep_last, keep_best, mode, epoch_end)
        self.step, self.number = 0, 0
        self.saved, self.unsure, self.ever = [], set(), {}
        self.restart()

    def restart(self):
        self.unsure.clear()
        self.store = Store("run", self.disk)
        self.store.read()
        self.store.clean()

    def save(self, value, ends_epoch):
        self.step += 1
        content = {"global_step": self.step, "batch": 0 if ends_epoch else 1, "monitor_value": value}
        text = str(self.step).encode()
        parts = {"keras": lambda stream: stream.write(text * 9), "state.npz": lambda stream: stream.write(text)}
        found = self.store.write(self.step, content, parts)
        self.unsure.clear()
        self.ever[found.number, self.step] = (found.number, self.step, value, ends_epoch)
        self.store.keep(self.retention.kept(self.store.checkpoints), self.retention.best(self.store.checkpoints))
        return found

    def expected(self, saved):
        """What the policy keeps, written down once more without the store."""
        sign = 1 if self.retention.mode == "min" else -1
        valued = [each for each in saved if each[2] is not None]
        best = sorted(valued, key=lambda each: (sign * each[2], each[0]))[: self.retention.keep_best]
        ends = [each for each in saved if each[3]][-1:] if self.retention.keep_epoch_end else []
        return {each[0] for each in [*saved[-self.retention.keep_last :], *best, *ends]}

    @rule(value=VALUES, ends_epoch=st.booleans())
    def save_and_return(self, value, ends_epoch):
        found = self.save(value, ends_epoch)
        kept = self.expected([*self.saved, (found.number, self.step, value, ends_epoch)])
        self.saved = [*self.saved, (found.number, self.step, value, ends_epoch)]
        assert {each.number for each in self.store.checkpoints} == kept
        self.saved = [each for each in self.saved if each[0] in kept]
        stems = {each.stem for each in self.store.checkpoints}
        names = {f"{stem}.{kind}" for stem in stems for kind in ("keras", "state.npz", "json")}
        links = {"latest.keras", "latest.json"}
        best = self.retention.best(self.store.checkpoints)
        if best is not None:
            links |= {"best.keras", "best.json"}
            assert self.disk.entries["best.keras"] == f"{best.stem}.keras"
        assert set(self.disk.entries) == names | links
        assert self.disk.entries["latest.keras"] == f"{found.stem}.keras"

    @rule(value=VALUES, ends_epoch=st.booleans(), at=st.integers(0, 40), power=st.booleans(), data=st.data())
    def save_and_crash(self, value, ends_epoch, at, power, data):
        before = list(self.saved)
        self.disk.countdown, self.disk.error = at, None
        try:
            found = self.save(value, ends_epoch)
        except Crash:
            crashed = True
        else:
            crashed = False
            self.saved = [*self.saved, (found.number, self.step, value, ends_epoch)]
        self.disk.countdown = None
        if crashed and power:
            before = [each for each in before if each[0] not in self.unsure]
            self.disk.lose_power(lambda name: (data.draw(st.booleans()), data.draw(st.booleans())))
        self.after_restart(before, (self.step, value, ends_epoch))

    def after_restart(self, before, attempt):
        self.restart()
        newest, damaged = self.store.newest_whole(lambda each: True)
        assert damaged == [], "a crash left a checkpoint that counts and isn't whole"
        if before:
            assert newest is not None, "all checkpoints are gone"
            assert newest.step >= before[-1][1], "the newest one that was saved is gone"
        self.saved = []
        for each in self.store.checkpoints:
            # A power failure may bring one back that was removed: whole, or it would have been called damaged.
            found = self.ever.get((each.number, each.step), (each.number, *attempt))
            assert found[1:] == (each.step, each.value, each.ends_an_epoch), "a checkpoint appeared from nowhere"
            self.ever[each.number, each.step] = found
            self.saved.append(found)
        for name in self.disk.entries:
            assert not name.endswith(".tmp"), "a leftover survived the start"
        stems = {each.stem for each in self.store.checkpoints}
        assert all(name.split(".")[0] in stems or name.split(".")[0] in ("latest", "best") for name in self.disk.entries)

    @rule(value=VALUES, at=st.integers(0, 25), number=st.sampled_from([errno.ENOSPC, errno.EROFS, errno.ENOENT, errno.EIO]))
    def save_and_fail(self, value, at, number):
        before = {each.number for each in self.store.checkpoints}
        self.disk.countdown, self.disk.error = at, number
        try:
            found = self.save(value, True)
        except OSError:
            pass
        else:
            self.saved = [*self.saved, (found.number, self.step, value, True)]
        self.disk.countdown, self.disk.error = None, None
        numbers = {each.number for each in self.store.checkpoints}
        new = numbers - before
        for number_ in new:
            if number_ not in {each[0] for each in self.saved}:
                self.saved.append((number_, self.step, value, True))
                self.ever[number_, self.step] = self.saved[-1]
                self.unsure.add(number_)
        self.saved = [each for each in self.saved if each[0] in numbers]

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), how=st.sampled_from(["cut", "flip", "remove"]))
    def damage(self, data, how):
        victim = data.draw(st.sampled_from(self.store.checkpoints))
        name = f"{victim.stem}.{data.draw(st.sampled_from(['keras', 'state.npz', 'json']))}"
        if how == "remove" and name.endswith("json"):
            return
        if how == "remove":
            del self.disk.entries[name]
        else:
            content = self.disk.entries[name].content
            # A JSON that has lost its last newline is whole.
            at = data.draw(st.integers(0, len(content) - 1 - name.endswith("json")))
            if how == "cut":
                del content[at:]
            else:
                content[at] ^= 1 << data.draw(st.integers(0, 7))
        self.store = Store("run", self.disk)
        self.store.read()
        self.store.clean()
        found, damaged = self.store.newest_whole(lambda each: True)
        whole = [each for each in self.saved if each[0] != victim.number]
        if victim.number == max(each[0] for each in self.saved):
            assert len(damaged) == 1
            assert victim.stem in damaged[0]
        if whole:
            assert found is not None
            assert found.number == max(each[0] for each in whole) or found.number > victim.number
        # What is damaged goes with the next save; the model forgets it at once.
        for each in list(self.store.checkpoints):
            if each.number == victim.number:
                self.store.checkpoints.remove(each)
                for kind in ("json", "keras", "state.npz"):
                    self.disk.entries.pop(f"{victim.stem}.{kind}", None)
        self.saved = whole
        self.disk.lose_power(lambda name: (True, True))

    @invariant()
    def there_is_always_a_whole_one(self):
        if getattr(self, "saved", None):
            assert any(self.store.damage(each) is None for each in self.store.checkpoints)


class TestFiles(Files.TestCase):
    settings = settings(
        max_examples=int(os.environ.get("KERAS_MIRROR_EXAMPLES", 40)),
        stateful_step_count=8,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
