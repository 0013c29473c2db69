"""Batches per replica, the order of batches, how often a step is traced, and what feeding costs in memory."""

import warnings

import keras
import kinds
import numpy as np
import pytest
import tensorflow as tf
from fresh_process import run
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import BATCH, KINDS, Batches, notes, pair

from keras_mirror import MirroredFitter
from keras_mirror.engine import feed, in_place


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield


# -- batches per replica -----------------------------------------------------------------------------------------------


def of_sizes(sizes):
    """A dataset of numbered rows in batches of these sizes, of every form that a tensor has."""
    rows = sum(sizes)
    data = {
        "dense": np.arange(2.0 * rows).reshape(rows, 2),
        "text": np.arange(rows).astype("U3"),
        "ragged": kinds.ragged(np.arange(rows)),
        "sparse": tf.sparse.from_dense(np.eye(rows, 40, dtype="float32")),
    }
    ends = np.cumsum(sizes)
    bounds = tf.data.Dataset.from_tensor_slices((ends - np.array(sizes), ends))
    tensors = {**data, "dense": tf.constant(data["dense"]), "text": tf.constant(data["text"])}

    def cut(first, last):
        out = {name: value[first:last] for name, value in tensors.items() if name != "sparse"}
        out["sparse"] = tf.sparse.slice(tensors["sparse"], [first, 0], [last - first, 40])
        return out

    return bounds.map(cut), data


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7), times=st.integers(1, 4))
def test_consecutive_batches_are_joined_and_nothing_else_changes(sizes, times):
    dataset, data = of_sizes(sizes)
    found = feed.joined(dataset, times)
    assert int(found.cardinality()) == -(-len(sizes) // times)
    keras.tree.assert_same_structure(found.element_spec, dataset.element_spec)
    for mine, theirs in zip(keras.tree.flatten(found.element_spec), keras.tree.flatten(dataset.element_spec), strict=True):
        assert (type(mine), mine.dtype, mine.shape.as_list()[1:]) == (type(theirs), theirs.dtype, theirs.shape.as_list()[1:])
        assert mine.shape[0] is None
    batches = list(found)
    assert [len(batch["text"]) for batch in batches] == [sum(sizes[i : i + times]) for i in range(0, len(sizes), times)]
    np.testing.assert_array_equal(np.concatenate([b["dense"] for b in batches]), data["dense"])
    assert [int(text) for batch in batches for text in batch["text"]] == list(range(sum(sizes)))
    assert [row for batch in batches for row in batch["ragged"].to_list()] == data["ragged"].to_list()
    dense = np.concatenate([tf.sparse.to_dense(batch["sparse"]) for batch in batches])
    np.testing.assert_array_equal(dense, np.eye(len(dense), 40))


@pytest.mark.parametrize(
    "elements",
    [np.arange(5), (np.arange(5),), (np.arange(5), {"a": np.arange(5)}), {"a": (np.arange(5), np.arange(5))}],
    ids=["tensor", "one", "pair", "dict"],
)
def test_joining_keeps_the_structure(elements):
    dataset = tf.data.Dataset.from_tensor_slices(elements).batch(1)
    found = feed.joined(dataset, 2)
    keras.tree.assert_same_structure(found.element_spec, dataset.element_spec)
    assert [np.asarray(keras.tree.flatten(batch)[0]).tolist() for batch in found] == [[0, 1], [2, 3], [4]]


def test_joining_draws_nothing_before_it_is_asked():
    drawn = []

    def generator():
        for number in range(100):
            drawn.append(number)
            yield np.full(2, number)

    source = tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec([None], tf.int64))
    joined = feed.joined(source, 2)
    assert drawn == []
    assert int(joined.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert int(feed.joined(tf.data.Dataset.range(2).batch(1).repeat(), 2).cardinality()) == tf.data.INFINITE_CARDINALITY
    next(iter(joined))
    assert len(drawn) < 100


def sizes_of(fitter, call="fit", **arguments):
    """The rows of each step, and the history."""
    seen = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(int(logs["rows"])))
    history = fitter.fit(**arguments, callbacks=[log], verbose=0)
    rows = [b - (a if b > a else 0) for a, b in zip([0, *seen[:-1]], seen, strict=True)]
    return rows, history


PER_REPLICA = ["NumPy", "tf.data", "tf.data of unknown length", "PyDataset", "PyDataset, 2 workers", "generator"]


