"""Sharing a batch among replicas, and the order of arrays."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_mirror.engine import data


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 40), replicas=st.integers(1, 8))
def test_every_row_goes_to_exactly_one_share_in_order(rows, replicas):
    batch = {"x": tf.reshape(tf.range(rows * 3), [rows, 3]), "y": tf.range(rows), "none": None, "scalar": tf.constant(7)}
    parts, shares = data.split(batch, replicas)
    counts = [int(share.count) for share in shares]
    assert sum(counts) == rows == int(shares[0].total)
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert [int(s.first) for s in shares] == list(np.cumsum([0, *counts[:-1]]))
    own = [part["y"][:count].numpy() for part, count in zip(parts, counts, strict=True)]
    np.testing.assert_array_equal(np.concatenate(own), np.arange(rows))
    for part, count in zip(parts, counts, strict=True):
        assert part["y"].shape[0] == part["x"].shape[0] == max(count, 1)
        np.testing.assert_array_equal(part["x"][:, 0], part["y"] * 3)
        assert part["none"] is None
        assert int(part["scalar"]) == 7


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 12), replicas=st.integers(2, 4))
def test_ragged_and_sparse_rows_are_shared_like_dense_ones(rows, replicas):
    lengths = [(7 * i) % 4 for i in range(rows)]
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths)), lengths)
    dense = np.diag(np.arange(1, rows + 1)).astype(np.float32)
    parts, shares = data.split((ragged, tf.sparse.from_dense(dense)), replicas)
    rejoined, rejoined_dense = [], []
    for (a, b), share in zip(parts, shares, strict=True):
        rejoined += a[: int(share.count)].to_list()
        rejoined_dense.append(tf.sparse.to_dense(b).numpy()[: int(share.count)])
    assert rejoined == ragged.to_list()
    np.testing.assert_array_equal(np.concatenate(rejoined_dense), dense)


def test_rows_that_do_not_match_are_refused():
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])])
    def split(x, y):
        return data.split((x, y), 2)[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="differ in rows"):
        split(tf.zeros([5, 2]), tf.zeros([4]))


def test_a_batch_without_rows_of_its_own_dimension_says_how_to_batch():
    with pytest.raises(ValueError, match=r"dataset\.batch"):
        data.split((tf.constant(1.0), tf.constant(2)), 2)


@settings(max_examples=100, deadline=None)
@given(
    examples=st.integers(1, 60), batch_size=st.integers(1, 20), shuffle=st.sampled_from([True, "batch"]), seed=st.integers(0, 99)
)
def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch_alone(examples, batch_size, shuffle, seed):
    order = data.ArrayOrder(examples, batch_size, shuffle, seed)
    first, second = order.next(), order.next()
    assert sorted(first) == sorted(second) == list(range(examples))
    again = data.ArrayOrder(examples, batch_size, shuffle, seed, first_epoch=1)
    np.testing.assert_array_equal(again.next(), second)
    if shuffle == "batch":
        full = examples // batch_size * batch_size
        for start in range(0, full, batch_size):
            assert list(np.diff(first[start : start + batch_size])) == [1] * (batch_size - 1)


def test_each_epoch_has_an_order_of_its_own():
    order = data.ArrayOrder(100, 10, True, seed=0)
    assert list(order.next()) != list(order.next())


@pytest.mark.parametrize("examples", [1, 7, 8, 9])
def test_array_batches_hold_every_row_once_and_say_how_many_there_are(examples):
    x = np.arange(examples * 2.0).reshape(-1, 2)
    order = data.ArrayOrder(examples, 4, True, seed=3)
    dataset = data.array_dataset((tf.constant(x),), order, examples, 4)
    assert int(dataset.cardinality()) == -(-examples // 4)
    for _ in range(2):
        seen = np.concatenate([batch[0] for batch in dataset])
        np.testing.assert_array_equal(np.sort(seen[:, 0]), x[:, 0])
    assert dataset.element_spec[0].shape[0] is None


def test_missing_targets_become_none():
    batch = (tf.zeros([2]), tf.experimental.Optional.empty(None))
    assert data.without_optionals(batch)[1] is None
    assert keras.tree.flatten(data.batch_leaves(batch[:1]))[0].shape == [2]
