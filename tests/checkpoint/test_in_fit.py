"""SingleCopyCheckpoint in fit: what it keeps, what it refuses, and what it does when the disk or a signal gets in the way."""

import csv
import datetime
import errno
import json
import os
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_parts import BATCH, STEPS, Crash, CrashAt, X, Y, begin_anew, bits, compiled, fitter, forget, train, values_of

from keras_mirror import SingleCopyCheckpoint
from keras_mirror.checkpoint.disk import Disk
from keras_mirror.checkpoint.lock import Lock


@pytest.fixture(scope="module")
def small():
    """A model that is traced once, and what all its variables began with."""
    made = fitter()
    return made, values_of(made)


def fit(model, directory, *callbacks, epochs=1, **options):
    return model.fit(
        X, Y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[*callbacks, SingleCopyCheckpoint(directory, **options)]
    )


def contents(directory):
    return {
        name[:-5]: json.loads((directory / name).read_text())
        for name in os.listdir(directory)
        if name[:6].isdigit() and name.endswith(".json")
    }


class Says(keras.callbacks.Callback):
    """Gives the epochs' logs a value."""

    def __init__(self, values):
        super().__init__()
        self.values = list(values)

    def on_epoch_end(self, epoch, logs=None):
        logs["value"] = self.values[epoch]


class At(keras.callbacks.Callback):
    """Does something once, at a given event of fit, and notes the events after it."""

    def __init__(self, event, count, action):
        super().__init__()
        self.event, self.count, self.action, self.after = event, count, action, None

    def get_state(self):
        return None

    def set_state(self, state):
        """Counts this fit only."""

    def _event(self, name):
        if self.after is not None:
            self.after.append(name)
        elif name == self.event:
            self.count -= 1
            if self.count == 0:
                self.after = []
                self.action()

    def on_train_batch_end(self, batch, logs=None):
        self._event("batch")

    def on_test_begin(self, logs=None):
        self._event("validation")

    def on_test_batch_end(self, batch, logs=None):
        self._event("validation batch")

    def on_epoch_end(self, epoch, logs=None):
        self._event("epoch")


# -- what is kept --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ([3.0, 1.0, float("nan"), 1.0, 2.0], "min", {2, 4}),
        ([float("nan"), 1.0, 5.0, 5.0, 5.0], "max", {3, 4}),
    ],
)
def test_the_best_stay_beside_the_last(small, tmp_path, values, mode, best):
    fit(small[0], tmp_path, Says(values), epochs=5, keep_best=2, monitor="value", mode=mode)
    kept = {each["epoch"]: each for each in contents(tmp_path).values()}
    assert set(kept) == best | {5}
    checkpoint = SingleCopyCheckpoint(tmp_path, keep_best=2, monitor="value", mode=mode)
    first = min(best, key=lambda epoch: (values[epoch - 1] * (1 if mode == "min" else -1), epoch))
    assert checkpoint.best.endswith(f"step-{first * STEPS}.keras")
    assert os.path.realpath(tmp_path / "best.keras") == os.path.realpath(checkpoint.best)
    assert os.path.realpath(tmp_path / "latest.keras") == os.path.realpath(checkpoint.latest)


def test_a_best_epoch_is_saved_whatever_the_trigger_says(small, tmp_path):
    fit(small[0], tmp_path, Says([1.0, 0.0, 2.0]), epochs=3, every=10**6, keep_best=1, monitor="value", mode="min")
    assert sorted(each["epoch"] for each in contents(tmp_path).values()) == [2, 3]


def test_all_are_kept_where_none_is_to_go(small, tmp_path):
    fit(small[0], tmp_path, every=4, keep_last=None)
    assert sorted(each["global_step"] for each in contents(tmp_path).values()) == [4, 8, 9]


def test_a_time_may_be_the_trigger(small, tmp_path):
    fit(small[0], tmp_path, every=datetime.timedelta(microseconds=1), keep_last=None)
    assert sorted(each["global_step"] for each in contents(tmp_path).values()) == list(range(1, STEPS + 1))
    shutil.rmtree(tmp_path)
    fit(small[0], tmp_path, every=datetime.timedelta(hours=1), keep_last=None)
    assert [each["global_step"] for each in contents(tmp_path).values()] == [STEPS]


