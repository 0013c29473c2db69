"""What is saved is plain Keras: it loads where keras_mirror isn't, and training goes on from it on any number of replicas."""

import json
import pickle
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from fresh_process import run
from users_code import Pair, Slow, absolute

from keras_mirror import MirroredFitter

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = 0.1 * X.sum(1, keepdims=True)
FIT = {"batch_size": 4, "shuffle": False, "verbose": 0}


def sequential(*layers):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), *layers, keras.layers.Dense(1)])


def normalised():
    return sequential(keras.layers.BatchNormalization(synchronized=True))


def pair():
    keras.utils.set_random_seed(1)
    return Pair(3, name="pair")


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)


def scheduled():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)


# name: (factory, optimizer, precision, policy of the process that loads)
CASES = {
    "adam clipnorm": (sequential, lambda: keras.optimizers.Adam(0.01, clipnorm=0.1), None, "float32"),
    "adam by name": (sequential, lambda: "adam", None, "float32"),
    "sgd schedule": (sequential, scheduled, None, "float32"),
    "users loss scale": (sequential, loss_scaled, None, "float32"),
    "mixed, loaded in float32": (sequential, lambda: keras.optimizers.Adam(0.01), "mixed_float16", "float32"),
    "mixed, loaded in mixed": (sequential, lambda: keras.optimizers.Adam(0.01), "mixed_float16", "mixed_float16"),
    "mixed, users loss scale": (sequential, loss_scaled, "mixed_float16", "mixed_float16"),
    "mixed by name": (sequential, lambda: "adam", "mixed_float16", "float32"),
    "bfloat16": (sequential, lambda: keras.optimizers.Adam(0.01), "mixed_bfloat16", "float32"),
    "ema": (sequential, lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2), None, "float32"),
    "accumulation": (sequential, lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), None, "float32"),
    "batch normalization": (normalised, lambda: keras.optimizers.Adam(0.01), None, "float32"),
    "users classes": (pair, lambda: Slow(3.0, learning_rate=0.1), None, "float32"),
}
HALF = [name for name, case in CASES.items() if case[2]]

LOAD = """
import pickle, sys
import keras, numpy as np
import users_code

wanted, x = pickle.load(open(sys.argv[1], "rb"))
found = {}
for name, (path, policy) in wanted.items():
    keras.config.set_dtype_policy(policy)
    model = keras.models.load_model(path)
    optimizer = model.optimizer
    found[name] = {
        "class": type(model).__name__,
        "predictions": model.predict(x, verbose=0),
        "weights": model.get_weights(),
        "optimizers": [type(o).__name__ for o in (optimizer, getattr(optimizer, "inner_optimizer", None)) if o],
        "iterations": int(optimizer.iterations),
        "state": [keras.ops.convert_to_numpy(v) for v in optimizer.variables],
    }
assert "keras_mirror" not in sys.modules
pickle.dump(found, open(sys.argv[2], "wb"))
"""


def trained(make, case):
    factory, optimizer, _, _ = CASES[case]
    model = make(factory)
    model.compile(optimizer(), absolute if factory is pair else "mse", metrics=["mae"])
    model.fit(X, Y, **FIT)
    return model


