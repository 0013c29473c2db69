"""Step time and memory of one model in float32, bfloat16 and float16, side by side in one run.

python benchmarks/precision.py [--devices cpu:1] [--rounds 3] [--batch-size 64] [--steps 20]

Each measurement is a process of its own, so that its memory is its own, and the three precisions take turns. Without --devices
it takes all visible GPUs, else one CPU replica. On a CPU no gain is to be expected: it computes the smaller types more slowly
than float32, and the figures only show what that costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help='as for MirroredFitter: "cpu:2", or a number of GPUs')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--measure", choices=POLICIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options)))
        return
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for _ in range(options.rounds):
        for policy in POLICIES:
            found[policy].append(in_a_process(policy))
    first = found["float32"][0]
    print(f"{first['device']}, {first['replicas']} replicas, global batch {options.batch_size}, Keras {first['keras']}")
    if first["device"] == "CPU":
        print("On a CPU no gain is to be expected from a smaller type; measure on the GPU that you train on.")
    print("| precision | ms a step (median) | of float32 | peak memory, MB | skipped steps |")
    print("|---|---|---|---|---|")
    for policy, rounds in found.items():
        ratio = statistics.median(r["ms"] / b["ms"] for r, b in zip(rounds, found["float32"], strict=True))
        ms, memory = (statistics.median(r[key] for r in rounds) for key in ("ms", "memory_mb"))
        print(f"| {policy} | {ms:.2f} | {ratio:.2f} | {memory:.0f} | {rounds[0]['skipped']} |")


def in_a_process(policy: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *sys.argv, "--measure", policy], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(policy: str, options: argparse.Namespace) -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_mirror import MirroredFitter

    layers = keras.layers

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.BatchNormalization(),
                layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
                layers.BatchNormalization(),
                layers.GlobalAveragePooling2D(),
                layers.Dense(256, "relu"),
                layers.Dense(10, "softmax", dtype="float32"),
            ]
        )

    devices = int(options.devices) if (options.devices or "").isdigit() else options.devices
    model = MirroredFitter(build, devices=devices, precision=policy)
    model.compile("adam", "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.batch_size * options.steps, 32, 32, 3)).astype("float32")
    y = rng.integers(0, 10, size=len(x))
    model.fit(x, y, batch_size=options.batch_size, verbose=0)
    start = time.perf_counter()
    model.fit(x, y, batch_size=options.batch_size, verbose=0)
    seconds = time.perf_counter() - start
    on_gpu = "GPU" in model.strategy.extended.worker_devices[0]
    if on_gpu:
        memory = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    else:
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "ms": 1000 * seconds / options.steps,
        "memory_mb": memory / 1e6,
        "skipped": sum(state.skipped for state in model.loss_scaling),
        "device": "GPU" if on_gpu else "CPU",
        "replicas": model.num_replicas,
        "keras": keras.__version__,
    }


if __name__ == "__main__":
    main()
