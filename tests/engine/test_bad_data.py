"""Data that can't be right: each fault gets its message, where it can before anything is trained, and nothing hangs."""

import threading
import traceback
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_mirror import MirroredFitter

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


class MineError(Exception):
    """The user's own."""


def regression(replicas=2):
    def build():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    fitter = MirroredFitter(build, devices=f"cpu:{replicas}")
    fitter.compile("sgd", "mse")
    return fitter


@pytest.fixture(scope="module")
def fitter():
    return regression()


@pytest.fixture(autouse=True)
def _quiet():
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield
    for thread in set(threading.enumerate()) - before:
        if "Worker" in thread.name:  # Keras's name for what makes a PyDataset's batches
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} still runs"


# -- exceptions of the user's code -------------------------------------------------------------------------------------


def batches(fail_at, error=MineError, endless=False):
    index = 0
    while endless or index < 6:
        if index == fail_at:
            raise error(f"batch {index}")
        yield X, Y
        index += 1


class Data(keras.utils.PyDataset):
    def __init__(self, fail_at, error=MineError, **arguments):
        super().__init__(**arguments)
        self.fail_at, self.error = fail_at, error

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == self.fail_at:
            raise self.error(f"batch {index}")
        return X, Y


FAILING = {
    "generator": batches,
    "PyDataset": Data,
    "PyDataset, 2 workers": lambda at, error=MineError: Data(at, error, workers=2, max_queue_size=3),
}


@pytest.mark.parametrize("error", [MineError, ValueError, KeyError, StopAsyncIteration])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING.keys())
def test_an_exception_reaches_the_caller_with_its_own_traceback(fitter, make, at, error):
    with pytest.raises(error) as caught:
        fitter.fit(make(at, error), shuffle=False, verbose=0)
    assert str(at) in str(caught.value)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] in ("batches", "__getitem__"), frames


@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING.keys())
def test_so_it_does_from_evaluate_and_predict(fitter, make, call):
    with pytest.raises(MineError, match="batch 3"):
        getattr(fitter, call)(make(3), verbose=0)


def test_so_it_does_from_validation_data(fitter):
    with pytest.raises(MineError, match="batch 3"):
        fitter.fit(X, Y, validation_data=Data(3), verbose=0)


def test_what_fails_after_the_last_step_is_no_failure(fitter):
    """Batches are made ahead of the steps; one that is never asked for may fail."""
    fitter.fit(batches(4), steps_per_epoch=3, shuffle=False, verbose=0)


def test_training_goes_on_after_a_failure(fitter):
    with pytest.raises(MineError):
        fitter.fit(batches(3), shuffle=False, verbose=0)
    before = fitter.get_weights()
    fitter.fit(X, Y, verbose=0)
    assert np.any(fitter.get_weights()[0] != before[0])


def test_an_error_of_the_model_is_not_taken_for_one_of_the_data(fitter):
    """A made-ahead batch has failed, and then the model does."""
    data = batches(3)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        fitter.fit(((x[:, :2] if i else x, y) for i, (x, y) in enumerate(data)), shuffle=False, verbose=0)
    assert not isinstance(caught.value, MineError)


# -- generators --------------------------------------------------------------------------------------------------------


def few(count):
    for _ in range(count):
        yield X, Y


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_generator_that_ends_early_ends_training_with_its_epoch_and_says_so(steps_per_execution):
    fitter = regression()
    fitter.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    with pytest.warns(
        UserWarning, match=r"the generator ended after 3 batches, in epoch 1 of 4; training stops there(.|\n)*PyDataset"
    ):
        history = fitter.fit(few(3), epochs=4, shuffle=False, verbose=0)
    assert history.epoch == [0]
    assert int(fitter.optimizer.iterations) == 3
    with pytest.warns(UserWarning, match=r"after 5 batches, in epoch 3 of 9"):
        history = fitter.fit(few(5), epochs=9, steps_per_epoch=2, shuffle=False, verbose=0)
    assert history.epoch == [0, 1, 2]
    assert int(fitter.optimizer.iterations) == 3 + 5


def test_a_generator_that_lasts_is_not_warned_of(fitter):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitter.fit(few(4), epochs=2, steps_per_epoch=2, shuffle=False, verbose=0)
        fitter.fit(batches(None, endless=True), epochs=2, steps_per_epoch=2, verbose=0)


def test_an_empty_generator_says_so(fitter):
    with pytest.raises(ValueError, match=r"fit: the generator gave no batch"):
        fitter.fit(few(0), verbose=0)


