"""Keras outside the engine is as it was: plain models train to the same bits with the seams in place and without."""

import json

import pytest
from fresh_process import run

TRAIN = """
import hashlib, json, sys
import keras, numpy as np, tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
if sys.argv[1] == "with":
    from keras_mirror import seams
    seams.install()
x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
y = x.sum(1, keepdims=True)
words = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [2, 2, 1, 0], [1, 0, 0, 0]] * 3)

def dense(*layers, outputs=1):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), *layers, keras.layers.Dense(outputs)])

class Own(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2) + keras.random.uniform(())
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}

def plain():
    model = dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.ActivityRegularization(0.1))
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5), "mse", metrics=["mae", "mse"])
    return model, x, y

def accumulating():
    model = dense()
    model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2), "mse")
    return model, x, y

def scaled():
    model = dense()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0), "mae")
    return model, x, y

def masked():
    model = keras.Sequential([keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.LSTM(2, return_sequences=True)])
    model.compile("adam", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), weighted_metrics=["mae"])
    return model, words, np.ones((12, 4, 2), "float32")

def own():
    model = Own([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("nadam", "mse")
    return model, x, y

def small():
    model = dense(keras.layers.Dropout(0.3))
    model.compile("adam", "mse", metrics=["mae"])
    return model, x, y

def digest(make):
    keras.utils.set_random_seed(5)
    model, inputs, targets = make()
    history = model.fit(inputs, targets, batch_size=4, epochs=3, verbose=0).history
    model.evaluate(inputs, targets, verbose=0)
    values = [*model.get_weights(), *[keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]]
    total = hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in values)).hexdigest()
    return [total, {k: [float(v).hex() for v in vs] for k, vs in history.items()}]

found = {make.__name__: digest(make) for make in (plain, accumulating, scaled, masked, own)}
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
with strategy.scope():
    found["mirrored strategy"] = digest(small)
keras.utils.set_random_seed(5)
found["random"] = np.asarray(keras.random.uniform((3,))).tolist()
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def results():
    environment = {"KERAS_BACKEND": "tensorflow", "TF_DETERMINISTIC_OPS": "1"}
    return {how: json.loads(run(TRAIN, how, **environment).split("RESULT")[1]) for how in ("with", "without")}


@pytest.mark.parametrize("case", ["plain", "accumulating", "scaled", "masked", "own", "mirrored strategy", "random"])
def test_plain_keras_trains_to_the_same_bits_with_the_seams_in_place(results, case):
    assert results["with"][case] == results["without"][case]
