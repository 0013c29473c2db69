"""A log's files: appended to by their own run, moved by another, widened, repaired after a crash."""

import csv
import json
import math

import pytest

from keras_mirror.log.files import Csv, JsonLines, TensorBoard, flat

FACTS = {"versions": {"keras": "3"}, "devices": ["CPU:0"], "seed": None, "command": "python a\nb.py"}


def record(step, **logs):
    return {"event": "step", "step": step, "epoch": 1, "batch": step, "logs": logs, "memory_mb": {"GPU:0": 1.5}}


def begun(kind, path, run="r1", step=None):
    file = kind(path)
    file.check()
    moved = file.open(run, step)
    file.begin(run, FACTS, 0.0)
    return file, moved


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_csv_gets_a_column_for_a_new_value_and_keeps_the_rows(tmp_path):
    path = tmp_path / "new" / "log.csv"
    file, _ = begun(Csv, path)
    file.write(record(1, loss=0.5))
    file.write(record(2, loss=0.25, **{'odd, "name"\n': [1.0, 2.0]}))
    file.write(record(3, val_loss=math.nan))
    file.close()
    found = rows(path)
    assert [row["step"] for row in found] == ["1", "2", "3"]
    assert [row["loss"] for row in found] == ["0.5", "0.25", ""]
    assert [row["val_loss"] for row in found] == ["", "", "nan"]
    assert found[1]['odd, "name"\n'] == "[1.0, 2.0]"
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert comments[:3] == ["# keras_mirror log, run r1", "# versions: keras 3", "# devices: CPU:0"]
    assert comments[-1] == "# command: python a b.py"


def test_a_metric_may_be_called_as_a_column():
    odd = {**record(1), "logs": {"step": 9.0}}
    assert (flat(odd)["step"], flat(odd)["metric_step"]) == (1, 9.0)
    assert flat(record(1))["memory_mb_GPU:0"] == 1.5


@pytest.mark.parametrize("kind", [Csv, JsonLines])
def test_the_run_itself_appends_without_what_it_trains_again(tmp_path, kind):
    path = tmp_path / "log"
    file, _ = begun(kind, path)
    for step in (1, 2, 3):
        file.write(record(step, loss=1.0 / step))
    file.close()
    # A crash in the middle of a line.
    path.write_text(path.read_text() + '{"event": "st' + '"1')
    file, moved = begun(kind, path, step=2)
    assert moved is None
    file.write(record(3, loss=7.0, new=1.0))
    file.close()
    found = rows(path) if kind is Csv else [each for each in lines(path) if each["event"] == "step"]
    assert [int(row["step"]) for row in found] == [1, 2, 3]
    assert float((found[2] if kind is Csv else found[2]["logs"])["loss"]) == 7.0


@pytest.mark.parametrize("kind", [Csv, JsonLines])
def test_the_log_of_another_run_is_moved(tmp_path, kind):
    path = tmp_path / "log.txt"
    for run, expected in (("r1", None), ("r2", "log.1.txt"), ("r3", "log.2.txt")):
        file, moved = begun(kind, path, run)
        file.write(record(1, loss=1.0))
        file.close()
        assert moved == (None if expected is None else str(tmp_path / expected))
    assert "r1" in (tmp_path / "log.1.txt").read_text()
    assert "r3" in path.read_text()


@pytest.mark.parametrize("kind", [Csv, JsonLines])
def test_a_file_that_is_no_log_and_a_place_that_cant_be_written_are_errors(tmp_path, kind):
    (tmp_path / "thesis.txt").write_text("Chapter 1\n")
    with pytest.raises(ValueError, match="isn't a log of this kind; it begins 'Chapter 1"):
        kind(tmp_path / "thesis.txt").check()
    with pytest.raises(OSError, match=r"can't be written to: (Not a directory|File exists)"):
        kind(tmp_path / "thesis.txt" / "log").check()
    with pytest.raises(OSError, match="can't be written to"):
        TensorBoard(tmp_path / "thesis.txt" / "board").check()
    assert (tmp_path / "thesis.txt").read_text() == "Chapter 1\n"


def test_json_has_no_nan(tmp_path):
    path = tmp_path / "log.jsonl"
    file, _ = begun(JsonLines, path)
    file.write(record(1, loss=math.nan, worst=[math.inf, -math.inf]))
    file.close()
    start, found = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert found["logs"] == {"loss": "nan", "worst": ["inf", "-inf"]}
    assert (start["event"], start["run"], start["seed"]) == ("start", "r1", None)
