"""MirroredFitter on Keras 2: what is refused before training, what comes out of a file, what stays the user's."""

import importlib
import importlib.util
import json
import pathlib

import numpy as np
import pytest
import stack
import tensorflow as tf
from stack import keras, layers, optimizers

import keras_mirror
from keras_mirror import MirroredFitter

if stack.GENERATION == 3:
    pytest.skip("Keras 2's own", allow_module_level=True)

X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(20, 2)).astype("float32")


def build() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dropout(0.2), layers.Dense(2)])


def fitted(**options: object) -> MirroredFitter:
    model = MirroredFitter(build, devices="cpu:2", seed=1, **options)
    model.compile(optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def test_a_stateful_rnn_is_refused_before_training() -> None:
    def stateful() -> keras.Model:
        return keras.Sequential([layers.LSTM(2, stateful=True, batch_input_shape=(4, 3, 2), name="memory")])

    # Keras says so itself, in a strategy's scope.
    with pytest.raises(ValueError, match="Stateful RNNs"):
        MirroredFitter(stateful, devices="cpu:2")

    def made_so_later() -> keras.Model:
        layer = layers.LSTM(2, batch_input_shape=(4, 3, 2), name="memory")
        model = keras.Sequential([layer])
        layer.stateful = True
        return model

    model = MirroredFitter(made_so_later, devices="cpu:2")
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"the layer 'memory' \(LSTM\) is stateful.*\n.*stateful=False"):
        model.fit(np.zeros((4, 3, 2)), np.zeros((4, 2)), batch_size=4, verbose=0)


@pytest.mark.parametrize("family", ["current", "legacy"])
def test_an_optimizer_that_trained_another_model_is_refused(family: str) -> None:
    optimizer = optimizers.Adam() if family == "current" else optimizers.legacy.Adam()
    other = build()
    other.compile(optimizer, "mse")
    other.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match=r"the optimizer 'Adam' \(Adam\) was already used to train another model"):
        MirroredFitter(build, devices="cpu:2").compile(optimizer, "mse")


def test_what_is_not_there_yet_says_so() -> None:
    with pytest.raises(NotImplementedError, match="SingleCopyCheckpoint isn't there on Keras 2 yet"):
        keras_mirror.SingleCopyCheckpoint  # noqa: B018


def test_verify_says_that_it_is_not_there_yet() -> None:
    with pytest.raises(NotImplementedError, match="verify isn't there on Keras 2 yet"):
        fitted().verify(X, Y)