def test_whether_more_is_better_is_what_keras_says(small, tmp_path):
    fit(small[0], tmp_path, epochs=2, keep_best=1, monitor="accuracy")
    kept = contents(tmp_path).values()
    accuracy = [each["monitor_value"] for each in kept]
    assert json.loads((tmp_path / "best.json").read_text())["monitor_value"] == max(accuracy)


def test_the_json_is_for_people_too(small, tmp_path):
    fit(small[0], tmp_path, epochs=2)
    (found,) = contents(tmp_path).values()
    wanted = {"format": 1, "global_step": 18, "epoch": 2, "batch": 0, "replicas": 2, "global_batch": BATCH, "steps_per_epoch": 9}
    assert {name: found[name] for name in wanted} == wanted
    assert found["history"]["epoch"] == [0, 1]
    for name, file in found["files"].items():
        assert os.path.getsize(tmp_path / name) == file["size"]
        assert os.sep not in name


# -- what is refused, before training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "every=0, expected"),
        ({"every": "batch"}, ValueError, "every='batch', expected"),
        ({"every": 1.5}, TypeError, "every=1.5, expected"),
        ({"every": datetime.timedelta(0)}, ValueError, "expected"),
        ({"keep_last": 0}, ValueError, "keep_last=0, expected a whole number of at least 1, or None"),
        ({"keep_best": -1}, ValueError, "keep_best=-1, expected"),
        ({"keep_best": True}, TypeError, "keep_best=True is a bool"),
        ({"monitor": 3}, TypeError, "monitor=3 is a int"),
        ({"mode": "best"}, ValueError, "mode='best', expected one of 'auto', 'min', 'max'"),
        ({"on_error": "ignore"}, ValueError, "on_error='ignore', expected one of 'raise', 'warn'"),
        ({"save_on_interrupt": ["SIGTERM"]}, TypeError, "save_on_interrupt="),
        ({"directory": 3}, TypeError, "directory=3 is a int, expected a path"),
    ],
)
def test_a_wrong_argument_has_its_own_sentence(arguments, error, text):
    with pytest.raises(error, match=text):
        SingleCopyCheckpoint(**{"directory": "run", **arguments})


def test_validation_that_isnt_there_cant_be_monitored(small, tmp_path):
    before = bits(small[0])
    with pytest.raises(ValueError, match="fit was given no validation_data"):
        fit(small[0], tmp_path, keep_best=1)
    assert bits(small[0]) == before


def test_an_absent_value_is_an_error_that_lists_what_there_is_and_costs_nothing(small, tmp_path):
    with pytest.raises(ValueError, match="looks at 'f1', which isn't among the epoch's logs: found accuracy, loss"):
        fit(small[0], tmp_path, keep_best=1, monitor="f1", mode="max")
    assert [each["epoch"] for each in contents(tmp_path).values()] == [1]


def test_two_in_one_fit_are_refused(small, tmp_path):
    with pytest.raises(ValueError, match="found 2 of them in the same fit"):
        fit(small[0], tmp_path, SingleCopyCheckpoint(tmp_path / "other"))


def test_without_resume_an_earlier_run_isnt_written_over(small, tmp_path):
    fit(small[0], tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=r"resume=False, but .* has 1 checkpoints of an earlier run"):
        fit(small[0], tmp_path, resume=False)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_model_that_cant_be_serialised_is_told_before_training(tmp_path):
    class Own(keras.Model):
        def __init__(self, size):
            super().__init__()
            self.dense = keras.layers.Dense(size, activation="softmax")

        def call(self, x):
            return self.dense(x)

        def get_config(self):
            raise NotImplementedError("no config")

    with pytest.raises(ValueError, match=r"can't be saved as a \.keras file"):
        fit(compiled(Own(3)), tmp_path)
    fit(compiled(Own(3)), tmp_path, weights_only=True)
    assert (tmp_path / "latest.weights.h5").exists()


