"""Step time of one device, of plain MirroredStrategy and of MirroredFitter, side by side in one run, as ratios.

python benchmarks/step_time.py [--model dense|cnn] [--rounds 5]

The three take turns, so that a busy machine slows all of them; a ratio is the median over the rounds of each round's ratio.
On simulated replicas, which share the CPU, it says what the replication costs, not what GPUs gain.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import MirroredFitter, replicas

LAYERS = keras.layers


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((32,)), LAYERS.Dense(64, "relu"), LAYERS.Dense(10, "softmax")])


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            LAYERS.Conv2D(16, 3, padding="same", activation="relu"),
            LAYERS.BatchNormalization(),
            LAYERS.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            LAYERS.BatchNormalization(),
            LAYERS.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            LAYERS.GlobalAveragePooling2D(),
            LAYERS.Dense(10, "softmax"),
        ]
    )


# model -> (factory, shape of an example, global batch, steps per round)
MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...], int, int]] = {
    "dense": (dense, (32,), 32, 200),
    "cnn": (cnn, (32, 32, 3), 64, 20),
}


def compiled(model: Any) -> Any:
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def plain_mirrored(factory: Callable[[], keras.Model]) -> keras.Model:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        return compiled(factory())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    replicas.device_names("cpu:4")
    factory, shape, batch_size, steps = MODELS[options.model]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch_size * steps, *shape)).astype("float32")
    y = rng.integers(0, 10, size=len(x))
    contenders = {
        "one device": compiled(factory()),
        "plain MirroredStrategy, 2 replicas": plain_mirrored(factory),
        "MirroredFitter, 2 replicas": compiled(MirroredFitter(factory, devices="cpu:2")),
        "MirroredFitter, 4 replicas": compiled(MirroredFitter(factory, devices="cpu:4")),
    }
    first, rounds = {}, {name: [] for name in contenders}
    for name, model in contenders.items():
        first[name] = fit_time(model, x, y, batch_size)
    for _ in range(options.rounds):
        for name, model in contenders.items():
            rounds[name].append(fit_time(model, x, y, batch_size) / steps)
    base = rounds["one device"]
    print(
        f"{options.model}, global batch {batch_size}, {steps} steps a round, {options.rounds} rounds, Keras {keras.__version__}"
    )
    print("| | ms a step (median) | of one device | first epoch with tracing, s |")
    print("|---|---|---|---|")
    for name, times in rounds.items():
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        print(f"| {name} | {1000 * statistics.median(times):.2f} | {ratio:.2f} | {first[name]:.1f} |")


def fit_time(model: Any, x: np.ndarray, y: np.ndarray, batch_size: int) -> float:
    start = time.perf_counter()
    model.fit(x, y, batch_size=batch_size, verbose=0)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
