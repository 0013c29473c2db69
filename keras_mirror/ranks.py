"""Which worker this process is, known before TensorFlow starts; functions and logging for the first worker alone."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_CHIEF = ("chief", "master")
_WHICH = ("first", "all", "in_order")


def of_environment() -> tuple[int, int | None]:
    """This process's number among the workers, from 0, and how many there are, as the launcher says in the environment.

    The first of these that is set counts: TF_CONFIG, SLURM_PROCID (with SLURM_NTASKS), RANK (with WORLD_SIZE). Where none is,
    the process is alone: (0, 1). A chief is the first worker; an evaluator is none, and counts after all of them.

    Raises:
        ValueError: a variable is set and can't be read.
    """
    config = os.environ.get("TF_CONFIG", "").strip()
    if config:
        found = _of_tf_config(config)
        if found is not None:
            return found
    for name, of in (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")):
        if os.environ.get(name, "").strip():
            number = _whole(name, os.environ[name])
            return number, _whole(of, os.environ[of]) if os.environ.get(of, "").strip() else None
    return 0, 1


def _of_tf_config(text: str) -> tuple[int, int] | None:
    try:
        config = json.loads(text)
        cluster = {kind: len(addresses) for kind, addresses in config.get("cluster", {}).items()}
        task = config.get("task", {})
        kind, index = task.get("type"), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"keras_mirror: the environment variable TF_CONFIG can't be read ({error}): {text[:200]!r}.\n"
            'Expected JSON such as {"cluster": {"worker": ["host1:port", "host2:port"]}, "task": {"type": "worker", "index": 0}}.'
        ) from None
    if not cluster or kind is None:
        return None
    chiefs = sum(cluster.get(name, 0) for name in _CHIEF)
    world = chiefs + cluster.get("worker", 0)
    if kind in _CHIEF:
        return index, world
    if kind == "worker":
        return chiefs + index, world
    return world + index, world


def _whole(name: str, text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"keras_mirror: the environment variable {name} is {text!r}, expected a whole number from 0 on.")
    return int(text)


def rank() -> int:
    """This process's number among the workers, from 0: that of the strategy whose scope is entered, else the environment's."""
    strategy = _current_strategy()
    if strategy is not None:
        from keras_mirror import replicas

        # A strategy of several workers has a resolver, whose kind of task and index are TF_CONFIG's.
        if replicas.is_chief(strategy):
            return 0
        resolver = strategy.cluster_resolver
        cluster = resolver.cluster_spec().as_dict()
        return int(resolver.task_id) + sum(len(cluster.get(name, ())) for name in _CHIEF)
    return of_environment()[0]


def _current_strategy() -> Any:
    """The strategy of several workers whose scope this thread is in; TensorFlow isn't imported for that."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not hasattr(tf, "distribute") or not tf.distribute.has_strategy():
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) else None


def rank_zero_only(function: Callable[P, R] | None = None, *, default: Any = None) -> Any:
    """Has a function run on the first worker only; on the others it returns `default` at once.

    Which worker this is, is asked when the function is called: of the environment (TF_CONFIG, SLURM_PROCID, RANK), or of the
    MultiWorkerMirroredStrategy whose scope is entered. The function mustn't need the other workers: it would wait for them.

    Example:
        ```python
        @rank_zero_only
        def announce(text):
            print(text)


        @rank_zero_only(default={})
        def settings():
            return {"seed": 1}
        ```

    Args:
        function: what to run; left out where `default` is given.
        default: what it returns on the other workers.

    Returns:
        The function with its name and signature, or a decorator.

    Raises:
        TypeError: `function` can't be called.
        ValueError: when it is called, an environment variable that says which worker this is can't be read.
    """
    if function is None:
        return functools.partial(rank_zero_only, default=default)
    if not callable(function):
        raise TypeError(
            f"rank_zero_only: got {function!r} ({type(function).__name__}), expected a function.\n"
            "Use it as @rank_zero_only, or @rank_zero_only(default=value)."
        )

    @functools.wraps(function)
    def on_first(*args: P.args, **kwargs: P.kwargs) -> Any:
        return function(*args, **kwargs) if rank() == 0 else default

    return on_first


def get_logger(name: str, *, strategy: Any = None) -> WorkerLogger:
    """A standard logger that speaks on the first worker, unless a call asks for more.

    Example:
        ```python
        log = get_logger(__name__)
        log.warning("said once, by the first worker")
        log.warning("said by each, with its number", workers="all")
        ```

    Args:
        name: the name of the logger, as for `logging.getLogger`; level and handlers are that logger's.
        strategy: the MultiWorkerMirroredStrategy, which `workers="in_order"` needs where its scope isn't entered.

    Returns:
        A `logging.LoggerAdapter` whose methods take `workers`: "first" (the default), "all", or "in_order": each in turn,
        for which all workers have to make the call. The last two begin with `[worker 1]`.
    """
    return WorkerLogger(logging.getLogger(name), strategy)


class WorkerLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """What `get_logger` returns: a LoggerAdapter whose methods take `workers="first"`, "all" or "in_order"."""

    def __init__(self, logger: logging.Logger, strategy: Any = None) -> None:
        super().__init__(logger, {})
        self._strategy = strategy

    def log(self, level: int, msg: Any, *args: Any, workers: str = "first", **kwargs: Any) -> None:  # type: ignore[override]
        """Logs on the workers asked for.

        Raises:
            ValueError: `workers` is none of the three, or "in_order" with several workers and no strategy.
        """
        if workers not in _WHICH:
            raise ValueError(f"get_logger: workers={workers!r}, expected one of {', '.join(map(repr, _WHICH))}.")
        # Whose line is told to the reader is that of the caller, not this one.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if workers == "in_order":
            self._in_order(level, msg, args, kwargs)
        elif workers == "all":
            super().log(level, f"[worker {self._rank()}] {msg}", *args, **kwargs)
        elif self._rank() == 0:
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Keeps the caller's own `extra`."""
        return msg, kwargs

    def _rank(self) -> int:
        if self._strategy is None:
            return rank()
        with self._strategy.scope():
            return rank()

    def _in_order(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        strategy = self._strategy if self._strategy is not None else _current_strategy()
        mine, world = self._rank(), of_environment()[1] or 1
        if strategy is not None:
            cluster = strategy.cluster_resolver.cluster_spec().as_dict() if strategy.cluster_resolver else {}
            world = sum(len(cluster.get(kind, ())) for kind in (*_CHIEF, "worker")) or 1
        elif world > 1:
            raise ValueError(
                f'get_logger: workers="in_order" with {world} workers and no strategy through which they could wait.\n'
                "Pass it: get_logger(name, strategy=strategy), or log inside strategy.scope()."
            )
        from keras_mirror.checkpoint.workers import Workers

        turns = Workers(strategy)
        kwargs["stacklevel"] += 1
        for turn in range(world):
            if turn == mine:
                super().log(level, f"[worker {mine}] {msg}", *args, **kwargs)
                for handler in self.logger.handlers or logging.getLogger().handlers:
                    handler.flush()
            turns.wait()
