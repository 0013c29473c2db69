"""MirroredFitter as a stand-in for the model: what it takes, what it refuses, and what it passes on."""

import copy
import inspect
import linecache
import pickle
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from fresh_process import run

from keras_mirror import MirroredFitter

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def build():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])


def compiled(optimizer="adam", **arguments):
    model = build()
    model.compile(optimizer, "mse", **arguments)
    return model


def mirrored(factory=compiled, devices="cpu:2", **arguments):
    return MirroredFitter(factory, devices=devices, **arguments)


def other_strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())


def assert_same(actual, expected, **tolerance):
    """Compares nests of numbers, keys included."""
    keras.tree.assert_same_structure(actual, expected)
    if actual is None:
        return
    for a, b in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, **{"rtol": 1e-4, "atol": 1e-6, **tolerance})


# -- what the factory returns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returned", [None, "model", 3])
def test_a_factory_that_returns_no_model_is_told_what_it_returned(returned):
    with pytest.raises(TypeError, match=rf"model_factory returned {returned!r} .*expected a keras\.Model\.\n.*return model"):
        mirrored(lambda: returned)


def test_a_layer_is_no_model():
    with pytest.raises(TypeError, match=r"model_factory returned .*Dense.*expected a keras\.Model"):
        mirrored(lambda: keras.layers.Dense(1))


def test_a_factory_that_returns_a_fitter_is_refused():
    fitter = mirrored()
    with pytest.raises(TypeError, match=r"model_factory returned a MirroredFitter, expected a plain keras\.Model"):
        mirrored(lambda: fitter)


def test_a_model_instead_of_a_factory_says_to_pass_the_function():
    with pytest.raises(TypeError, match=r"got the model 'mine', expected a function(.|\n)*MirroredFitter\(build_model\)"):
        mirrored(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="mine"))


@pytest.mark.parametrize("wrong", [lambda: mirrored(), lambda: keras.layers.Dense(2)], ids=["fitter", "layer"])
def test_a_callable_that_is_no_factory_is_refused(wrong):
    with pytest.raises(TypeError, match=r"^MirroredFitter: .*expected a function"):
        mirrored(wrong())


@pytest.mark.parametrize("wrong", [None, "build_model", 3])
def test_what_is_not_callable_is_no_factory(wrong):
    with pytest.raises(TypeError, match=r"model_factory is a \w+, expected a function that returns a keras\.Model"):
        mirrored(wrong)


def test_a_model_class_is_a_factory():
    fitter = mirrored(keras.Sequential)
    assert type(fitter.model) is keras.Sequential


def test_a_model_built_elsewhere_says_to_move_its_construction():
    model = compiled()
    with pytest.raises(
        ValueError, match=r"isn't wholly built by model_factory: its variable '.*kernel'(.|\n)*Move the construction"
    ):
        mirrored(lambda: model)


def test_an_unbuilt_model_made_elsewhere_is_refused_too():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"isn't wholly built by model_factory: the model object(.|\n)*Move the construction"):
        mirrored(lambda: model)


def test_a_pretrained_base_from_outside_is_named():
    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)], name="pretrained")
    with pytest.raises(ValueError, match=r"its variable 'pretrained/.*kernel' was made before it\.\n.*pretrained base too"):
        mirrored(lambda: keras.Sequential([keras.Input((3,)), base, keras.layers.Dense(1)]))


def test_an_unbuilt_layer_from_outside_is_made_on_every_replica():
    layer = keras.layers.Dense(4)
    fitter = mirrored(lambda: keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)]))
    fitter.compile("sgd", "mse")
    fitter.fit(X, Y, verbose=0)
    assert np.isfinite(fitter.get_weights()[0]).all()


def test_the_same_model_twice_is_refused():
    fitter = mirrored()
    with pytest.raises(ValueError, match=r"returned the model '.*', which another MirroredFitter holds already\.\n.*new model"):
        mirrored(lambda: fitter.model)


def test_a_factorys_exception_arrives_unchanged_and_nothing_stays_entered():
    mine = RuntimeError("mine")
    policy = keras.config.dtype_policy()

    def factory():
        keras.config.set_dtype_policy("mixed_bfloat16")
        raise mine

    with pytest.raises(RuntimeError) as caught:
        mirrored(factory, precision="mixed_float16")
    assert caught.value is mine
    assert not tf.distribute.has_strategy()
    assert keras.config.dtype_policy() is policy


