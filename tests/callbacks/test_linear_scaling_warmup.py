"""LinearScalingWarmup inside fit: what rate the updates use, what it composes with, and what it leaves behind."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from observed import Observed, data

from keras_mirror import LinearScalingWarmup, MirroredFitter
from keras_mirror.seams import learning_rate

SGD = keras.optimizers.SGD
WRAPPED = ("apply", "_backend_apply_gradients", "_backend_update_step", "_get_current_learning_rate")


@pytest.fixture(autouse=True)
def _float64(_keras_globals):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def observed(optimizer, batches=64, **arguments):
    model = Observed(batches)
    model.compile(optimizer, jit_compile=arguments.pop("jit_compile", False), **arguments)
    return model


def curve(updates, k, warmup, start=1.0):
    t = np.arange(updates)
    return np.where(t >= warmup - 1, k, start + (k - start) * t / max(warmup - 1, 1))


def assert_rates(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-14)


def is_untouched(model):
    optimizers = [model.optimizer, *learning_rate.optimizers_of(model).values()]
    return not any(name in vars(o) for o in optimizers for name in WRAPPED) and not [
        name for name in vars(model) if "warmup" in name or (name == "fit" and not hasattr(model, "_keras_mirror_engine"))
    ]


# -- the rate of each update -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compile_arguments", [{}, {"steps_per_execution": 4}, {"run_eagerly": True}, {"jit_compile": True}], ids=str
)
def test_every_way_to_run_a_step_uses_the_curve(compile_arguments):
    model = observed(SGD(0.5), **compile_arguments)
    model.fit(data(5), epochs=3, verbose=0, callbacks=[LinearScalingWarmup(2, scale=8)])
    assert_rates(model.rates(), 0.5 * curve(15, 8, 10))
    assert model.rates()[9] == 0.5 * 8


RULES = {"linear": 9.0, "sqrt": 3.0, "function": 10.0}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_makes_k_of_the_factor(rule):
    model = observed(SGD(0.5))
    given = (lambda factor: factor + 1) if rule == "function" else rule
    model.fit(data(6), verbose=0, callbacks=[LinearScalingWarmup(scale=9, rule=given, warmup_steps=4, start_factor=0.25)])
    assert_rates(model.rates(), 0.5 * curve(6, RULES[rule], 4, start=0.25))


def test_one_step_of_warmup_scales_at_once():
    model = observed(SGD(0.5))
    model.fit(data(3), verbose=0, callbacks=[LinearScalingWarmup(scale=4, warmup_steps=1)])
    assert model.rates().tolist() == [2.0] * 3


def test_a_smaller_batch_lowers_the_rate_and_says_so():
    model = observed(SGD(0.5))
    with pytest.warns(UserWarning, match=r"factor of 'optimizer' is 0\.25, below 1"):
        model.fit(data(6), verbose=0, callbacks=[LinearScalingWarmup(scale=0.25, warmup_steps=4)])
    assert_rates(model.rates(), 0.5 * curve(6, 0.25, 4))


def test_float16_steps_that_are_skipped_do_not_count():
    model = observed(keras.optimizers.LossScaleOptimizer(SGD(0.5)))
    batches = [0, np.inf, 0, 0, np.inf, np.inf, 0, 0, 0]
    logs = model.fit(data(batches), verbose=0, callbacks=[LinearScalingWarmup(scale=8, warmup_steps=5)]).history
    assert_rates(model.rates(), 0.5 * curve(6, 8, 5))
    assert logs["effective_learning_rate"] == [4.0]
    assert is_untouched(model)


def test_the_effective_rate_is_that_of_the_last_update_not_of_a_skipped_step():
    model = observed(keras.optimizers.LossScaleOptimizer(SGD(0.5)))
    logs = model.fit(data([0, 0, np.inf]), verbose=0, callbacks=[LinearScalingWarmup(scale=8, warmup_steps=3)]).history
    assert logs["effective_learning_rate"] == [model.rates()[-1]] == [0.5 * 4.5]


# -- what it composes with ---------------------------------------------------------------------------------------------

SCHEDULES = {
    "exponential": lambda: keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5),
    "piecewise": lambda: keras.optimizers.schedules.PiecewiseConstantDecay([4, 9], [0.5, 0.25, 0.125]),
}


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_keeps_its_own_clock(name, accumulation):
    schedule = SCHEDULES[name]()
    model = observed(SGD(schedule, gradient_accumulation_steps=accumulation))
    model.fit(data(12), verbose=0, callbacks=[LinearScalingWarmup(scale=4, warmup_steps=5)])
    every = accumulation or 1  # Keras's schedules count batches, accumulated ones too
    own = [float(schedule(batch)) for batch in range(every - 1, 12, every)]
    # Keras computes schedules in float32.
    np.testing.assert_allclose(model.rates(), own * curve(12 // every, 4, 5), rtol=1e-6)
    assert model.optimizer.get_config()["learning_rate"]["config"]["initial_learning_rate" if name == "exponential" else "name"]


def test_a_function_as_rate_is_scaled():
    model = observed(SGD(lambda: 0.5))
    model.fit(data(4), verbose=0, callbacks=[LinearScalingWarmup(scale=4, warmup_steps=3)])
    assert_rates(model.rates(), 0.5 * curve(4, 4, 3))


class Halving(keras.callbacks.Callback):
    """Reads, halves and assigns the rate in the middle of an epoch, as a user may."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            self.model.optimizer.learning_rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)) / 2


