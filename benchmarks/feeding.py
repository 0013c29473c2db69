"""Examples per second of feeding alone: MirroredFitter against plain `experimental_distribute_dataset`, kind by kind.

python benchmarks/feeding.py [--rounds 5] [--replicas 2]

Both get the same data through Keras's adapters, run an epoch in one compiled call and read one value of each share. They
take turns (A B A B), so that a busy machine slows both; a ratio is the median over the rounds of each round's ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters

from keras_mirror import MirroredFitter, replicas
from keras_mirror.engine import data, feed, in_place

BATCH = 64


class Batches(keras.utils.PyDataset):
    def __init__(self, x: np.ndarray, y: np.ndarray, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


def generator(x: np.ndarray, y: np.ndarray) -> Any:
    return ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH))


def rows(count: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, *shape)).astype("float32"), rng.integers(0, 10, size=count)


def kinds() -> dict[str, Callable[[], dict[str, Any]]]:
    """Kind -> makes fit's arguments, anew for each epoch: a generator can be gone through once."""
    table, images = rows(100_000, 32), rows(8_000, 32, 32, 3)
    loaded = tf.data.Dataset.from_tensor_slices(images).batch(BATCH)
    mapped = loaded.map(lambda x, y: (x * 2 + 1, y), num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def arrays(x: np.ndarray, y: np.ndarray, shuffle: bool) -> dict[str, Any]:
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": shuffle}

    return {
        "arrays, rows of 32, shuffled": lambda: arrays(*table, True),
        "arrays, images of 32x32x3, shuffled": lambda: arrays(*images, True),
        "arrays, images of 32x32x3, in order": lambda: arrays(*images, False),
        "arrays read in place, images, shuffled": lambda: arrays(*images, True),
        "tf.data": lambda: {"x": loaded},
        "tf.data, mapped in parallel, prefetched": lambda: {"x": mapped},
        "generator": lambda: {"x": generator(*images)},
        "PyDataset": lambda: {"x": Batches(*images)},
        "PyDataset, 2 workers": lambda: {"x": Batches(*images, workers=2)},
    }


class Contender:
    """One way to feed: from fit's arguments to an epoch in one compiled call."""

    def __init__(self, fitter: MirroredFitter) -> None:
        self.fitter, self.strategy = fitter, fitter.strategy
        self.compiled = tf.function(self.epoch, reduce_retracing=True)

    def read(self, per_replica: Callable[[], tuple[Any, Any]]) -> Any:
        """Reads what every replica got; the number of examples."""

        def replica() -> Any:
            x, count = per_replica()
            with tf.control_dependencies([tf.reshape(x, [-1])[0]]):
                return tf.identity(count)

        return self.strategy.reduce("SUM", self.strategy.run(replica), axis=None)

    def time(self, arguments: dict[str, Any]) -> float:
        """Examples per second of one epoch, its opening included."""
        adapter = self.adapter(arguments)
        dataset = self.dataset(adapter)
        iterator = iter(dataset)
        adapter.on_epoch_begin()
        start = time.perf_counter()
        count = int(self.compiled(iterator))
        seconds = time.perf_counter() - start
        adapter.on_epoch_end()
        return count / seconds

    def epoch(self, iterator: Any) -> Any:
        def more(_: Any, go_on: Any) -> Any:
            return go_on

        def body(count: Any, _: Any) -> Any:
            batch = iterator.get_next_as_optional()
            has_batch = batch.has_value()
            count += tf.cond(has_batch, lambda: self.step(batch.get_value()), lambda: 0)
            return count, has_batch

        return tf.while_loop(more, body, (0, True))[0]


class Plain(Contender):
    def adapter(self, arguments: dict[str, Any]) -> Any:
        return data_adapters.get_data_adapter(**arguments)

    def dataset(self, adapter: Any) -> Any:
        return self.strategy.experimental_distribute_dataset(adapter.get_tf_dataset())

    def step(self, batch: Any) -> Any:
        x = batch[0]

        def share() -> tuple[Any, Any]:
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            value = x.values[int(tf.get_static_value(here))] if isinstance(x, tf.distribute.DistributedValues) else x
            # A replica that got no example has nothing to read.
            return tf.pad(tf.reshape(value, [-1]), [[0, 1]])[:1] if value.shape[0] == 0 else value, tf.shape(value)[0]

        return self.read(share)


class Mirrored(Contender):
    def adapter(self, arguments: dict[str, Any]) -> Any:
        return feed.prepare_fit(self.fitter._engine, arguments)["x"]

    def dataset(self, adapter: Any) -> Any:
        return adapter.get_tf_dataset()

    def step(self, batch: Any) -> Any:
        with tf.device("CPU:0"):
            parts, shares = data.split(batch, self.strategy.num_replicas_in_sync)

        def share() -> tuple[Any, Any]:
            here = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            return parts[here][0], shares[here].count

        return self.read(share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    replicas.device_names("cpu:4")
    fitter = MirroredFitter(lambda: keras.Sequential([keras.layers.Dense(1)]), devices=f"cpu:{options.replicas}")
    print(f"{options.replicas} replicas, batches of {BATCH}, {options.rounds} rounds, Keras {keras.__version__}")
    print("| kind | plain, examples/s | MirroredFitter, examples/s | ratio (median) | from | to |")
    print("|---|---|---|---|---|---|")
    for kind, make in kinds().items():
        in_place.BIG_ARRAY = 0 if "in place" in kind else 2**40
        plain, ours = Plain(fitter), Mirrored(fitter)
        rates: list[tuple[float, float]] = []
        for _ in range(options.rounds + 1):
            rates.append((plain.time(make()), ours.time(make())))
        del rates[0]  # with tracing
        ratios = sorted(b / a for a, b in rates)
        a, b = (statistics.median(found) for found in zip(*rates, strict=True))
        print(
            f"| {kind} | {a:,.0f} | {b:,.0f} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