def test_a_factory_that_wants_arguments_is_told_so_by_python():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'units'"):
        mirrored(lambda units: build())


# -- the other arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["local", 32, None])
def test_an_unknown_batch_names_the_choices(batch):
    with pytest.raises(ValueError, match=rf"^MirroredFitter: batch={batch!r}, expected one of 'global', 'per_replica'"):
        mirrored(batch=batch)


@pytest.mark.parametrize("precision", ["float16", "half", 16])
def test_an_unknown_precision_names_the_choices(precision):
    with pytest.raises(ValueError, match=rf"^MirroredFitter: precision={precision!r}, expected one of None, 'float32', 'mixed_"):
        mirrored(precision=precision)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_the_precision_holds_in_the_factory_and_nowhere_else(precision):
    fitter = mirrored(precision=precision)
    assert fitter.layers[0].dtype_policy.name == precision
    assert keras.config.dtype_policy().name == "float32"


def test_devices_and_a_strategy_together_are_refused():
    with pytest.raises(ValueError, match=r"devices='cpu:2' and a strategy were given, expected one of them\.\nDrop devices"):
        mirrored(strategy=other_strategy())


def test_a_strategy_of_ones_own_is_used():
    strategy = other_strategy()
    fitter = MirroredFitter(compiled, strategy=strategy)
    assert fitter.strategy is strategy
    assert fitter.num_replicas == 2


def test_a_one_device_strategy_is_refused_by_name():
    with pytest.raises(ValueError, match=r"OneDeviceStrategy, expected MirroredStrategy"):
        MirroredFitter(compiled, strategy=tf.distribute.OneDeviceStrategy("CPU:0"))


# -- scopes ------------------------------------------------------------------------------------------------------------


def test_construction_inside_another_strategy_is_refused():
    with (
        pytest.raises(RuntimeError, match=r"inside the scope of a MirroredStrategy(.|\n)*Leave that scope"),
        other_strategy().scope(),
    ):
        mirrored()


def test_construction_inside_the_scope_of_its_own_strategy_works():
    strategy = other_strategy()
    with strategy.scope():
        assert MirroredFitter(compiled, strategy=strategy).num_replicas == 2


CALLS = {
    "compile": lambda fitter: fitter.compile("sgd", "mse"),
    "fit": lambda fitter: fitter.fit(X, Y, verbose=0),
    "evaluate": lambda fitter: fitter.evaluate(X, Y, verbose=0),
    "predict": lambda fitter: fitter.predict(X, verbose=0),
    "train_on_batch": lambda fitter: fitter.train_on_batch(X, Y),
    "test_on_batch": lambda fitter: fitter.test_on_batch(X, Y),
    "predict_on_batch": lambda fitter: fitter.predict_on_batch(X),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_inside_another_strategy_is_refused(call):
    fitter = mirrored()
    with (
        pytest.raises(RuntimeError, match=rf"^{call}: called inside the scope of another strategy(.|\n)*Leave that scope"),
        other_strategy().scope(),
    ):
        CALLS[call](fitter)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_inside_the_fitters_own_scope_is_as_without(call):
    fitter, plain = mirrored(), compiled()
    with fitter.scope():
        inside = CALLS[call](fitter)
    outside = CALLS[call](plain)
    if isinstance(inside, keras.callbacks.History):
        inside, outside = inside.history, outside.history
    assert_same(inside, outside)
    assert_same(fitter.get_weights(), plain.get_weights())


def test_no_call_leaves_a_scope_entered():
    fitter = mirrored()
    for call in CALLS.values():
        call(fitter)
    assert not tf.distribute.has_strategy()


def test_fit_from_another_thread_is_as_from_this_one():
    fitter, plain = mirrored(), compiled()
    thread = threading.Thread(target=fitter.fit, args=(X, Y), kwargs={"verbose": 0})
    thread.start()
    thread.join()
    plain.fit(X, Y, verbose=0)
    assert_same(fitter.get_weights(), plain.get_weights())


# -- compile -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_before_compile_a_call_says_to_compile(call):
    with pytest.raises(ValueError, match=r"call `compile\(\)` before"):
        CALLS[call](mirrored(build))


def test_predict_needs_no_compile():
    assert_same(mirrored(build).predict(X, verbose=0), build().predict(X, verbose=0))


def test_an_optimizer_in_use_by_another_model_is_named():
    optimizer = keras.optimizers.Adam()
    compiled(optimizer).fit(X, Y, verbose=0)
    fitter = mirrored(build)
    with pytest.raises(
        ValueError, match=r"the optimizer 'adam.*' \(Adam\) was already used to train another(.|\n)*pass a new one"
    ):
        fitter.compile(optimizer, "mse")


def test_an_optimizer_of_another_fitter_is_named():
    optimizer = keras.optimizers.Adam()
    first, second = mirrored(build), mirrored(build, "cpu:3")
    first.compile(optimizer, "mse")
    first.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match=r"was already used to train another(.|\n)*pass a new one"):
        second.compile(optimizer, "mse")