def state_of(model):
    return [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every case trained on three replicas and saved: path, and what the fitter itself had."""
    folder, out = tmp_path_factory.mktemp("saved"), {}
    for case, (_, _, precision, _) in CASES.items():
        fitter = trained(lambda factory, p=precision: MirroredFitter(factory, devices="cpu:3", precision=p), case)
        path = folder / f"{case}.keras"
        fitter.save(path)
        out[case] = {
            "path": path,
            "predictions": fitter.predict(X, verbose=0),
            "weights": fitter.get_weights(),
            "iterations": int(fitter.optimizer.iterations),
            "state": state_of(fitter),
        }
    return out


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    """What a process without keras_mirror finds in the files."""
    folder = tmp_path_factory.mktemp("loaded")
    wanted = {case: (str(saved[case]["path"]), CASES[case][3]) for case in CASES}
    (folder / "wanted").write_bytes(pickle.dumps((wanted, X)))
    run(LOAD, folder / "wanted", folder / "found", without=("keras_mirror",), KERAS_BACKEND="tensorflow")
    return pickle.loads((folder / "found").read_bytes())


@pytest.mark.parametrize("case", CASES)
def test_the_model_predicts_the_same_where_keras_mirror_is_not(saved, loaded, case):
    assert loaded[case]["class"] == ("Pair" if case == "users classes" else "Sequential")
    np.testing.assert_allclose(loaded[case]["predictions"], saved[case]["predictions"], rtol=1e-6, atol=1e-7)
    for found, had in zip(loaded[case]["weights"], saved[case]["weights"], strict=True):
        np.testing.assert_array_equal(found, had)


@pytest.mark.parametrize("case", [case for case in CASES if case != "accumulation"])
def test_the_optimizers_state_is_the_same_where_keras_mirror_is_not(saved, loaded, case):
    assert loaded[case]["iterations"] == saved[case]["iterations"] > 0
    assert len(loaded[case]["state"]) == len(saved[case]["state"])
    for found, had in zip(loaded[case]["state"], saved[case]["state"], strict=True):
        np.testing.assert_array_equal(found, had)


def test_between_accumulated_updates_the_file_holds_the_sum_as_one_device_has_it(loaded):
    plain = trained(lambda factory: factory(), "accumulation")
    for found, had in zip(loaded["accumulation"]["state"], state_of(plain), strict=True):
        np.testing.assert_allclose(found, had, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", [case for case in CASES if case not in HALF])
def test_weights_and_state_are_those_of_one_device(loaded, case):
    plain = trained(lambda factory: factory(), case)
    file, model = loaded[case]["weights"] + loaded[case]["state"], plain.get_weights() + state_of(plain)
    for found, had in zip(file, model, strict=True):
        np.testing.assert_allclose(found, had, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("case", HALF)
def test_a_loss_scale_optimizer_is_loaded_as_one_and_wrapped_once(loaded, case):
    wanted = ["Adam"] if case == "bfloat16" else ["LossScaleOptimizer", "Adam"]
    assert loaded[case]["optimizers"] == wanted


def every(config, key):
    """All values of `key` in a nested config."""
    if isinstance(config, dict):
        return [v for k, v in config.items() if k == key] + [f for v in config.values() for f in every(v, key)]
    return [f for v in config for f in every(v, key)] if isinstance(config, list) else []


@pytest.mark.parametrize("case", CASES)
def test_the_saved_config_names_nothing_of_ours(saved, case):
    text = zipfile.ZipFile(saved[case]["path"]).read("config.json").decode()
    assert "mirror" not in text.lower()
    registered = {name for name in every(json.loads(text), "registered_name") if name}
    if case == "users classes":
        assert registered == {"users>Pair", "users>Slow", "users>absolute", "function"} or registered == {
            "users>Pair",
            "users>Slow",
            "function",
        }
    else:
        assert registered <= {"Sequential", "Functional"}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_the_file_on_any_number_of_replicas(saved, case):
    path, policy = saved[case]["path"], CASES[case][3]
    keras.config.set_dtype_policy(policy)
    tolerance = {"rtol": 0.02, "atol": 0.01} if case in HALF else {"rtol": 1e-3, "atol": 1e-5}
    plain = keras.models.load_model(path)
    plain.fit(X, Y, epochs=2, **FIT)
    for replicas in (1, 3, 4):
        fitter = MirroredFitter(lambda: keras.models.load_model(path), devices=f"cpu:{replicas}")
        fitter.fit(X, Y, epochs=2, **FIT)
        assert int(fitter.optimizer.iterations) == int(plain.optimizer.iterations) > saved[case]["iterations"]
        for ours, theirs in zip(fitter.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, **tolerance, err_msg=f"on {replicas} replicas")


def test_a_file_of_plain_keras_goes_on_as_well(tmp_path):
    plain = trained(lambda factory: factory(), "adam clipnorm")
    plain.save(tmp_path / "plain.keras")
    fitter = MirroredFitter(lambda: keras.models.load_model(tmp_path / "plain.keras"), devices="cpu:3")
    for model in (plain, fitter):
        model.fit(X, Y, **FIT)
    for ours, theirs in zip(fitter.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# -- other formats -----------------------------------------------------------------------------------------------------

SERVE = """
import pickle, sys
import tensorflow as tf

wanted, x = pickle.load(open(sys.argv[1], "rb"))
found = {}
for key, path in wanted.items():
    model = tf.saved_model.load(path)
    signature = model.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    (out,) = signature(**{name: tf.constant(x)}).values()
    found[key] = out.numpy()
assert "keras_mirror" not in sys.modules
pickle.dump(found, open(sys.argv[2], "wb"))
"""
SERVED = ["adam clipnorm", "batch normalization", "mixed, loaded in float32", "users classes"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(what the fitter predicted, what a process without keras_mirror serves) for each case and format."""
    folder, wanted, predicted = tmp_path_factory.mktemp("served"), {}, {}
    for case in SERVED:
        precision = CASES[case][2]
        fitter = trained(lambda factory, p=precision: MirroredFitter(factory, devices="cpu:2", precision=p), case)
        fitter.export(folder / f"{case} export", verbose=False)
        tf.saved_model.save(fitter.model, str(folder / f"{case} save"))
        predicted[case] = fitter.predict(X, verbose=0)
        wanted.update({(case, how): str(folder / f"{case} {how}") for how in ("export", "save")})
    (folder / "wanted").write_bytes(pickle.dumps((wanted, X)))
    run(SERVE, folder / "wanted", folder / "found", without=("keras_mirror",))
    return predicted, pickle.loads((folder / "found").read_bytes())


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize("how", ["export", "save"])
def test_a_saved_model_serves_where_keras_mirror_is_not(served, case, how):
    predicted, found = served
    np.testing.assert_allclose(found[case, how], predicted[case], rtol=1e-5, atol=1e-6)


def test_training_goes_on_after_saving_in_every_format(tmp_path):
    fitter = trained(lambda factory: MirroredFitter(factory, devices="cpu:3"), "adam clipnorm")
    plain = trained(lambda factory: factory(), "adam clipnorm")
    fitter.save(tmp_path / "m.keras")
    fitter.save_weights(tmp_path / "m.weights.h5")
    fitter.export(tmp_path / "export", verbose=False)
    tf.saved_model.save(fitter.model, str(tmp_path / "saved"))
    for model in (fitter, plain):
        model.fit(X, Y, **FIT)
    for ours, theirs in zip(fitter.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_weights_files_go_both_ways_between_plain_keras_and_a_fitter(tmp_path):
    fitter = trained(lambda factory: MirroredFitter(factory, devices="cpu:3"), "batch normalization")
    fitter.save_weights(tmp_path / "ours.weights.h5")
    plain = normalised()
    plain.load_weights(tmp_path / "ours.weights.h5")
    for ours, theirs in zip(fitter.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    plain.set_weights([2 * w for w in plain.get_weights()])
    plain.save_weights(tmp_path / "theirs.weights.h5")
    fitter.load_weights(tmp_path / "theirs.weights.h5")
    for variable, theirs in zip(fitter.weights, plain.get_weights(), strict=True):
        for component in variable.value.values:
            np.testing.assert_array_equal(component, theirs)


def test_weights_set_by_the_user_reach_every_replica():
    fitter = MirroredFitter(normalised, devices="cpu:3")
    fitter.set_weights([w + 1 for w in fitter.get_weights()])
    for variable, value in zip(fitter.weights, fitter.get_weights(), strict=True):
        for component in variable.value.values:
            np.testing.assert_array_equal(component, value)


def test_a_checkpoint_of_tensorflows_holds_and_restores_the_model(tmp_path):
    fitter = trained(lambda factory: MirroredFitter(factory, devices="cpu:2"), "adam clipnorm")
    had = fitter.get_weights()
    path = tf.train.Checkpoint(model=fitter.model).save(str(tmp_path / "check"))
    fitter.fit(X, Y, **FIT)
    tf.train.Checkpoint(model=fitter.model).restore(path)
    for ours, before in zip(fitter.get_weights(), had, strict=True):
        np.testing.assert_array_equal(ours, before)