@pytest.mark.parametrize("name", PER_REPLICA)
def test_a_batch_per_replica_is_one_replicas_share_of_a_step(name):
    kind, rows = KINDS[name], 19
    for replicas in (2, 3):
        fitter = notes(replicas, batch="per_replica")
        found, history = sizes_of(fitter, **kind.arguments(rows, fitter.strategy))
        whole = BATCH * replicas
        if "PyDataset" in name:  # Shuffled in its batches, of which the last is smaller.
            assert sum(found) == rows
            assert len(found) == -(-5 // replicas)
        else:
            assert found == [min(whole, rows - first) for first in range(0, rows, whole)]
        assert history.history["rows"] == [rows]
        if kind.name not in ("tf.data of unknown length", "generator"):
            assert history.params["steps"] == -(-rows // whole) if kind.arrays else -(-5 // replicas)
        np.testing.assert_array_equal(np.asarray(fitter.seen)[:rows], np.ones(rows))
        assert int(fitter.optimizer.iterations) > 0


def test_steps_of_batches_per_replica_are_global_ones():
    fitter = notes(2, batch="per_replica")
    endless = kinds.dataset(np.arange(20)).repeat()
    found, history = sizes_of(fitter, x=endless, steps_per_epoch=3, epochs=2, validation_data=endless, validation_steps=2)
    assert found == [2 * BATCH] * 6 or found == [8, 8, 4 + 4] * 2
    assert history.history["rows"] == [24, 24]
    assert history.history["val_rows"] == [16, 16]
    found, history = sizes_of(fitter, x=pair(np.arange(20))[0], steps_per_epoch=4)
    assert found == [5, 5, 5, 5], "20 examples in 4 global steps"


def test_predictions_of_batches_per_replica_keep_the_order():
    fitter = notes(3, batch="per_replica")
    np.testing.assert_array_equal(fitter.predict(kinds.dataset(np.arange(19)), verbose=0)[:, 0], np.arange(19))
    assert fitter.evaluate(kinds.dataset(np.arange(19)), verbose=0, return_dict=True)["powers"] == 2.0**19 - 1


def test_a_dataset_that_the_user_distributed_is_in_parts_already():
    fitter = notes(2, batch="per_replica")
    found, _ = sizes_of(fitter, x=kinds.distributed(np.arange(16), fitter.strategy))
    assert found == [BATCH] * 4


def test_a_fit_evaluate_or_predict_of_the_users_own_gets_what_it_was_given():
    class Own(kinds.Notes):
        def fit(self, numbers):
            return super().fit(tf.data.Dataset.from_tensor_slices(numbers).batch(2), verbose=0)

        def evaluate(self, numbers, times):
            return super().evaluate(np.tile(numbers, times), verbose=0, return_dict=True)

        def predict(self, numbers):
            return super().predict(numbers[::-1], verbose=0)

    fitter = MirroredFitter(Own, devices="cpu:2", step_sums=True)
    fitter.compile(keras.optimizers.SGD(1.0))
    assert fitter.fit(np.arange(5)).history["rows"] == [5]
    assert fitter.evaluate(np.arange(5), times=3)["rows"] == 15
    np.testing.assert_array_equal(fitter.predict(np.arange(5))[:, 0], [4, 3, 2, 1, 0])


# -- the order ---------------------------------------------------------------------------------------------------------


def orders(replicas, x, seed=5, **arguments):
    """The numbers in each step of two epochs, in sets as 2 ** number."""
    fitter = MirroredFitter(kinds.Notes, devices=f"cpu:{replicas}", step_sums=True, seed=seed)
    fitter.compile(keras.optimizers.SGD(1.0))
    seen = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, float(logs["powers"]))))
    fitter.fit(x, epochs=2, callbacks=[log], verbose=0, **arguments)
    return seen


ORDERED = {
    "arrays": lambda: ({"x": np.arange(13), "batch_size": 3}),
    "batches of arrays": lambda: ({"x": np.arange(13), "batch_size": 3, "shuffle": "batch"}),
    "PyDataset": lambda: {"x": Batches(18, lambda n: (n,))},
    "PyDataset, workers": lambda: {"x": Batches(18, lambda n: (n,), workers=3)},
}


@pytest.mark.parametrize("make", ORDERED.values(), ids=ORDERED.keys())
def test_the_batches_are_the_same_in_the_same_order_for_any_number_of_replicas(make):
    first = orders(1, **make())
    np.random.default_rng().random()
    assert orders(3, **make()) == first
    half = len(first) // 2
    assert first[:half] != first[half:], "each epoch has an order of its own"
    assert orders(1, seed=6, **make()) != first


