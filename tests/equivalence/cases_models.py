"""Rows about models: how they are built, their layers and layers' state, inputs of every kind, frozen parts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from harness import Case
from parts import dense, regression
from stack import keras, layers, ops, regularizers


def row(name: str, model: Callable[[], keras.Model], data: Any = regression, **more: Any) -> Case:
    options: dict[str, Any] = {"optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.5), "loss": "mse", **more}
    optimizer, loss, given = options.pop("optimizer"), options.pop("loss"), options.pop("compile", {})
    return Case(name=name, model=model, data=data, compile=lambda: {"optimizer": optimizer(), "loss": loss, **given}, **options)


def stack(shape: tuple[Any, ...], *made: Callable[[], Any], **more: Any) -> Callable[[], keras.Model]:
    """A Sequential of layers made anew for each model, with two outputs."""
    return lambda: keras.Sequential([keras.Input(shape, **more), *(make() for make in made), layers.Dense(2)])


def images(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return rng.normal(size=(rows, 4, 4, 2)), rng.normal(size=(rows, 2))


def sequences(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return rng.normal(size=(rows, 5, 3)), rng.normal(size=(rows, 2))


# -- how a model is built


def functional() -> keras.Model:
    """Two inputs, a shared layer, a nested model and a skip connection."""
    x, z = keras.Input((3,), name="x"), keras.Input((3,), name="z")
    shared = layers.Dense(4, "tanh")
    nested = keras.Sequential([keras.Input((4,)), layers.Dense(4, "tanh")], name="nested")
    h = layers.Add()([shared(x), nested(shared(z))])
    return keras.Model({"x": x, "z": z}, layers.Dense(2)(layers.Concatenate()([h, x])))


def two_inputs_two_outputs() -> keras.Model:
    x, z = keras.Input((3,)), keras.Input((2,))
    h = layers.Dense(4, "tanh")(layers.Concatenate()([x, z]))
    return keras.Model([x, z], [layers.Dense(2, name="a")(h), layers.Dense(1, name="b")(h)])


class Subclassed(keras.Model):
    """Unbuilt until it sees data; takes a dictionary, `training` and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, "tanh")
        self.blocks = [layers.Dense(4, "tanh"), layers.LayerNormalization()]
        self.a, self.b = layers.Dense(2), layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        h = self.hidden(ops.concatenate([inputs["x"], inputs["z"]], axis=-1))
        for block in self.blocks:
            h = block(h)
        return {"a": self.a(h), "b": self.b(h) * (2.0 if training else 1.0)}


BUILDS = [
    row("Sequential", dense(), predict=True, evaluate=True, replicas=(2, 3, 4)),
    row("Sequential-unbuilt", lambda: keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2)]), predict=True, evaluate=True),
    row(
        "functional-nested-shared-dict-of-inputs",
        functional,
        lambda rng, rows: ({"x": rng.normal(size=(rows, 3)), "z": rng.normal(size=(rows, 3))}, rng.normal(size=(rows, 2))),
        predict=True,
    ),
    row(
        "functional-lists-of-inputs-and-outputs",
        two_inputs_two_outputs,
        lambda rng, rows: (
            (rng.normal(size=(rows, 3)), rng.normal(size=(rows, 2))),
            (rng.normal(size=(rows, 2)), rng.normal(size=(rows, 1))),
        ),
        loss=["mse", "mae"],
        predict=True,
        evaluate=True,
    ),
    row(
        "subclassed-dicts-of-inputs-and-outputs",
        Subclassed,
        lambda rng, rows: (
            {"x": rng.normal(size=(rows, 3)), "z": rng.normal(size=(rows, 2))},
            {"a": rng.normal(size=(rows, 2)), "b": rng.normal(size=(rows, 1))},
        ),
        loss={"a": "mse", "b": "mae"},
        predict=True,
        evaluate=True,
        replicas=(2, 3, 4),
    ),
    row("run_eagerly", dense(), compile={"run_eagerly": True, "metrics": ["mae"]}, evaluate=True, predict=True),
]

# -- layers that compute from a batch alone

