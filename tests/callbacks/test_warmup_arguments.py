"""LinearScalingWarmup's arguments: where the factor and the length come from, what is refused, and the picture of a plan."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.optimizers import base_optimizer
from observed import Observed, data

from keras_mirror import LinearScalingWarmup, MirroredFitter

SGD = keras.optimizers.SGD
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def build(optimizer=None):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(SGD(0.01) if optimizer is None else optimizer, "mse", jit_compile=False)
    return model


def mirrored(devices="cpu:2", optimizer=None, **arguments):
    fitter = MirroredFitter(lambda: build(), devices=devices, **arguments)
    if optimizer is not None:
        fitter.compile(optimizer, "mse")
    return fitter


def end_of(model, warmup, *args, **arguments):
    """k: what the rate of the last update was multiplied by."""
    logs = model.fit(*args, verbose=0, callbacks=[warmup], **arguments).history
    return logs["effective_learning_rate"][-1] / 0.01


# -- the factor --------------------------------------------------------------------------------------------------------


def test_a_batch_per_replica_wants_one_times_the_rate_for_each_replica():
    fitter = mirrored("cpu:4", batch="per_replica")
    assert end_of(fitter, LinearScalingWarmup(1), X, Y, batch_size=2) == pytest.approx(4)


def test_the_global_batch_over_the_base_batch():
    assert end_of(mirrored(), LinearScalingWarmup(1, base_batch_size=4), X, Y, batch_size=12) == pytest.approx(3)
    fitter = mirrored(batch="per_replica")
    assert end_of(fitter, LinearScalingWarmup(1, base_batch_size=4), X, Y, batch_size=6) == pytest.approx(3)


def test_accumulated_batches_are_part_of_the_batch_of_an_update():
    fitter = mirrored(optimizer=SGD(0.01, gradient_accumulation_steps=2))
    assert end_of(fitter, LinearScalingWarmup(1, base_batch_size=4), X, Y, batch_size=6) == pytest.approx(3)


def test_a_dataset_that_knows_its_batch_size_tells_it():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)
    assert end_of(mirrored(), LinearScalingWarmup(1, base_batch_size=4), dataset) == pytest.approx(2)


UNKNOWN = {
    "plain Keras": (build, {}, r"isn't known.*\n.*Pass scale=k"),
    "global batch": (mirrored, {}, r"isn't known: the batch was given for all replicas together.*\n.*Pass scale=k"),
    "plain Keras, base_batch_size": (build, {"base_batch_size": 4}, r"base_batch_size=4.*doesn't tell.*\nPass scale="),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_factor_that_cannot_be_known_is_asked_for(name):
    make, arguments, message = UNKNOWN[name]
    with pytest.raises(ValueError, match=message):
        make().fit(X, Y, verbose=0, callbacks=[LinearScalingWarmup(1, **arguments)])


def test_a_datasets_batches_may_not_tell_their_size():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    with pytest.raises(ValueError, match=r"isn't known.*\n.*Pass scale="):
        mirrored(batch="per_replica").fit(dataset, verbose=0, callbacks=[LinearScalingWarmup(1, base_batch_size=4)])


def test_a_datasets_batches_count_one_replicas_share_as_those_of_arrays_do():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
    assert end_of(mirrored("cpu:4", batch="per_replica"), LinearScalingWarmup(1), dataset) == pytest.approx(4)


# -- the length --------------------------------------------------------------------------------------------------------


def generator():
    while True:
        yield X[:4], Y[:4]


@pytest.mark.parametrize("make", [build, mirrored])
def test_a_generator_needs_warmup_steps(make):
    finite = (batch for batch, _ in zip(generator(), range(3), strict=False))
    with pytest.raises(ValueError, match=r"steps per epoch isn't known.*generator(.|\n)*Pass warmup_steps="):
        make().fit(finite, verbose=0, callbacks=[LinearScalingWarmup(1, scale=2)])
    finite = (batch for batch, _ in zip(generator(), range(3), strict=False))
    assert end_of(make(), LinearScalingWarmup(scale=2, warmup_steps=2), finite) == pytest.approx(2)


def test_steps_per_epoch_is_the_length_of_an_epoch():
    model = Observed()
    model.compile(SGD(1.0), jit_compile=False)
    model.fit(data(3).repeat(), steps_per_epoch=4, epochs=2, verbose=0, callbacks=[LinearScalingWarmup(1.25, scale=5)])
    np.testing.assert_allclose(model.rates(), [1, 2, 3, 4, 5, 5, 5, 5], rtol=1e-6)


def test_a_warmup_longer_than_training_is_a_warning():
    message = r"takes 30 updates, but training ends after 6, at a factor of 1\.17241 instead of 2"
    with pytest.warns(UserWarning, match=message):
        build().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[LinearScalingWarmup(10, scale=2)])


@pytest.mark.filterwarnings("error")
def test_a_resumed_run_counts_what_was_done_before():
    model = build()
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    model.fit(X, Y, batch_size=8, epochs=4, initial_epoch=2, verbose=0, callbacks=[LinearScalingWarmup(4, scale=2)])


# -- bad input ---------------------------------------------------------------------------------------------------------

NUMBERS = ["warmup_epochs", "warmup_steps", "scale", "base_batch_size", "start_factor"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_must_be_positive_numbers(name):
    for value in (0, -1, -0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"^LinearScalingWarmup: {name}={value!r}, expected a (positive|whole) number"):
            LinearScalingWarmup(**{name: value})
    for value in ("5", True, [1], 1j):
        with pytest.raises(TypeError, match=rf"^LinearScalingWarmup: {name}=.* is a {type(value).__name__}, expected a"):
            LinearScalingWarmup(**{name: value})


def test_no_warmup_at_all_is_said_another_way():
    for name in ("warmup_epochs", "warmup_steps"):
        with pytest.raises(ValueError, match=r"\nTo scale at once, without a warmup, pass warmup_steps=1\."):
            LinearScalingWarmup(**{name: 0})


def test_steps_are_whole():
    with pytest.raises(ValueError, match=r"warmup_steps=2\.5, expected a whole number of at least 1"):
        LinearScalingWarmup(warmup_steps=2.5)
    assert LinearScalingWarmup(warmup_steps=np.int64(2)).warmup_steps == 2


TWICE = {
    r"scale=2 and base_batch_size=32 were given, expected one": {"scale": 2, "base_batch_size": 32},
    r"warmup_epochs=3 and warmup_steps=7 were given, expected one": {"warmup_epochs": 3, "warmup_steps": 7},
}


def test_two_answers_to_one_question_are_refused():
    for message, arguments in TWICE.items():
        with pytest.raises(ValueError, match=message):
            LinearScalingWarmup(**arguments)


def test_a_rule_is_a_known_name_or_a_function():
    with pytest.raises(ValueError, match=r'rule=\'cubic\', expected "linear", "sqrt" or a function'):
        LinearScalingWarmup(rule="cubic")
    with pytest.raises(TypeError, match=r"rule=2, expected"):
        LinearScalingWarmup(rule=2)


def test_a_rule_that_returns_no_positive_number_is_refused():
    model = build()
    for returned in (0, -2.0, float("nan"), None, "4", True):
        warmup = LinearScalingWarmup(1, scale=8, rule=lambda factor, returned=returned: returned)
        with pytest.raises(ValueError, match=rf"rule\(8\.0\) returned {returned!r}, expected a positive number"):
            model.fit(X, Y, verbose=0, callbacks=[warmup])


def test_a_start_above_the_end_is_refused():
    with pytest.raises(ValueError, match=r"start_factor=5 is above the factor 4 that the warmup ends with"):
        build().fit(X, Y, verbose=0, callbacks=[LinearScalingWarmup(1, scale=4, start_factor=5)])


@pytest.mark.parametrize("make", [build, mirrored])
@pytest.mark.parametrize("same", [True, False])
def test_two_warmups_in_one_fit_are_refused(make, same):
    model = make()
    first = LinearScalingWarmup(scale=2, warmup_steps=1)
    second = first if same else LinearScalingWarmup(scale=2, warmup_steps=1)
    with pytest.raises(ValueError, match=r"second warmup in the same fit.*\n.*drop the other"):
        model.fit(X, Y, verbose=0, callbacks=[first, second])
    assert end_of(model, first, X, Y) == pytest.approx(2), "and the next fit is as it should be"


class Stubborn(SGD):
    @property
    def learning_rate(self):
        return 0.25


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_whose_rate_cannot_be_scaled_is_named(wrapped):
    optimizer = keras.optimizers.LossScaleOptimizer(Stubborn()) if wrapped else Stubborn()
    with pytest.raises(ValueError, match=r"'optimizer' is a Stubborn, which has a learning_rate property of its own"):
        build(optimizer).fit(X, Y, verbose=0, callbacks=[LinearScalingWarmup(1, scale=2)])


def test_a_model_without_an_optimizer_is_named():
    model = build()
    model.optimizer = None
    with pytest.raises(ValueError, match=rf"the model '{model.name}' has no Keras optimizer"):
        model.fit(X, Y, verbose=0, callbacks=[LinearScalingWarmup(1, scale=2)])


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_plan_is_what_training_does_and_changes_nothing():
    model = Observed()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([11], [1.0, 0.5])
    model.compile(SGD(schedule, gradient_accumulation_steps=2), jit_compile=False)
    warmup = LinearScalingWarmup(2, scale=4)
    [plan] = warmup.plot(model, epochs=4, steps_per_epoch=5)
    assert not model.optimizer.built
    model.fit(data(5), epochs=4, verbose=0, callbacks=[warmup])
    np.testing.assert_allclose([rate for _, rate in plan.points], model.rates(), rtol=1e-6)
    assert [update for update, _ in plan.points] == list(range(10))


def test_the_picture_of_a_plan():
    [plan] = LinearScalingWarmup(3, scale=8).plot(build(), epochs=8, steps_per_epoch=100)
    lines = str(plan).splitlines()
    assert lines[0] == "optimizer: learning rate x 1 at update 0, x 8 from update 299 on"
    assert lines[1].split("|")[0].strip() == "0.08"
    assert lines[1].endswith("*" * 30)
    assert lines[-1].endswith("update 799")
    assert max(map(len, lines)) <= 80
    assert (299, pytest.approx(0.08)) in plan.points


def test_a_plan_of_a_fitter_knows_the_factor_as_its_fit_does():
    fitter = mirrored("cpu:4", batch="per_replica")
    for arguments in ({}, {"base_batch_size": 16}):
        [plan] = LinearScalingWarmup(1, **arguments).plot(fitter, epochs=2, steps_per_epoch=3, batch_size=8)
        assert plan.curve.end == (2.0 if arguments else 4.0)
    with pytest.raises(ValueError, match="Pass scale=k"):
        LinearScalingWarmup(1).plot(mirrored(), epochs=2, steps_per_epoch=3)


def test_a_plan_says_that_training_ends_first():
    [plan] = LinearScalingWarmup(5, scale=8).plot(build(), epochs=1, steps_per_epoch=10)
    assert "training ends before the warmup, at update 9" in str(plan)


def test_a_plan_needs_a_length():
    for epochs, steps in ((0, 3), (2, -1)):
        with pytest.raises(ValueError, match=r"plot\((epochs|steps_per_epoch)\)=.*, expected a whole number of at least 1"):
            LinearScalingWarmup(1, scale=2).plot(build(), epochs=epochs, steps_per_epoch=steps)


# -- upstream ----------------------------------------------------------------------------------------------------------

# What the seam puts on an optimizer, with the parameters that Keras's own has.
REPLACED = {
    "apply": "self grads trainable_variables",
    "_backend_apply_gradients": "self grads trainable_variables",
    "_backend_update_step": "self grads trainable_variables learning_rate",
    "_get_current_learning_rate": "self",
}


def test_keras_has_what_the_seam_replaces():
    for name, expected in REPLACED.items():
        parameters = inspect.signature(getattr(base_optimizer.BaseOptimizer, name)).parameters
        assert " ".join(parameters) == expected, f"Keras's Optimizer.{name} changed: see keras_mirror/seams/learning_rate.py"


def test_keras_has_the_velocities_that_contain_the_rate():
    variables = [keras.Variable(0.0)]
    for optimizer, name in ((SGD(momentum=0.9), "momentums"), (keras.optimizers.RMSprop(momentum=0.9), "_momentums")):
        optimizer.build(variables)
        assert len(getattr(optimizer, name)) == 1, f"Keras's {type(optimizer).__name__} has no {name}: see seams/learning_rate.py"
    assert isinstance(keras.optimizers.Adam()._learning_rate, keras.Variable)
