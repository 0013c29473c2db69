"""A small training run that can be killed, gone on with and compared bit by bit."""

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import LinearScalingWarmup, MirroredFitter, SingleCopyCheckpoint

ROWS, BATCH, EPOCHS = 70, 8, 3
STEPS = -(-ROWS // BATCH)
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(ROWS, 6)).astype("float32")
Y = _RNG.integers(0, 3, size=ROWS)


class Crash(Exception):
    """Stands for whatever ends a process."""


class CrashAt(keras.callbacks.Callback):
    """Raises when `at` batches were trained on, counted over all epochs of this fit."""

    def __init__(self, at):
        super().__init__()
        self.at, self.seen = at, 0

    def get_state(self):
        return None

    def set_state(self, state):
        """Counts this fit only."""

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.at:
            raise Crash


class Batches(keras.utils.PyDataset):
    """Batches by position; shuffles its rows between epochs, from a seed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rng, self.order, self.asked = np.random.default_rng(5), np.arange(ROWS), []

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        self.asked.append(index)
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.order = self.rng.permutation(ROWS)


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=4).batch(BATCH)


def generator():
    while True:
        for i in range(0, ROWS - BATCH, BATCH):
            yield X[i : i + BATCH], Y[i : i + BATCH]


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays in order": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False},
    "dataset": lambda: {"x": dataset()},
    "dataset, steps_per_epoch": lambda: {"x": dataset().repeat(), "steps_per_epoch": 7},
    "pydataset": lambda: {"x": Batches()},
    "pydataset, workers": lambda: {"x": Batches(workers=2)},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 7},
}


def build():
    """Everything that has a state: moving statistics that differ between replicas, two kinds of random numbers."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3, activation="softmax"),
        ]
    )


def compiled(model, execution=1, accumulation=None):
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=execution)
    return model


def fitter(replicas=2, execution=1, accumulation=None, factory=build, seed=3, precision=None):
    made = MirroredFitter(factory, devices=f"cpu:{replicas}", seed=seed, precision=precision)
    return compiled(made, execution, accumulation)


def own_callbacks():
    """Callbacks with a state of each kind."""
    return [
        LinearScalingWarmup(scale=2, warmup_steps=15),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=0.2),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
    ]


def train(model, directory, data="arrays", crash=None, callbacks=(), epochs=EPOCHS, validate=True, **options):
    """Trains; returns None where it crashes, else (bits of every variable, History, its epochs)."""
    given = [*callbacks, SingleCopyCheckpoint(directory, **options)]
    if crash is not None:
        given.insert(0, CrashAt(crash))
    kwargs = {**DATA[data](), "epochs": epochs, "verbose": 0, "callbacks": given}
    if validate:
        kwargs["validation_data"] = (X[:20], Y[:20])
    try:
        history = model.fit(**kwargs)
    except Crash:
        return None
    return bits(model), history.history, history.epoch


def everything(model):
    """Every variable that training reads or writes, metrics and random states too."""
    engine = getattr(model, "model", model)._keras_mirror_engine
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables, engine.global_seeds().state]


def values_of(model):
    """A copy of everything, once the model is built."""
    model.fit(X, Y, batch_size=BATCH, steps_per_epoch=1, verbose=0)
    return [np.array(keras.ops.convert_to_numpy(each)) for each in everything(model)]


def begin_anew(model, values):
    """Puts everything back: as a new process would build the model, without tracing it again."""
    for variable, value in zip(everything(model), values, strict=True):
        variable.assign(value)


def forget(model):
    """Makes everything nonsense, so that what isn't restored shows."""
    for variable in everything(model):
        variable.assign(keras.ops.convert_to_numpy(variable) * 0 + 7)


def bits(model):
    """Every weight and optimizer variable, to the bit."""
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(each).tobytes() for each in variables]
