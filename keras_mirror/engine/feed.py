"""What Keras's loop is fed with: its own adapter for the user's data, in global batches, each example once a pass."""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror import notices
from keras_mirror.engine import data
from keras_mirror.engine.joining import joined
from keras_mirror.seams import data_seams, generation
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine

# What Keras takes where arrays are given without a batch size.
_KERAS_BATCH_SIZE = 32
_MADE_BY_PYTHON = {"generator": "generator", "pydataset": "PyDataset", "torch": "DataLoader"}


class Feed(data_seams.DataAdapter):
    """Stands before the adapter that Keras chose for the user's data.

    Args:
        engine: the model's engine.
        adapter: Keras's adapter.
        call: the call that the data was given to, for messages.
        times: how many consecutive batches make a global one; 1 where the batches are global ones already.
        dataset: makes the dataset in the adapter's stead.
    """

    def __init__(
        self, engine: Engine, adapter: Any, call: str, times: int = 1, dataset: Callable[[], tf.data.Dataset] | None = None
    ) -> None:
        self.kind = data_seams.kind_of(adapter)
        self.is_per_replica = times > 1
        self.ended = False
        self.epochs_begun = 0
        self._engine, self._adapter, self._call, self._times = engine, adapter, call, times
        self._dataset: Callable[[], tf.data.Dataset] = dataset or adapter.get_tf_dataset
        # Where the data can be gone on with without drawing through it: the order that is ours, and what skips batches.
        self.order: data.ArrayOrder | None = None
        self.skip: Callable[[int], Callable[[], tf.data.Dataset] | None] | None = None
        self._batches_made = 0
        self._epochs: int | None = None
        if self.kind == "generator":
            # Keras begins every pass with the batches that it drew to learn their form, and so trains on them twice.
            rest = iter(adapter.generator())
            data_seams.replace_generator(adapter, lambda: self._watched(rest))
        elif self.kind in _MADE_BY_PYTHON:
            data_seams.wrap_passes(adapter, self._watched)

    def get_tf_dataset(self) -> Any:
        dataset = self._dataset()
        if self._times > 1 and isinstance(dataset, tf.data.Dataset):
            dataset = joined(dataset, self._times)
        return dataset

    @property
    def num_batches(self) -> int | None:
        """The number of global batches; None where it isn't known or there is no end."""
        batches = self._adapter.num_batches
        return None if batches is None else -(-batches // self._times)

    @property
    def batch_size(self) -> int | None:
        """The global batch size; None where the data doesn't tell."""
        try:
            size = self._adapter.batch_size
        except IndexError:  # The dataset's first tensor is a scalar.
            return None
        return None if size is None else size * self._times

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    def go_to(self, seed: int | None, passes: int, drawn: int) -> Callable[[], tf.data.Dataset] | None:
        """Goes on where another run stood; no batch is drawn for it. Only where `skip` is there.

        Args:
            seed: what that run's order was drawn from; None where it had none.
            passes: how many times it had gone through the data.
            drawn: how many global batches it had taken of the pass after those.

        Returns:
            What makes the dataset of the rest of that pass, once; None where the feed's own dataset gives it.
        """
        if self.order is not None and seed is not None:
            self.order.go_to(seed, passes)
        return None if self.skip is None else self.skip(drawn * self._times)

    def repeat_hooks(self, epochs: int) -> None:
        """Tells a PyDataset of epochs that are over: one that shuffles itself between epochs does so again for each."""
        for _ in range(epochs if self.kind == "pydataset" else 0):
            # Not the adapter's own, which starts workers.
            self._adapter.py_dataset.on_epoch_begin()
            self._adapter.py_dataset.on_epoch_end()

    def accounts_for(self, epochs: int) -> None:
        """Called where this is what `epochs` epochs of fit are fed with: then it says how long they wait for it."""
        self._epochs = epochs

    def on_epoch_begin(self) -> None:
        self.epochs_begun += 1
        if self._epochs is not None:
            self._engine.waiting.begin_epoch()
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._epochs is not None and self.epochs_begun:
            self._engine.waiting.warn(self.epochs_begun, self._epochs)
        self._adapter.on_epoch_end()

    def tell_of_end(self) -> bool:
        """Whether a generator has ended before fit has had all of its epochs; says so."""
        epochs = self._epochs or 1
        if self.kind != "generator" or not self.ended or self.epochs_begun >= epochs:
            return False
        notices.warn(
            f"{self._call}: the generator ended after {_count(self._batches_made, 'batch', 'batches')}, in epoch"
            f" {self.epochs_begun} of {epochs}; training stops there, since a generator can be gone through only once.\n"
            "Pass a keras.utils.PyDataset, a tf.data.Dataset, or an endless generator with steps_per_epoch."
        )
        return True

    def _watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, checked; what the user's code raises is kept for the caller of fit, who is in another thread."""
        if self.kind != "generator":
            self._batches_made = 0
        try:
            for batch in batches:
                self._batches_made += 1
                self._check(batch)
                yield batch
        except Exception as error:
            self._engine.failure = error
            raise
        self.ended = True

    def _check(self, batch: Any) -> None:
        """Refuses a batch that isn't of the form of the first ones, or whose parts differ in rows."""
        where = f"{self._call}: batch {self._batches_made} of the {_MADE_BY_PYTHON[self.kind]}"
        expected = data_seams.signature(self._adapter)
        try:
            keras.tree.assert_same_structure(batch, expected)
        except (ValueError, TypeError):
            raise ValueError(
                f"{where} is {_form(batch)}, expected {_form(expected)} as in the first batch.\nGive every batch the same form."
            ) from None
        leaves = [(value, spec) for value, spec in zip(keras.tree.flatten(batch), keras.tree.flatten(expected), strict=True)]
        leaves = [(value, spec) for value, spec in leaves if hasattr(value, "shape") and hasattr(spec, "shape")]
        for value, spec in leaves:
            if not spec.shape.is_compatible_with(value.shape):
                raise ValueError(
                    f"{where} holds an array of shape {tuple(value.shape)}, expected {_shape(spec)} as in the first batches.\n"
                    "If that dimension varies on purpose, let the first two batches differ in it."
                )
        rows = [int(value.shape[0]) for value, _ in leaves if len(value.shape) > 0 and value.shape[0] is not None]
        if len(set(rows)) > 1:
            raise ValueError(
                f"{where}: inputs, targets and weights differ in rows: found {', '.join(map(str, rows))}, expected the same"
                " number in every one."
            )


class _Ordered(keras.utils.PyDataset):
    """The user's PyDataset, its batches in the order of `order`; None leaves them as they are.

    Keras shuffles by Python's generator, which whoever else draws from changes; here the order is a function of (seed, pass).
    """

    def __init__(self, inner: Any, order: data.ArrayOrder | None) -> None:
        super().__init__(
            workers=inner.workers, use_multiprocessing=inner.use_multiprocessing, max_queue_size=inner.max_queue_size
        )
        self.inner, self.order = inner, order
        self._indices: Any = None
        self._skipped = 0
        self._skips_next = False

    def skip(self, batches: int) -> None:
        """Leaves out the first batches of the next pass."""
        self._skipped, self._skips_next = batches, True

    def begin_pass(self) -> None:
        if not self._skips_next:
            self._skipped = 0
        self._skips_next = False
        if self.order is not None:
            self._indices = self.order.next()

    @property
    def num_batches(self) -> int | None:
        batches: int | None = self.inner.num_batches
        return None if batches is None else batches - self._skipped

    def __getitem__(self, index: int) -> Any:
        index += self._skipped
        return _without_missing(self.inner[index if self._indices is None else int(self._indices[index])])

    def on_epoch_begin(self) -> None:
        self.inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.inner.on_epoch_end()


class _Distributed(data_seams.DataAdapter):
    """A dataset that the user distributed: each replica's part is what the user gave it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def get_tf_dataset(self) -> Any:
        return self._dataset

    @property
    def num_batches(self) -> int | None:
        cardinality = getattr(self._dataset, "cardinality", None)
        return None if cardinality is None or int(cardinality) < 0 else int(cardinality)

    @property
    def batch_size(self) -> int | None:
        return None


# -- the arguments of a call -------------------------------------------------------------------------------------------


def prepare_fit(engine: Engine, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of fit with a `Feed` for its data, and one for its validation data."""
    arguments = dict(arguments)
    if arguments.get("validation_split") and arguments.get("validation_data") is None:
        arrays = tuple(arguments.get(name) for name in ("x", "y", "sample_weight"))
        split = generation.train_validation_split(arrays, arguments.pop("validation_split"))
        (x, y, weight), arguments["validation_data"] = split
        arguments.update(x=x, y=y, sample_weight=weight)
    if arguments.get("validation_data") is not None:
        x, y, weight = generation.unpack(arguments["validation_data"])
        batch_size = arguments.get("validation_batch_size") or arguments.get("batch_size")
        steps = arguments.get("validation_steps")
        given = {"x": x, "y": y, "sample_weight": weight, "batch_size": batch_size, "steps_per_epoch": steps}
        arguments["validation_data"] = _feed(engine, "evaluate", given)
    taken = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
    given = {name: arguments.get(name) for name in taken}
    first_pass = arguments.get("initial_epoch") or 0
    feed = _feed(engine, "fit", given, arguments.get("shuffle"), first_pass)
    for name in ("y", "sample_weight", "class_weight"):
        arguments.pop(name, None)
    return {**arguments, "x": feed}


def prepare(engine: Engine, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of evaluate or predict with a `Feed` for the data."""
    arguments = dict(arguments)
    given = {name: arguments.get(name) for name in ("x", "y", "sample_weight", "batch_size")}
    feed = _feed(engine, call, {**given, "steps_per_epoch": arguments.get("steps")})
    for name in ("y", "sample_weight"):
        arguments.pop(name, None)
    return {**arguments, "x": feed}


def _feed(engine: Engine, call: str, given: dict[str, Any], shuffle: Any = False, first_pass: int = 0) -> Any:
    """A `Feed` for what was given to a call; an adapter of the user's own is taken as it is.

    Args:
        engine: the model's engine.
        call: its name.
        given: arguments of Keras's adapters by name.
        shuffle: fit's; None where it wasn't given, which is True for what can be shuffled.
        first_pass: the number of the data's first pass, from which its order is drawn.
    """
    x = given["x"]
    if generation.is_data_adapter(x):
        return x
    given = {name: value for name, value in given.items() if value is not None}
    if generation.holds_arrays(given):
        return _array_feed(engine, call, given, True if shuffle is None else shuffle, first_pass)
    if data_seams.is_distributed(x):
        return Feed(engine, _Distributed(x), call)
    ordered = None
    if isinstance(x, types.GeneratorType):
        x = (_without_missing(batch) for batch in x)
    elif isinstance(x, keras.utils.PyDataset):
        length = x.num_batches
        order = _order(engine, length, 1, True, first_pass) if shuffle in (None, True, "batch") and length else None
        x = ordered = _Ordered(x, order)
        shuffle = shuffle if order is None else None
    if isinstance(x, types.GeneratorType):
        first = next(x, _NOTHING)
        if first is _NOTHING:
            raise ValueError(f"{call}: the generator gave no batch.\nA generator can be gone through only once: pass a new one.")
        x = _with_first(first, x)
    # Keras warns where it can't shuffle; said by fit's default that is no wish of the user's.
    adapter = generation.data_adapter(**{**given, "x": x, "shuffle": shuffle or False})
    if ordered is not None:
        data_seams.before_each_pass(adapter, ordered.begin_pass)
    feed = Feed(engine, adapter, call, engine.batches_to_join)
    if ordered is not None:
        feed.order, feed.skip = ordered.order, functools.partial(_skip, feed, ordered)
    return feed


def _skip(feed: Feed, ordered: _Ordered, batches: int) -> Callable[[], tf.data.Dataset] | None:
    length = ordered.inner.num_batches
    if length is None or batches < length:
        ordered.skip(batches)
        return None
    if ordered.order is not None:
        ordered.order.next()
    return lambda: feed.get_tf_dataset().take(0)


def _array_feed(engine: Engine, call: str, given: dict[str, Any], shuffle: Any, first_pass: int) -> Feed:
    if engine.batch == "per_replica":
        if not given.get("batch_size") and not given.get("steps_per_epoch"):
            given["batch_size"] = _KERAS_BATCH_SIZE
        if given.get("batch_size"):
            given["batch_size"] *= engine.replicas
    adapter = generation.data_adapter(**given)
    parts, examples, batch_size = data_seams.array_parts(adapter)
    order = _order(engine, examples, batch_size, shuffle, first_pass) if shuffle else None

    def dataset(first: int = 0, order: Any = order) -> tf.data.Dataset:
        return data.array_dataset(parts, order, examples, batch_size, empty_batch=call == "predict", first=first)

    def skip(batches: int) -> Callable[[], tf.data.Dataset]:
        # The order is drawn now: where no batch is left, nobody would draw it.
        rows = None if order is None else order.next()
        return lambda: dataset(batches, None if rows is None else types.SimpleNamespace(next=lambda: rows))

    feed = Feed(engine, adapter, call, dataset=dataset)
    feed.order, feed.skip = order, skip
    feed.is_per_replica = engine.batch == "per_replica"
    return feed


def _order(engine: Engine, examples: int, batch_size: int, shuffle: Any, first_pass: int) -> data.ArrayOrder:
    seed = data.draw_seed() if engine.seed is None else engine.seed
    return data.ArrayOrder(examples, batch_size, shuffle, seed, first_epoch=first_pass)


def attach(engine: Engine, epoch_iterator: Any, call: str) -> None:
    """Puts a `Feed` into an iterator that Keras made without one, because the user's class has a `fit` of its own."""
    if not isinstance(epoch_iterator.data_adapter, Feed):
        adapter = epoch_iterator.data_adapter
        data_seams.set_feed(epoch_iterator, Feed(engine, adapter, call, engine.batches_to_join))


# -- errors ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_errors(engine: Engine) -> Iterator[None]:
    """Raises what the user's data code raised, with its own traceback, in place of TensorFlow's report of it."""
    engine.failure = None
    try:
        yield
    except tf.errors.OpError as error:
        failure, engine.failure = engine.failure, None
        # The batch that failed may have been made ahead and never asked for; then this error is another one.
        if failure is None or type(failure).__name__ not in str(error):
            raise
        raise failure from None


def single_batches(engine: Engine) -> contextlib.AbstractContextManager[Any]:
    """Nothing to do for a batch given by itself: Keras 3 hands it to the model's functions as it is."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def at_least_one_batch() -> Iterator[None]:
    """Says in words what Keras's predict says by a variable that it has never set."""
    try:
        yield
    except UnboundLocalError as error:
        if error.name == "batch_outputs" or "batch_outputs" in str(error):
            raise ValueError("predict: the data gave no batch, expected at least one.") from None
        raise


# -- small helpers ----------------------------------------------------------------------------------------------------


def _without_missing(batch: Any) -> Any:
    """A batch without the `None`s at its end: (x, None) and (x, None, None) are (x,), which every Keras understands."""
    if isinstance(batch, (tuple, list)):
        while len(batch) > 1 and batch[-1] is None:
            batch = batch[:-1]
    return batch


_NOTHING = object()


def _with_first(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """The generator again from which `first` was taken."""
    yield first
    yield from rest


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _form(nest: Any) -> str:
    """The structure of a batch, with a dot for each array."""
    return re.sub(r"'?·'?", "·", str(keras.tree.map_structure(lambda v: None if v is None else "·", nest)))


def _shape(spec: Any) -> tuple[int | None, ...] | None:
    return None if spec.shape.rank is None else tuple(spec.shape)