LAYERS = [
    row(
        "layers-convolution",
        stack((4, 4, 2), lambda: layers.Conv2D(2, 3, activation="tanh"), layers.MaxPooling2D, layers.Flatten),
        images,
    ),
    row(
        "layers-LSTM-GRU",
        stack((5, 3), lambda: layers.Bidirectional(layers.LSTM(2, return_sequences=True)), lambda: layers.GRU(2)),
        sequences,
    ),
    row(
        "layers-attention",
        lambda: _attention(),
        sequences,
    ),
    row(
        "layers-normalisation-of-examples",
        stack(
            (4, 4, 2), lambda: layers.GroupNormalization(2), layers.LayerNormalization, layers.Flatten, layers.UnitNormalization
        ),
        images,
    ),
    row("layers-masked-LSTM", lambda: _masked_lstm(), lambda rng, rows: (_padded(rng, rows), rng.normal(size=(rows, 2)))),
]


def _attention() -> keras.Model:
    x = keras.Input((5, 3))
    return keras.Model(x, layers.Dense(2)(layers.GlobalMaxPooling1D()(layers.MultiHeadAttention(2, 2)(x, x) + x)))


def _masked_lstm() -> keras.Model:
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(6, 3, mask_zero=True), layers.LSTM(3), layers.Dense(2)]
    )


def _padded(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(1, 6, (rows, 5)) * (np.arange(5) < rng.integers(1, 6, rows)[:, None])


# -- layers with state that the forward pass writes


class RunningMean(layers.Layer):
    """Keeps a running mean of its inputs and a count of calls in training; takes off the mean of the steps before."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        before = ops.copy(self.mean)
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
            self.calls.assign_add(1)
        return inputs - before


@tf.function
def _weighted_sum(inputs: Any, weight: Any) -> Any:
    return tf.reduce_sum(inputs * weight, axis=-1, keepdims=True)


class TwoWeightsOneFunction(layers.Layer):
    """Calls one tf.function with two weights of one shape: TensorFlow itself hands the second call the first one's trace."""

    def build(self, shape: Any) -> None:
        self.first = self.add_weight(name="first", shape=(shape[-1],), initializer="zeros")
        self.second = self.add_weight(name="second", shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        weights = [w if callable(w.value) else w.value for w in (self.first, self.second)]  # the TensorFlow variables
        return tf.concat([_weighted_sum(inputs, weight) for weight in weights], -1)


def synchronised(**more: Any) -> layers.Layer:
    return layers.BatchNormalization(momentum=0.8, synchronized=True, **more)


def bn_with_mask() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(6, 3, mask_zero=True),
            synchronised(),
            layers.LSTM(2),
            layers.Dense(2),
        ]
    )


STATE = [
    row(
        "BatchNormalization-synchronized",
        stack((3,), lambda: layers.Dense(4, "tanh"), synchronised),
        evaluate=True,
        predict=True,
        replicas=(2, 3, 4),
    ),
    row(
        "BatchNormalization-synchronized-convolution",
        stack((4, 4, 2), lambda: layers.Conv2D(2, 3), synchronised, layers.ReLU, layers.GlobalAveragePooling2D),
        images,
    ),
    row(
        "BatchNormalization-synchronized-activity_regularizer",
        stack(
            (3,),
            lambda: layers.Dense(4, "tanh", activity_regularizer="l2"),
            synchronised,
            lambda: layers.Dense(3, activity_regularizer="l2"),
        ),
        replicas=(2, 3, 4),
    ),
    row(
        "BatchNormalization-synchronized-mask",
        bn_with_mask,
        lambda rng, rows: (_padded(rng, rows), rng.normal(size=(rows, 2))),
        replicas=(2, 3, 4),
    ),
    row("BatchNormalization-frozen", lambda: _frozen_bn(), evaluate=True),
    row(
        "layer-with-state-of-its-own",
        stack((3,), RunningMean, lambda: layers.Dense(4, "tanh")),
        evaluate=True,
        replicas=(2, 3, 4),
    ),
    row("layer-with-two-weights-to-one-tf.function", stack((3,), TwoWeightsOneFunction, lambda: layers.Dense(4, "tanh"))),
    row("layer-SpectralNormalization", stack((3,), lambda: layers.SpectralNormalization(layers.Dense(4, "tanh")))),
]


def _frozen_bn() -> keras.Model:
    bn = layers.BatchNormalization()
    bn.trainable = False
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), bn, layers.Dense(2)])


# -- parts that aren't trained


def frozen_part() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh", kernel_regularizer="l2"), layers.Dense(2)])
    model.layers[0].trainable = False
    return model


