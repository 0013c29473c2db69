"""`keras-mirror demo`: what it prints and returns when all is well and when it isn't, and the file that it saves."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from fresh_process import run

from keras_mirror import MirroredFitter
from keras_mirror.cli import common, demo, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One run in a process of its own, from outside the source tree: the process, and the file that it saved."""
    folder = tmp_path_factory.mktemp("demo")
    own = {"PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "KERAS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "keras_mirror", "demo", "--devices", "cpu:3", "--epochs", "4", "--save", "digits.keras"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**environment, **own},
    )
    assert done.returncode == common.DONE, done.stdout + done.stderr
    return done, folder / "digits.keras"


def line(text: str, start: str) -> str:
    (found,) = [each for each in text.splitlines() if each.startswith(f"{start} ")]
    return found


def test_it_says_what_it_trains_on_what(good):
    out = good[0].stdout
    assert "CPU:0, CPU:1, CPU:2 (simulated" in line(out, "replicas")
    assert "64 images, 21 or 22 on each replica" in line(out, "batch")
    assert "1437 images to train on, 360 held out" in line(out, "data")
    assert out.count("\nEpoch ") == 4
    assert "PASSED: one device and 3 replicas" in out


def test_it_says_what_it_reached_and_how_long_it_took(good):
    out = good[0].stdout
    found = re.search(r"^accuracy +(0\.\d+) on the images held out: (\d+) of 360", out, re.MULTILINE)
    assert float(found[1]) == pytest.approx(int(found[2]) / 360, abs=1e-4)
    assert float(found[1]) >= demo.ACCURACY
    for part in ("set-up", "verification", "tracing", "training", "evaluation and saving"):
        assert re.search(rf"{part} \d+\.\d s", line(out, "time"))
    assert out.splitlines()[-1].startswith("passed ")


def test_tensorflow_is_silent(good):
    # TensorFlow 2.18's graph optimizer writes this whatever the level is.
    unavoidable = ("loop_optimizer.cc", "All log messages before absl::InitializeLog()")
    assert [each for each in good[0].stderr.splitlines() if not any(text in each for text in unavoidable)] == []


_LOAD = """
import json, sys
import keras
import numpy as np

x = np.load(sys.argv[2])
model = keras.models.load_model(sys.argv[1])
print(json.dumps({"class": type(model).__module__, "outputs": model.predict(x, verbose=0).tolist(),
                  "steps": int(model.optimizer.iterations.numpy())}))
"""


def test_the_saved_model_predicts_the_same_without_keras_mirror(good, tmp_path):
    done, path = good
    _, (x, y) = demo.load_digits()
    np.save(tmp_path / "x.npy", x)
    loaded = json.loads(run(_LOAD, path, tmp_path / "x.npy", without=("keras_mirror",)))
    outputs = np.asarray(loaded["outputs"])
    right = int((outputs.argmax(-1) == y).sum())
    assert f"{right} of 360 are right" in line(done.stdout, "accuracy")
    mirrored = MirroredFitter(lambda: keras.models.load_model(path), devices="cpu:2")
    np.testing.assert_allclose(mirrored.predict(x, verbose=0), outputs, atol=1e-5)
    assert loaded["class"].startswith("keras.")
    assert loaded["steps"] == 4 * 23


def test_devices_that_are_not_there_name_the_dry_run(capsys):
    assert main(["demo", "--devices", "64"]) == common.CANNOT_RUN
    message = capsys.readouterr().err
    assert "keras-mirror demo: error: " in message
    assert "64 GPUs" in message
    assert "--devices cpu:64" in message


def test_gpus_are_named(monkeypatch):
    gpus = [types.SimpleNamespace(name=f"/physical_device:GPU:{i}") for i in range(3)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"device_name": f"Model {gpu.name[-1]}"})
    workers = tuple(f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in (0, 2))
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(worker_devices=workers))
    assert demo._device_text(types.SimpleNamespace(strategy=strategy)) == "GPU:0 (Model 0), GPU:2 (Model 2)"


def test_a_batch_of_more_than_all_images_is_refused(capsys):
    assert main(["demo", "--batch-size", "1438"]) == common.CANNOT_RUN
    assert "--batch-size 1438 is more than the 1437 images" in capsys.readouterr().err


def test_a_low_accuracy_and_a_difference_fail(monkeypatch, capsys):
    report = types.SimpleNamespace(passed=False)
    monkeypatch.setattr(MirroredFitter, "verify", lambda *_, **__: report)
    # One step, so that the accuracy is that of chance.
    assert main(["demo", "--devices", "cpu:2", "--epochs", "1", "--batch-size", "1437"]) == common.FAILED
    printed = capsys.readouterr()
    assert re.search(r"failed: the accuracy 0\.\d{4} is below 0.97: try more epochs\.\n", printed.err)
    assert "failed: the replicas differ from one device, see the report above.\n" in printed.err
    assert "718 or 719 on each replica" in printed.out
    assert "passed " not in printed.out


def test_a_file_that_cannot_be_written_is_a_failure_and_no_traceback(tmp_path):
    def save(_):
        raise OSError("No space left on device")

    (failure,) = demo._save(types.SimpleNamespace(save=save), tmp_path / "model.keras")
    assert failure.endswith("model.keras: No space left on device")


def test_the_split_is_fixed_and_apart():
    (x, y), (held_x, held_y) = demo.load_digits()
    again = demo.load_digits()
    assert (len(x), len(held_x)) == (demo._TRAINED_ON, demo._HELD_OUT) == (len(y), len(held_y))
    assert np.array_equal(held_x, again[1][0])
    assert not {each.tobytes() for each in x} & {each.tobytes() for each in held_x}
    assert (x.dtype, x.min(), x.max()) == (np.float32, 0, 1)


@pytest.mark.parametrize(("batch", "replicas", "verified"), [(64, 2, 65), (65, 2, 65), (64, 1, 64), (64, 3, 64), (1, 2, 1)])
def test_what_is_verified_is_a_batch_that_does_not_divide(batch, replicas, verified):
    assert demo._uneven(batch, replicas) == verified
