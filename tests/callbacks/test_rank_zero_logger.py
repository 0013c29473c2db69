"""RankZeroLogger in fit: what is logged is right, costs nothing that isn't asked for, and never ends training."""

import csv
import errno
import importlib.util
import json
import math
import os
import re
import time

import numpy as np
import pytest
import tensorflow as tf
from stack import GENERATION, keras, optimizers

from keras_mirror import LossScaleMonitor, MirroredFitter, RankZero, RankZeroLogger
from keras_mirror.log import console, files
from keras_mirror.seams import log_seams
from keras_mirror.seams.rates import Rates

RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 3)).astype("float32")
Y = X[:, :1]


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)])


def made(devices="cpu:2", compile_arguments=None, **options):
    fitter = MirroredFitter(build, devices=devices, seed=1, **options)
    fitter.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"], **(compile_arguments or {})})
    return fitter


def fit(fitter, *callbacks, **options):
    return fitter.fit(X, Y, **{"batch_size": 8, "epochs": 2, "callbacks": list(callbacks), **options})


def read(path):
    """Lines of each event."""
    out = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        out.setdefault(record["event"], []).append(record)
    return out


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.fixture(autouse=True)
def _no_line_within_an_epoch(monkeypatch):
    """A plain console's, which on a busy machine may come in a short fit, too."""
    monkeypatch.setattr(console.Plain, "every_s", 600.0)


@pytest.fixture(scope="module")
def fitter():
    return made()


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_the_log_is_history_and_counts_are_right(tmp_path, steps_per_execution):
    fitter = made(compile_arguments={"steps_per_execution": steps_per_execution})
    logger = RankZeroLogger(5, csv=tmp_path / "log.csv", jsonl=tmp_path / "log.jsonl", tensorboard=tmp_path / "board")
    history = fit(fitter, logger, validation_data=(X, Y))
    found, table = read(tmp_path / "log.jsonl"), rows(tmp_path / "log.csv")
    assert set(found) == {"start", "step", "epoch", "end"}
    for name, values in history.history.items():
        assert [each["logs"][name] for each in found["epoch"]] == values
        assert [float(row[name]) for row in table if row["event"] == "epoch"] == values
    # 100 examples in batches of 8: 13 steps, the last of 4 examples.
    assert [each["step"] for each in found["epoch"]] == [13, 26]
    steps = [each["step"] for each in found["step"]]
    # Calls of 4, 4, 4 and 1 steps: a line at the end of each that passes a multiple of 5.
    assert steps == {1: [5, 10, 15, 20, 25], 4: [8, 12, 17, 21, 25]}[steps_per_execution]
    assert all(each["batch"] == each["step"] - 13 * (each["epoch"] - 1) for each in found["step"])
    first, second = found["epoch"]
    assert second["examples_per_second"] * second["step_ms"] > 0
    assert "first_step_seconds" in first
    assert "first_step_seconds" not in second
    start = found["start"][0]
    assert (start["global_batch"], start["replicas"], start["seed"], start["steps_per_epoch"]) == (8, 2, 1, 13)
    assert start["versions"]["keras"] == keras.__version__
    assert list((tmp_path / "board").rglob("events.*"))
    assert [row["event"] for row in table].count("step") == len(steps)


def test_it_changes_no_bit_of_the_training(tmp_path):
    def weights(*callbacks):
        fitter = made()
        fit(fitter, *callbacks, verbose=0)
        return [each.tobytes() for each in fitter.get_weights()]

    board = RankZero(keras.callbacks.TensorBoard(tmp_path / "board"))
    assert weights(RankZeroLogger(1, jsonl=tmp_path / "log.jsonl"), board) == weights()


@pytest.mark.parametrize(("verbose", "shown"), [("auto", False), (1, True), (2, True), (0, False)])
def test_there_is_one_bar_unless_the_user_asks(fitter, capsys, verbose, shown):
    fit(fitter, RankZeroLogger(), verbose=verbose)
    said = capsys.readouterr().out
    assert ("Epoch 1/2" in said) == shown
    # Keras's bar leaves its line open.
    assert len(re.findall(r"epoch \d/2  ", said)) == 2


def test_without_a_console_nothing_is_said(fitter, capsys, tmp_path):
    fit(fitter, RankZeroLogger(console=False, jsonl=tmp_path / "log"))
    assert capsys.readouterr().out == ""


def test_a_plain_console_says_what_is_wanted(fitter, capsys):
    fit(fitter, RankZeroLogger())
    first, second, one, two = capsys.readouterr().out.splitlines()
    assert first.startswith("keras_mirror ")
    assert second == "2 replicas (CPU:0, CPU:1), global batch 8, 13 steps an epoch, 2 epochs, seed 1"
    for line in (one, two):
        assert re.search(r"loss \d\.\d+  mae \d\.\d+  lr 0.1  \S+ examples/s \(\S+ a replica\)  .+/step \(p95", line), line