def test_a_directory_in_use_is_refused_and_a_failed_fit_leaves_none_in_use(small, tmp_path):
    lock = Lock(str(tmp_path))
    lock.acquire()
    with pytest.raises(RuntimeError, match="is in use by another fit of this process"):
        fit(small[0], tmp_path)
    lock.release()
    with pytest.raises(Crash):
        fit(small[0], tmp_path, CrashAt(2))
    plain = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")]))
    with pytest.raises(Crash):
        fit(plain, tmp_path, CrashAt(2))
    fit(plain, tmp_path)
    assert not (tmp_path / ".lock").exists()


# -- damage and errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "how"), [("keras", "cut"), ("keras", "flip"), ("state.npz", "cut"), ("json", "flip")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(small, tmp_path, kind, how, capsys):
    made = small[0]
    with pytest.raises(Crash):
        fit(made, tmp_path, CrashAt(8), every=3, keep_last=2)
    newest = max(contents(tmp_path))
    path = tmp_path / f"{newest}.{kind}"
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=f"a damaged checkpoint was passed over: .*{newest}"):
        fit(made, tmp_path, every=3)
    assert "going on from epoch 1, batch 3 of 9" in capsys.readouterr().out
    assert [each["global_step"] for each in contents(tmp_path).values()] == [STEPS]


