"""The base script: a classifier of handwritten digits on several replicas, one line away from plain Keras."""

from __future__ import annotations

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_mirror import MirroredFitter


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:2", help="cpu:N: N simulated replicas on the CPU; N: N GPUs (default: cpu:2)")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    devices = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices

    keras.utils.set_random_seed(0)
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)

    # On one device this line is: model = build_model()
    model = MirroredFitter(build_model, devices=devices)
    # From here on there is no difference to plain Keras.
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x_train, y_train, batch_size=32, epochs=arguments.epochs, verbose=2)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"replicas: {model.num_replicas}, accuracy on {len(y_test)} digits held out: {accuracy:.4f}")


if __name__ == "__main__":
    main()
