"""Datasets of one replica's batches, joined to global ones."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def joined(dataset: tf.data.Dataset, times: int) -> tf.data.Dataset:
    """A dataset whose batches are `times` consecutive ones each, one after the other; the last may be fewer.

    Nothing is drawn before it is asked for; structure, dtypes and inner dimensions stay, and so does what is known of the length.
    The batch dimension is open, since the last batch may be smaller.

    Args:
        dataset: batches of any sizes; their tensors may be dense, ragged, sparse or strings.
        times: how many make one.
    """
    spec = dataset.element_spec

    def join(*window: Any) -> Any:
        parts = window[0] if len(window) == 1 and type(spec) is not tuple else window
        together: Any = tf.data.Dataset.zip(parts) if tf.nest.is_nested(spec) else parts
        return tf.data.Dataset.get_single_element(together.rebatch(_ALL))

    return dataset.window(times).map(join, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# More rows than any batch has: rebatching to it concatenates.
_ALL = 2**40