def test_where_all_are_damaged_nothing_is_removed(small, tmp_path):
    fit(small[0], tmp_path)
    path = os.path.realpath(tmp_path / "latest.keras")
    os.truncate(path, 100)
    before = sorted(os.listdir(tmp_path))
    with (
        pytest.raises(ValueError, match="every checkpoint is damaged"),
        pytest.warns(UserWarning, match="has 100 bytes, expected"),
    ):
        fit(small[0], tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


class FullFrom(Disk):
    """Stands in for `Disk.write`: full from a certain number of bytes on."""

    def __init__(self, number, bytes_left):
        self.number, self.left, self.plain = number, bytes_left, Disk.write

    def __call__(self, file, data):
        self.left -= len(data)
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        self.plain(Disk(), file, data)


@pytest.mark.parametrize(("number", "background"), [(errno.ENOSPC, True), (errno.ENOSPC, False), (errno.EROFS, True)])
def test_a_disk_that_fails_stops_training_or_not_as_asked(small, tmp_path, monkeypatch, number, background):
    full = FullFrom(number, 60_000)
    monkeypatch.setattr(Disk, "write", lambda self, file, data: full(file, data))
    options = {"every": 1, "background": background, "keep_last": 2}
    with pytest.raises(OSError, match="What was there is whole; the last whole checkpoint is") as raised:
        fit(small[0], tmp_path / "a", **options)
    assert raised.value.errno == number
    full.left = 60_000
    with pytest.warns(UserWarning, match=r"saving to .* failed"):
        fit(small[0], tmp_path / "b", **options, on_error="warn")
    for each in "ab":
        kept = contents(tmp_path / each)
        assert kept
        names = {name for name in os.listdir(tmp_path / each) if name[:6].isdigit()}
        assert names == {f"{stem}.{kind}" for stem in kept for kind in ("keras", "state.npz", "json")}
        keras.models.load_model(SingleCopyCheckpoint(tmp_path / each).latest)
    full.left = 10**9
    fit(small[0], tmp_path / "a", **options)


def test_a_vanished_directory_is_an_error_of_saving(small, tmp_path):
    def vanish():
        while (tmp_path / "run").exists():  # A checkpoint that is being written makes files in it.
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    gone = At("batch", 4, vanish)
    with pytest.raises(FileNotFoundError, match=r"saving to .* failed"):
        fit(small[0], tmp_path / "run", gone, every=2)
    gone = At("batch", 4, vanish)
    with pytest.warns(UserWarning, match=r"saving to .* failed: FileNotFoundError"):
        fit(small[0], tmp_path / "run", gone, every=2, on_error="warn")


# -- signals -------------------------------------------------------------------------------------------------------------


def handlers():
    return [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize(
    ("which", "event", "count"),
    [
        (signal.SIGTERM, "batch", 5),
        (signal.SIGTERM, "batch", STEPS),
        (signal.SIGTERM, "validation batch", 1),
        (signal.SIGINT, "validation", 1),
        (signal.SIGINT, "epoch", 1),
    ],
)
def test_a_signal_saves_and_stops_and_the_end_is_the_same(small, tmp_path, which, event, count, capsys):
    made, values = small
    begin_anew(made, values)
    undisturbed = train(made, tmp_path / "a", epochs=2)
    begin_anew(made, values)
    before, at = handlers(), At(event, count, lambda: os.kill(os.getpid(), which))
    with pytest.raises(KeyboardInterrupt if which == signal.SIGINT else SystemExit) as stopped:
        train(made, tmp_path / "b", callbacks=[at], epochs=2)
    if which == signal.SIGTERM:
        assert stopped.value.code == 128 + signal.SIGTERM
    assert handlers() == before
    # The rest of the same event is all: no validation after a batch, no false end of an epoch.
    assert at.after == []
    said = capsys.readouterr()
    assert f"stopped by {which.name};" in said.out
    assert "Run the same again to go on" in said.out
    forget(made)
    resumed = train(made, tmp_path / "b", epochs=2)
    assert resumed[1:] == undisturbed[1:]
    assert resumed[0] == undisturbed[0]


def test_a_second_signal_stops_at_once(small, tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = handlers()
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(small[0], tmp_path, At("batch", 3, twice))
    assert stopped.value.args == ()
    assert handlers() == before
    assert contents(tmp_path) == {}


def test_ones_own_handler_is_called_after_the_save(small, tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(len(contents(tmp_path))))
    try:
        with pytest.raises(SystemExit):
            fit(small[0], tmp_path, At("batch", 3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [1]


def test_after_a_plain_fit_that_raised_a_signal_does_what_it_always_did(tmp_path):
    before = handlers()
    plain = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")]))
    with pytest.raises(Crash):
        fit(plain, tmp_path, CrashAt(2))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert handlers() == before


def test_a_notice_of_another_kind_is_the_same(small, tmp_path):
    checkpoint = SingleCopyCheckpoint(tmp_path)
    with pytest.raises(SystemExit):
        small[0].fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[At("batch", 3, checkpoint.interrupt), checkpoint])
    assert [each["batch"] for each in contents(tmp_path).values()] == [3]


# -- callbacks and data --------------------------------------------------------------------------------------------------


class Counter(keras.callbacks.Callback):
    """A user's: its state is attributes, an argument of which a new script may change."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.count, self.sums, self.ages = limit, 0, np.zeros(2), {}

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        self.sums = self.sums + 1
        self.ages[batch] = (self.count, float("inf"))


class Deciding(Counter):
    """A user's that says itself what its state is."""

    def get_state(self):
        return {"mine": self.count}

    def set_state(self, state):
        self.count = state["mine"]


def test_callbacks_go_on_with_what_they_had_and_keep_new_arguments(small, tmp_path):
    with pytest.raises(Crash):
        fit(small[0], tmp_path, Counter(1), Deciding(1), CrashAt(5), every=4)
    again = [Deciding(2), Counter(2)]
    fit(small[0], tmp_path, *again, every=4)
    assert [each.count for each in again] == [STEPS, STEPS]
    assert [each.limit for each in again] == [2, 2]
    np.testing.assert_array_equal(again[1].sums, [STEPS, STEPS])
    assert again[1].ages[0] == (1, float("inf"))


def test_a_csv_log_goes_on_without_a_row_twice(small, tmp_path):
    def logged():
        return keras.callbacks.CSVLogger(tmp_path / "log.csv")

    with pytest.raises(Crash):
        fit(small[0], tmp_path / "run", logged(), CrashAt(2 * STEPS + 1), epochs=3, every=STEPS + 2)
    fit(small[0], tmp_path / "run", logged(), epochs=3)
    with open(tmp_path / "log.csv", newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]


@pytest.mark.parametrize("random", ["shuffle", "map"])
def test_data_that_cant_be_had_again_is_told_at_the_first_save(small, tmp_path, random):
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    if random == "shuffle":
        data = data.shuffle(20)
    else:
        data = data.map(lambda x, y: (x + tf.random.uniform(()), y))
    with pytest.warns(UserWarning, match="without a seed"):
        small[0].fit(data.batch(BATCH), verbose=0, callbacks=[SingleCopyCheckpoint(tmp_path)])