WRONG = {
    "a third part": ((X, Y, Y[:, 0]), r"batch 3 of the generator is \(·, ·, ·\), expected \(·, ·\) as in the first batch"),
    "a dict": (({"a": X}, Y), r"batch 3 of the generator is .*a.*, expected \(·, ·\)"),
    "no tuple": (X, r"batch 3 of the generator is ·, expected \(·, ·\)"),
    "another width": ((X[:, :2], Y), r"batch 3 .* an array of shape \(10, 2\), expected \(None, 3\)"),
    "another rank": ((X[:, 0], Y), r"batch 3 .* an array of shape \(10,\), expected \(None, 3\)"),
    "fewer targets": ((X, Y[:7]), r"batch 3 of the generator: .*differ in rows: found 10, 7"),
    "None": (None, r"batch 3 of the generator is None"),
}


@pytest.mark.parametrize(("batch", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_generators_batch_of_another_form_is_named(fitter, batch, message):
    with pytest.raises(ValueError, match="fit: " + message):
        fitter.fit(iter_of([(X, Y), (X, Y), batch, (X, Y)]), shuffle=False, verbose=0)


def iter_of(found):
    yield from found


def test_a_pydatasets_batch_of_another_form_is_named(fitter):
    class Odd(Data):
        def __getitem__(self, index):
            return (X, Y) if index < 5 else (X[:, :2], Y)

    with pytest.raises(
        ValueError, match=r"fit: batch 6 of the PyDataset holds an array of shape \(10, 2\), expected \(None, 3\)"
    ):
        fitter.fit(Odd(None), shuffle=False, verbose=0)


def test_a_pydataset_of_wrong_batches_says_what_keras_takes(fitter):
    class Odd(Data):
        def __getitem__(self, index):
            return "batch"

    with pytest.raises(ValueError, match="must return a tuple or a dict"):
        fitter.fit(Odd(None), verbose=0)


# -- datasets ----------------------------------------------------------------------------------------------------------


def test_a_dataset_that_changes_shape_says_what_was_found(fitter):
    def batch(i):
        width = tf.cast(3 + i // 2, tf.int32)
        return tf.zeros([4, width]), tf.zeros([4, 1])

    data = tf.data.Dataset.range(4).map(batch)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"\b4\b") as caught:
        fitter.fit(data, shuffle=False, verbose=0)
    assert "3" in str(caught.value)


def test_a_dataset_whose_inner_dimensions_vary_on_purpose_is_fine():
    fitter = MirroredFitter(
        lambda: keras.Sequential([keras.Input((None, 3)), keras.layers.GlobalAveragePooling1D()]), devices="cpu:3"
    )
    fitter.compile(loss="mse", optimizer="sgd")
    data = tf.data.Dataset.range(1, 5).map(lambda i: (tf.ones([4, i, 3]), tf.ones([4, 3])))
    assert fitter.evaluate(data, verbose=0) == 0
    assert fitter.test_function.traces == 1


def test_predict_without_a_batch_says_so(fitter):
    with pytest.raises(ValueError, match=r"predict: the data gave no batch"):
        fitter.predict(tf.data.Dataset.from_tensor_slices(X).batch(4).take(0), verbose=0)


def test_predict_of_no_row_gives_no_row(fitter):
    assert fitter.predict(X[:0], verbose=0).shape == (0, 1)


@pytest.mark.parametrize("validation", ["arrays", "dataset"])
def test_validation_data_of_zero_length_leaves_training_as_it_is(validation):
    histories = []
    for given in (
        None,
        (X[:0], Y[:0]) if validation == "arrays" else tf.data.Dataset.from_tensor_slices((X, Y)).take(0).batch(4),
    ):
        keras.utils.set_random_seed(3)
        fitter = regression()
        histories.append(fitter.fit(X, Y, batch_size=4, epochs=2, validation_data=given, verbose=0).history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_arrays_of_different_lengths_are_named_before_training(fitter, call):
    with pytest.raises(ValueError, match=r"same number of samples(.|\n)*'x' sizes: 10(.|\n)*'y' sizes: 7"):
        getattr(fitter, call)(X, Y[:7], verbose=0)


# -- targets -----------------------------------------------------------------------------------------------------------


def with_nan():
    y = Y.copy()
    y[7] = np.nan
    return y


HOLDING_NAN = {
    "arrays": lambda: (X, with_nan()),
    "dataset": lambda: (tf.data.Dataset.from_tensor_slices((X, with_nan())).batch(4), None),
    "generator": lambda: (((X, with_nan()) for _ in range(3)), None),
}


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("make", HOLDING_NAN.values(), ids=HOLDING_NAN.keys())
def test_nan_among_targets_is_warned_of_once(make, eager):
    fitter = regression()
    fitter.compile("sgd", "mse", run_eagerly=eager)
    with pytest.warns(UserWarning, match=r"^fit: the targets contain NaN(.|\n)*sample_weight 0") as caught:
        fitter.fit(*make(), epochs=1 if eager else 2, steps_per_epoch=2, batch_size=4, verbose=0)
    said = [warning for warning in caught if "NaN" in str(warning.message)]
    assert len(said) == 1
    assert said[0].filename == __file__


@pytest.mark.parametrize("value", [np.inf, 0.0, 3e38])
def test_other_targets_are_not_warned_of(fitter, value):
    y = np.full_like(Y, value)
    y[0] = -y[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitter.evaluate(X, y, verbose=0)
        fitter.evaluate(X, y.astype("int32") if value == 0 else y, verbose=0)


def classifier(replicas, **options):
    def build():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Activation("softmax")])

    fitter = MirroredFitter(build, devices=f"cpu:{replicas}")
    loss = keras.losses.SparseCategoricalCrossentropy(**options) if options else "sparse_categorical_crossentropy"
    fitter.compile("sgd", loss)
    return fitter


@pytest.mark.parametrize("replicas", [1, 3])
def test_labels_that_the_output_has_no_class_for_are_named(replicas):
    fitter = classifier(replicas)
    before = fitter.get_weights()
    for wrong, message in ((4, "from 4 to 4"), (-1, "from -1 to -1")):
        for dtype in ("int32", "uint8" if wrong > 0 else "int64", "float32"):
            y = np.full(10, 3, dtype)
            y[7] = wrong
            with pytest.raises(
                ValueError, match=rf"^fit: labels {message} were found, expected 0 to 3: the output has 4 classes"
            ):
                fitter.fit(X, y, batch_size=10, verbose=0)
        with pytest.raises(ValueError, match=r"^evaluate: labels"):
            fitter.evaluate(X, np.full((10, 1), wrong), verbose=0)
        with pytest.raises(ValueError, match=r"^fit: labels"):
            fitter.train_on_batch(X, np.full(10, wrong))
    for a, b in zip(before, fitter.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_labels_are_named_where_a_gpu_would_be_silent(monkeypatch):
    """The check itself, with a loss that takes any label as TensorFlow's does on a GPU."""
    import keras.src.backend.tensorflow.nn as nn

    def silent(target, output, **_):
        return np.nan * (tf.reduce_sum(output, -1) + tf.cast(target, output.dtype))

    monkeypatch.setattr(nn, "sparse_categorical_crossentropy", silent)
    fitter = classifier(3)
    before = fitter.get_weights()
    with pytest.raises(ValueError, match="labels from 9 to 9"):
        fitter.fit(X, np.full(10, 9), batch_size=10, verbose=0)
    np.testing.assert_array_equal(before[0], fitter.get_weights()[0])


@pytest.mark.parametrize("ignored", [-1, 255])
def test_a_label_that_the_loss_ignores_is_none_of_the_wrong_ones(ignored):
    fitter = classifier(2, ignore_class=ignored)
    y = np.arange(10) % 4
    y[3] = ignored
    assert np.isfinite(fitter.fit(X, y, verbose=0).history["loss"][0])
    y[4] = 7
    with pytest.raises(ValueError, match=r"labels from 7 to 7 were found"):
        fitter.fit(X, y, verbose=0)


def test_labels_of_several_outputs_are_each_held_against_their_own():
    def build():
        x = keras.Input((3,))
        return keras.Model(x, {"few": keras.layers.Dense(2, "softmax")(x), "many": keras.layers.Dense(9, "softmax")(x)})

    fitter = MirroredFitter(build, devices="cpu:2")
    fitter.compile("sgd", {"few": "sparse_categorical_crossentropy", "many": "sparse_categorical_crossentropy"})
    good = {"few": np.arange(10) % 2, "many": np.arange(10) % 9}
    fitter.fit(X, good, verbose=0)
    with pytest.raises(ValueError, match="expected 0 to 1: the output has 2 classes"):
        fitter.fit(X, {"few": good["many"], "many": good["many"]}, verbose=0)


def test_a_loss_of_the_users_own_takes_what_labels_it_likes():
    class Mine(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true, y_pred):
            return super().call(keras.ops.maximum(y_true, 0), y_pred)

    fitter = MirroredFitter(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "softmax")]), devices="cpu:2")
    fitter.compile("sgd", Mine())
    assert np.isfinite(fitter.fit(X, np.full(10, -1), verbose=0).history["loss"][0])
