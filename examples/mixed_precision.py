"""Mixed precision by one argument: digits in float16, with the loss scale and the skipped steps in the log."""

from __future__ import annotations

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_mirror import LossScaleMonitor, MirroredFitter


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.BatchNormalization(),
            # The output stays in float32: a softmax in float16 holds no small probability.
            keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:2", help="cpu:N: N simulated replicas on the CPU; N: N GPUs (default: cpu:2)")
    parser.add_argument("--precision", default="mixed_float16", help="float32, mixed_float16, mixed_bfloat16 or auto")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    devices = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices

    keras.utils.set_random_seed(0)
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)

    model = MirroredFitter(build_model, devices=devices, precision=arguments.precision)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x_train, y_train, batch_size=32, epochs=arguments.epochs, verbose=2, callbacks=[LossScaleMonitor()])
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    for scaling in model.loss_scaling:
        print(f"loss scale {scaling.scale:g}, {scaling.skipped} of {scaling.steps} steps skipped")
    print(f"replicas: {model.num_replicas}, accuracy on {len(y_test)} digits held out: {accuracy:.4f}")


if __name__ == "__main__":
    main()