# What sets the base, and the base of each of 12 updates in 3 epochs of 4.
SETTERS = {
    "plateau": (lambda: keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=9.0), [1, 1, 0.5]),
    "scheduler": (lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2), [0.5, 0.25, 0.125]),
    "assignment": (Halving, None),
}


@pytest.mark.parametrize(
    ("name", "first"), [("plateau", "warmup"), ("plateau", "setter"), ("scheduler", "setter"), ("assignment", "warmup")]
)
def test_what_sets_the_rate_sets_the_base_and_the_factor_stays(name, first):
    make, per_epoch = SETTERS[name]
    model = observed(SGD(1.0))
    callbacks = [LinearScalingWarmup(2, scale=8), make()]
    logs = model.fit(data(4), epochs=3, verbose=0, callbacks=callbacks if first == "warmup" else callbacks[::-1]).history
    base = np.repeat(per_epoch, 4) if per_epoch else np.repeat([1, 0.5, 0.25, 0.125], [2, 4, 4, 2])
    assert_rates(model.rates(), base * curve(12, 8, 8))
    assert logs["effective_learning_rate"] == model.rates()[[3, 7, 11]].tolist()
    if "learning_rate" in logs and name == "scheduler":
        assert logs["learning_rate"] == per_epoch, "Keras's own log is the base"


class Two(Observed):
    def compile(self, first, second, **arguments):
        super().compile("sgd", **arguments)
        self.first, self.second = first, second

    def optimizers(self):
        return [self.first, self.second]


def test_several_optimizers_each_follow_their_own_count():
    model = Two()
    model.compile(SGD(1.0), SGD(0.1, gradient_accumulation_steps=2), jit_compile=False)
    logs = model.fit(data(8), verbose=0, callbacks=[LinearScalingWarmup(0.5, scale=4)]).history
    notes = model.notes.numpy()[:16].reshape(8, 2)
    assert_rates(notes[:, 0], curve(8, 4, 4))
    assert_rates(notes[1::2, 1], 0.1 * curve(4, 4, 2))
    assert logs["effective_learning_rate_first"] == [4.0]
    assert logs["effective_learning_rate_second"] == [0.1 * 4]
    assert "effective_learning_rate" not in logs, "compile's own optimizer made no update"
    assert is_untouched(model)


