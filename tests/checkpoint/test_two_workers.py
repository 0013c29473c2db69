"""Two real processes under MultiWorkerMirroredStrategy: one copy, and neither ever waits for the other in vain."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_workers import _free_ports

PROGRAM = """
import errno, json, os, signal, sys
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras
from keras_mirror import MirroredFitter, SingleCopyCheckpoint
from keras_mirror.checkpoint.disk import Disk

folder, worker = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
x, y = rng.normal(size=(29, 6)).astype("float32"), rng.integers(0, 3, size=29)

class Crash(Exception):
    pass

class At(keras.callbacks.Callback):
    def __init__(self, count, action):
        super().__init__()
        self.count, self.action = count, action

    def get_state(self):
        return None

    def set_state(self, state):
        pass

    def on_train_batch_end(self, batch, logs=None):
        self.count -= 1
        if self.count == 0:
            self.action()

def crash():
    raise Crash

def build():
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dropout(0.2), layers.Dense(3, "softmax")])

def model():
    made = MirroredFitter(build, strategy=strategy, seed=1)
    optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=3)
    made.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made

def fit(made, name, *callbacks, **options):
    checkpoint = SingleCopyCheckpoint(os.path.join(folder, name), **{"every": 5, **options})
    history = made.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[*callbacks, checkpoint])
    return {"weights": [w.tolist() for w in made.get_weights()], "history": history.history}

out = {"undisturbed": fit(model(), "undisturbed")}
try:
    fit(model(), "crashed", At(13, crash))
except Crash:
    pass
out["resumed"] = fit(model(), "crashed")
last = model()
try:
    # Only the second worker gets the signal.
    fit(last, "stopped", At(4, lambda: os.kill(os.getpid(), signal.SIGTERM) if worker == 1 else None))
except SystemExit as stopped:
    out["stopped"] = stopped.code
write = Disk.write
def full(self, file, data):
    raise OSError(errno.ENOSPC, "full")
Disk.write = full
try:
    fit(last, "full", every=2)
except (OSError, RuntimeError) as error:
    out["full"] = str(error)
Disk.write = write
print("RESULT" + json.dumps(out))
"""


def test_two_workers_write_one_copy_and_agree(tmp_path):
    workers = [f"127.0.0.1:{port}" for port in _free_ports(2)]
    processes = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(tmp_path), str(index)],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_CONFIG": config},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results, said = [], []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            assert "RESULT" in out, err[-3000:]
            results.append(json.loads(out.split("RESULT")[1]))
            said.append(out.split("RESULT")[0])
    finally:
        for process in processes:
            process.kill()
    first, second = results
    for result in results:
        assert result["resumed"] == result["undisturbed"]
        assert result["stopped"] == 143
    assert first["resumed"] == second["resumed"]
    assert "saving to" in first["full"]
    assert "the first worker couldn't save" in second["full"]
    assert "going on from" in said[0]
    assert said[1] == ""
    for name, step in (("undisturbed", 16), ("crashed", 16)):
        (found,) = (path for path in (tmp_path / name).glob("0*.json"))
        assert json.loads(found.read_text())["global_step"] == step
        assert json.loads(found.read_text())["replicas"] == 2
    (found,) = (path for path in (tmp_path / "stopped").glob("0*.json"))
    assert json.loads(found.read_text())["global_step"] >= 4
    for directory in tmp_path.iterdir():
        assert not list(directory.glob("*.tmp*")) + list(directory.glob(".lock"))
    loaded = keras.models.load_model(tmp_path / "undisturbed" / "latest.keras")
    for ours, theirs in zip(loaded.get_weights(), first["undisturbed"]["weights"], strict=True):
        np.testing.assert_array_equal(ours, np.asarray(theirs, ours.dtype))