def test_a_metric_of_another_fitter_is_named():
    metric = keras.metrics.MeanAbsoluteError(name="mine")
    first, second = mirrored(build), mirrored(build, "cpu:3")
    first.compile("sgd", "mse", metrics=[metric])
    with pytest.raises(ValueError, match=r"the metric 'mine'(.|\n)*pass a new one"):
        second.compile("sgd", "mse", metrics=[metric])
    assert first.fit(X, Y, verbose=0).history["mine"][0] > 0


class Unrebuildable(keras.optimizers.SGD):
    """A constructor argument is missing from get_config, so from_config fails."""

    def __init__(self, gain, **arguments):
        super().__init__(**arguments)
        self.gain = gain

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.gain, variable, learning_rate)


def test_an_optimizer_that_cannot_be_rebuilt_from_its_config_just_works():
    mine, theirs = Unrebuildable(3.0, learning_rate=0.1, momentum=0.9), Unrebuildable(3.0, learning_rate=0.1, momentum=0.9)
    with pytest.raises(TypeError):
        Unrebuildable.from_config(mine.get_config())
    fitter, plain = mirrored(build), compiled(theirs)
    fitter.compile(mine, "mse")
    fitter.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
    plain.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
    assert fitter.optimizer is mine
    assert_same(fitter.get_weights(), plain.get_weights())


OUTSIDE = {
    "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
}


