"""A run that goes on ends as the run that was never interrupted: to the bit, in every way to feed it."""

import os
import random

import keras
import numpy as np
import pytest
from checkpoint_parts import (
    BATCH,
    STEPS,
    Batches,
    Crash,
    CrashAt,
    X,
    Y,
    begin_anew,
    build,
    compiled,
    fitter,
    forget,
    own_callbacks,
    train,
    values_of,
)

from keras_mirror import MirroredFitter, SingleCopyCheckpoint


def assert_same(resumed, undisturbed):
    assert resumed is not None
    assert resumed[1:] == undisturbed[1:], "History differs"
    assert resumed[0] == undisturbed[0], "weights or optimizer differ"


# data, after how many batches it crashes, trigger
CASES = [
    ("arrays", 5, 3),
    ("arrays", 24, 5),
    ("arrays", 13, "epoch"),
    ("arrays in order", 13, 5),
    ("dataset", 22, 5),
    ("dataset, steps_per_epoch", 12, 3),
    ("pydataset", 15, 4),
    ("pydataset, workers", 15, 4),
    ("generator", 12, 4),
]


CASES_OF_SEVERAL = [case for case in CASES if case[:2] in (("arrays", 24), ("dataset, steps_per_epoch", 12))]


@pytest.fixture(scope="module")
def models():
    """Models that are traced once, and what all their variables began with."""
    made = {}

    def get(execution, accumulation):
        if (execution, accumulation) not in made:
            model = fitter(2, execution, accumulation, seed=None)
            made[execution, accumulation] = model, values_of(model)
        return made[execution, accumulation]

    return get


@pytest.mark.parametrize(
    ("execution", "accumulation", "case"),
    [*((1, None, case) for case in CASES), *((4, 3, case) for case in CASES_OF_SEVERAL)],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_the_end_is_the_same_to_the_bit(models, execution, accumulation, case, tmp_path):
    made, values = models(execution, accumulation)
    data, crash, every = case
    options = {"data": data, "every": every}
    begin_anew(made, values)
    random.seed(1)
    undisturbed = train(made, tmp_path / "a", callbacks=own_callbacks(), **options)
    begin_anew(made, values)
    random.seed(1)
    assert train(made, tmp_path / "b", crash=-(-crash // execution), callbacks=own_callbacks(), **options) is None
    forget(made)
    random.seed(2)
    resumed = train(made, tmp_path / "b", callbacks=own_callbacks(), **options)
    assert_same(resumed, undisturbed)
    assert sorted(os.listdir(tmp_path / "b")) == sorted(os.listdir(tmp_path / "a"))


@pytest.fixture(scope="module")
def small():
    """A model that is traced once, one step a call."""
    made = fitter()
    return made, values_of(made)


def test_a_loss_scale_goes_on_as_well(tmp_path):
    made = fitter(precision="mixed_float16")
    values = values_of(made)
    begin_anew(made, values)
    undisturbed = train(made, tmp_path / "a", every=4, validate=False)
    begin_anew(made, values)
    assert train(made, tmp_path / "b", crash=14, every=4, validate=False) is None
    forget(made)
    assert_same(train(made, tmp_path / "b", every=4, validate=False), undisturbed)
    loaded = keras.models.load_model(tmp_path / "b" / "latest.keras")
    assert type(loaded.optimizer).__name__ == "LossScaleOptimizer"


def test_several_crashes_are_the_same_as_none(small, tmp_path):
    made, values = small
    begin_anew(made, values)
    undisturbed = train(made, tmp_path / "a", every=2, validate=False)
    begin_anew(made, values)
    for crash in (3, 7, 9):
        assert train(made, tmp_path / "b", crash=crash, every=2, validate=False) is None
        forget(made)
    assert_same(train(made, tmp_path / "b", every=2, validate=False), undisturbed)


def test_a_pydataset_is_gone_on_with_by_position(small, tmp_path):
    model, batches = small[0], Batches()
    with pytest.raises(Crash):
        model.fit(batches, epochs=1, verbose=0, callbacks=[CrashAt(7), SingleCopyCheckpoint(tmp_path, every=6)])
    rest = Batches()
    model.fit(rest, epochs=1, verbose=0, callbacks=[SingleCopyCheckpoint(tmp_path, every=6)])
    # Keras asks for two of them first, to see their shapes.
    assert len(rest.asked) == 2 + STEPS - 6


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_another_number_of_replicas_goes_on_to_the_same_end(before, after, tmp_path, capsys):
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3, "softmax")])

    def make(replicas):
        return fitter(replicas, accumulation=3, factory=build)

    undisturbed, model = make(before), make(after)
    train(undisturbed, tmp_path / "a", every=4)
    assert train(make(before), tmp_path / "b", crash=14, every=4) is None
    end = train(model, tmp_path / "b", every=4)
    for ours, theirs in zip(model.get_weights(), undisturbed.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert len(end[1]["loss"]) == 3
    assert f"{before} replicas before, {after} now: the same as before but for rounding" in capsys.readouterr().out


def test_a_finished_run_isnt_trained_again_and_returns_its_history(small, tmp_path, capsys):
    made = small[0]
    first = train(made, tmp_path, callbacks=own_callbacks(), epochs=2)
    forget(made)
    again = train(made, tmp_path, callbacks=own_callbacks(), epochs=2)
    assert_same(again, first)
    assert "nothing to train: all 2 epochs were done" in capsys.readouterr().out
    longer = train(made, tmp_path, callbacks=own_callbacks(), epochs=3)
    assert longer[2] == [0, 1, 2]


def test_a_run_that_early_stopping_ended_stays_ended(small, tmp_path, capsys):
    made = small[0]

    def stop():
        return [keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100.0, restore_best_weights=True)]

    first = train(made, tmp_path, callbacks=stop(), epochs=9)
    assert len(first[2]) < 9
    forget(made)
    assert_same(train(made, tmp_path, callbacks=stop(), epochs=9), first)
    assert "a callback had stopped training" in capsys.readouterr().out


