"""A model whose every update has a known gradient, so that what its weight loses is the rate that the optimizer used."""

import keras
import numpy as np
import tensorflow as tf


class Observed(keras.Model):
    """Its weight is put to 0 before every batch and noted after it: with gradient 1, minus the note is the rate, exactly.

    A batch is one number, which is added to the gradient of 1.

    Args:
        batches: how many batches are noted.
    """

    def __init__(self, batches=64):
        super().__init__(dtype=keras.config.floatx())
        self.w = self.add_weight(shape=(), initializer="zeros")
        self.batch = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
        self.notes = self.add_weight(shape=(batches,), initializer="zeros", trainable=False)
        self.built = True

    def call(self, x):
        return x

    def optimizers(self):
        """Whose updates are noted, one after the other."""
        return [self.optimizer]

    def train_step(self, data):
        for optimizer in self.optimizers():
            self.w.assign(0.0)
            gradient = 1.0 + tf.cast(tf.reduce_mean(data), self.w.dtype)
            optimizer.apply([optimizer.scale_loss(gradient)], [self.w])
            here = tf.one_hot(self.batch.value, self.notes.shape[0], dtype=self.notes.dtype)
            self.notes.assign_add(-self.w.value * here)
            self.batch.assign_add(1)
        return {"loss": tf.identity(self.w.value)}

    def rates(self):
        """The rate of each update so far; batches that were accumulated or skipped have none."""
        notes = self.notes.numpy()[: int(self.batch.numpy())]
        return notes[notes != 0]


def data(batches):
    """Batches of one number each, length known: that many zeros, or these numbers."""
    numbers = np.zeros(batches) if isinstance(batches, int) else np.asarray(batches, "float64")
    return tf.data.Dataset.from_tensor_slices(numbers[:, None]).batch(1)