@pytest.mark.parametrize("where", ["in the factory", "later", "twice"])
@pytest.mark.parametrize("make", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_what_was_made_outside_the_scope_stays_the_live_object(make, where):
    optimizer, metric = make(), keras.metrics.MeanAbsoluteError()
    plain = compiled(make(), metrics=["mae"])
    if where == "in the factory":
        fitter = mirrored(lambda: compiled(optimizer, metrics=[metric]))
    else:
        fitter = mirrored(compiled if where == "twice" else build)
        fitter.compile(optimizer, "mse", metrics=[metric])
    history = fitter.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history
    plain.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert fitter.optimizer is optimizer
    assert int(optimizer.iterations) == 3
    assert float(metric.result()) == history["mean_absolute_error"][0]
    assert_same(fitter.get_weights(), plain.get_weights())
    assert_same([np.asarray(v) for v in optimizer.variables], [np.asarray(v) for v in plain.optimizer.variables])


def test_an_optimizer_built_beforehand_for_this_model_is_taken_with_its_state():
    fitter, plain = mirrored(build), build()
    for model in (fitter, plain):
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        optimizer.iterations.assign(5)
        model.compile(optimizer, "mse")
        model.fit(X, Y, verbose=0)
    assert int(fitter.optimizer.iterations) == 6
    assert_same(fitter.get_weights(), plain.get_weights())


def test_a_learning_rate_set_through_the_users_reference_takes_effect():
    optimizer = keras.optimizers.SGD(0.1)
    fitter = mirrored(build)
    fitter.compile(optimizer, "mse")
    fitter.fit(X, Y, verbose=0)
    optimizer.learning_rate = 0.0
    before = fitter.get_weights()
    fitter.fit(X, Y, verbose=0)
    assert_same(fitter.get_weights(), before, rtol=0, atol=0)
    assert float(fitter.model.optimizer.learning_rate) == 0.0


def test_compiling_again_with_the_same_optimizer_goes_on_with_its_state():
    fitter, plain = mirrored(), compiled()
    for model in (fitter, plain):
        model.fit(X, Y, verbose=0)
        model.compile(model.optimizer, "mae")
        model.fit(X, Y, verbose=0)
    assert int(fitter.optimizer.iterations) == 2
    assert_same(fitter.get_weights(), plain.get_weights())


def test_unfreezing_a_layer_between_fits_is_as_on_plain_keras():
    def frozen():
        model = build()
        model.layers[0].trainable = False
        model.compile("adam", "mse")
        return model

    fitter, plain = mirrored(frozen), frozen()
    for model in (fitter, plain):
        model.fit(X, Y, verbose=0)
        model.layers[0].trainable = True
        model.compile("adam", "mse")
        model.fit(X, Y, verbose=0)
    assert_same(fitter.get_weights(), plain.get_weights())


@pytest.mark.parametrize("when", ["in the factory", "later"])
def test_jit_compile_is_warned_of_at_the_users_line_and_trains(when):
    def construct_and_compile():
        fitter = mirrored(build)
        fitter.compile("sgd", "mse", jit_compile=True)
        return fitter

    make = construct_and_compile if when == "later" else lambda: mirrored(lambda: compiled("sgd", jit_compile=True))
    with pytest.warns(UserWarning, match=r"jit_compile=True was given, but XLA can't compile") as caught:
        fitter = make()
    if when == "later":
        assert "jit_compile=True" in linecache.getline(caught[0].filename, caught[0].lineno)
    plain = compiled("sgd")
    assert_same(fitter.fit(X, Y, verbose=0).history, plain.fit(X, Y, verbose=0).history)


# -- the wrapper -------------------------------------------------------------------------------------------------------


class Mine(keras.Model):
    strategy = "the model's own"

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def shout(self, word):
        return word.upper()


def test_the_model_is_the_users_own_class():
    fitter = mirrored(Mine)
    assert type(fitter.model) is Mine
    assert fitter.shout("hello") == "HELLO"


def test_the_fitters_own_names_win_and_the_models_stay_reachable():
    fitter = mirrored(Mine)
    assert fitter.strategy.num_replicas_in_sync == fitter.num_replicas == 2
    assert fitter.model.strategy == "the model's own"
    assert fitter.is_chief is True


@pytest.mark.parametrize("name", ["model", "strategy", "num_replicas", "is_chief", "scope", "verify"])
def test_the_fitters_own_names_cannot_be_set(name):
    with pytest.raises(AttributeError, match=rf"MirroredFitter\.{name} can't be set"):
        setattr(mirrored(), name, 1)


def test_attributes_pass_to_the_model_and_back():
    fitter = mirrored()
    fitter.note = "kept"
    assert fitter.model.note == "kept"
    fitter.model.note = "changed"
    assert fitter.note == "changed"
    del fitter.note
    assert not hasattr(fitter.model, "note")
    fitter.trainable = False
    assert fitter.model.trainable_variables == []
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nope'"):
        _ = fitter.nope


def test_the_fitter_reads_as_the_model(capsys):
    fitter, plain = mirrored(), compiled()
    assert set(dir(plain)) | {"num_replicas", "is_chief", "scope", "verify"} <= set(dir(fitter))
    assert repr(fitter) == f"<MirroredFitter of {fitter.model!r} on 2 replicas>"
    assert repr(mirrored(devices="cpu:1")).endswith("on 1 replica>")
    assert fitter.count_params() == plain.count_params()
    assert [type(layer) for layer in fitter.layers] == [type(layer) for layer in plain.layers]
    np.testing.assert_allclose(fitter(X), plain(X), rtol=1e-6)
    fitter.summary()
    ours = capsys.readouterr().out
    plain.summary()
    theirs = capsys.readouterr().out
    assert ours.split("\n", 1)[1].split("┃")[-1].count("Dense") == theirs.split("\n", 1)[1].split("┃")[-1].count("Dense")
    assert [line for line in ours.splitlines() if "Total params" in line] == [
        line for line in theirs.splitlines() if "Total params" in line
    ]


@pytest.mark.parametrize("name", [*CALLS, "save", "summary", "load_weights", "get_compile_config"])
def test_signatures_names_and_docstrings_are_keras(name):
    ours, theirs = getattr(mirrored(), name), getattr(compiled(), name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours.__doc__ == theirs.__doc__
    assert ours.__name__ == theirs.__name__


def test_return_values_are_those_of_keras():
    fitter, plain = mirrored(), compiled()
    for model in (fitter, plain):
        model.compile("sgd", "mse", metrics=["mae"])
    ours, theirs = fitter.fit(X, Y, epochs=2, verbose=0), plain.fit(X, Y, epochs=2, verbose=0)
    assert type(ours) is type(theirs) is keras.callbacks.History
    assert ours.model is fitter.model
    assert (ours.params, ours.epoch) == (theirs.params, theirs.epoch)
    assert_same(ours.history, theirs.history)
    for call in (
        lambda model: model.evaluate(X, Y, verbose=0),
        lambda model: model.evaluate(X, Y, verbose=0, return_dict=True),
        lambda model: model.train_on_batch(X, Y),
        lambda model: model.train_on_batch(X, Y, return_dict=True),
        lambda model: model.train_on_batch(X, Y, np.arange(10.0)),
        lambda model: model.train_on_batch(X, Y > 0, class_weight={0: 1.0, 1: 2.0}),
        lambda model: model.test_on_batch(X, Y),
        lambda model: model.test_on_batch(X, Y, return_dict=True),
        lambda model: model.predict_on_batch(X),
        lambda model: model.predict(X, verbose=0),
    ):
        ours, theirs = call(fitter), call(plain)
        assert_same(ours, theirs)
        for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
            assert type(a) is type(b)


@pytest.mark.parametrize("call", ["train_on_batch", "test_on_batch", "evaluate"])
def test_one_loss_without_metrics_is_one_number_as_in_keras(call):
    ours, theirs = CALLS[call](mirrored()), CALLS[call](compiled())
    assert type(ours) is type(theirs)
    assert_same(ours, theirs)


def test_the_models_own_fit_runs_on_the_replicas_too():
    fitter, plain = mirrored(devices="cpu:3"), compiled()
    fitter.model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    plain.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert fitter.model.train_function is not None
    assert len({np.asarray(v).tobytes() for v in fitter.weights[0].value.values}) == 1
    assert_same(fitter.get_weights(), plain.get_weights())


class OwnFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        self.given = (len(args), sorted(kwargs))
        return super().fit(*args, **kwargs)


class OtherFit(keras.Sequential):
    def fit(self, data, rounds=1):
        return super().fit(*data, epochs=rounds, verbose=0)


@pytest.mark.parametrize(
    ("kind", "call"),
    [(OwnFit, lambda model: model.fit(X, Y, verbose=0)), (OtherFit, lambda model: model.fit((X, Y), rounds=2))],
)
def test_a_fit_that_the_users_class_overrides_is_called_as_the_user_called_it(kind, call):
    def factory():
        keras.utils.set_random_seed(1)
        model = kind([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    fitter, plain = mirrored(factory), factory()
    assert_same(call(fitter).history, call(plain).history)
    assert getattr(fitter, "given", None) == getattr(plain, "given", None)


class OwnCompile(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.dense(inputs)

    @property
    def metrics(self):
        return [self.tracker]

    def compile(self, teacher, loss_fn):
        super().compile()
        self.teacher, self.loss_fn = teacher, loss_fn

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_fn(y, self(x, training=True))
        self.teacher.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def test_a_compile_of_the_users_own_may_take_any_arguments():
    def factory():
        keras.utils.set_random_seed(1)
        return OwnCompile()

    fitter, plain = mirrored(factory), factory()
    for model in (fitter, plain):
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(optimizer, loss_fn=keras.losses.MeanSquaredError())
        model.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
        assert model.teacher is optimizer
    assert int(fitter.teacher.iterations) == 8
    assert_same(fitter.get_weights(), plain.get_weights())


# -- copies ------------------------------------------------------------------------------------------------------------

COPIES = {
    "clone_model": keras.models.clone_model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_the_model_is_plain_keras_on_one_device(make):
    fitter = mirrored()
    fitter.fit(X, Y, verbose=0)
    twin = make(fitter.model)
    assert type(twin) is type(fitter.model)
    assert not [name for name in vars(twin) if "mirror" in name]
    assert "fit" not in vars(twin)
    twin.set_weights(fitter.get_weights())
    twin.compile("sgd", "mse")
    plain = compiled("sgd")
    plain.set_weights(fitter.get_weights())
    assert_same(twin.fit(X, Y, verbose=0).history, plain.fit(X, Y, verbose=0).history, rtol=1e-6)
    assert isinstance(twin.weights[0].value, tf.Variable)
    assert not isinstance(twin.weights[0].value, tf.distribute.DistributedValues)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_fitter_itself_says_to_copy_its_model(copied):
    with pytest.raises(TypeError, match=r"Copy or pickle fitter\.model"):
        copied(mirrored())


@pytest.mark.parametrize("make", [keras.models.clone_model, copy.deepcopy])
def test_a_copy_made_in_a_factory_is_mirrored_again(make):
    fitter = mirrored(lambda: compiled("sgd"))
    fitter.fit(X, Y, verbose=0)
    again = mirrored(lambda: make(fitter.model), "cpu:3")
    again.set_weights(fitter.get_weights())
    for model in (fitter, again):
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
    assert_same(again.get_weights(), fitter.get_weights())


def test_two_fitters_train_side_by_side():
    first, second, plain = mirrored(), mirrored(devices="cpu:3"), compiled()
    for _ in range(2):
        for model in (first, second, plain):
            model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert_same(first.get_weights(), plain.get_weights())
    assert_same(second.get_weights(), plain.get_weights())


# -- fit's arguments ---------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "validation_data": {"validation_data": (X[:7], Y[:7])},
    "validation weights": {"validation_data": (X[:7], Y[:7], np.arange(7.0))},
    "validation_split": {"validation_split": 0.3},
    "validation_freq": {"validation_data": (X[:7], Y[:7]), "validation_freq": 2},
    "validation_freq list": {"validation_data": (X[:7], Y[:7]), "validation_freq": [1, 3]},
    "validation_steps": {"validation_data": (X[:7], Y[:7]), "validation_steps": 1, "validation_batch_size": 2},
    "class_weight": {"class_weight": {0: 1.0, 1: 3.0}},
    "sample_weight": {"sample_weight": np.arange(10.0)},
    "initial_epoch": {"initial_epoch": 2},
    "one batch": {"batch_size": 16},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_fits_arguments_mean_what_they_mean_in_keras(arguments):
    arguments = {"epochs": 3, "batch_size": 4, "shuffle": False, "verbose": 0, **arguments}
    y = (Y > 0).astype("float32") if "class_weight" in arguments else Y
    calls = {}
    for model in (mirrored(devices="cpu:3"), compiled()):
        seen = calls[type(model)] = []
        hooks = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs, seen=seen: seen.append(("begin", batch)),
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append(("end", batch, sorted(logs))),
            on_epoch_end=lambda epoch, logs, seen=seen: seen.append(("epoch", epoch, sorted(logs))),
        )
        seen.append(model.fit(X, y, callbacks=[hooks], **arguments).history)
        seen.append(model.get_weights())
    ours, theirs = calls.values()
    assert ours[:-2] == theirs[:-2]
    assert_same(ours[-2:], theirs[-2:])


def test_arguments_by_position_are_understood():
    fitter, plain = mirrored(), compiled()
    assert_same(fitter.fit(X, Y, 10, 2, 0).history, plain.fit(X, Y, 10, 2, 0).history)
    assert_same(fitter.evaluate(X, Y, 4, 0), plain.evaluate(X, Y, 4, 0))
    assert_same(fitter.predict(X, 4, 0), plain.predict(X, 4, 0))


def test_an_unknown_argument_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match=r"fit\(\).*'epoch'"):
        mirrored().fit(X, Y, epoch=2)


def steps_of(call, **arguments):
    seen = []
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    counter.on_test_batch_end = counter.on_predict_batch_end = lambda batch, logs=None: seen.append(batch)
    call(callbacks=[counter], verbose=0, **arguments)
    return len(seen)


def test_a_batch_per_replica_counts_one_replicas_share():
    fitter = mirrored(devices="cpu:3", batch="per_replica")
    assert steps_of(lambda **kw: fitter.fit(X, Y, batch_size=2, **kw)) == 2
    assert steps_of(lambda **kw: fitter.fit(X, Y, 2, **kw)) == 2
    assert steps_of(lambda **kw: fitter.evaluate(X, Y, batch_size=2, **kw)) == 2
    assert steps_of(lambda **kw: fitter.predict(X, batch_size=2, **kw)) == 2


def test_a_batch_per_replica_by_position_counts_alike():
    fitter = mirrored(devices="cpu:3", batch="per_replica")
    assert steps_of(lambda **kw: fitter.evaluate(X, Y, 2, **kw)) == 2
    assert steps_of(lambda **kw: fitter.predict(X, 2, **kw)) == 2


def test_a_batch_per_replica_of_kerass_default_size_counts_alike():
    fitter = mirrored(devices="cpu:3", batch="per_replica")
    x, y = np.tile(X, (20, 1)), np.tile(Y, (20, 1))
    assert steps_of(lambda **kw: fitter.fit(x, y, **kw)) == 3  # 200 examples by 3 x 32


def test_a_seed_gives_the_same_weights_in_two_constructions():
    def factory():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)])

    weights = []
    for seed in (3, 3, 4):
        fitter = mirrored(factory, seed=seed)
        fitter.compile("sgd", "mse")
        fitter.fit(X, Y, batch_size=4, epochs=2, verbose=0)
        weights.append(fitter.get_weights())
    assert_same(weights[0], weights[1], rtol=0, atol=0)
    assert np.abs(weights[0][0] - weights[2][0]).max() > 1e-3


@pytest.mark.parametrize("seed", ["a", 1.5, -1, 2**33])
def test_what_is_no_seed_is_a_value_error(seed):
    with pytest.raises(ValueError, match=r"[Ss]eed"):
        mirrored(seed=seed)


# -- callbacks ---------------------------------------------------------------------------------------------------------

CALLBACKS = {
    "EarlyStopping": lambda path: keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=2, restore_best_weights=True),
    "ReduceLROnPlateau": lambda path: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, min_delta=9.0, patience=1),
    "LearningRateScheduler": lambda path: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "ModelCheckpoint": lambda path: keras.callbacks.ModelCheckpoint(path / "{epoch}.keras"),
    "ModelCheckpoint weights": lambda path: keras.callbacks.ModelCheckpoint(
        path / "{epoch}.weights.h5", save_weights_only=True, save_best_only=True, monitor="loss"
    ),
    "CSVLogger": lambda path: keras.callbacks.CSVLogger(path / "log.csv"),
    "BackupAndRestore": lambda path: keras.callbacks.BackupAndRestore(path / "backup", save_freq=2),
    "SwapEMAWeights": lambda path: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
}