def test_weight_decay_uses_the_rate_in_effect():
    rates = []
    for callbacks in ([LinearScalingWarmup(scale=8, warmup_steps=1)], []):
        model = dense()
        model.compile(keras.optimizers.AdamW(0.08 if not callbacks else 0.01, weight_decay=0.5), "mse", jit_compile=False)
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        rates.append(model.get_weights())
    for a, b in zip(*rates, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


# -- momentum ----------------------------------------------------------------------------------------------------------

# Momentum 0.875: Keras's SGD rounds its momentum to float32, whatever the variables are.
GRADIENTS = np.array([0.0, 1.0, -0.5, 2.0, 0.25, -1.0, 0.5, 3.0]) + 1.0


def sgd_by_the_book(rates, nesterov=False, correct=True, momentum=0.875):
    """The paper's equation 10, whose velocity contains the rate, with its correction (remark 2)."""
    velocity, steps = 0.0, []
    for t, (rate, g) in enumerate(zip(rates, GRADIENTS, strict=True)):
        change = rates[t] / rates[t - 1] if correct and t else 1.0
        velocity = momentum * change * velocity - rate * g
        steps.append(-(momentum * velocity - rate * g) if nesterov else -velocity)
    return steps


def rmsprop_by_the_book(rates, correct=True, momentum=0.875, rho=0.9):
    square, velocity, steps = 0.0, 0.0, []
    for t, (rate, g) in enumerate(zip(rates, GRADIENTS, strict=True)):
        square = rho * square + (1 - rho) * g**2
        change = rates[t] / rates[t - 1] if correct and t else 1.0
        velocity = momentum * change * velocity + rate * g / np.sqrt(square + 1e-7)
        steps.append(velocity)
    return steps


MOMENTA = {
    "SGD": (lambda: SGD(0.1, momentum=0.875), sgd_by_the_book, True),
    "SGD nesterov": (lambda: SGD(0.1, momentum=0.875, nesterov=True), lambda r: sgd_by_the_book(r, nesterov=True), True),
    "SGD not corrected": (lambda: SGD(0.1, momentum=0.875), lambda r: sgd_by_the_book(r, correct=False), False),
    "SGD in LossScaleOptimizer": (
        lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1, momentum=0.875)),
        sgd_by_the_book,
        True,
    ),
    "RMSprop": (lambda: keras.optimizers.RMSprop(0.1, momentum=0.875), rmsprop_by_the_book, True),
    "RMSprop not corrected": (
        lambda: keras.optimizers.RMSprop(0.1, momentum=0.875),
        lambda r: rmsprop_by_the_book(r, correct=False),
        False,
    ),
}


@pytest.mark.parametrize("name", MOMENTA)
def test_velocities_follow_the_rate_as_in_the_textbook(name):
    make, book, correct = MOMENTA[name]
    model = observed(make(), steps_per_execution=3)
    warmup = LinearScalingWarmup(scale=8, warmup_steps=6, momentum_correction=correct)
    model.fit(data(GRADIENTS - 1), verbose=0, callbacks=[warmup])
    np.testing.assert_allclose(model.notes.numpy()[:8], book(0.1 * curve(8, 8, 6)), rtol=1e-12)


def test_velocities_are_corrected_once_an_update_under_accumulation():
    model = observed(SGD(0.1, momentum=0.875, gradient_accumulation_steps=2))
    model.fit(data(np.repeat(GRADIENTS, 2) - 1), verbose=0, callbacks=[LinearScalingWarmup(scale=8, warmup_steps=6)])
    np.testing.assert_allclose(model.notes.numpy()[1:16:2], sgd_by_the_book(0.1 * curve(8, 8, 6)), rtol=1e-12)


def test_the_users_own_change_of_the_rate_is_left_as_keras_does_it():
    model = observed(SGD(0.1, momentum=0.875))
    model.fit(data(4), verbose=0, callbacks=[LinearScalingWarmup(scale=4, warmup_steps=1), Halving()])
    steps, velocity = [], 0.0
    for rate in (0.4, 0.4, 0.2, 0.2):
        velocity = 0.875 * velocity + rate
        steps.append(velocity)
    np.testing.assert_allclose(model.rates(), steps, rtol=1e-12)


# -- one device and N replicas -----------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(22, 3))
Y = X.sum(1, keepdims=True)


def dense():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])


