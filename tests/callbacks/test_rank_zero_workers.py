"""RankZero with two real processes: one log, and what the first worker decides holds for both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_workers import _free_ports

HERE = Path(__file__).resolve().parent
KERAS_2 = keras.__version__.startswith("2")


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What each of two workers has found, what it wrote to stderr, and the folder for files."""
    folder = tmp_path_factory.mktemp("workers")
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(2)]
    processes = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        processes.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "rank_zero_program.py"), str(folder), str(index)],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_CONFIG": config, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=250)
            assert "RESULT" in out, err[-3000:]
            found.append((json.loads(out.split("RESULT")[1]), err))
    finally:
        for process in processes:
            process.kill()
    return [result for result, _ in found], [err for _, err in found], folder


def test_there_is_one_log(workers):
    _, _, folder = workers
    assert len((folder / "log.csv").read_text().splitlines()) == 7
    assert len(list((folder / "board").rglob("events.*"))) == 1


def test_logging_changes_no_weight(workers):
    for result in workers[0]:
        assert result["logged"] == result["bare"]


def test_workers_end_alike(workers):
    first, second = workers[0]
    for name in first:
        if isinstance(first[name], dict):
            assert first[name] == second[name], name


@pytest.mark.parametrize(
    ("name", "epochs", "rate"),
    [
        ("stopped", 2, 0.1),
        ("scheduled", 6, 0.1 / 64),
        ("stopped_in_batch", 2, 0.1),
        ("stopped_after_epoch", 2, 0.1),
        ("slower_in_batch", 6, 0.05),
        ("zeroed", 2, 0.1),
    ],
)
def test_the_first_workers_decision_holds(workers, name, epochs, rate):
    for result in workers[0]:
        assert len(result[name]["epochs"]) == epochs
        np.testing.assert_allclose(result[name]["rate"], rate, rtol=1e-6)


def test_a_stop_in_a_batch_holds_at_once_or_at_the_epochs_end(workers):
    bare = workers[0][0]["bare"]
    at_once, later = workers[0][0]["stopped_in_batch"], workers[0][0]["stopped_after_epoch"]
    assert later["loss"] == bare["loss"][:2]
    assert at_once["loss"][1] != bare["loss"][1]
    assert at_once["weights"] != later["weights"]


def test_weights_that_it_puts_back_are_everyones(workers):
    for result in workers[0]:
        assert not np.any([np.any(w) for w in result["zeroed"]["weights"]])
        assert result["stopped"]["weights"] != result["bare"]["weights"]


def test_a_failure_stops_all(workers):
    (first, second), _, _ = workers
    for name in ("failed_in_epoch", "failed_in_batch"):
        assert first[name] == "OSError: the disk is full"
        assert second[name].startswith("RuntimeError: RankZero(At")
        assert "failed on the first worker" in second[name]


def test_statistics_of_all_workers(workers):
    results, _, folder = workers
    for result in results:
        if KERAS_2:
            assert "pass EarlyStopping itself" in result["refused"]
            assert "use SingleCopyCheckpoint" in result["refused_saving"]
        else:
            assert len(result["normalized"]["epochs"]) == 2
            assert (folder / "best.keras").exists()


def test_the_logger_is_the_first_workers(workers):
    (first, second), _, folder = workers
    assert first["logger"] == second["logger"] == first["bare"]
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [record["logs"]["loss"] for record in records if record["event"] == "epoch"] == first["bare"]["loss"]
    assert [record["step"] for record in records if record["event"] == "step"] == list(range(1, 19))
    assert (records[0]["workers"], records[0]["replicas"]) == (2, 2)
    assert "can't be written to" in first["cant_log"]
    assert second["cant_log"].startswith("RuntimeError: RankZeroLogger: the first worker can't write the log")


def test_functions_and_loggers(workers):
    results, said, _ = workers
    assert [result["function"] for result in results] == ["ran", "left"]
    assert ["once" in err.splitlines() for err in said] == [True, False]
    assert ["[worker 0] in turn" in said[0], "[worker 1] in turn" in said[1]] == [True, True]
