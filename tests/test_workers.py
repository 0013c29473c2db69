"""Two real processes under MultiWorkerMirroredStrategy on the loopback interface: the same as one device."""

import json
import os
import socket
import subprocess
import sys

import numpy as np

PROGRAM = """
import json, os, sys
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else None
import keras
from keras_mirror import MirroredFitter
keras.config.set_floatx("float64")
rng = np.random.default_rng(0)
x, y = rng.normal(size=(29, 6)), rng.integers(0, 3, size=29)

def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential([
        keras.Input((6,)), layers.Dense(8, "tanh"), layers.BatchNormalization(synchronized=True), layers.Dense(3, "softmax")
    ])

model = build() if strategy is None else MirroredFitter(build, strategy=strategy)
optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5, gradient_accumulation_steps=3)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
# 29 rows in batches of 4: the last batch has one row, so the second worker has none.
history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history

# Loss scaling: the last row, which is the second worker's, has a gradient that isn't finite.
def linear():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])

scaled = linear() if strategy is None else MirroredFitter(linear, strategy=strategy)
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
scaled.compile(optimizer, lambda y_true, y_pred: y_pred[:, 0])
scales = []
for last in (1.0, np.nan, 1.0):
    scaled.train_on_batch(np.array([[1.0], [1.0], [1.0], [last]]), np.zeros((4, 1)))
    scales.append([float(optimizer.dynamic_scale), int(optimizer.iterations), float(scaled.get_weights()[0][0, 0])])

# precision="auto": each worker sees a GPU of another age.
capability = None
if strategy is not None:
    from keras_mirror import replicas
    index = strategy.cluster_resolver.task_id
    replicas._short = lambda name: "GPU:0"
    replicas._compute_capability = lambda device: (900, 705)[index]
    tf.config.get_visible_devices = lambda kind: [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    capability = replicas.lowest_compute_capability(strategy)

print("RESULT" + json.dumps({
    "scales": scales,
    "capability": capability,
    "history": history,
    "evaluate": model.evaluate(x, y, batch_size=7, verbose=0),
    "predict": model.predict(x, batch_size=4, verbose=0).tolist(),
    "weights": [w.tolist() for w in model.get_weights()],
    "chief": getattr(model, "is_chief", None),
    "replicas": getattr(model, "num_replicas", 1),
}))
"""


def _start(environment):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _result(process):
    out, err = process.communicate(timeout=200)
    lines = [line for line in out.splitlines() if line.startswith("RESULT")]
    assert lines, err[-3000:]
    return json.loads(lines[0][len("RESULT") :])


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_two_workers_train_as_one_device():
    workers = [f"127.0.0.1:{port}" for port in _free_ports(2)]
    config = [json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}) for i in range(2)]
    processes = [_start({"TF_CONFIG": each}) for each in config]
    try:
        results = [_result(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    reference = _result(_start({}))
    assert [r["chief"] for r in results] == [True, False]
    assert [r["replicas"] for r in results] == [2, 2]
    assert reference["scales"] == [[8.0, 1, 0.0], [4.0, 1, 0.0], [4.0, 2, -1.0]]
    for result in results:
        assert result["scales"] == reference["scales"]
        assert result["capability"] == [7, 5]
        for name, values in reference["history"].items():
            np.testing.assert_allclose(result["history"][name], values, atol=1e-10, rtol=0)
        np.testing.assert_allclose(result["evaluate"], reference["evaluate"], atol=1e-10, rtol=0)
        np.testing.assert_allclose(result["predict"], reference["predict"], atol=1e-10, rtol=0)
        for mine, theirs in zip(result["weights"], reference["weights"], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-10, rtol=0)