def test_plain_fit_goes_on_from_the_end_of_an_epoch_and_says_so(tmp_path, capsys):
    def plain():
        keras.utils.set_random_seed(1)
        return compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")]))

    options = {"data": "arrays in order", "every": 4, "validate": False}
    undisturbed = train(plain(), tmp_path / "a", **options)
    assert train(plain(), tmp_path / "b", crash=14, **options) is None
    capsys.readouterr()
    assert_same(train(plain(), tmp_path / "b", **options), undisturbed)
    said = capsys.readouterr().out
    assert "plain fit can't go on inside an epoch" in said
    assert "3 steps are trained again" in said
    assert "going on from the end of epoch 1 (step 9)" in said


def test_plain_fit_builds_a_model_that_isnt_built_before_it_goes_on(tmp_path):
    def plain():
        keras.utils.set_random_seed(1)
        return compiled(keras.Sequential([keras.layers.Dense(3, activation="softmax")]))

    options = {"data": "arrays in order", "validate": False}
    undisturbed = train(plain(), tmp_path / "a", **options)
    assert train(plain(), tmp_path / "b", crash=14, **options) is None
    assert_same(train(plain(), tmp_path / "b", **options), undisturbed)


def test_a_checkpoint_of_an_engine_inside_an_epoch_is_refused_by_plain_fit(small, tmp_path):
    assert train(small[0], tmp_path, crash=4, every=3) is None
    with pytest.raises(ValueError, match="was taken inside an epoch, which plain fit can't go on in"):
        train(compiled(keras.models.load_model(SingleCopyCheckpoint(tmp_path).latest)), tmp_path, every=3)


def test_another_batch_size_inside_an_epoch_is_refused_before_training(small, tmp_path):
    assert train(small[0], tmp_path, crash=4, every=3) is None
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=f"global batch {BATCH}, this fit has 16|steps per epoch 9, this fit has 5"):
        small[0].fit(X, Y, batch_size=16, verbose=0, callbacks=[SingleCopyCheckpoint(tmp_path)])
    assert sorted(os.listdir(tmp_path)) == before


def test_another_model_is_refused_before_training(small, tmp_path):
    train(small[0], tmp_path, epochs=1)
    before = sorted(os.listdir(tmp_path))
    other = MirroredFitter(lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)]), devices="cpu:2")
    with pytest.raises(ValueError, match="doesn't fit this model"):
        train(compiled(other), tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_the_file_is_plain_keras_with_the_optimizers_state(small, tmp_path):
    model, values = small
    begin_anew(model, values)
    before = int(model.optimizer.iterations)
    train(model, tmp_path, epochs=1)
    loaded = keras.models.load_model(tmp_path / "latest.keras")
    assert type(loaded) is keras.Sequential
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(loaded.optimizer.iterations) == before + STEPS


def test_between_updates_the_file_has_the_sum_that_one_device_has(tmp_path):
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])

    ours, one = fitter(3, accumulation=4, factory=build), compiled(build(), accumulation=4)
    for model, directory in ((ours, tmp_path / "a"), (one, tmp_path / "b")):
        train(model, directory, data="arrays in order", epochs=1, every="epoch")
    ours, one = (keras.models.load_model(tmp_path / name / "latest.keras") for name in "ab")
    for mine, theirs in zip(ours.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-7)
    assert any(np.any(each.numpy()) for each in ours.optimizer.variables if "accumulator" in each.path)


def test_weights_only_writes_a_weights_file_and_goes_on_as_well(small, tmp_path):
    made, values = small
    options = {"every": 4, "weights_only": True, "validate": False}
    begin_anew(made, values)
    undisturbed = train(made, tmp_path / "a", **options)
    begin_anew(made, values)
    assert train(made, tmp_path / "b", crash=14, **options) is None
    forget(made)
    assert_same(train(made, tmp_path / "b", **options), undisturbed)
    plain = compiled(build())
    plain.load_weights(tmp_path / "b" / "latest.weights.h5")
    for ours, theirs in zip(plain.get_weights(), made.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_directory_that_was_moved_is_gone_on_from(small, tmp_path):
    made, values = small
    begin_anew(made, values)
    undisturbed = train(made, tmp_path / "a", every=4, validate=False)
    begin_anew(made, values)
    assert train(made, tmp_path / "b", crash=14, every=4, validate=False) is None
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    assert keras.models.load_model(tmp_path / "elsewhere" / "latest.keras") is not None
    forget(made)
    assert_same(train(made, tmp_path / "elsewhere", every=4, validate=False), undisturbed)
