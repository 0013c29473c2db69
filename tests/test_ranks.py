"""Which worker this process is, from the environment, and what follows: rank_zero_only and get_logger."""

import json
import logging

import pytest
from fresh_process import run

from keras_mirror import get_logger, rank_zero_only, ranks

VARIABLES = ("TF_CONFIG", "SLURM_PROCID", "SLURM_NTASKS", "RANK", "WORLD_SIZE")


def tf_config(kind, index, **cluster):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3"}, (3, None)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "RANK": "7"}, (2, 4)),
        ({"TF_CONFIG": tf_config("worker", 1, worker=["a:1", "b:1"]), "SLURM_PROCID": "5"}, (1, 2)),
        ({"TF_CONFIG": tf_config("chief", 0, chief=["c:1"], worker=["a:1", "b:1"])}, (0, 3)),
        ({"TF_CONFIG": tf_config("worker", 1, chief=["c:1"], worker=["a:1", "b:1"])}, (2, 3)),
        ({"TF_CONFIG": tf_config("evaluator", 0, worker=["a:1", "b:1"])}, (2, 2)),
        ({"TF_CONFIG": "{}", "RANK": "4"}, (4, None)),
    ],
)
def test_the_environment_says_which_worker(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks.of_environment() == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "one", "RANK is 'one', expected a whole number"),
        ("SLURM_PROCID", "-1", "SLURM_PROCID is '-1'"),
        ("TF_CONFIG", "{cluster", "TF_CONFIG can't be read"),
        ("TF_CONFIG", "[1]", "TF_CONFIG can't be read"),
    ],
)
def test_an_environment_that_cant_be_read_is_named(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        ranks.rank()


def test_rank_zero_only_runs_on_the_first_worker(monkeypatch):
    @rank_zero_only
    def add(a, b=1):
        """Adds."""
        return a + b

    @rank_zero_only(default="other")
    def named():
        return "first"

    assert (add(1, b=2), named(), add.__name__, add.__doc__) == (3, "first", "add", "Adds.")
    # Asked at the call: a launcher's variable may be set after the import.
    monkeypatch.setenv("RANK", "1")
    assert (add(1), named()) == (None, "other")
    with pytest.raises(TypeError, match="expected a function"):
        rank_zero_only(3)


def test_the_logger_speaks_on_the_first_worker(monkeypatch, caplog):
    log = get_logger("keras_mirror.test")
    caplog.set_level(logging.INFO, "keras_mirror.test")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        log.info("loss %.1f", 0.5)
        log.warning("here", workers="all", extra={"mine": 1})
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [("INFO", "loss 0.5"), ("WARNING", "[worker 0] here"), ("WARNING", "[worker 1] here")]
    assert {record.filename for record in caplog.records} == {"test_ranks.py"}
    assert caplog.records[1].mine == 1


def test_in_order_alone_is_one_line_and_needs_a_strategy_otherwise(monkeypatch, caplog):
    log = get_logger("keras_mirror.test")
    log.warning("here", workers="in_order")
    assert [record.getMessage() for record in caplog.records] == ["[worker 0] here"]
    assert caplog.records[0].filename == "test_ranks.py"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="2 workers and no strategy"):
        log.warning("here", workers="in_order")
    with pytest.raises(ValueError, match="workers='some', expected one of"):
        log.warning("here", workers="some")


def test_neither_needs_tensorflow():
    script = """
import sys
from keras_mirror import get_logger, rank_zero_only
get_logger("a").error("said", workers="all")
print(rank_zero_only(lambda: "first", default="other")(), sorted({"tensorflow", "keras"} & set(sys.modules)))
"""
    assert run(script, RANK="0") == "first []\n"
    assert run(script.replace("lambda: ", "lambda: 1/0 or "), RANK="2") == "other []\n"
