"""tensorflow-addons: its optimizers, losses, metrics and layers train as on one device; its callbacks work in fit."""

from typing import Any

import harness
import numpy as np
import pytest
from stack import keras

from keras_mirror import MirroredFitter

tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons runs on TensorFlow 2.15 at the latest")

import cases_addons  # noqa: E402
from parts import dense, regression  # noqa: E402


@harness.parametrised(cases_addons.CASES)
def test_addons(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)


def test_callbacks_of_addons_in_fit(tmp_path: Any) -> None:
    """A progress bar, a time limit and a checkpoint of the averages, each with its own work, in one fit."""
    model = MirroredFitter(dense(), devices="cpu:2", seed=1)
    model.compile(tfa.optimizers.MovingAverage(keras.optimizers.legacy.SGD(0.05), average_decay=0.5), "mse")
    x, y = regression(np.random.default_rng(0), 30)
    path = str(tmp_path / "averages.h5")
    checkpoint = tfa.callbacks.AverageModelCheckpoint(update_weights=False, filepath=path, save_weights_only=True)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[tfa.callbacks.TimeStopping(seconds=600), checkpoint, tfa.callbacks.TQDMProgressBar()],
    )
    assert len(history.history["loss"]) == 2
    plain = dense()()
    plain.load_weights(path)
    model.optimizer.assign_average_vars(model.trainable_variables)
    for saved, average in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(saved, average, rtol=1e-6)


def test_a_time_limit_stops_training() -> None:
    model = MirroredFitter(dense(), devices="cpu:2", seed=1)
    model.compile("sgd", "mse")
    x, y = regression(np.random.default_rng(0), 30)
    history = model.fit(x, y, epochs=50, verbose=0, callbacks=[tfa.callbacks.TimeStopping(seconds=0)])
    assert len(history.history["loss"]) < 50
