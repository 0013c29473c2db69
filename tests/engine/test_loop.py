"""The compiled functions that Keras's own loop calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_mirror import MirroredFitter

X = np.random.default_rng(0).normal(size=(19, 3)).astype("float32")
Y = X.sum(1)


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_epoch_with_a_partial_last_batch_is_traced_at_most_twice(replicas, steps_per_execution):
    model = MirroredFitter(build, devices=[f"CPU:{i}" for i in range(replicas)])
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    model.evaluate(X, Y, batch_size=4, verbose=0)
    assert model.train_function.traces <= 2
    assert model.test_function.traces <= 2


def test_predict_is_not_traced_anew_for_a_partial_last_batch():
    model = MirroredFitter(build, devices=["CPU:0", "CPU:1"])
    for rows in (19, 18, 17, 5, 1):
        assert model.predict(X[:rows], batch_size=4, verbose=0).shape == (rows, 1)
    assert model.predict_function.traces == 1


@pytest.mark.parametrize("replicas", [2, 4])
def test_predictions_come_in_the_order_of_the_inputs(replicas):
    model = MirroredFitter(build, devices=[f"CPU:{i}" for i in range(replicas)])
    expected = model.model(X).numpy()
    for batch_size in (1, 3, 4, 19, 32):
        np.testing.assert_allclose(model.predict(X, batch_size=batch_size, verbose=0), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model.predict_on_batch(X[:batch_size]), expected[:batch_size], rtol=1e-5, atol=1e-6)


class Counter(keras.Model):
    """Counts what it is trained on."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = keras.metrics.Sum(name="seen")
        self.rows = keras.metrics.Sum(name="rows")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        self.seen.update_state(y)
        self.rows.update_state(tf.ones_like(y))
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x)[:, 0] - y) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True))
        return {"seen": self.seen.result(), "rows": self.rows.result(), "loss": loss}


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("examples", [1, 2, 3, 8, 9, 19])
def test_each_example_is_trained_on_exactly_once_an_epoch(examples, replicas):
    model = MirroredFitter(Counter, devices=[f"CPU:{i}" for i in range(replicas)])
    model.compile("sgd")
    values = 2.0 ** np.arange(examples) if examples < 20 else np.ones(examples)
    history = model.fit(X[:examples], values.astype("float32"), batch_size=4, epochs=2, verbose=0, shuffle=True)
    assert history.history["rows"] == [examples, examples]
    assert history.history["seen"] == [2.0**examples - 1] * 2


def test_a_generator_is_trained_on_from_its_first_batch():
    model = MirroredFitter(Counter, devices=["CPU:0", "CPU:1"])
    model.compile("sgd")

    def batches():
        for i in range(5):
            yield X[: 3 + i], np.full(3 + i, 10.0**i, "float32")

    history = model.fit(batches(), epochs=1, verbose=0)
    assert history.history["seen"] == [3 + 40 + 500 + 6000 + 70000]


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("batches", [3, 4])
def test_nothing_is_updated_once_more_at_the_end_of_data_of_unknown_length(batches, steps_per_execution):
    def generator():
        for i in range(batches):
            yield X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]

    def fit(model, data):
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.5), "mse", steps_per_execution=steps_per_execution)
        model.fit(data, verbose=0, shuffle=False)
        return model

    model = MirroredFitter(build, devices=["CPU:0", "CPU:1"], seed=1)
    start = model.get_weights()
    fit(model, generator())
    assert int(model.optimizer.iterations) == batches
    known = MirroredFitter(build, devices=["CPU:0", "CPU:1"], seed=1)
    known.set_weights(start)
    fit(known, tf.data.Dataset.from_tensor_slices((X[: 4 * batches], Y[: 4 * batches])).batch(4))
    for mine, theirs in zip(model.get_weights(), known.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_a_dataset_that_the_user_distributed_gives_each_replica_what_it_was_given():
    def fit(distribute):
        model = MirroredFitter(build, devices=["CPU:0", "CPU:1", "CPU:2"], seed=1)
        model.compile("adam", "mse")
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
        data = model.strategy.experimental_distribute_dataset(data) if distribute else data
        history = model.fit(data, epochs=2, verbose=0, shuffle=False)
        return history.history["loss"], model.get_weights()

    mine, whole = fit(True), fit(False)
    np.testing.assert_allclose(mine[0], whole[0], rtol=1e-6)
    for a, b in zip(mine[1], whole[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