@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS.keys())
def test_keras_callbacks_see_what_they_see_on_one_device(make, tmp_path):
    def factory():
        return compiled(keras.optimizers.Adam(0.01, use_ema=True))

    results = []
    for name, model in (("ours", mirrored(factory, "cpu:3")), ("theirs", factory())):
        path = tmp_path / name
        path.mkdir()
        history = model.fit(X, Y, batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=[make(path)]).history
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*"))
        results.append((history, model.get_weights(), float(model.optimizer.learning_rate), files))
    ours, theirs = results
    assert_same(ours[:3], theirs[:3])
    assert ours[3] == theirs[3]


def test_terminate_on_nan_stops_at_the_same_batch():
    histories = []
    for model in (mirrored(lambda: compiled(keras.optimizers.SGD(1e30))), compiled(keras.optimizers.SGD(1e30))):
        callbacks = [keras.callbacks.TerminateOnNaN()]
        histories.append(model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks))
    assert [len(h.epoch) for h in histories] == [1, 1]


@pytest.mark.parametrize("through", ["callback", "fitter"])
def test_stop_training_stops(through):
    fitter = mirrored()
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            (self.model if through == "callback" else fitter).stop_training = True

    fitter.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[Stop()])
    assert seen == [0]
    assert fitter.stop_training is True


