"""As plain_classifier.py, but for a model with a train step of its own: a variational autoencoder of handwritten digits.

Its losses are the model's own means over the batch. Nothing in the class knows of replicas: in `train_step` the batch is a
replica's share, and keras_mirror makes the means and their gradient those of the global batch.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_mirror import MirroredFitter


class VAE(keras.Model):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(2 * latent)]
        )
        self.decoder = keras.Sequential(
            [keras.Input((latent,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(64, activation="sigmoid")]
        )
        self.seeds = keras.random.SeedGenerator(0)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "kl")]

    def losses_of(self, x: Any) -> tuple[Any, Any, Any]:
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        z = mean + ops.exp(log_variance / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)
        x_again = ops.clip(self.decoder(z), 1e-6, 1 - 1e-6)
        reconstruction = -ops.mean(ops.sum(x * ops.log(x_again) + (1 - x) * ops.log(1 - x_again), axis=-1))
        kl = 0.5 * ops.mean(ops.sum(ops.square(mean) + ops.exp(log_variance) - log_variance - 1, axis=-1))
        return reconstruction + kl, reconstruction, kl

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            losses = self.losses_of(x)
        gradients = tape.gradient(losses[0], self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.track(losses)

    def test_step(self, x: Any) -> dict[str, Any]:
        return self.track(self.losses_of(x))

    def track(self, losses: tuple[Any, Any, Any]) -> dict[str, Any]:
        for tracker, value in zip(self.trackers, losses, strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.trackers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:2", help="cpu:N: N simulated replicas on the CPU; N: N GPUs (default: cpu:2)")
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    devices = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices

    keras.utils.set_random_seed(0)
    x = load_digits().data.astype("float32") / 16
    x_train, x_test = train_test_split(x, test_size=0.2, random_state=0)

    # On one device this line is: model = VAE()
    model = MirroredFitter(VAE, devices=devices)
    model.compile(keras.optimizers.Adam(2e-3))
    model.fit(x_train, batch_size=32, epochs=arguments.epochs, verbose=2)
    logs = model.evaluate(x_test, verbose=0, return_dict=True)
    parts = f"reconstruction {logs['reconstruction']:.3f}, kl {logs['kl']:.3f}"
    print(f"replicas: {model.num_replicas}, loss on {len(x_test)} digits held out: {logs['loss']:.3f} ({parts})")


if __name__ == "__main__":
    main()
