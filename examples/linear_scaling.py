"""As plain_classifier.py, but for the batch: eight times the batch, eight times the learning rate, reached gradually.

Trains a classifier of handwritten digits with a batch of 32 on one device, then with 32 on each replica: first with
LinearScalingWarmup, then with the rate that was right for one device.
"""

from __future__ import annotations

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_mirror import LinearScalingWarmup, MirroredFitter

RATE, BATCH = 0.01, 32


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64),
            # The default momentum of 0.99 wants several hundred updates: more than a run with large batches has.
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def make_optimizer() -> keras.Optimizer:
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9, weight_decay=1e-3)
    # No decay on biases, nor on BatchNormalization's gamma and beta.
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def accuracy(devices: int | str, epochs: int, seed: int, callbacks: list[keras.callbacks.Callback]) -> float:
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=seed, stratify=y)
    model = MirroredFitter(build_model, devices=devices, batch="per_replica", seed=seed)
    model.compile(make_optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=5)
    model.fit(x_train, y_train, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks)
    return float(model.evaluate(x_test, y_test, verbose=0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:8", help="cpu:N: N simulated replicas on the CPU; N: N GPUs (default: cpu:8)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1, help="how many times to train, each with a split of its own")
    arguments = parser.parse_args()
    devices = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices
    one = 1 if isinstance(devices, int) else "cpu:1"

    # TensorFlow makes its simulated replicas once: the larger number first.
    warmup = LinearScalingWarmup(warmup_epochs=5)
    fitter = MirroredFitter(build_model, devices=devices, batch="per_replica")
    fitter.compile(make_optimizer(), "sparse_categorical_crossentropy")
    print(*warmup.plot(fitter, epochs=arguments.epochs, steps_per_epoch=-(-1437 // (BATCH * fitter.num_replicas))), sep="\n")

    runs = {
        f"batch {BATCH} on one device": (one, []),
        f"batch {BATCH} on each of {fitter.num_replicas} replicas, scaled": (devices, [warmup]),
        f"batch {BATCH} on each of {fitter.num_replicas} replicas, not scaled": (devices, []),
    }
    for name, (where, callbacks) in runs.items():
        reached = [accuracy(where, arguments.epochs, seed, callbacks) for seed in range(arguments.seeds)]
        each = f" ({', '.join(f'{value:.4f}' for value in reached)})" if len(reached) > 1 else ""
        print(f"{name}: accuracy {sum(reached) / len(reached):.4f}{each}", flush=True)


if __name__ == "__main__":
    main()
