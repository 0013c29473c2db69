"""How long saving stops training: SingleCopyCheckpoint against keras.callbacks.ModelCheckpoint on a model of about 200 MB.

python benchmarks/checkpoint_time.py [--steps 20] [--saves 4] [--rounds 3] [--directory DIR]

Both save in the same run, in turns, so that a busy machine slows both; figures are medians. "Training waits" is the time in the
callbacks' hooks. "Epoch" is the whole time of the steps between two saves and the save, which includes what the writing thread
takes from training: without a GPU or a core to spare a save costs its CPU time, behind training or not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from keras_mirror import MirroredFitter, SingleCopyCheckpoint, replicas
from keras_mirror.seams import checkpoint3


def build() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input((64,)), layers.Dense(4096, "relu"), layers.Dense(6000, "relu"), layers.Dense(10)])


def timed(callback: keras.callbacks.Callback, waits: list[float]) -> None:
    """Notes how long a callback's hook at an epoch's end takes."""
    hook = callback.on_epoch_end

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        start = time.perf_counter()
        hook(epoch, logs)
        waits.append(time.perf_counter() - start)

    callback.on_epoch_end = on_epoch_end


class Clock(keras.callbacks.Callback):
    """The times of epochs, from begin to begin: what a callback after this one takes is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.marks.append(time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        self.marks.append(time.perf_counter())


def run(model: Any, x: Any, y: Any, epochs: int, callback: keras.callbacks.Callback | None) -> tuple[float, float]:
    """(seconds an epoch, seconds in which training waits for an epoch's save)."""
    waits: list[float] = []
    clock = Clock()
    if isinstance(callback, SingleCopyCheckpoint):
        # The half of it that saves is put at the end of the list when training begins.
        begin = callback.on_train_begin

        def on_train_begin(logs: Any = None) -> None:
            begin(logs)
            timed(checkpoint3.running_fit().callbacks.callbacks[-1], waits)

        callback.on_train_begin = on_train_begin
    elif callback is not None:
        timed(callback, waits)
    callbacks = [clock] if callback is None else [clock, callback]
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, callbacks=callbacks)
    times = [after - before for before, after in itertools.pairwise(clock.marks)]
    return statistics.median(times), statistics.median(waits) if waits else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=4, help="saves in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps between two saves")
    parser.add_argument("--directory", help="where to write (default: a temporary folder)")
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    replicas.device_names(f"cpu:{options.replicas}")
    model = MirroredFitter(build, devices=f"cpu:{options.replicas}", seed=1)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(32 * options.steps, 64)).astype("float32")
    y = x[:, :10]
    model.fit(x, y, batch_size=32, verbose=0)
    found: dict[str, list[tuple[float, float]]] = {
        "no callback": [],
        "ModelCheckpoint": [],
        "background=True": [],
        "background=False": [],
    }
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for i in range(options.rounds):
            for name in found:
                path = os.path.join(folder, f"{name} {i}")
                callback: keras.callbacks.Callback | None = None
                if name == "ModelCheckpoint":
                    callback = keras.callbacks.ModelCheckpoint(f"{path}.keras")
                elif name != "no callback":
                    callback = SingleCopyCheckpoint(path, background=name.endswith("True"))
                found[name].append(run(model, x, y, options.saves, callback))
        size = os.path.getsize(os.path.join(folder, "ModelCheckpoint 0.keras"))
    plain = statistics.median(epoch for epoch, _ in found["no callback"])
    theirs = statistics.median(wait for _, wait in found["ModelCheckpoint"])
    print(f"{size / 1e6:.0f} MB, {options.steps} steps between two saves, {options.replicas} replicas, Keras {keras.__version__}")
    print("| | training waits, ms | of ModelCheckpoint's | epoch, s | of no callback |")
    print("|---|---|---|---|---|")
    for name, times in found.items():
        epoch, wait = statistics.median(each for each, _ in times), statistics.median(each for _, each in times)
        print(f"| {name} | {1000 * wait:.0f} | {wait / theirs:.2f} | {epoch:.2f} | {epoch / plain:.2f} |")


if __name__ == "__main__":
    main()