OPTIMIZERS = {
    "SGD": lambda: SGD(0.01, momentum=0.875, nesterov=True, weight_decay=0.01, global_clipnorm=1.0),
    "SGD accumulating": lambda: SGD(0.01, momentum=0.875, weight_decay=0.01, gradient_accumulation_steps=2),
    "AdamW on a schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.02, 20), clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "RMSprop in LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.RMSprop(0.01, momentum=0.5, weight_decay=0.1)
    ),
}
REPLICAS = [("SGD", 4), ("SGD accumulating", 2), ("AdamW on a schedule", 2)]
REPLICAS += [("RMSprop in LossScaleOptimizer", 4)]
STEPS_PER_EXECUTION = {None: 1, 2: 4, 4: 1}


def trained(optimizer, replicas, epochs=3, model=None, initial_epoch=0, callbacks=()):
    if model is None:
        model = dense() if replicas is None else MirroredFitter(dense, devices=f"cpu:{replicas}")
        steps = STEPS_PER_EXECUTION[replicas]
        model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps, jit_compile=False)
    warmup = LinearScalingWarmup(2, scale=6)
    logs = model.fit(
        X, Y, batch_size=5, epochs=epochs, initial_epoch=initial_epoch, shuffle=False, verbose=0, callbacks=[warmup, *callbacks]
    ).history
    own = model if replicas is None else model.model
    assert is_untouched(own)
    return own, logs


def state_of(model):
    return [np.asarray(v.numpy(), "float64") for v in [*model.weights, *model.optimizer.variables]]


def assert_same(actual, expected):
    keras.tree.assert_same_structure(actual, expected)
    for a, b in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "replicas"), REPLICAS)
def test_replicas_train_with_warmup_as_one_device_does(name, replicas):
    model, logs = trained(OPTIMIZERS[name](), None)
    other, other_logs = trained(OPTIMIZERS[name](), replicas)
    assert_same(state_of(other), state_of(model))
    assert_same(other_logs, logs)


def test_a_plain_mirrored_strategy_trains_as_one_device_does():
    results = []
    for strategy in (
        tf.distribute.get_strategy(),
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()),
    ):
        with strategy.scope():
            model = dense()
            model.compile(SGD(0.01, momentum=0.875, weight_decay=0.1), "mse", jit_compile=False)
        warmup = LinearScalingWarmup(scale=6, warmup_steps=7)
        model.fit(X[:20], Y[:20], batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[warmup])
        results.append(state_of(model))
        assert is_untouched(model)
    assert_same(*results)


# -- resume and what is saved ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*training ends after 5:UserWarning")
def test_a_run_resumed_in_the_warmup_on_other_replicas_goes_on_where_the_curve_was(tmp_path):
    optimizer = OPTIMIZERS["SGD"]
    whole, logs = trained(optimizer(), None, epochs=3)
    first, _ = trained(optimizer(), 2, epochs=1)
    first.save(tmp_path / "first.keras")

    fitter = MirroredFitter(lambda: keras.models.load_model(tmp_path / "first.keras"), devices="cpu:4")
    resumed, more = trained(None, 4, epochs=3, model=fitter, initial_epoch=1)
    assert_same(state_of(resumed), state_of(whole))
    assert_same(more["effective_learning_rate"], logs["effective_learning_rate"][1:])


@pytest.mark.parametrize("replicas", [None, 2])
def test_a_file_written_during_training_holds_the_users_optimizer_and_rate(tmp_path, replicas):
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    configs = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: configs.append(model.optimizer.get_config()))
    model = dense() if replicas is None else MirroredFitter(dense, devices=f"cpu:{replicas}")
    model.compile(SGD(0.01, momentum=0.875, name="mine"), "mse", jit_compile=False)
    plain = model.optimizer.get_config()
    trained(None, replicas, model=model, callbacks=[saved, note])
    assert configs == [plain] * 3
    loaded = keras.models.load_model(tmp_path / "1.keras")
    assert type(loaded.optimizer) is SGD
    assert loaded.optimizer.get_config() == plain
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    assert is_untouched(loaded)


