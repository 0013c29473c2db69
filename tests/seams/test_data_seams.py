"""What the data seams read and replace is there, and does what they count on."""

import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import losses as losses_module
from keras.src.trainers import data_adapters, epoch_iterator

from keras_mirror import MirroredFitter
from keras_mirror.seams import data3

X, Y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
GONE = f"is gone from Keras {keras.__version__}"


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X + index, Y


def adapters():
    return {
        "arrays": data_adapters.get_data_adapter(X, Y),
        "dataset": data_adapters.get_data_adapter(tf.data.Dataset.from_tensors((X, Y))),
        "generator": data_adapters.get_data_adapter((X, Y) for _ in range(3)),
        "pydataset": data_adapters.get_data_adapter(Data()),
    }


def test_each_kind_of_data_has_the_adapter_that_it_is_told_by():
    for kind, adapter in adapters().items():
        assert data3.kind_of(adapter) == kind
        assert isinstance(adapter, data3.DataAdapter)
    for name in ("TorchDataLoaderAdapter", "is_tf_dataset"):
        assert hasattr(data_adapters, name), f"data_adapters.{name} {GONE}"


def test_fit_asks_an_adapter_for_nothing_that_a_feed_does_not_answer():
    from keras_mirror.engine.feed import Feed

    asked = {name for name, value in vars(data3.DataAdapter).items() if not name.startswith("_")}
    only_other_backends = {"get_numpy_iterator", "get_jax_iterator", "get_torch_dataloader"}
    assert asked - set(vars(Feed)) == only_other_backends, "Keras asks adapters for something new"


def test_a_generators_adapter_begins_each_pass_with_the_batches_that_it_peeked_at():
    """Where Keras repairs that, `Feed` needn't replace the generator."""
    adapter = adapters()["generator"]
    assert len(list(adapter.generator())) == 3
    assert len(list(adapter.generator())) == 2
    data3.replace_generator(adapter, lambda: itertools.repeat((X, Y), 5))
    assert len(list(adapter.get_tf_dataset())) == 5


@pytest.mark.parametrize("workers", [1, 2])
def test_passes_over_a_pydataset_go_through_the_wrapper_and_are_announced(workers):
    adapter, begun = data_adapters.get_data_adapter(Data(workers=workers)), []
    data3.wrap_passes(adapter, lambda batches: ((x * 2, y) for x, y in batches))
    data3.before_each_pass(adapter, lambda: begun.append(len(begun)))
    dataset = adapter.get_tf_dataset()
    for number in range(2):
        adapter.on_epoch_begin()
        assert [float(x[0, 0]) for x, _ in dataset] == [2.0, 4.0, 6.0]
        adapter.on_epoch_end()
        assert begun == list(range(number + 1))


def test_a_made_dataset_has_left_its_signature():
    for kind in ("generator", "pydataset"):
        adapter = adapters()[kind]
        adapter.get_tf_dataset()
        assert data3.signature(adapter)[0].shape.as_list() == [None, 3]


def test_an_epoch_iterator_takes_another_feed():
    assert "data_adapter" in inspect.getsource(epoch_iterator.EpochIterator), f"EpochIterator.data_adapter {GONE}"

    class Own(keras.Sequential):
        def fit(self, data):
            return super().fit(data, verbose=0)

    def build():
        model = Own([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    fitter = MirroredFitter(build, devices="cpu:2", batch="per_replica")
    fitter.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(1))
    assert int(fitter.optimizer.iterations) == 2


def test_arrays_come_out_as_keras_feeds_them():
    adapter = adapters()["arrays"]
    parts, rows, batch_size = data3.array_parts(adapter)
    assert (len(parts), rows, batch_size) == (2, 4, 32)
    for array in (np.ones(3, "float64"), np.ones(3, "float16"), np.ones(3, "int8"), np.ones(3, bool)):
        fed = next(iter(data_adapters.get_data_adapter(array).get_tf_dataset()))
        assert data3.dtype_when_fed(array) == fed.dtype.as_numpy_dtype
        assert data3.to_gather_from(array).dtype == fed.dtype.as_numpy_dtype


def test_rows_of_a_sparse_tensor_are_gathered_empty_ones_at_the_end_included():
    dense = np.array([[0, 1], [2, 0], [0, 0], [0, 0]], "float32")
    wrapper = data3.to_gather_from(tf.sparse.from_dense(dense))
    assert data3.is_sparse_wrapper(wrapper)
    found = data3.gather_sparse(wrapper, tf.constant([3, 1, 0]))
    np.testing.assert_array_equal(tf.sparse.to_dense(found), dense[[3, 1, 0]])


def test_a_loss_of_class_numbers_says_how_many_and_which_it_ignores():
    outputs = tf.zeros([2, 5])
    assert data3.class_labels(keras.losses.SparseCategoricalCrossentropy(), outputs) == (5, None)
    assert data3.class_labels(keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), outputs) == (5, -1)
    wrapped = losses_module.LossFunctionWrapper(keras.losses.sparse_categorical_crossentropy)
    assert data3.class_labels(wrapped, outputs) == (5, None)
    for other in (keras.losses.CategoricalCrossentropy(), keras.losses.MeanSquaredError(), type("L", (keras.Loss,), {})()):
        assert data3.class_labels(other, outputs) is None


def test_a_distributed_iterator_says_whether_it_is_empty_or_endless():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    data = tf.data.Dataset.from_tensors(1.0)
    kinds = [data3.length_kind(iter(strategy.experimental_distribute_dataset(d))) for d in (data, data.take(0), data.repeat())]
    assert kinds == ["", "empty", "endless"]
    assert data3.length_kind(iter(data.take(0))) == ""
