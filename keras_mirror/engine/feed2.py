"""What Keras 2's data handler is given: its own arguments, with batch sizes that count all replicas."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror.seams import data2

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine

# What Keras takes where arrays are given without a batch size.
_KERAS_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Fed:
    """What is known of the data of the running fit.

    Attributes:
        batch_size: the global batch size; None where the data doesn't tell.
        is_per_replica: whether its batches count one replica's share.
    """

    batch_size: int | None
    is_per_replica: bool

    def tell_of_end(self) -> bool:
        """Keras 2 says itself that data ended too early."""
        return False


def prepare_fit(engine: Engine, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of fit; with batch="per_replica" batch sizes times the number of replicas."""
    takes_batch_size = _takes_batch_size(arguments.get("x"))
    arguments = _global(engine, arguments, "batch_size", "steps_per_epoch")
    size = arguments.get("batch_size") or (None if arguments.get("steps_per_epoch") else _KERAS_BATCH_SIZE)
    engine.feeds(Fed(size if takes_batch_size else None, engine.batch == "per_replica"))
    if arguments.get("validation_batch_size"):
        arguments = _global(engine, arguments, "validation_batch_size", "validation_steps")
    return arguments


def prepare(engine: Engine, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of evaluate or predict."""
    if arguments.get("_use_cached_eval_dataset"):
        return arguments  # fit's own call: its batch size is a global one already.
    return _global(engine, arguments, "batch_size", "steps")


def _global(engine: Engine, arguments: dict[str, Any], name: str, steps: str) -> dict[str, Any]:
    if engine.batches_to_join == 1 or not _takes_batch_size(arguments.get("x")):
        return arguments
    given = arguments.get(name) or (None if arguments.get(steps) else _KERAS_BATCH_SIZE)
    return arguments if given is None else {**arguments, name: given * engine.replicas}


def _takes_batch_size(x: Any) -> bool:
    """Whether it is arrays, rather than batches."""
    return not isinstance(x, (tf.data.Dataset, tf.distribute.DistributedDataset)) and not data2.gives_batches(x)


@contextlib.contextmanager
def own_errors(engine: Engine) -> Iterator[None]:
    """Raises what a check inside the compiled call found, in place of TensorFlow's report of it."""
    engine.failure = None
    try:
        yield
    except tf.errors.OpError as error:
        failure, engine.failure = engine.failure, None
        if failure is None or type(failure).__name__ not in str(error):
            raise
        raise failure from None


def single_batches(engine: Engine) -> contextlib.AbstractContextManager[Any]:
    """While entered, a batch given by itself isn't shared out by Keras."""
    scope: contextlib.AbstractContextManager[Any] = data2.feeding(engine)
    return scope


@contextlib.contextmanager
def at_least_one_batch() -> Iterator[None]:
    """Keras 2 says it itself."""
    yield