def test_a_callback_may_read_and_set_the_learning_rate_as_numbers():
    fitter = mirrored()
    rates = []

    class Halve(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))
            self.model.optimizer.learning_rate = rates[-1] / 2
            assert int(self.model.optimizer.iterations) == epoch

    fitter.fit(X, Y, epochs=3, verbose=0, callbacks=[Halve()])
    np.testing.assert_allclose(rates, [1e-3, 5e-4, 2.5e-4])
    fitter.optimizer.learning_rate = 0.5
    assert float(fitter.model.optimizer.learning_rate) == 0.5


# -- the user's own exceptions -----------------------------------------------------------------------------------------


class MineError(Exception):
    pass


MINE = MineError("mine")


def raising(*args, **kwargs):
    raise MINE


class RaisingStep(Mine):
    train_step = raising


class RaisingData(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise MINE
        return X, Y


@pytest.fixture
def no_scope_left():
    yield
    assert not tf.distribute.has_strategy()


@pytest.mark.usefixtures("no_scope_left")
class TestExceptionsOfTheUsers:
    def fails(self, fitter, x=X, y=Y, **arguments):
        with pytest.raises(MineError) as caught:
            fitter.fit(x, y, verbose=0, **arguments)
        assert caught.value is MINE

    def test_from_train_step(self):
        fitter = mirrored(RaisingStep)
        fitter.compile("sgd", "mse")
        self.fails(fitter)

    def test_from_a_loss(self):
        fitter = mirrored(build)
        fitter.compile("sgd", raising)
        self.fails(fitter)

    def test_from_a_callback(self):
        callback = keras.callbacks.Callback()
        callback.on_train_batch_end = raising
        self.fails(mirrored(), callbacks=[callback])

    def test_from_a_pydataset(self):
        self.fails(mirrored(), RaisingData(), None, shuffle=False)

    def test_from_a_generators_first_batch(self):
        def generator():
            raise MINE
            yield X, Y

        self.fails(mirrored(), generator(), None)

    def test_from_a_generators_later_batch(self):
        def generator():
            for _ in range(3):
                yield X, Y
            raise MINE

        self.fails(mirrored(), generator(), None, shuffle=False)

    @pytest.mark.parametrize("call", ["fit", "predict"])
    def test_from_a_layers_call(self, call):
        class Raising(keras.layers.Layer):
            call = raising

        fitter = mirrored(lambda: keras.Sequential([Raising(), keras.layers.Dense(1)]))
        fitter.compile("sgd", "mse")
        with pytest.raises(MineError, match="mine"):
            CALLS[call](fitter)

    def test_training_goes_on_afterwards(self):
        fitter, plain = mirrored(), compiled()
        callback = keras.callbacks.Callback()
        callback.on_epoch_begin = raising
        self.fails(fitter, callbacks=[callback])
        fitter.fit(X, Y, verbose=0)
        plain.fit(X, Y, verbose=0)
        assert_same(fitter.get_weights(), plain.get_weights())


# -- data that can't be right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_unbatched_dataset_of_numbers_says_to_batch_it(call):
    dataset = tf.data.Dataset.from_tensor_slices((X[:, 0], Y[:, 0]))
    with pytest.raises(ValueError, match=r"without any tensor of rank 1(.|\n)*Batch the dataset: dataset\.batch"):
        getattr(mirrored(), call)(dataset, verbose=0)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_unbatched_dataset_of_rows_says_to_batch_it_where_the_model_knows_its_shape(call):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=r"\(3,\)(.|\n)*Batch the dataset: dataset\.batch"):
        getattr(mirrored(), call)(dataset, verbose=0)


