"""Stops a training run whose loss scaling leads nowhere, and names the layer where the numbers go wrong."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_mirror.engine import data
from keras_mirror.engine.build import BuildStep
from keras_mirror.engine.precision import Counts
from keras_mirror.seams import gate, generation, loss_scale
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine


_CURES = (
    "Look at the data, and at that layer's weights and what it computes (a division by 0, the logarithm of 0, a learning rate"
    ' too high), or let it compute in float32: pass it dtype="float32". precision="mixed_bfloat16" has float32\'s range.'
)


def stop_if_hopeless(engine: Engine, iterator: Any, last: Any = None) -> None:
    """Raises after steps whose gradients weren't finite, when a smaller loss scale can't be the cure.

    Args:
        engine: the model's engine.
        iterator: what the execution drew its batches from; one more is drawn to look at, since training is over.
        last: the batch of the last step, where it is at hand.

    Raises:
        FloatingPointError: 50 steps in a row were skipped, or two in a row with the loss scale at its floor.
    """
    counts = engine.loss_scales.hopeless()
    if counts is None:
        return
    found = counts.read()
    batch = _next(iterator) if last is None else last
    where = [None if batch is None else _first_bad_value(engine.model, batch), _first_bad_gradient(counts)]
    counts.start_again()
    initial = loss_scale.initial_scale(counts.optimizer)
    raise FloatingPointError(
        f"MirroredFitter: {found.skipped_in_a_row} steps in a row were skipped, since gradients weren't finite; the loss scale"
        f" of {found.optimizer!r} has come down to {found.scale:g}, and a smaller one can't help.\n"
        + "".join(f"{each}\n" for each in where if each)
        + f"{_CURES}\nThe weights are those of the last good step; the loss scale is {initial:g} again."
    )


def _next(iterator: Any) -> Any:
    if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        batch = iterator.get_next_as_optional()
        return batch.get_value() if batch.has_value() else None
    return next(iter(iterator), None)


def _first_bad_gradient(counts: Counts) -> str:
    path, bad, of = counts.bad_gradients
    return (
        f"In the last of them {bad} of {of} gradients weren't finite. In the backward pass, which runs from the model's end to"
        f" its start, the first was that of {path!r}."
    )


def _first_bad_value(model: keras.Model, batch: Any) -> str | None:
    """Says which part of the batch, or which layer's output, is the first that isn't finite; None where all of it is."""
    batch = data.without_optionals(data.first_local(batch))
    names = ("inputs", "targets", "sample weights")
    parts = generation.unpack(batch)
    for name, part in zip(names, parts, strict=True):
        if not _finite(part):
            return f"The {name} of the batch that was looked at hold NaN or inf themselves."
    seen: list[keras.layers.Layer] = []
    with _watched(model, seen), gate.entered(BuildStep()), generation.stateless(model), tf.init_scope():
        try:
            model(parts[0], training=True)
        except Exception:
            # A model that only has a train_step, or takes its inputs in another form: the gradients are told instead.
            return None
    if not seen:
        return None
    layer = seen[0]
    name = generation.layer_path(layer)
    return f"In the batch that was looked at, the first layer whose output isn't finite is {name!r} ({type(layer).__name__})."


@contextlib.contextmanager
def _watched(model: keras.Model, seen: list[keras.layers.Layer]) -> Iterator[None]:
    """While entered, every layer of which an output isn't finite adds itself to `seen`, inner layers before outer ones."""
    watched = [layer for layer in generation.sublayers(model) if "call" not in vars(layer)]

    def watch(layer: keras.layers.Layer) -> None:
        original = layer.call

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            if not _finite(outputs):
                seen.append(layer)
            return outputs

        vars(layer)["call"] = call

    try:
        for layer in watched:
            watch(layer)
        yield
    finally:
        for layer in watched:
            vars(layer).pop("call", None)


def _finite(values: Any) -> bool:
    for value in keras.tree.flatten(values):
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            value = value.flat_values if isinstance(value, tf.RaggedTensor) else value.values
        is_floating = value is not None and tf.is_tensor(value) and value.dtype.is_floating
        if is_floating and not np.all(np.isfinite(tf.cast(value, tf.float64).numpy())):
            return False
    return True
