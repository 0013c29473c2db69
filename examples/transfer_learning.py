"""As plain_classifier.py, but with a frozen part: features learnt on the digits 0 to 4 serve to tell 5 to 9 apart."""

from __future__ import annotations

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_mirror import MirroredFitter


def build_base() -> keras.Model:
    layers = [keras.Input((8, 8, 1))]
    for filters in (32, 64):
        layers.append(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        layers.append(keras.layers.BatchNormalization(momentum=0.9, synchronized=True))
        layers.append(keras.layers.ReLU())
    return keras.Sequential([*layers, keras.layers.MaxPooling2D(2), keras.layers.Flatten()], name="base")


def build_model() -> keras.Model:
    return keras.Sequential([build_base(), keras.layers.Dense(5, activation="softmax")])


def build_model_on(base_weights: list[np.ndarray]) -> keras.Model:
    # The base is built here, in the factory, so that its variables are made on every replica.
    base = build_base()
    base.set_weights(base_weights)
    base.trainable = False
    return keras.Sequential([base, keras.layers.Dense(5, activation="softmax")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:2", help="cpu:N: N simulated replicas on the CPU; N: N GPUs (default: cpu:2)")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    devices = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices

    keras.utils.set_random_seed(0)
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1) / 16
    x_train, x_test, y_train, y_test = train_test_split(x[y >= 5], y[y >= 5] - 5, test_size=0.2, random_state=0)

    first = MirroredFitter(build_model, devices=devices)
    first.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    first.fit(x[y < 5], y[y < 5], batch_size=32, epochs=arguments.epochs, verbose=2)
    base_weights = first.get_layer("base").get_weights()

    model = MirroredFitter(lambda: build_model_on(base_weights), devices=devices)
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x_train, y_train, batch_size=32, epochs=arguments.epochs, verbose=2)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)

    after = model.get_layer("base").get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(base_weights, after, strict=True)), "the frozen base has changed"
    print(f"the frozen base is unchanged, bit for bit: {len(after)} arrays, {sum(a.size for a in after):,} numbers")
    print(f"replicas: {model.num_replicas}, accuracy on {len(y_test)} digits held out: {accuracy:.4f}")


if __name__ == "__main__":
    main()