class Seen(RankZeroLogger):
    """Notes what it is given in each batch."""

    def on_train_batch_end(self, batch, logs=None):
        vars(self).setdefault("seen", []).append(logs["loss"])
        super().on_train_batch_end(batch, logs)


def test_no_log_is_converted_that_nobody_reads(fitter, tmp_path):
    logger, seen = Seen(5, console=False, jsonl=tmp_path / "log"), []
    fit(fitter, logger)
    assert len(logger.seen) == 26
    assert all(tf.is_tensor(each) for each in logger.seen)
    reader = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    fit(fitter, reader, RankZeroLogger())
    assert len(seen) == 26
    assert not any(tf.is_tensor(each) for each in seen)


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2's own list converts for all or for none")
def test_logs_are_converted_once_and_for_those_who_read_them(fitter, monkeypatch, tmp_path):
    counted = []
    monkeypatch.setattr(log_seams, "plain_logs", lambda logs: counted.append(1) or {"loss": 1.0})
    fit(fitter, RankZeroLogger(5, console=False, jsonl=tmp_path / "log"))
    assert counted == []
    seen, more = [], []
    fit(
        fitter,
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: more.append(logs["loss"])),
        RankZeroLogger(),
    )
    assert seen == more == [1.0] * 26
    assert len(counted) == 26


def test_others_batch_logs_are_as_keras_gives_them(fitter):
    def seen(*callbacks):
        fitter.set_weights([np.ones_like(each) for each in fitter.get_weights()])
        found = []
        old = keras.callbacks.Callback()
        old.on_batch_end = lambda batch, logs=None: found.append((batch, logs))
        mine = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append((batch, logs)))
        fit(fitter, old, mine, *callbacks, verbose=0, shuffle=False)
        return found

    ours = seen(RankZeroLogger(console=False))
    assert len(ours) == 4 * 13
    assert all(type(value) is float for _, logs in ours for value in logs.values())
    assert [batch for batch, _ in ours] == [batch for batch, _ in seen()]


def test_speeds_agree_with_a_stopwatch(fitter, tmp_path):
    class Slow(keras.callbacks.Callback):
        """Takes its time, and stops it: from the first step's end to the last step's."""

        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                self.began = time.perf_counter()
            else:
                time.sleep(0.005)
                self.took = time.perf_counter() - self.began

    slow = Slow()
    fit(fitter, slow, RankZeroLogger(1, console=False, jsonl=tmp_path / "log"), epochs=1, batch_size=4, verbose=0)
    (epoch,) = read(tmp_path / "log")["epoch"]
    assert epoch["examples_per_second"] == pytest.approx(96 / slow.took, rel=0.05)
    assert epoch["examples_per_second_per_replica"] == pytest.approx(48 / slow.took, rel=0.05)
    assert 5 <= epoch["step_ms"] <= epoch["step_ms_p95"]


def test_the_rate_in_effect_and_the_loss_scale(tmp_path):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([12], [0.1, 0.01])
    optimizer = optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule), initial_scale=8.0)
    fitter = made(compile_arguments={"optimizer": optimizer})
    fit(fitter, LossScaleMonitor(), RankZeroLogger(1, csv=tmp_path / "log.csv", jsonl=tmp_path / "log"), verbose=0)
    found = read(tmp_path / "log")
    rates = [each["learning_rate"] for each in found["step"]]
    assert rates == pytest.approx([0.1] * 13 + [0.01] * 13)
    assert [each["loss_scale"] for each in found["epoch"]] == [8.0, 8.0]
    assert [each["skipped_steps"] for each in found["epoch"]] == [0, 0]
    assert rows(tmp_path / "log.csv")[-1]["metric_skipped_steps"] == "0.0"


def test_odd_metrics_and_nan(tmp_path):
    class PerClass(keras.metrics.MeanSquaredError):
        def result(self):
            value = super().result()
            return tf.stack([value, value * float("nan")])

    odd = 'a, "b"\nstep'
    metrics = [PerClass(name=odd), keras.metrics.MeanAbsoluteError(name="step")]
    fitter = made(compile_arguments={"metrics": metrics})
    fit(fitter, RankZeroLogger(5, csv=tmp_path / "log.csv", jsonl=tmp_path / "log"), verbose=0)
    epoch = read(tmp_path / "log")["epoch"][0]
    assert isinstance(epoch["logs"][odd][0], float)
    assert epoch["logs"][odd][1] == "nan"
    row = rows(tmp_path / "log.csv")[-1]
    assert (row["step"], float(row["metric_step"]) > 0) == ("26", True)


