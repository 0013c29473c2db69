"""k steps in one compiled call: the train, test and predict functions that Keras's own loop calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror.engine import data, diagnose, measure, state, waiting
from keras_mirror.engine.step import Step
from keras_mirror.seams import data_seams, gate, generation
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.core import Engine


def make_train_function(engine: Engine, force: bool = False) -> Any:
    """Stands in for `Model.make_train_function`."""
    model = engine.model
    if model.train_function is None or force:
        model.train_function = Execution(engine, "train_step")
    return model.train_function


def make_test_function(engine: Engine, force: bool = False) -> Any:
    """Stands in for `Model.make_test_function`."""
    model = engine.model
    if model.test_function is None or force:
        model.test_function = Execution(engine, "test_step")
    return model.test_function


def make_predict_function(engine: Engine, force: bool = False) -> Any:
    """Stands in for `Model.make_predict_function`."""
    model = engine.model
    if model.predict_function is None or force:
        model.predict_function = Prediction(engine)
    return model.predict_function


class Replicated:
    """Runs one of the model's step functions on each replica's share of a global batch."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.function: Callable[[Any], Any] = generation.step_function(engine.model, name)
        self.own = generation.has_own_step(engine.model, name)

    def shares(self, batch: Any) -> tuple[list[Any], list[data.Share]]:
        """Each local replica's data and `Share`, cut on the host."""
        engine = self.engine
        if isinstance(batch, data.Given):
            return data.shares_of(batch.parts)
        if data.is_distributed_batch(batch):
            return data.shares_of(data.local_parts(batch, engine.strategy))
        with tf.device("CPU:0"):
            return data.split(batch, engine.replicas)

    def run(self, batch: Any, on_replica: Callable[[Step, Any], Any]) -> Any:
        """Calls `on_replica(step, share's data)` on every replica, each with its own step; returns per-replica values."""
        engine = self.engine
        batch = data.without_optionals(batch)
        parts, shares = self.shares(batch)
        self.total: Any = shares[0].total
        siblings: dict[int, Step] = {}

        @tf.autograph.experimental.do_not_convert
        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            index = int(tf.get_static_value(context.replica_id_in_sync_group))
            step = Step(engine, index, shares[index], self.own, siblings)
            step.name, step.batch, step.part = self.name, batch, parts[index]
            with gate.entered(step):
                return on_replica(step, parts[index])

        return engine.strategy.run(replica)


