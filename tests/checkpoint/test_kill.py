"""A training process is killed with SIGKILL at random moments, in and around saves; it loses at most the steps since one."""

import json
import os
from pathlib import Path

import keras
from fresh_process import ROOT, run

HERE = Path(__file__).resolve().parent
KILLS = int(os.environ.get("KERAS_MIRROR_KILLS", "10"))


def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(tmp_path):
    program = (HERE / "kill_program.py").read_text()
    path = os.pathsep.join([str(ROOT), str(HERE)])
    printed = run(program, tmp_path, KILLS, 7, limit_s=60 + 15 * KILLS, KERAS_BACKEND="tensorflow", PYTHONPATH=path)
    found = json.loads(printed.split("RESULT")[1])
    assert found["resumed"] == found["undisturbed"]
    assert found["steps"] == sorted(found["steps"])
    assert len(found["steps"]) >= KILLS // 2, "too few kills came after a save"
    names = [name for name in found["left"] if not name.startswith(("latest", "best"))]
    assert {name.partition(".")[2] for name in names} == {"keras", "state.npz", "json"}
    # The two newest and the best one; no leftover, no lock.
    assert len(names) in (6, 9)
    assert set(found["left"]) - set(names) == {"latest.keras", "latest.json", "best.keras", "best.json"}
    for each in sorted(tmp_path.glob("kill-*.keras")):
        assert isinstance(keras.models.load_model(each), keras.Sequential)