def test_objects_made_outside_the_scope_stay_the_users() -> None:
    optimizer, metric = optimizers.Adam(0.01), keras.metrics.MeanAbsoluteError(name="error")
    model = MirroredFitter(build, devices="cpu:2")
    model.compile(optimizer, "mse", metrics=[metric])
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
    assert model.optimizer is optimizer
    assert int(optimizer.iterations.numpy()) == 6
    assert float(metric.result().numpy()) == pytest.approx(history["error"][-1])
    optimizer.learning_rate = 0.0
    before = model.get_weights()
    model.fit(X, Y, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_file_is_plain_keras_with_the_optimizers_state(suffix: str, tmp_path: object) -> None:
    model = fitted()
    path = f"{tmp_path}/model{suffix}"
    model.save(path)
    loaded = keras.models.load_model(path)
    np.testing.assert_allclose(model.predict(X, verbose=0), loaded.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    assert type(loaded) is keras.Sequential
    assert "keras_mirror" not in str(loaded.get_config())
    state = [v.numpy() for v in model.optimizer.variables]
    for a, b in zip(state, [v.numpy() for v in loaded.optimizer.variables], strict=True):
        np.testing.assert_array_equal(a, b)
    loaded.fit(X, Y, verbose=0)


def test_a_scale_of_batches_per_replica() -> None:
    """Six examples a batch of each replica are twelve in all, for arrays and for a dataset's batches."""
    seen = []

    class Batches(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            seen.append(self.params["steps"])

    model = fitted(batch="per_replica")
    model.fit(X, Y, batch_size=6, verbose=0, callbacks=[Batches()])
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(6), verbose=0, callbacks=[Batches()])
    assert seen == [2, 2]


def test_a_generator_and_a_sequence_feed_fit() -> None:
    class Data(keras.utils.Sequence):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            return X[5 * index : 5 * index + 5], Y[5 * index : 5 * index + 5]

    def generator():
        for i in range(4):
            yield X[5 * i : 5 * i + 5], Y[5 * i : 5 * i + 5]

    results = []
    for data in (Data(), generator()):
        keras.utils.set_random_seed(3)
        model = MirroredFitter(lambda: keras.Sequential([keras.Input((3,)), layers.Dense(2)]), devices="cpu:2", seed=3)
        model.compile("sgd", "mse")
        history = model.fit(data, verbose=0, shuffle=False, steps_per_epoch=4)
        assert int(model.optimizer.iterations.numpy()) == 4
        results.append((history.history["loss"][0], *model.get_weights()))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_model_outside_the_engine_trains_as_plain_keras_does() -> None:
    """The seams are in place by now, and are the identity without a step."""
    fitted()
    keras.utils.set_random_seed(5)
    model = build()
    model.compile("adam", keras.losses.MeanSquaredError(reduction="sum"), metrics=["mae"])
    first = model.fit(X, Y, batch_size=20, verbose=0).history["loss"][0]
    assert first == pytest.approx(20 * model.history.history["loss"][0] / 20)
    assert not hasattr(model.make_train_function(), "engine")


def test_jit_compile_is_said_to_be_left_out() -> None:
    model = MirroredFitter(build, devices="cpu:2")
    with pytest.warns(UserWarning, match="jit_compile=True was given"):
        model.compile("adam", "mse", jit_compile=True)
    model.fit(X, Y, verbose=0)


FACTORS = [1.0, 5 / 3, 7 / 3, 3.0, 3.0, 3.0]  # Four updates from 1 to 3.


@pytest.mark.parametrize("family", ["current", "legacy"])
def test_a_warmup_scales_each_update(family: str) -> None:
    """With a gradient of 1 at every update the weight loses just the rate, and SGD's is known."""
    kind = optimizers.SGD if family == "current" else optimizers.legacy.SGD

    def one_weight() -> keras.Model:
        return keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def value(y_true: object, y_pred: object) -> object:
        return tf.reduce_mean(y_pred, axis=-1)

    lost = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            lost.append(-float(self.model.get_weights()[0][0, 0]))

    model = MirroredFitter(one_weight, devices="cpu:2")
    model.compile(kind(0.1), value)
    warmup = keras_mirror.LinearScalingWarmup(warmup_steps=4, scale=3.0)
    ones = np.ones((24, 1), "float32")
    history = model.fit(ones, ones, batch_size=4, verbose=0, callbacks=[warmup, Losses()]).history
    np.testing.assert_allclose(np.diff([0.0, *lost]), 0.1 * np.array(FACTORS), rtol=1e-5)
    assert history["effective_learning_rate"] == [pytest.approx(0.3)]
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)
    model.fit(ones, ones, batch_size=24, verbose=0)
    assert -float(model.get_weights()[0][0, 0]) - lost[-1] == pytest.approx(0.1, rel=1e-5)


def test_a_log_has_the_rates_in_effect(tmp_path: pathlib.Path) -> None:
    """Of the optimizer inside a wrapper, of a schedule, of both families, and none where there is none."""
    schedule = optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.01])
    wrapped = optimizers.LossScaleOptimizer(optimizers.legacy.SGD(schedule), initial_scale=8.0)
    wanted: list[tuple[object, list[float]]] = [
        (optimizers.SGD(schedule), [0.1] * 4 + [0.01] * 2),
        (wrapped, [0.1] * 4 + [0.01] * 2),
        (optimizers.legacy.SGD(0.1, decay=1.0), [0.1 / (1 + step) for step in range(6)]),
    ]
    if importlib.util.find_spec("tensorflow_addons") is not None:
        tfa = importlib.import_module("tensorflow_addons")
        wanted += [(tfa.optimizers.Lookahead(optimizers.legacy.SGD(0.2)), [0.2] * 6), (tfa.optimizers.COCOB(), [])]
    for number, (optimizer, rates) in enumerate(wanted):
        model = MirroredFitter(build, devices="cpu:2")
        model.compile(optimizer, "mse")
        path = tmp_path / f"{number}.jsonl"
        logger = keras_mirror.RankZeroLogger(1, console=False, jsonl=path)
        model.fit(X[:18], Y[:18], batch_size=3, verbose=0, callbacks=[logger])
        steps = [each for each in map(json.loads, path.read_text().splitlines()) if each["event"] == "step"]
        assert len(steps) == 6
        assert [each["learning_rate"] for each in steps if "learning_rate" in each] == pytest.approx(rates)
