"""A PyDataset whose batches are made by processes: the same batches in the same order as without, in a process of its own.

Keras forks its workers. A test process full of TensorFlow's threads is no place to do that.
"""

import os
import subprocess
import sys

import keras
import numpy as np

BATCHES, ROWS = 6, 4


class Numbered(keras.utils.PyDataset):
    """Rows by number; the targets are the process that made them."""

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        rows = np.arange(ROWS * index, ROWS * (index + 1))
        return rows[:, None].astype("float32"), np.full((ROWS, 1), os.getpid(), "float64")


def program() -> None:
    import tensorflow as tf

    from keras_mirror import MirroredFitter

    seen: list[tuple[np.ndarray, int]] = []

    class Watched(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            tf.numpy_function(lambda x, y: seen.append((x[:, 0], int(y[0, 0]))) or np.float32(0), [x, y], tf.float32)
            return super().train_step(data)

    def fed(**arguments):
        keras.config.set_floatx("float64")  # which holds the number of any process
        seen.clear()
        fitter = MirroredFitter(Watched, devices="cpu:1", seed=3)
        fitter.compile("sgd", "mse")
        fitter.fit(Numbered(**arguments), epochs=2, verbose=0)
        return np.concatenate([rows for rows, _ in seen]), {process for _, process in seen}

    alone, makers = fed()
    assert makers == {os.getpid()}, makers
    for epoch in np.split(alone, 2):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(BATCHES * ROWS))
    by_processes, makers = fed(workers=2, use_multiprocessing=True, max_queue_size=4)
    assert makers, "no batch was made"
    assert os.getpid() not in makers, "not made by processes"
    np.testing.assert_array_equal(by_processes, alone)
    print("as without processes")


def test_batches_made_by_processes_are_the_same_in_the_same_order() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "as without processes" in done.stdout


if __name__ == "__main__":
    program()
