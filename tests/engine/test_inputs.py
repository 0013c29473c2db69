"""Input kind by guarantee: each example once an epoch and on one replica, the same batches for any number of replicas."""

import warnings
from pathlib import Path

import kinds
import numpy as np
import pytest
from kinds import KINDS, Kind, notes

# Replicas -> examples, in batches of four: none, one, fewer than replicas, a last batch of one, one over a multiple of replicas.
ROWS = {1: (5,), 2: (0, 9), 3: (1,), 4: (3, 5)}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield


@kinds.parametrised(KINDS.values())
def test_each_example_is_trained_on_once_an_epoch(kind: Kind) -> None:
    for replicas, sizes in ROWS.items():
        fitter = notes(replicas)
        traces = getattr(fitter.train_function, "traces", 0)
        for rows in sizes if kind.empty else [rows or 1 for rows in sizes]:
            case, numbers, epochs = f"{replicas} replicas, {rows} examples", np.arange(rows), 1 if kind.once or rows > 3 else 2
            history = fitter.fit(**kind.arguments(rows, fitter.strategy), epochs=epochs, verbose=0).history
            expected = np.zeros(kinds.MOST)
            expected[:rows] = epochs * kind.times(numbers)
            np.testing.assert_array_equal(np.asarray(fitter.seen), expected, case)
            if rows:
                assert history["rows"] == [rows] * epochs, case
                assert history["apart"] == [0] * epochs, case
            fitter.seen.assign(np.zeros(kinds.MOST))
        # An empty distributed dataset is traced by itself.
        assert fitter.train_function.traces - traces <= 2, "a partial last batch is traced anew"


@kinds.parametrised(KINDS.values())
def test_evaluate_and_predict_see_each_example_once_and_in_order(kind: Kind) -> None:
    rows, fitter = 9, notes(3)
    given = kind.arguments(rows, fitter.strategy)
    length = {"steps": given["steps_per_epoch"]} if "steps_per_epoch" in given else {}
    given = {name: given[name] for name in ("x", "y", "batch_size") if name in given}
    found = fitter.evaluate(**given, **length, verbose=0, return_dict=True)
    assert found == {"rows": rows, "powers": 2.0**rows - 1, "apart": 0}
    given = kind.arguments(rows, fitter.strategy)
    given = {name: given[name] for name in ("x", "batch_size") if name in given}
    outputs = fitter.predict(**given, **length, verbose=0)
    np.testing.assert_array_equal(outputs[:, 0], kind.order(np.arange(rows)))
    assert not np.any(np.asarray(fitter.seen)), "evaluate and predict train nothing"


def test_the_table_in_the_docs_has_a_row_for_each_kind() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs", "data.md").read_text(encoding="utf-8")
    table = page.split("| input kind |")[1].split("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == list(KINDS)
    for line in table:
        name, shuffled, counted = (cell.strip() for cell in line.split("|")[1:4])
        kind = KINDS[name]
        assert (shuffled == "your order") == (not kind.shuffles), name
        assert (counted == "rows") == kind.arrays, name