def test_arrays_of_different_lengths_are_named_as_in_keras():
    with pytest.raises(ValueError, match=r"same number of samples(.|\n)*'x' sizes: 10(.|\n)*'y' sizes: 7"):
        mirrored().fit(X, Y[:7], verbose=0)


def test_a_generators_batch_of_different_lengths_says_so():
    def generator():
        for _ in range(3):
            yield X, Y[:7]

    with pytest.raises(ValueError, match="batch 1 of the generator: inputs, targets and weights differ in rows: found 10, 7"):
        mirrored().fit(generator(), shuffle=False, verbose=0)


@pytest.mark.parametrize("other", [(X, Y[:7]), (X, Y, np.ones(7, "float32"))], ids=["targets", "weights"])
def test_a_datasets_batch_of_different_lengths_says_so(other):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"differ in rows|10.*7|7.*10"):
        mirrored().fit(tf.data.Dataset.from_tensors(other), verbose=0, shuffle=False)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("rows", [7, 12])
@pytest.mark.parametrize("call", ["train_on_batch", "test_on_batch"])
def test_a_batch_of_different_lengths_says_so(call, rows, eager):
    fitter = mirrored(lambda: compiled(run_eagerly=eager))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=rf"differ in rows|10.*{rows}|{rows}.*10"):
        getattr(fitter, call)(X, np.ones((rows, 1), "float32"))


def test_one_changed_line_is_all_it_takes_in_a_fresh_process():
    script = """
import keras, numpy as np
from keras_mirror import MirroredFitter

def build_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

model = MirroredFitter(build_model, devices="cpu:2")
model.compile(keras.optimizers.Adam(0.1), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
x = np.ones((7, 3), "float32")
history = model.fit(x, x[:, :1], epochs=2, batch_size=4, verbose=0).history
print(model.num_replicas, sorted(history))
"""
    assert run(script, KERAS_BACKEND="tensorflow") == "2 ['loss', 'mean_absolute_error']\n"
