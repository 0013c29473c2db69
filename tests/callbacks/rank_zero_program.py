"""One of two workers: fits with callbacks on the first worker only, and prints what came of it as JSON.

Plain Keras 2 (MultiWorkerMirroredStrategy runs there as it is), or MirroredFitter on Keras 3.
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Before anything else touches a device.

import keras  # noqa: E402

from keras_mirror import RankZero, RankZeroLogger, get_logger, rank_zero_only  # noqa: E402

KERAS_2 = keras.__version__.startswith("2")
folder, worker = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
x, y = rng.normal(size=(24, 6)).astype("float32"), rng.integers(0, 3, size=24)
normalized = False


def build():
    layers = keras.layers
    keras.utils.set_random_seed(1)
    middle = [layers.BatchNormalization()] if normalized else []
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), *middle, layers.Dense(3, "softmax")])


def fit(*callbacks, epochs=6, engine=not KERAS_2):
    if engine:
        from keras_mirror import MirroredFitter

        model = MirroredFitter(build, strategy=strategy, seed=1)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        data = {"x": x, "y": y, "batch_size": 8}
    else:
        with strategy.scope():
            model = build()
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = {"x": dataset.with_options(options)}
    history = model.fit(**data, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return {
        "epochs": history.epoch,
        "weights": [w.tolist() for w in model.get_weights()],
        "rate": float(tf.convert_to_tensor(model.optimizer.learning_rate)),
        "loss": history.history["loss"],
    }


class Once(keras.callbacks.Callback):
    """Does something at one moment; where that is a batch, at the fourth."""

    def __init__(self, action):
        super().__init__()
        self.action, self.batches = action, 0


class AtBatch(Once):
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 4:
            self.action(self.model)


class AtTest(Once):
    def on_epoch_begin(self, epoch, logs=None):
        pass

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1
        if self.batches == 4:
            self.action(self.model)


class AtEpoch(Once):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.action(self.model)


def stop(model):
    model.stop_training = True


def slower(model):
    model.optimizer.learning_rate = 0.05


def zero_weights(model):
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])


def fail(model):
    raise OSError("the disk is full")


def error(*callbacks):
    try:
        fit(*callbacks)
    except (OSError, RuntimeError, ValueError) as found:
        return f"{type(found).__name__}: {found}"


out = {}
log = keras.callbacks.CSVLogger(os.path.join(folder, "log.csv"))
board = keras.callbacks.TensorBoard(os.path.join(folder, "board"))
out["logged"] = fit(RankZero(log), RankZero(board))
out["bare"] = fit()
out["stopped"] = fit(RankZero(keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0, restore_best_weights=True)))
out["scheduled"] = fit(RankZero(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)))
out["stopped_in_batch"] = fit(RankZero(AtBatch(stop)))
out["stopped_after_epoch"] = fit(RankZero(AtBatch(stop), decides="epoch"))
out["slower_in_batch"] = fit(RankZero(AtBatch(slower)))
out["zeroed"] = fit(RankZero(AtEpoch(zero_weights)), epochs=2)
out["failed_in_epoch"] = error(RankZero(AtEpoch(fail)))
out["failed_in_batch"] = error(RankZero(AtTest(fail), decides="epoch"))
out["logger"] = fit(RankZeroLogger(1, jsonl=os.path.join(folder, "log.jsonl")))
out["cant_log"] = error(RankZeroLogger(1, jsonl=os.path.join(folder, "log.csv", "log.jsonl")))
normalized = True
best = os.path.join(folder, "best.keras")
stopping = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0, restore_best_weights=True)
saving = keras.callbacks.ModelCheckpoint(best, monitor="loss", save_best_only=True)
if KERAS_2:
    out["refused"] = error(RankZero(stopping))
    out["refused_saving"] = error(RankZero(saving))
else:
    out["normalized"] = fit(RankZero(stopping), RankZero(saving))
logger = get_logger("program", strategy=strategy)
logger.warning("once")
logger.warning("in turn", workers="in_order")
out["function"] = rank_zero_only(lambda: "ran", default="left")()
print("RESULT" + json.dumps(out))