def transfer() -> keras.Model:
    """A base of keras.applications, frozen and run in inference mode, under a new head."""
    base = keras.applications.MobileNet(input_shape=(32, 32, 3), alpha=0.25, weights=None, include_top=False, pooling="avg")
    base.trainable = False
    x = keras.Input((32, 32, 3))
    return keras.Model(x, layers.Dense(2)(base(x, training=False)))


FROZEN = [
    row("frozen-part", frozen_part, optimizer=lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, use_ema=True)),
    row(
        "transfer-from-keras.applications",
        transfer,
        lambda rng, rows: (rng.uniform(0, 1, (rows, 32, 32, 3)), rng.normal(size=(rows, 2))),
        sizes=(4, 3, 1),
        epochs=1,
        steps_per_execution=1,
        optimizer=lambda: keras.optimizers.Adam(0.05),
    ),
]

# -- inputs that aren't dense numbers

WORDS = ("a", "b", "c", "d", "e")


def lookup() -> keras.Model:
    x = keras.Input((3,), dtype="string")
    ids = layers.StringLookup(vocabulary=list(WORDS[:4]))(x)
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(layers.Embedding(5, 2)(ids))))


def vectorised() -> keras.Model:
    x = keras.Input((1,), dtype="string")
    ids = layers.TextVectorization(vocabulary=list(WORDS[:4]), output_sequence_length=4)(x)
    return keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(layers.Embedding(6, 2, mask_zero=True)(ids))))


def words(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return np.array(WORDS)[rng.integers(0, 5, (rows, 3))], rng.normal(size=(rows, 2))


def texts(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    made = [" ".join(np.array(WORDS)[rng.integers(0, 5, rng.integers(1, 6))]) for _ in range(rows)]
    return np.array(made)[:, None], rng.normal(size=(rows, 2))


class Ragged(keras.Model):
    """Sums embeddings over rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = layers.Embedding(6, 3), layers.Dense(2)
        self.embedding.build((None,))
        self.head.build((None, 3))

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, tf.RaggedTensor):
            return self.head(
                tf.reduce_sum(
                    self.embedding(inputs.to_tensor()) * tf.cast(tf.sequence_mask(inputs.row_lengths()), "float64")[..., None],
                    axis=1,
                )
            )
        return self.head(ops.sum(self.embedding(inputs), axis=1))


def ragged(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    lengths = rng.integers(1, 5, rows)
    return tf.RaggedTensor.from_row_lengths(rng.integers(1, 6, lengths.sum()), lengths), rng.normal(size=(rows, 2))


def sparse(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    values = rng.normal(size=(rows, 6)) * (rng.uniform(size=(rows, 6)) < 0.4)
    return tf.sparse.from_dense(values), rng.normal(size=(rows, 2))


INPUTS = [
    row("inputs-strings-StringLookup", lookup, words, predict=True),
    row("inputs-strings-TextVectorization", vectorised, texts, predict=True, evaluate=True),
    row("inputs-ragged", Ragged, ragged, predict=True),
    row("inputs-sparse", stack((6,), lambda: layers.Dense(4, "tanh"), sparse=True), sparse, predict=True),
    row(
        "inputs-Normalization-adapted",
        lambda: _adapted(),
        evaluate=True,
    ),
    row(
        "inputs-integers-and-numbers-of-other-ranks",
        lambda: _mixed_ranks(),
        lambda rng, rows: (
            {
                "id": rng.integers(0, 5, rows),
                "x": rng.normal(size=(rows, 2, 3)),
                "flag": rng.integers(0, 2, (rows, 1)).astype(bool),
            },
            rng.normal(size=(rows, 2)),
        ),
        predict=True,
    ),
]


def _adapted() -> keras.Model:
    normalization = layers.Normalization()
    normalization.adapt(np.random.default_rng(0).normal(1.0, 2.0, (20, 3)))
    return keras.Sequential([keras.Input((3,)), normalization, layers.Dense(2, kernel_regularizer=regularizers.L2(0.1))])


def _mixed_ranks() -> keras.Model:
    number, x, flag = (
        keras.Input((), dtype="int32", name="id"),
        keras.Input((2, 3), name="x"),
        keras.Input((1,), dtype="bool", name="flag"),
    )
    h = layers.Concatenate()([layers.Embedding(5, 2)(number), layers.Flatten()(x), ops.cast(flag, "float64")])
    return keras.Model({"id": number, "x": x, "flag": flag}, layers.Dense(2)(h))


CASES = [*BUILDS, *LAYERS, *STATE, *FROZEN, *INPUTS]
