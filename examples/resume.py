"""As plain_classifier.py, but for a checkpoint: training is stopped in the middle of an epoch, and goes on as if it hadn't been.

The script sends itself SIGTERM, as a scheduler does to whoever has to make room, then trains on with a new model.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_mirror import MirroredFitter, SingleCopyCheckpoint


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


class SchedulerMakesRoom(keras.callbacks.Callback):
    """Sends SIGTERM to this process in the third epoch's tenth batch."""

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if batch == 9 and int(self.model.optimizer.iterations) > 90:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:2", help="cpu:N: N simulated replicas on the CPU; N: N GPUs (default: cpu:2)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--directory", help="where the checkpoints go (default: a temporary folder)")
    arguments = parser.parse_args()
    devices = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)

    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.directory or folder

        def train(*callbacks: keras.callbacks.Callback) -> MirroredFitter:
            model = MirroredFitter(build_model, devices=devices, seed=0)
            model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
            checkpoint = SingleCopyCheckpoint(directory, every=20)
            model.fit(x_train, y_train, batch_size=32, epochs=arguments.epochs, verbose=0, callbacks=[*callbacks, checkpoint])
            return model

        try:
            train(SchedulerMakesRoom())
        except SystemExit as stopped:
            print(f"the process would end here, with status {stopped.code}")
        # Another process, another day, the same script.
        model = train()
        assert model.model.history.epoch == list(range(arguments.epochs))
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"replicas: {model.num_replicas}, accuracy on {len(y_test)} digits held out: {accuracy:.4f}")


if __name__ == "__main__":
    main()