def test_a_pydataset_is_told_of_its_epochs_and_left_in_order_where_shuffle_is_off():
    told = []

    class Told(Batches):
        def on_epoch_begin(self):
            told.append("begin")

        def on_epoch_end(self):
            told.append("end")

    seen = orders(2, Told(18, lambda n: (n,)), shuffle=False)
    assert [value for _, value in seen[:2]] == [2.0**4 - 1, 2.0**8 - 1]
    assert told.count("begin") == 2
    assert "end" in told


# -- traces ------------------------------------------------------------------------------------------------------------


@kinds.parametrised(
    kind for kind in KINDS.values() if kind.name in ("NumPy", "RaggedTensor", "SparseTensor", "tf.data", "generator")
)
def test_an_epoch_is_traced_at_most_twice(kind):
    fitter = MirroredFitter(kinds.Notes, devices="cpu:3", step_sums=True)
    fitter.compile("sgd")
    for rows in (9, 5, 7) if not kind.once else (9, 11):
        fitter.fit(**kind.arguments(rows, fitter.strategy), epochs=1 if kind.once else 2, verbose=0)
    assert fitter.train_function.traces <= 2


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _in_place(monkeypatch):
    monkeypatch.setattr(in_place, "BIG_ARRAY", 0)


@pytest.mark.usefixtures("_in_place")
@kinds.parametrised(
    KINDS[name] for name in ("NumPy", "float64", "uint8", "bool", "nest", "no targets", "sample_weight", "strings")
)
def test_big_arrays_are_fed_as_small_ones_are(kind):
    for replicas in (1, 3):
        fitter = notes(replicas)
        for rows in (0, 1, 9):
            fitter.fit(**kind.arguments(rows, fitter.strategy), verbose=0)
            np.testing.assert_array_equal(np.asarray(fitter.seen)[:rows], kind.times(np.arange(rows)))
            fitter.seen.assign(np.zeros(kinds.MOST))
        given = kind.arguments(9, fitter.strategy)
        outputs = fitter.predict(given["x"], batch_size=BATCH, verbose=0)
        np.testing.assert_array_equal(outputs[:, 0], np.arange(9))


def test_memory_of_a_batch_is_used_again_only_when_nothing_refers_to_it():
    memory = in_place._Memory()
    first = memory.array((4, 3), np.dtype("float32"))
    assert first.ctypes.data % 64 == 0
    assert not np.shares_memory(first, memory.array((4, 3), np.dtype("float32")))
    part, tensor = first[1:], tf.constant(0)
    del first
    assert not np.shares_memory(part, memory.array((2, 3), np.dtype("float64")))
    where = part.ctypes.data
    del part, tensor
    assert memory.array((4, 3), np.dtype("int32")).ctypes.data == where - 12


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 30), batch_size=st.integers(1, 12), shuffle=st.sampled_from([True, "batch", None]))
def test_rows_read_in_place_are_the_arrays_own_while_batches_are_kept(rows, batch_size, shuffle):
    from keras_mirror.engine import data

    before, in_place.BIG_ARRAY = in_place.BIG_ARRAY, 0
    try:
        x = np.random.default_rng(rows).normal(size=(rows, 2))
        order = data.ArrayOrder(rows, batch_size, shuffle, seed=3) if shuffle else None
        dataset = data.array_dataset((x, np.arange(rows)), order, rows, batch_size)
        batches = [*dataset, *dataset]
    finally:
        in_place.BIG_ARRAY = before
    numbers = np.concatenate([number for _, number in batches])
    np.testing.assert_array_equal(np.bincount(numbers), np.full(rows, 2))
    np.testing.assert_array_equal(np.concatenate([v for v, _ in batches]), x[numbers].astype("float32"))


def test_a_big_array_is_not_copied():
    """Peak memory grows by much less than the array, also where Keras would cast the whole of it."""
    script = """
import resource, sys
import keras, numpy as np, tensorflow as tf
from keras_mirror import MirroredFitter

fitter = MirroredFitter(lambda: keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)]), devices="cpu:2")
fitter.compile("sgd", "mse")
small = np.ones((256, 64))
fitter.fit(small, small[:, 0], batch_size=64, validation_data=(small, small[:, 0]), verbose=0)
x = np.ones((600_000, 64))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
y = np.ones(len(x), "float32")
fitter.fit(x, y, batch_size=64, steps_per_epoch=20, epochs=2, validation_split=0.45, validation_steps=3, verbose=0)
print(x.nbytes, peak() - before)
"""
    size, grown = map(int, run(script, KERAS_BACKEND="tensorflow").split())
    assert size > in_place.BIG_ARRAY
    assert grown < 0.2 * size