def test_a_second_fit_goes_on_with_the_curve_and_one_without_the_callback_uses_the_base():
    model = observed(SGD(1.0))
    warmup = LinearScalingWarmup(scale=8, warmup_steps=6)
    with pytest.warns(UserWarning, match="training ends after 4"):
        model.fit(data(4), verbose=0, callbacks=[warmup])
    model.fit(data(4), verbose=0, callbacks=[warmup])
    assert_rates(model.rates(), curve(8, 8, 6))
    model.fit(data(4), verbose=0)
    assert model.rates()[8:].tolist() == [1.0] * 4


def test_an_optimizers_own_patches_are_put_back():
    model = observed(SGD(1.0))
    seen = []
    original = model.optimizer.apply
    vars(model.optimizer)["apply"] = mine = lambda *args: (seen.append(1), original(*args))[1]
    model.fit(data(4), verbose=0, callbacks=[LinearScalingWarmup(scale=8, warmup_steps=3)])
    assert_rates(model.rates(), curve(4, 8, 3))
    assert vars(model.optimizer)["apply"] is mine
    assert seen


# -- fits that fail ----------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Failing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise Stop


def failed(model, *callbacks):
    with pytest.raises(Stop):
        model.fit(data(4), verbose=0, callbacks=[*callbacks, Failing()])


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("then", ["nothing", "another warmup", "the same warmup"])
def test_after_a_fit_that_failed_the_next_one_is_as_it_should_be(mirrored, then):
    model = MirroredFitter(lambda: observed(SGD(1.0)), devices="cpu:2") if mirrored else observed(SGD(1.0))
    warmup = LinearScalingWarmup(scale=8, warmup_steps=4)
    failed(model, warmup)
    if mirrored:
        assert is_untouched(model.model), "MirroredFitter's fit leaves the optimizer as Keras would have it, at once"
    callbacks = {"nothing": [], "another warmup": [LinearScalingWarmup(scale=8, warmup_steps=4)], "the same warmup": [warmup]}
    model.fit(data(3), verbose=0, callbacks=callbacks[then])
    assert_rates(model.rates(), [*curve(4, 8, 4), *[1.0 if then == "nothing" else 8.0] * 3])
    assert is_untouched(model.model if mirrored else model)


def test_evaluation_and_saving_after_a_fit_that_failed_see_the_users_rate(tmp_path):
    model = dense()
    model.compile(SGD(0.01), "mse", jit_compile=False)
    with pytest.raises(Stop):
        model.fit(X, Y, verbose=0, callbacks=[LinearScalingWarmup(scale=8, warmup_steps=1), Failing()])
    model.evaluate(X, Y, verbose=0)
    model.save(tmp_path / "it.keras")
    assert keras.models.load_model(tmp_path / "it.keras").optimizer.get_config() == model.optimizer.get_config()
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == 0.01


# -- logs and prints ---------------------------------------------------------------------------------------------------


def test_the_rate_in_effect_is_in_the_logs_of_later_callbacks(tmp_path):
    model = observed(SGD(0.5))
    callbacks = [LinearScalingWarmup(2, scale=8), keras.callbacks.CSVLogger(tmp_path / "log.csv")]
    model.fit(data(4), epochs=3, verbose=0, callbacks=callbacks)
    lines = (tmp_path / "log.csv").read_text().split()
    column = lines[0].split(",").index("effective_learning_rate")
    assert [float(line.split(",")[column]) for line in lines[1:]] == model.rates()[[3, 7, 11]].tolist()


def test_verbose_says_what_is_planned_and_when_it_is_over(capsys):
    model = observed(SGD(0.5))
    model.fit(data(4), epochs=3, verbose=0, callbacks=[LinearScalingWarmup(2, scale=8, verbose=1)])
    assert capsys.readouterr().out.splitlines() == [
        "LinearScalingWarmup: optimizer: learning rate x 1 to x 8 over the first 8 updates (x 1)",
        "LinearScalingWarmup: epoch 2: the warmup is over",
    ]
    model.fit(data(4), verbose=0, callbacks=[LinearScalingWarmup(2, scale=8)])
    assert capsys.readouterr().out == ""