class Execution(Replicated):
    """One call of fit's (or evaluate's) loop: `steps_per_execution` steps, and the logs after the last."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine, name)
        self.traces = 0
        self._recipe: Recipe | None = None
        self._last: Any = None
        self._compiled = not engine.model.run_eagerly
        self._one: Any = self._one_step
        self._finish: Any = self._logs
        self._many_by_length: dict[str, Any] = {}
        if self._compiled:
            self._one = tf.function(self._one_step, reduce_retracing=True)
            self._finish = tf.function(self._logs, reduce_retracing=True)

    def __call__(self, iterator: Iterable[Any]) -> Any:
        steps = self.engine.steps_due(self.name)
        self._last = None
        if self._compiled and isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            logs = self._compiled_steps(iterator, steps)
        else:
            logs = self._single_steps(iterator, steps)
        self.engine.targets.warn(self.name)
        if logs is None:
            self.engine.epoch_is_over(self.name)
            raise StopIteration
        if self.name == "train_step":
            diagnose.stop_if_hopeless(self.engine, iterator, self._last)
        return logs

    def _many(self, iterator: Any, steps: Any) -> Any:
        """The compiled call. What is traced for a distributed dataset without a batch, or without an end, fits no other."""
        key = data_seams.length_kind(iterator)
        if key not in self._many_by_length:
            self._many_by_length[key] = tf.function(self._steps, reduce_retracing=True)
        return self._many_by_length[key](iterator, steps)

    def _compiled_steps(self, iterator: Any, steps: int) -> Any:
        """The logs of up to `steps` steps in one compiled call; None where the data has ended."""
        try:
            started, logs = self._timed(iterator, steps)
        except measure.Unmeasured:
            # Raised in tracing, before a batch was drawn: the next one is measured on, and trained on by itself.
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                return None
            values = self._one_measured(batch.get_value())
            if self.name == "train_step":
                self.engine.waiting.count(1, data.example_count(batch.get_value(), self.engine.strategy))
            started, logs = self._timed(iterator, steps - 1) if steps > 1 else (False, None)
            return logs if started else self._finish(values)
        return logs if started else None

    def _timed(self, iterator: Any, steps: int) -> tuple[Any, Any]:
        logs, account = self._many(iterator, tf.constant(steps))
        done, began, waited, examples = account.numpy().tolist()
        if self.name == "train_step" and done:
            self.engine.waiting.add(began, waited, done, examples)
        if 0 < done < steps:
            self.engine.epoch_is_over(self.name)
        generation.count_steps(self.engine.model, self.name, int(done))
        return done > 0, logs

    def _single_steps(self, iterator: Iterable[Any], steps: int) -> Any:
        values, batches = None, iter(iterator)
        for _ in range(steps):
            asked = time.time()
            try:
                batch = next(batches)
            except StopIteration:
                break
            waited = time.time() - asked
            batch = keras.tree.map_structure(_tensor, batch)
            self._last = batch if self.engine.loss_scales else None
            values = self._one_measured(batch)
            if self.name == "train_step":
                self.engine.waiting.add(asked, waited, 1, data.example_count(batch, self.engine.strategy))
        return None if values is None else self._finish(values)

    def _one_measured(self, batch: Any) -> Any:
        try:
            return self._one(batch)
        except measure.Unmeasured:
            self.engine.measure_losses(self.name, batch)
            return self._one(batch)

    @tf.autograph.experimental.do_not_convert
    def _steps(self, iterator: Any, steps: Any) -> tuple[Any, Any]:
        """Up to `steps` steps; returns the logs, and as float64 numbers the account: steps, when they began, waited, examples.

        A step stands in a cond on there being a batch. With a plain `get_next`, what doesn't depend on the data (the count
        of iterations, weight decay) runs once more at the end of data of unknown length, as it does in Keras.
        """
        began = waiting.now()
        values = Kept()

        def more(done: Any, has_batch: Any, *_: Any) -> Any:
            return tf.logical_and(done < steps, has_batch)

        def body(done: Any, _: Any, waited: Any, examples: Any, ended: Any, kept: Any) -> Any:
            batch, has_batch, more_waited = self._next(iterator, waiting.now(done), ended)

            def step() -> tuple[Any, Any]:
                # Not through a tf.function of its own: collectives (NCCL, several workers) take their keys from the function
                # that is called, and don't find it from one that is called inside a cond.
                kept = values.keep(self._one_step(batch.get_value()))
                return self._examples(), kept

            outputs = tf.cond(has_batch, step, lambda: (_zero(), kept))
            done = done + tf.cast(has_batch, tf.int32)
            return done, has_batch, waited + more_waited, examples + outputs[0], self._ended(outputs), outputs[1]

        ended = waiting.caught_up(self.engine, began)
        loop_vars = (tf.constant(0), tf.constant(True), _zero(), _zero(), ended, values.none())
        one = generation.steps_per_execution(self.engine.model) == 1
        done, _, waited, examples, _, kept = body(*loop_vars) if one else tf.while_loop(more, body, loop_vars)
        with tf.device("CPU:0"):
            account = tf.stack([tf.cast(done, tf.float64), began, waited, examples])
        return self._logs(values.read(kept)), account

    def _examples(self) -> Any:
        """How many examples the step that was just traced has, as a float64 on the host."""
        with tf.device("CPU:0"):
            return tf.cast(self.total, tf.float64)

    def _next(self, iterator: Any, asked: Any, ended: Any) -> tuple[Any, Any, Any]:
        """The next batch, whether there is one, and how long the replicas, done with the last step at `ended`, waited for it."""
        with tf.control_dependencies([asked]):
            batch = iterator.get_next_as_optional()
        has_batch = batch.has_value()
        waited = tf.maximum(waiting.now(has_batch) - tf.maximum(asked, ended), 0.0)
        return batch, has_batch, waited

    def _ended(self, outputs: Any) -> Any:
        """When a step was done, on the host and on its device."""
        return waiting.caught_up(self.engine, waiting.now(*waiting.executed(outputs)))

    @tf.autograph.experimental.do_not_convert
    def _one_step(self, batch: Any) -> list[Any]:
        self.traces += 1
        self.engine.targets.look_for_nan(batch)
        recipes: dict[int, Recipe] = {}

        def on_replica(step: Step, share: Any) -> Any:
            before = state.MetricsBefore(step, self.engine.metric_variables())
            kept = state.FiniteState(step, self.engine.guarded_state())
            logs = self.function(share)
            recipe = recipes[step.replica] = Recipe(step, logs)
            before.restore_if_empty()
            written = self.engine.state_written(step.written.values())
            state.combine(step, written)
            kept.restore_if_not_finite(written)
            return recipe.share_of_values()

        per_replica = self.run(batch, on_replica)
        self._recipe = next(iter(recipes.values()))
        return self._recipe.sum_over_replicas(per_replica, self.engine.strategy)

    @tf.autograph.experimental.do_not_convert
    def _logs(self, values: list[Any]) -> Any:
        if self._recipe is None:
            raise RuntimeError("keras_mirror: logs were asked for before a step was traced")
        return self._recipe.logs(list(values))


class Kept:
    """The values of a loop's last step, as one tensor: so the loop is traced before it is known what they are.

    A loop variable needs a value to begin with. Another trace of the step, to learn their types from, would take as long again.
    """

    def __init__(self) -> None:
        self._kinds: list[tuple[Any, Any]] = []

    def none(self) -> Any:
        """What there is before the first step."""
        with tf.device("CPU:0"):
            return tf.raw_ops.OptionalNone()

    def keep(self, values: list[Any]) -> Any:
        """A step's values, in its trace."""
        self._kinds = [(value.shape, value.dtype) for value in values]
        with tf.device("CPU:0"):
            return tf.raw_ops.OptionalFromValue(components=values) if values else tf.raw_ops.OptionalNone()

    def read(self, kept: Any) -> list[Any]:
        """The last step's values; zeros if there was no step."""
        if not self._kinds:
            return []
        shapes, dtypes = zip(*self._kinds, strict=True)

        def found() -> Any:
            return tf.raw_ops.OptionalGetValue(optional=kept, output_types=dtypes, output_shapes=shapes)

        def zeros() -> Any:
            return [tf.zeros([size or 0 for size in shape], dtype) for shape, dtype in self._kinds]

        with tf.device("CPU:0"):
            return list(tf.cond(tf.raw_ops.OptionalHasValue(optional=kept), found, zeros))


