"""The engine of one model: attached to the user's own instance, it makes Keras's `fit` run on N replicas."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror import notices
from keras_mirror.engine import checks, data, joining, loop, measure, precision, resume, state, waiting
from keras_mirror.engine.build import BuildStep
from keras_mirror.seams import generation, install, learning_rate, loss_scale, stack
from keras_mirror.seams import tensorflow as tf_seams
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine import feed
else:
    # What is given to fit goes through the adapters of Keras 3, or through the data handler of Keras 2.
    feed = stack.choose("keras_mirror.engine.feed", "keras_mirror.engine.feed2")

ATTRIBUTE = "_keras_mirror_engine"


class Engine:
    """What one model needs to train on the replicas of a strategy.

    Args:
        model: the user's model, made in the strategy's scope.
        strategy: a synchronous strategy with a copy of each variable per replica.
        seed: fixes the order of shuffled arrays; None draws one for each fit from Python's generator.
        batch: what fit's `batch_size` counts, "global" or "per_replica".
    """

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy, *, seed: int | None = None, batch: str = "global"
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.replicas: int = strategy.num_replicas_in_sync
        self.local_replicas = tf_seams.local_replica_count(strategy)
        self.seed = seed
        self.batch = batch
        self.step_sums = False
        # The policy that the factory ran under, for layers that are made as late as in build; None: whatever is set then.
        self.policy: str | None = None
        self.loss_scales = precision.LossScales(strategy)
        self._warned: set[str] = set()
        self.whole_batch_losses: dict[int, Any] = {}
        self.sums_added: set[tuple[str, int]] | None = None
        self._steps_per_epoch: dict[str, int | None] = {}
        self._steps_done: dict[str, int] = {}
        self.compile_arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._traced_steps: set[str] = set()
        self._seeds: Any = None
        self._feeding = threading.local()
        self._adapter: Any = None
        self._epochs = 1
        self.failure: Exception | None = None
        self.targets = checks.Targets()
        self.waiting = waiting.Waiting()
        # Of the running fit: where its data stands, and what is called when it ends or fails.
        self.cursor: resume.Cursor | None = None
        self.at_end: list[Callable[[], None]] = []
        # False while a checkpoint is taken, which notes each replica's accumulated gradients and leaves them as they are.
        self.settles = True

    # -- attaching

    def attach(self) -> None:
        """Puts the engine's functions on the instance; the model's class stays the user's."""
        install()
        precision.install()
        model = self.model
        own = {
            "compile": self._compile,
            "fit": self._fit,
            "evaluate": self._evaluate,
            "predict": self._predict,
            "train_on_batch": self._on_batch,
            "test_on_batch": self._on_batch,
            "predict_on_batch": self._predict_on_batch,
            "get_compile_config": self._get_compile_config,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
        }
        for name, function in own.items():
            original = getattr(model, name)
            vars(model)[name] = functools.wraps(original)(functools.partial(function, original))
        vars(model).update(
            {
                ATTRIBUTE: self,
                "make_train_function": functools.partial(loop.make_train_function, self),
                "make_test_function": functools.partial(loop.make_test_function, self),
                "make_predict_function": functools.partial(loop.make_predict_function, self),
                "_maybe_symbolic_build": self._build_for_keras,
            }
        )
        model.train_function = model.test_function = model.predict_function = None
        generation.feed_whole_batches(model, _default_strategy(), self)
        precision.scale_where_needed(model)
        self.adopt()
        self.restart_accumulation()
        self._warn_of_jit()
        self._warn_of_half_precision()

    # -- objects of the user's

    def adopt(self, *more: Any) -> None:
        """Moves optimizers and metrics made outside the scope into it, in place, and makes optimizers local.

        Args:
            *more: nests that may hold optimizers or metrics, beside the model's own.

        Raises:
            ValueError: an optimizer was built for variables of another model.
        """
        found = [*self._optimizers(), *(o for o in keras.tree.flatten(more) if generation.is_optimizer(o))]
        for optimizer in _with_inner(found):
            strangers = generation.strangers(optimizer, generation.model_variables(self.model))
            if strangers and self.model.built:
                raise ValueError(
                    f"compile: the optimizer {generation.titled(optimizer)} was already used to train"
                    f" another model (it holds state for {strangers[0]!r}).\n"
                    "An optimizer belongs to one model: pass a new one, e.g."
                    f" {type(optimizer).__name__}.from_config(optimizer.get_config())."
                )
            self._refuse_of_another_strategy("optimizer", optimizer)
            generation.move_into(optimizer, self.strategy)
            for variable in generation.optimizer_variables(optimizer):
                tf_seams.make_local(generation.raw_variable(variable))
            generation.bind_optimizer(optimizer, self.strategy)
        self.loss_scales.adopt(_with_inner(found))
        for variable in generation.model_variables(self.model, "trainable_variables"):
            tf_seams.make_local(generation.raw_variable(variable))
        metrics = [m for m in keras.tree.flatten(more) if isinstance(m, keras.metrics.Metric)]
        for metric in [*metrics, *self._metrics()]:
            self._refuse_of_another_strategy("metric", metric)
            generation.move_into(metric, self.strategy)
        generation.observe_results(_with_parts([*self._metrics(), *generation.hidden_metrics(self.model)]))

    def _refuse_of_another_strategy(self, kind: str, owner: Any) -> None:
        variables = generation.optimizer_variables(owner) if kind == "optimizer" else owner.variables
        for variable in variables:
            if tf_seams.owner_of(generation.raw_variable(variable)) not in (None, self.strategy):
                raise ValueError(
                    f"compile: the {kind} {generation.titled(owner)} belongs to a model on other replicas.\n"
                    f"One {kind} can't serve two strategies: pass a new one, e.g."
                    f" {type(owner).__name__}.from_config({kind}.get_config())."
                )

    def _optimizers(self) -> list[Any]:
        return generation.held_optimizers(self.model)

    def _metrics(self) -> list[Any]:
        try:
            return list(self.model.metrics)
        except AttributeError:
            # Keras's GAN example has a `metrics` property that reads what only its compile() sets.
            if generation.is_compiled(self.model):
                raise
            return []

    def metric_variables(self) -> list[Any]:
        """Every variable of every metric of the model, once."""
        return list({id(v): v for v in generation.metric_variables(self.model)}.values())

    def state_written(self, written: Iterable[Any]) -> list[Any]:
        """Those of the written variables that belong to the model's state: no metric, no seed, no optimizer variable."""
        raw = generation.raw_variable
        skip = {id(raw(v)) for v in self.metric_variables()}
        for optimizer in _with_inner(self._optimizers()):
            skip.update(id(raw(v)) for v in generation.optimizer_variables(optimizer))
        mine = {id(raw(v)) for v in generation.model_variables(self.model)}
        return [
            v
            for v in written
            if id(raw(v)) in mine
            and id(raw(v)) not in skip
            and not generation.is_seed_state(v)
            and tf_seams.is_distributed(raw(v))
        ]

    def guarded_state(self) -> list[Any]:
        """What a forward pass may write and mustn't take up from a batch that isn't finite; only where the loss is scaled."""
        return self.state_written(generation.model_variables(self.model, "non_trainable_variables")) if self.loss_scales else []

    # -- building

    def _build_for_keras(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Stands in for Keras's `_maybe_symbolic_build`: reads the dataset's spec and draws no batch."""
        if iterator is not None:
            feed.attach(self, iterator, "fit" if self.phase == "train" else "evaluate")
            if self.phase == "train":
                self._adapter = iterator.data_adapter
                self._adapter.accounts_for(self._epochs)
                self.cursor = resume.Cursor(self._adapter, iterator)
            self._steps_per_epoch[f"{self.phase}_step"] = iterator.steps_per_epoch
            self._steps_done[f"{self.phase}_step"] = 0
            try:
                raw = generation.epoch_dataset(iterator).element_spec
                data.refuse_unbatched(self.model, raw)
                spec = generation.keras_tensors(raw)
            except generation.UnknownRank:
                spec = generation.keras_tensors(generation.example_batch(iterator))
        else:
            self._steps_per_epoch.pop(f"{self.phase}_step", None)
            spec = generation.keras_tensors(data_batch)
        self.build(spec)

    def feeds(self, fed: Any) -> None:
        """What the running fit is fed with (Keras 2)."""
        self._adapter = fed

    def join(self, dataset: tf.data.Dataset, times: int) -> tf.data.Dataset:
        """A dataset whose batches are `times` consecutive ones each."""
        return joining.joined(dataset, times)

    def dataset_opened(self, spec: Any) -> None:
        """Keras's loop has made the dataset that it goes through next, of batches with this spec (Keras 2)."""
        data.refuse_unbatched(self.model, spec)
        if self.phase == "train":
            self.waiting.begin_epoch()
        self.build(generation.keras_tensors(spec))

    def build(self, spec: Any) -> None:
        """Creates every variable before anything is traced: layers, losses, metrics, optimizers.

        Args:
            spec: a batch of KerasTensors.
        """
        phase = self.phase
        step_name = f"{phase}_step"
        own = generation.has_own_step(self.model, step_name)
        generation.check_model(self.model, self.replicas)
        with self.strategy.scope(), generation.dtype_policy(self.policy):
            if not generation.is_built(self.model, step_name):
                try:
                    if phase == "predict" and generation.is_compiled(self.model):
                        # There are no targets, from which losses and metrics would be built.
                        generation.trace_symbolically(self.model, generation.unpack(spec)[0])
                    else:
                        generation.symbolic_build(self.model, spec, step_name)
                except Exception:
                    # A model with its own step may have no call() at all; its step is traced below.
                    if not own:
                        raise
                # A layer that was made just now may be the first one in float16.
                if precision.scale_where_needed(self.model) and phase != "predict":
                    trainable = generation.model_variables(self.model, "trainable_variables")
                    generation.build_optimizer(self.model.optimizer, trainable)
            if own and step_name not in self._traced_steps:
                self._traced_steps.add(step_name)
                self._trace_own_step(step_name, spec)
        generation.check_model(self.model, self.replicas)
        self.adopt()
        self._warn_of_half_precision()

    def measure_losses(self, step_name: str, batch: Any) -> None:
        """Finds out which added losses are sums, and which losses look at the whole batch; called when a step meets one.

        Args:
            step_name: "train_step" or "test_step".
            batch: the batch that is trained on next; no other is drawn, so the data's order isn't disturbed.
        """
        measure.measure(self, step_name, data.first_local(batch))

    def steps_due(self, step_name: str) -> int:
        """How many steps the next execution has: the last one of an epoch of `steps_per_epoch` may be shorter.

        Keras counts an execution as `steps_per_execution` steps, and trains too long where the two don't divide.
        """
        cursor = self.cursor if step_name == "train_step" else None
        due = generation.steps_per_execution(self.model)
        if cursor is not None:
            due = cursor.limit(due)
        total = self._steps_per_epoch.get(step_name)
        if total:
            done = self._steps_done.get(step_name, 0)
            due = min(due, total - done)
            self._steps_done[step_name] = (done + due) % total
        if cursor is not None:
            cursor.drew(due)
        return due

    def go_to(self, position: dict[str, Any], epochs: int, done: int, say: Callable[[str], None]) -> None:
        """Has the fit that begins go on at a position of its data; see `resume.Cursor.go_to`."""
        if self.cursor is None:
            raise RuntimeError("keras_mirror: a position was asked for outside fit")
        self.cursor.go_to(position, epochs, done, say)
        self._steps_done["train_step"] = 0 if position.get("validating") else done

    def epoch_is_over(self, step_name: str) -> None:
        """The data ended: the next execution begins an epoch, unless a generator has nothing left to give."""
        self._steps_done[step_name] = 0
        if step_name == "train_step" and self._adapter is not None and self._adapter.tell_of_end():
            self.model.stop_training = True

    def _trace_own_step(self, name: str, spec: Any) -> None:
        try:
            generation.trace_step(self.strategy, BuildStep, self.model, name, spec)
        except Exception:
            # Placeholders don't suit every step; the real trace will report what is really wrong.
            return

    @property
    def phase(self) -> str:
        """Which of "train", "test", "predict" the current call of the model runs."""
        return getattr(self._feeding, "phase", "train")

    def _in_phase(self, phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.phase
        self._feeding.phase = phase
        try:
            return function(*args, **kwargs)
        finally:
            self._feeding.phase = before

    def global_seeds(self) -> Any:
        """The generator that unseeded `keras.random` calls draw from inside a step."""
        if self._seeds is None:
            state = random.getstate()
            seed = random.randrange(2**31) if self.seed is None else self.seed
            random.setstate(state)
            with tf.init_scope(), self.strategy.scope():
                self._seeds = generation.new_seed_generator(seed)
        return self._seeds

    @property
    def batch_size(self) -> int | None:
        """The global batch size of the data that the running fit was given; None where the data doesn't tell."""
        return None if self._adapter is None else self._adapter.batch_size

    @property
    def batch_is_per_replica(self) -> bool:
        """Whether the batches given to the running fit count one replica's share: not so those that the user distributed."""
        return self._adapter is not None and self._adapter.is_per_replica

    @property
    def batches_to_join(self) -> int:
        """How many of a dataset's batches make a global one."""
        return self.replicas if self.batch == "per_replica" else 1

    # -- the model's methods

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse_foreign_scope("compile")
        self.adopt(args, kwargs)
        with self.strategy.scope():
            result = original(*args, **kwargs)
        precision.scale_where_needed(self.model)
        self.adopt()
        self.compile_arguments = (args, kwargs)
        self._traced_steps.clear()
        self.whole_batch_losses.clear()
        self.sums_added = None
        self._warn_of_jit()
        self._warn_of_half_precision(args, kwargs)
        return result

    def _warn_of_jit(self) -> None:
        if self.replicas > 1 and generation.wants_jit(self.model):
            notices.warn(
                "compile: jit_compile=True was given, but XLA can't compile a step that communicates between replicas;"
                " this version of keras_mirror trains without XLA, with equal results."
            )

    def _warn_of_half_precision(self, *more: Any) -> None:
        given = [m for m in keras.tree.flatten(more) if isinstance(m, keras.metrics.Metric)]
        for message in precision.half_precision_traps(self.model, [*given, *_with_parts(self._metrics())]):
            if message not in self._warned:
                self._warned.add(message)
                notices.warn(message)

    def warn_of_unscaled_half(self, optimizer: Any) -> None:
        """Called where a train_step of the user's applies an optimizer: says once if it trains float16 layers unscaled."""
        plain = generation.is_unscaled(optimizer)
        if plain and loss_scale.auto_scales(self.model) and precision.computes_in_half(self.model):
            self.loss_scales.warn_of_plain(optimizer)

    def _fit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse_foreign_scope("fit")
        self.global_seeds()
        self.targets.forget()
        self.waiting.warned = False
        if not generation.has_own_loop(self.model, "fit"):
            arguments = data.named(original, args, kwargs)
            self._epochs = arguments.get("epochs", 1) - (arguments.get("initial_epoch") or 0)
            args, kwargs = (), feed.prepare_fit(self, arguments)
        try:
            with feed.own_errors(self):
                return self._in_phase("train", original, *args, **kwargs)
        finally:
            # A callback isn't told that fit failed.
            learning_rate.release(self.model)
            for end in self.at_end:
                end()
            self.at_end.clear()
            self._adapter = self.cursor = None
            self.settle()

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse_foreign_scope("evaluate")
        self.global_seeds()
        if not generation.has_own_loop(self.model, "evaluate"):
            args, kwargs = (), feed.prepare(self, "evaluate", data.named(original, args, kwargs))
        with feed.own_errors(self):
            return self._in_phase("test", original, *args, **kwargs)

    def _predict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse_foreign_scope("predict")
        self.global_seeds()
        if not generation.has_own_loop(self.model, "predict"):
            args, kwargs = (), feed.prepare(self, "predict", data.named(original, args, kwargs))
        with feed.own_errors(self), feed.at_least_one_batch():
            return self._in_phase("predict", original, *args, **kwargs)

    def _on_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse_foreign_scope(original.__name__)
        self.global_seeds()
        phase = "train" if original.__name__ == "train_on_batch" else "test"
        with feed.own_errors(self), feed.single_batches(self):
            return self._in_phase(phase, original, *args, **kwargs)

    def _predict_on_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse_foreign_scope("predict_on_batch")
        self.global_seeds()
        with feed.own_errors(self), feed.single_batches(self):
            return self._in_phase("predict", original, *args, **kwargs)

    def _get_compile_config(self, original: Callable[..., Any]) -> Any:
        """Saves the LossScaleOptimizer that compile put around the optimizer, so that loading finds its state.

        Plain Keras saves the inner optimizer and loses the state of both where the loading process has another policy.
        """
        self.settle()
        config = original()
        optimizer = getattr(self.model, "optimizer", None)
        if config and loss_scale.is_loss_scaled(optimizer):
            config = {**config, "optimizer": generation.serialize(optimizer)}
        return config

    def _save_weights(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return original(*args, **kwargs)

    def _load_weights(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.restart_accumulation()
        return result

    def restart_accumulation(self) -> None:
        """Leaves accumulated gradients that were just written to every replica (by a load) on the first one alone."""
        if self.accumulates_locally:
            state.keep_first(self.strategy, generation.accumulators(self.model.optimizer))

    def settle(self) -> None:
        """Gives replica 0 the sum of the gradients that replicas accumulated, so that what is saved is one device's state."""
        if self.accumulates_locally and self.settles:
            state.settle(self.strategy, generation.accumulators(self.model.optimizer))

    @property
    def accumulates_locally(self) -> bool:
        """Whether gradients are accumulated on each replica and reduced once per update.

        Not so for a train_step of the user's (its gradients are reduced in the tape, since it may look at them) nor under a
        LossScaleOptimizer, which decides at every batch whether the gradients of all replicas are finite.
        """
        optimizer = getattr(self.model, "optimizer", None)
        return (
            self.replicas > 1
            and optimizer is not None
            and generation.accumulation_steps(optimizer) > 1
            and not generation.has_own_step(self.model, "train_step")
        )

    def _refuse_foreign_scope(self, call: str) -> None:
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not self.strategy:
            other = tf.distribute.get_strategy()
            raise RuntimeError(
                f"{call}: called inside the scope of another strategy ({type(other).__name__} with"
                f" {other.num_replicas_in_sync} replicas) than the model's ({self.replicas} replicas).\n"
                "Leave that scope: MirroredFitter enters its own. To use that strategy, pass MirroredFitter(factory,"
                " strategy=it)."
            )


def engine_of(model: Any) -> Engine | None:
    """The engine attached to a model, or None."""
    engine: Engine | None = vars(model).get(ATTRIBUTE)
    return engine


def _default_strategy() -> tf.distribute.Strategy:
    """TensorFlow's strategy of no strategy, whatever scope the caller is in: a fresh thread is in none."""
    found: list[tf.distribute.Strategy] = []
    thread = threading.Thread(target=lambda: found.append(_ask_default()))
    thread.start()
    thread.join()
    return found[0]


def _ask_default() -> tf.distribute.Strategy:
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


def _with_inner(optimizers: Iterable[Any]) -> list[Any]:
    out: dict[int, Any] = {}
    queue = list(optimizers)
    while queue:
        optimizer = queue.pop()
        if id(optimizer) not in out:
            out[id(optimizer)] = optimizer
            queue.extend(generation.held_optimizers(optimizer))
    return list(out.values())


def _with_parts(metrics: Iterable[Any]) -> list[Any]:
    out: list[Any] = []
    for metric in metrics:
        out.append(metric)
        out.extend(_with_parts(generation.metric_parts(metric)))
    return out
