"""MirroredFitter: from a model factory to a model that is ready for fit on N replicas."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror import precision as precision_switch
from keras_mirror import replicas, requirements
from keras_mirror.engine.core import Engine, engine_of
from keras_mirror.seams import generation
from keras_mirror.seams import tensorflow as tf_seams
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.precision import LossScaling
    from keras_mirror.verify import EquivalenceReport

_OWN = frozenset({"model", "strategy", "num_replicas", "is_chief", "loss_scaling", "scope", "verify", "waiting_share"})


class MirroredFitter:
    """A Keras model that trains on N replicas exactly as on one device.

    Calls `model_factory` once in the scope of a strategy and then behaves as the model: `compile`, `fit`, `evaluate`,
    `predict`, `train_on_batch`, `save` and every other attribute are the model's, with Keras's signatures and return values.

    Example:
        ```python
        model = MirroredFitter(build_model)  # was: model = build_model()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=256, epochs=10)
        ```

    Args:
        model_factory: a callable without arguments that builds a `keras.Model`, compiled or not. Called once, in scope. Its
            exceptions reach the caller unchanged.
        devices: None: all visible GPUs, else one CPU replica. 4: four GPUs. "cpu:4": four simulated replicas on the CPU.
            ["GPU:0", "GPU:2"]: these.
        strategy: a tf.distribute strategy of your own (MirroredStrategy, MultiWorkerMirroredStrategy), instead of devices.
        precision: None: leave Keras's dtype policy alone. "float32", "mixed_float16" or "mixed_bfloat16": the policy under
            which the factory is called; it is restored afterwards, and policies that layers were given are kept. "auto": what
            the replicas' devices are fastest at, as `precision_scope` says.
        batch: what fit's `batch_size`, and the batches of a dataset, generator or PyDataset, count: "global" (Keras's meaning:
            all replicas) or "per_replica" (one replica's share; N of them make a global batch).
        seed: an int: initial weights, dropout and the order of shuffled arrays are drawn from it, the same on every worker.
        step_sums: True where the model's own `train_step` sums over the batch instead of taking a mean: then each replica's
            loss counts 1 instead of n/N.

    Raises:
        TypeError: `model_factory` isn't callable, or doesn't return a `keras.Model`.
        ValueError: both `devices` and `strategy`; unknown devices; a model (or a part of it) made outside the factory; a
            model that another MirroredFitter holds.
        RuntimeError: simulated replicas were asked for after TensorFlow had started with fewer; another strategy's scope is
            entered.
    """

    def __init__(
        self,
        model_factory: Callable[[], keras.Model],
        *,
        devices: replicas.Devices = None,
        strategy: tf.distribute.Strategy | None = None,
        precision: str | None = None,
        batch: str = "global",
        seed: int | None = None,
        step_sums: bool = False,
    ) -> None:
        _check_factory(model_factory)
        _check_choice("batch", batch, ("global", "per_replica"))
        precision_switch.check(precision, "MirroredFitter: precision")
        if devices is not None and strategy is not None:
            raise ValueError(
                f"MirroredFitter: devices={devices!r} and a strategy were given, expected one of them.\n"
                "Drop devices: your strategy has its own."
            )
        _refuse_scope(strategy)
        strategy = replicas.make_strategy(devices) if strategy is None else replicas.check_strategy(strategy)
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
                raise ValueError(f"MirroredFitter: seed={seed!r} is a {type(seed).__name__}, expected an int or None.")
            seed = int(seed)
            keras.utils.set_random_seed(seed)
        precision = precision if precision is None else precision_switch.resolve(precision, strategy)
        model = build(model_factory, strategy, precision)
        engine = Engine(model, strategy, seed=seed, batch=batch)
        engine.step_sums = step_sums
        engine.policy = precision
        engine.attach()
        vars(self).update(_model=model, _engine=engine, _factory=model_factory, _precision=precision)

    # -- the fitter's own names

    @property
    def model(self) -> keras.Model:
        """The user's own model, an instance of the user's own class; its `fit` runs on the replicas as well."""
        model: keras.Model = vars(self)["_model"]
        return model

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The tf.distribute strategy that the model was made under."""
        return self._engine.strategy

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers."""
        return self._engine.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process is the first worker (always so with one process)."""
        return replicas.is_chief(self.strategy)

    @property
    def loss_scaling(self) -> tuple[LossScaling, ...]:
        """Loss scale, steps and skipped steps of each LossScaleOptimizer of the model; empty where no loss is scaled."""
        return self._engine.loss_scales.read()

    @property
    def waiting_share(self) -> float | None:
        """Which share of the last epoch of `fit` the replicas waited for data, from 0 to 1; None before the first.

        Of the time from the epoch's first step to the end of its last (callbacks between them included, compilation of the first
        not), the part in which a step had no batch and the replicas nothing to do. While `fit` runs, e.g. in a callback, it is
        about the epoch so far. Where it is large, the input pipeline is the bottleneck: use `dataset.cache()`,
        `dataset.map(..., num_parallel_calls=tf.data.AUTOTUNE)` and `dataset.prefetch(tf.data.AUTOTUNE)`, or more workers of a
        PyDataset. `fit` warns once where it is a quarter or more, and a second or more of an epoch.
        """
        return self._engine.waiting.share

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The strategy's scope, for objects that should be made in it. MirroredFitter never needs it from the user."""
        scope: contextlib.AbstractContextManager[Any] = self.strategy.scope()
        return scope

    def verify(
        self, x: Any, y: Any = None, *, sample_weight: Any = None, batch_size: int = 32, steps: int = 5
    ) -> EquivalenceReport:
        """Trains fresh copies of this model on one device and on the replicas, and compares them. The model isn't changed.

        Both copies start from this model's weights and optimizer state and see the same global batches. What draws at random
        is switched off in the copies, or reported where it can't be; BatchNormalization is synchronised in them, since without
        that its statistics are those of a share.

        Args:
            x: arrays (or a nest of them), as for fit.
            y: targets, or None.
            sample_weight: weights per example, or None.
            batch_size: the global batch size. One that the number of replicas doesn't divide is the harder test.
            steps: how many batches to train on; the data is repeated where it is shorter.

        Returns:
            An EquivalenceReport: loss and metrics side by side, the largest difference of each variable, the tolerance and
            where it comes from. It prints as a table; `report.passed` is a bool.

        Raises:
            RuntimeError: called before `compile`.
            ValueError: the factory returned the same model again instead of a new one.
            NotImplementedError: on Keras 2.
        """
        requirements.check_has("verify")
        from keras_mirror import verify

        return verify.verify(self, x, y, sample_weight=sample_weight, batch_size=batch_size, steps=steps)

    # -- everything else is the model's

    def __getattr__(self, name: str) -> Any:
        if "_model" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            raise AttributeError(f"MirroredFitter.{name} can't be set")
        setattr(vars(self)["_model"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_model"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, as `model(x)` does."""
        return self.model(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A fitter isn't copied or pickled; its model is, to a plain Keras model."""
        raise TypeError(
            "MirroredFitter: a fitter can't be copied or pickled, since it holds this process's devices.\n"
            "Copy or pickle fitter.model, which gives a plain Keras model, and wrap that in a new MirroredFitter."
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    def __repr__(self) -> str:
        return f"<MirroredFitter of {self.model!r} on {self.num_replicas} replica{'s' * (self.num_replicas != 1)}>"

    @property
    def _engine(self) -> Engine:
        engine: Engine = vars(self)["_engine"]
        return engine


def _check_factory(factory: Any) -> None:
    if isinstance(factory, keras.Model):
        raise TypeError(
            f"MirroredFitter: got the model {factory.name!r}, expected a function that builds it: its variables have to be"
            " made on every replica.\nPass the function: MirroredFitter(build_model), or"
            " MirroredFitter(lambda: keras.models.load_model(path)) for a saved one."
        )
    if not callable(factory) or isinstance(factory, (MirroredFitter, keras.layers.Layer)):
        raise TypeError(
            f"MirroredFitter: model_factory is a {type(factory).__name__}, expected a function that returns a keras.Model."
        )


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"MirroredFitter: {name}={value!r}, expected one of {', '.join(map(repr, choices))}.")


def _refuse_scope(strategy: tf.distribute.Strategy | None) -> None:
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not strategy:
        found = tf.distribute.get_strategy()
        raise RuntimeError(
            f"MirroredFitter: called inside the scope of a {type(found).__name__}; it enters a scope of its own.\n"
            "Leave that scope, or pass the strategy: MirroredFitter(factory, strategy=strategy)."
        )


def build(factory: Callable[[], keras.Model], strategy: tf.distribute.Strategy | None, precision: str | None) -> keras.Model:
    """Calls the factory, in the strategy's scope where there is one and under the precision's policy; checks what it returns."""
    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    with scope, precision_switch.precision_scope(precision):
        model = factory()
    if strategy is not None:
        _check_model(model, strategy)
    return model


def _check_model(model: Any, strategy: tf.distribute.Strategy) -> None:
    if isinstance(model, MirroredFitter):
        raise TypeError("MirroredFitter: model_factory returned a MirroredFitter, expected a plain keras.Model.")
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"MirroredFitter: model_factory returned {model!r} ({type(model).__name__}), expected a keras.Model.\n"
            "End the function with `return model`."
        )
    if engine_of(model) is not None:
        raise ValueError(
            f"MirroredFitter: model_factory returned the model {model.name!r}, which another MirroredFitter holds already.\n"
            "Build a new model in the function: each call needs its own."
        )
    outside = [v for v in generation.model_variables(model) if tf_seams.owner_of(generation.raw_variable(v)) is not strategy]
    if outside or generation.created_under(model) is not strategy:
        what = f"its variable {generation.variable_path(outside[0])!r}" if outside else "the model object"
        raise ValueError(
            f"MirroredFitter: the model {model.name!r} isn't wholly built by model_factory: {what} was made before it.\n"
            "Move the construction of every layer (a pretrained base too) into the function, so that its variables are made"
            " on every replica."
        )