class Recipe:
    """How a step's logs are put together after the last step of an execution.

    A value that is a metric's result is read from the metric again, from the state of all replicas. Any other value is the
    mean over the replicas, weighted by their examples (for a step that sums: the sum); an integer is replica 0's.
    """

    def __init__(self, step: Step, logs: Any) -> None:
        self._step = step
        self._structure = logs if logs is not None else {}
        self._leaves = keras.tree.flatten(self._structure)
        self._results = [step.results.get(id(leaf)) for leaf in self._leaves]

    def share_of_values(self) -> list[Any]:
        """This replica's part of each value that is no metric's result."""
        return [self._part(_tensor(leaf)) for leaf, result in zip(self._leaves, self._results, strict=True) if result is None]

    def _part(self, value: Any) -> Any:
        step = self._step
        if step.alone:
            return value
        if value.dtype.is_floating:
            weight = step.has_examples(value.dtype) if step.sums else step.weight(value.dtype)
            return tf.where(step.has_examples(), value * weight, tf.zeros_like(value))
        number = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
        return number if step.replica == 0 else tf.zeros_like(number)

    def sum_over_replicas(self, per_replica: list[Any], strategy: tf.distribute.Strategy) -> list[Any]:
        """The values, in cross-replica context."""
        return [strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None) for value in per_replica]

    def logs(self, values: list[Any]) -> Any:
        """The structure that the step returned, from all replicas."""
        results: dict[int, Any] = {}
        supply = iter(values)
        out = []
        for found in self._results:
            if found is None:
                out.append(next(supply))
                continue
            metric, key, _ = found
            if id(metric) not in results:
                results[id(metric)] = generation.metric_result(metric)
            result = results[id(metric)]
            out.append(result if key is None else result[key])
        return keras.tree.pack_sequence_as(self._structure, out)


