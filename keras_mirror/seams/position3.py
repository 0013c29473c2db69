"""Seams into fit's position in its data (Keras 3.10 and 3.15): where it is opened, what is next, what can't be had again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from keras_mirror.seams import data3


def on_opening(epoch_iterator: Any, opening: Callable[[Callable[[], Any]], Any]) -> None:
    """Has `opening` called wherever fit opens its data anew; it is given Keras's own function and returns an iterable."""
    original = epoch_iterator._get_iterator
    epoch_iterator._get_iterator = lambda: opening(original)


def opens_each_epoch(epoch_iterator: Any) -> bool:
    """Whether the next epoch opens the data anew; with steps_per_epoch it goes on where the last one stopped."""
    return epoch_iterator.steps_per_epoch is None or epoch_iterator._current_iterator is None


def batches_seen(epoch_iterator: Any) -> int:
    """How many batches Keras thinks it has taken since it opened the data; a whole number of executions."""
    return int(epoch_iterator._steps_seen)


def start_inside_epoch(epoch_iterator: Any, done: int, seen: int, shorter: Callable[[int], None]) -> None:
    """Has the next epoch begin after its first `done` batches; epoch and batch numbers are those of a whole epoch.

    Keras's own generator of steps runs from its beginning, so that its counts are right; the steps already done are dropped.

    Args:
        epoch_iterator: what feeds fit, whose opening gives the data from the right place on.
        done: how many batches of the epoch were trained on.
        seen: with steps_per_epoch, what `batches_seen` was when the epoch began.
        shorter: told how many steps the first execution has, where it is one of which some are done.
    """
    original = epoch_iterator._enumerate_iterator
    each = int(epoch_iterator.steps_per_execution)
    _open_where_it_stays_open(epoch_iterator, seen)

    def steps() -> Iterator[Any]:
        epoch_iterator._enumerate_iterator = original
        for item in original():
            first = item[0]
            if first + each <= done:
                continue
            if first < done:
                shorter(first + each - done)
            yield item

    epoch_iterator._enumerate_iterator = steps


def pass_epoch(epoch_iterator: Any, seen: int) -> None:
    """Has the next epoch have no step and open nothing: all its batches were trained on, and the one after it comes next."""
    original = epoch_iterator._enumerate_iterator
    _open_where_it_stays_open(epoch_iterator, seen)

    def steps() -> Iterator[Any]:
        epoch_iterator._enumerate_iterator = original
        return iter(())

    epoch_iterator._enumerate_iterator = steps


def _open_where_it_stays_open(epoch_iterator: Any, seen: int) -> None:
    """With steps_per_epoch an epoch doesn't open the data anew where it is open: so it is opened before the epoch begins."""
    if epoch_iterator.steps_per_epoch is not None:
        epoch_iterator._current_iterator = iter(epoch_iterator._get_iterator())
        epoch_iterator._steps_seen = seen


def kind_of_data(epoch_iterator: Any) -> str:
    """What fit was given: "arrays", "dataset", "generator", "pydataset", "torch" or "other"."""
    adapter = epoch_iterator.data_adapter
    return str(getattr(adapter, "kind", None) or data3.kind_of(adapter))


def order_is_lost(epoch_iterator: Any) -> str | None:
    """What about fit's data keeps another run from being given the same batches again; None: nothing that can be seen."""
    kind = kind_of_data(epoch_iterator)
    if kind == "dataset":
        return draws_without_seed(epoch_iterator.data_adapter.get_tf_dataset())
    if kind == "pydataset" and getattr(epoch_iterator.data_adapter, "shuffle", False):
        return "batches that Keras shuffles anew"
    return None


def draws_without_seed(dataset: Any) -> str | None:
    """What in a dataset draws at random without a seed, so that its order or content can't be had again; None: nothing.

    Read from the chain of datasets; what a function of the user's draws outside TensorFlow isn't seen.
    """
    queue = [dataset]
    while queue:
        each = queue.pop()
        seeds = [int(getattr(each, name)) for name in ("_seed", "_seed2") if getattr(each, name, None) is not None]
        if len(seeds) == 2 and not any(seeds):
            return "shuffle() without a seed"
        for function in getattr(each, "_functions", list)():
            for operation in function.function.graph.get_operations():
                node = operation.node_def
                if "seed" in node.attr and "seed2" in node.attr and not (node.attr["seed"].i or node.attr["seed2"].i):
                    return f"a function that draws at random without a seed ({operation.type})"
        queue.extend(getattr(each, "_inputs", list)())
    return None
