"""As plain_classifier.py, but for the callbacks: all of keras_mirror's and two of Keras's in one fit, and one log of it.

RankZeroLogger shows training and writes it down, SingleCopyCheckpoint saves it, LinearScalingWarmup leads the larger batch's rate
in, EarlyStopping ends it, and TensorBoard gets its files from the first worker only. `keras-mirror report FOLDER/log.jsonl` makes
a page of it afterwards. It needs scikit-learn and tensorboard: pip install -e ".[demo,log]".
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_mirror import LinearScalingWarmup, MirroredFitter, RankZero, RankZeroLogger, SingleCopyCheckpoint

BATCH = 32


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="digits",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:2", help="cpu:N: N simulated replicas on the CPU; N: N GPUs (default: cpu:2)")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--directory", help="where everything is written (default: a temporary folder)")
    arguments = parser.parse_args()
    devices = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.directory or temporary)
        model = MirroredFitter(build_model, devices=devices, batch="per_replica", seed=0)
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
        history = model.fit(
            x_train,
            y_train,
            batch_size=BATCH,
            epochs=arguments.epochs,
            validation_data=(x_test, y_test),
            callbacks=[
                LinearScalingWarmup(warmup_epochs=3),
                keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
                RankZero(keras.callbacks.TensorBoard(folder / "tensorboard")),
                RankZeroLogger(every=10, jsonl=folder / "log.jsonl", csv=folder / "log.csv"),
                SingleCopyCheckpoint(folder / "checkpoints", keep_best=1),
            ],
        )
        # The log is what Keras's History is.
        records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        epochs = [record for record in records if record["event"] == "epoch"]
        assert [record["logs"]["val_loss"] for record in epochs] == history.history["val_loss"]
        assert (folder / "checkpoints" / "latest.keras").exists()
        assert len(list((folder / "tensorboard").rglob("events.*"))) >= 1
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"replicas: {model.num_replicas}, accuracy on {len(y_test)} digits held out: {accuracy:.4f}")


if __name__ == "__main__":
    main()