class Prediction(Replicated):
    """One call of predict's loop: Keras hands it the batches of an execution and wants their outputs, row by row."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "predict_step")
        self.traces = 0
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, batches: list[Any]) -> Any:
        engine = self.engine
        batches = data_seams.batches_of(batches, generation.steps_per_execution(engine.model))
        given = data.is_distributed_batch(batches)
        if given:
            batches = [data.local_parts(data.without_optionals(batch), engine.strategy) for batch in batches]
        batches = [keras.tree.map_structure(_tensor, data.without_optionals(batch)) for batch in batches]
        example = batches[0][0] if given else batches[0]
        data.refuse_unbatched(engine.model, example)
        if not engine.model.built or not all(layer.built for layer in generation.sublayers(engine.model)):
            engine.build(generation.keras_tensors(example))
        if engine.model.run_eagerly:
            return self._predict(batches, given)
        leaves = [leaf for leaf in keras.tree.flatten(batches) if leaf is not None]
        signature = (given, *(_any_batch(leaf) for leaf in leaves))
        if signature not in self._compiled:
            self._compiled[signature] = self._compile(batches, given, signature[1:])
        return self._compiled[signature](*leaves)

    def _compile(self, batches: list[Any], given: bool, signature: tuple[Any, ...]) -> Callable[..., Any]:
        """Compiles for any batch size at once, so that a partial last batch isn't traced anew."""

        @tf.autograph.experimental.do_not_convert
        def function(*leaves: Any) -> Any:
            supply = iter(leaves)
            return self._predict(keras.tree.map_structure(lambda v: None if v is None else next(supply), batches), given)

        compiled: Callable[..., Any] = tf.function(function, input_signature=signature)
        return compiled

    def _predict(self, batches: list[Any], given: bool) -> Any:
        self.traces += 1
        outputs = [self._predict_one(data.Given(batch) if given else batch) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: _concat(parts), *outputs)

    def _predict_one(self, batch: Any) -> Any:
        def on_replica(step: Step, share: Any) -> Any:
            outputs = self.function(share)
            return keras.tree.map_structure(lambda value: _own_rows(step, value), outputs)

        per_replica = self.run(batch, on_replica)
        if self.engine.replicas == 1:
            return per_replica
        return keras.tree.map_structure(self._join, per_replica)

    def _join(self, value: Any) -> Any:
        strategy = self.engine.strategy
        if self.engine.local_replicas < self.engine.replicas:
            return strategy.gather(value, axis=0)
        return _concat(strategy.experimental_local_results(value))


def _own_rows(step: Step, value: Any) -> Any:
    """Drops the copied row of a replica without examples."""
    if step.alone or not tf.is_tensor(value) or value.shape.rank == 0:
        return value
    kept = tf.where(step.share.count > 0, data.rows(value), 0)
    if isinstance(value, tf.SparseTensor):
        extent = tf.concat([tf.cast([kept], tf.int64), value.dense_shape[1:]], 0)
        return tf.sparse.slice(value, tf.zeros_like(extent), extent)
    return value[:kept]


def _concat(parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    if parts[0].shape.rank == 0:
        return tf.stack(list(parts))
    return tf.concat(list(parts), 0)


def _zero() -> Any:
    with tf.device("CPU:0"):
        return tf.constant(0.0, tf.float64)


def _any_batch(value: Any) -> Any:
    """The spec of a tensor, dense, ragged or sparse, with the batch dimension left open."""
    spec = tf.type_spec_from_value(value)
    shape = spec.shape.as_list()
    shape = [None, *shape[1:]] if shape else shape
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _tensor(value: Any) -> Any:
    is_variable = isinstance(value, keras.Variable)
    if value is None or (tf.is_tensor(value) and not is_variable) or isinstance(value, tf.distribute.DistributedValues):
        return value
    return generation.to_tensor(value)
