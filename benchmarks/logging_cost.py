"""What logging costs: RankZeroLogger against fit(verbose=0), 1 and 2 on a step of about a millisecond.

python benchmarks/logging_cost.py [--steps 400] [--rounds 7] [--replicas 1]

Each round runs every way once, in turns, so that a busy machine slows all of them; a ratio is the median over the rounds of
(an epoch's time this way) / (that of verbose=0 in the same round), with the lowest and the highest beside it. The process's CPU
time is disturbed less by others on the machine. Standard output goes to a pseudo-terminal where a bar is drawn, else to a file.
RankZeroLogger writes JSON lines and CSV both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.pop("CI", None)

import keras
import numpy as np

from keras_mirror import MirroredFitter, RankZeroLogger, replicas


def build() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input((256,)), layers.Dense(256, "relu"), layers.Dense(256, "relu"), layers.Dense(10)])


@contextlib.contextmanager
def output(terminal: bool) -> Iterator[None]:
    """Standard output to a terminal of 100 columns that is read and thrown away, or to a file."""
    before = sys.stdout
    if not terminal:
        with tempfile.TemporaryFile("w") as sys.stdout:
            yield
            sys.stdout = before
        return
    ours, theirs = pty.openpty()

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(ours, 1 << 16):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    with open(theirs, "w") as sys.stdout:
        yield
        sys.stdout = before
    reader.join(1)
    os.close(ours)


class FirstStep(keras.callbacks.Callback):
    """Notes when an epoch's steps begin and end, without a hook in any batch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.took = time.perf_counter() - self.began[0], time.process_time() - self.began[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    replicas.device_names(f"cpu:{options.replicas}")
    model = MirroredFitter(build, devices=f"cpu:{options.replicas}", seed=1)
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae", "mape"])
    x = np.random.default_rng(0).normal(size=(64 * options.steps, 256)).astype("float32")
    y = x[:, :10]
    ways: dict[str, tuple[bool, Any, Any]] = {
        "verbose=0": (False, 0, None),
        "verbose=1, a terminal": (True, 1, None),
        "verbose=1, piped": (False, 1, None),
        "verbose=2": (False, 2, None),
        **{f"RankZeroLogger({every}), a terminal and files": (True, "auto", every) for every in (1, 10, 100)},
        **{f"RankZeroLogger({every}), piped and files": (False, "auto", every) for every in (1, 10, 100)},
    }
    model.fit(x, y, batch_size=64, verbose=0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.rounds):
            names = list(ways)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                terminal, verbose, every = ways[name]
                timer = FirstStep()
                callbacks: list[Any] = [timer]
                if every is not None:
                    stem = os.path.join(folder, f"{i}-{every}-{terminal}")
                    callbacks.append(RankZeroLogger(every, csv=f"{stem}.csv", jsonl=f"{stem}.jsonl"))
                with output(terminal):
                    model.fit(x, y, batch_size=64, verbose=verbose, callbacks=callbacks)
                times[name].append(timer.took)
    base = times["verbose=0"]
    step = 1000 * statistics.median(wall for wall, _ in base) / options.steps
    print(f"{step:.2f} ms a step, {options.steps} steps, {options.rounds} rounds, replicas: {options.replicas}")
    print("| | time | lowest to highest | CPU time | lowest to highest |")
    print("|---|---|---|---|---|")
    for name, found in times.items():
        cells = []
        for clock in (0, 1):
            ratios = [mine[clock] / theirs[clock] for mine, theirs in zip(found, base, strict=True)]
            cells.append(f"{statistics.median(ratios):.3f} | {min(ratios):.2f} to {max(ratios):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