@pytest.mark.skipif(GENERATION == 2, reason="SingleCopyCheckpoint needs Keras 3")
def test_a_run_that_goes_on_appends(tmp_path):
    from keras_mirror import SingleCopyCheckpoint

    def run(*callbacks):
        logger = RankZeroLogger(1, console=False, csv=tmp_path / "log.csv", jsonl=tmp_path / "log.jsonl")
        return fit(made(), *callbacks, logger, SingleCopyCheckpoint(tmp_path / "run", every=4), verbose=0)

    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 9:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Crash())
    assert read(tmp_path / "log.jsonl")["interrupted"][0]["step"] == 9
    history = run()
    found = read(tmp_path / "log.jsonl")
    # It went on from step 8.
    assert [each["step"] for each in found["step"]] == list(range(1, 27))
    assert [each["batch"] for each in found["step"]] == [*range(1, 14), *range(1, 14)]
    # Steps 1 and 9 are those in which the step was traced, which takes a time of its own.
    assert [each["step"] for each in found["step"] if each["step_ms"] is None] == [1, 9]
    assert [each["logs"]["loss"] for each in found["epoch"]] == history.history["loss"]
    assert len(found["start"]) == 2
    assert len({each["run"] for each in found["start"]}) == 1
    assert [int(row["step"]) for row in rows(tmp_path / "log.csv") if row["event"] == "step"] == [
        each["step"] for each in found["step"]
    ]


def test_another_runs_log_is_moved_and_a_second_fit_appends(fitter, tmp_path):
    path = tmp_path / "log.jsonl"
    logger = RankZeroLogger(5, console=False, jsonl=path)
    fit(fitter, logger)
    fit(fitter, logger)
    assert [each["step"] for each in read(path)["epoch"]] == [13, 26, 39, 52]
    with pytest.warns(UserWarning, match=r"log.jsonl was the log of another run; it is .*log\.1\.jsonl now"):
        fit(fitter, RankZeroLogger(5, console=False, jsonl=path))
    assert len(read(path)["epoch"]) == 2
    assert len(read(tmp_path / "log.1.jsonl")["epoch"]) == 4


def test_a_full_disk_is_a_warning(fitter, tmp_path, monkeypatch):
    written = []

    def full(self, text):
        written.append(text)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.JsonLines, "_write", full)
    with pytest.warns(UserWarning, match="can't be written to any more .*No space left.* training goes on") as warned:
        history = fit(fitter, RankZeroLogger(1, console=False, jsonl=tmp_path / "log", csv=tmp_path / "log.csv"))
    assert len(warned) == 1
    assert history.epoch == [0, 1]
    assert len(written) == 4
    assert [row["event"] for row in rows(tmp_path / "log.csv")].count("epoch") == 2


def test_logging_that_fails_ends_no_training(fitter, tmp_path, monkeypatch):
    monkeypatch.setattr(Rates, "in_effect", lambda self: 1 / 0)
    with pytest.warns(UserWarning, match="logging failed .ZeroDivisionError: division by zero.; training goes on without a log"):
        history = fit(fitter, RankZeroLogger(1, jsonl=tmp_path / "log"))
    assert history.epoch == [0, 1]


def test_a_missing_tensorboard_is_named_before_training(fitter, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    before = fitter.get_weights()
    with pytest.raises(ImportError, match=r"needs the package tensorboard.*\n.*pip install tensorboard"):
        fit(fitter, RankZeroLogger(tensorboard=tmp_path / "board"))
    np.testing.assert_equal(fitter.get_weights(), before)


def test_wrong_arguments_are_named(fitter, tmp_path):
    for wrong, error in ((0, ValueError), (1.5, TypeError), (True, TypeError), ("epoch", TypeError)):
        with pytest.raises(error, match=f"RankZeroLogger: every={wrong!r}"):
            RankZeroLogger(wrong)
    with pytest.raises(TypeError, match="csv=3 is a int, expected a path"):
        RankZeroLogger(csv=3)
    with pytest.raises(ValueError, match="jsonl='', expected a path"):
        RankZeroLogger(jsonl="")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="can't be written to"):
        fit(fitter, RankZeroLogger(jsonl=tmp_path / "file" / "log"))
    with pytest.raises(ValueError, match="isn't a log of this kind"):
        fit(fitter, RankZeroLogger(jsonl=tmp_path / "file"))


def test_in_plain_keras(tmp_path):
    model = build()
    model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=8, epochs=2, callbacks=[RankZeroLogger(5, console=False, jsonl=tmp_path / "log")])
    found = read(tmp_path / "log")
    assert [each["logs"]["loss"] for each in found["epoch"]] == history.history["loss"]
    assert [each["step"] for each in found["step"]] == [5, 10, 15, 20, 25]
    assert found["start"][0]["global_batch"] == 8
    assert not math.isnan(found["epoch"][1]["step_ms"])
