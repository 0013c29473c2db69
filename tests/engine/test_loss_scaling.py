"""Loss scaling in fit: who is scaled, what a skipped step changes, how it is counted, and when training stops."""

import io
import unittest
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from keras.optimizers import SGD, Adam, LossScaleOptimizer

from keras_mirror import MirroredFitter, loss_scaling
from keras_mirror.engine import precision
from keras_mirror.seams import keras3, loss_scale
from keras_mirror.seams import tensorflow as tf_seams

NAN = float("nan")


def on_replicas(variable):
    """A variable's values on all replicas, which have to be the same."""
    first, *others = [c.numpy() for c in tf_seams.components(keras3.raw_variable(variable))]
    for other in others:
        np.testing.assert_array_equal(first, other)
    return first


# -- a weight of 5 whose gradient is the mean of the rows: tf-keras's scenarios


def steered(optimizer, replicas=2, **compile):
    """A model with one weight, 5, whose gradient is the mean of the batch's rows."""

    def build():
        start = keras.initializers.Constant(5.0)
        return keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer=start)])

    model = MirroredFitter(build, devices=f"cpu:{replicas}", seed=1)
    model.compile(optimizer, lambda y_true, y_pred: y_pred[:, 0], **compile)
    return model


def weight(model):
    return float(on_replicas(model.weights[0])[0, 0])


def train(model, *rows):
    model.train_on_batch(np.array(rows, "float32")[:, None], np.zeros((len(rows), 1), "float32"))


@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf])
@pytest.mark.parametrize("replica", [0, 1, 3])
def test_a_bad_gradient_on_one_replica_alone_skips_the_step_on_all(bad, replica):
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=8.0), replicas=4)
    rows = [1.0, 1.0, 1.0, 1.0]
    rows[replica] = bad
    train(model, *rows)
    assert weight(model) == 5.0
    assert on_replicas(model.optimizer.dynamic_scale) == 4.0
    train(model, 1.0, 1.0, 1.0, 1.0)
    assert (weight(model), int(model.optimizer.iterations)) == (4.0, 1)


def test_the_scale_doubles_after_growth_steps_and_halves_after_a_bad_one():
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=2.0, dynamic_growth_steps=2))
    seen = []
    for row in (1.0, 1.0, 1.0, NAN, 1.0, 1.0, NAN, NAN, NAN):
        train(model, row, 1.0)
        seen.append((float(on_replicas(model.optimizer.dynamic_scale)), int(on_replicas(model.optimizer.step_counter))))
    assert seen == [(2, 1), (4, 0), (4, 1), (2, 0), (2, 1), (4, 0), (2, 0), (1, 0), (1, 0)]


@pytest.mark.parametrize("clip", [{"clipvalue": 2.0}, {"clipnorm": 2.0}, {"global_clipnorm": 2.0}])
def test_gradients_are_clipped_after_they_are_unscaled(clip):
    model = steered(LossScaleOptimizer(SGD(1.0, **clip), initial_scale=1024.0))
    train(model, 4.0, 2.0)
    assert weight(model) == pytest.approx(3.0, abs=1e-6)


def test_slots_stand_still_in_a_skipped_step():
    model = steered(LossScaleOptimizer(SGD(1.0, momentum=1.0), initial_scale=4.0))
    found = []
    for row in (1.0, NAN, 1.0):
        train(model, row, 1.0)
        (slot,) = (v for v in model.optimizer.inner_optimizer.variables if "momentum" in v.path)
        found.append((weight(model), float(on_replicas(slot)[0, 0])))
    assert found == [(4.0, -1.0), (4.0, -1.0), (2.0, -2.0)]


@pytest.mark.parametrize("more", [1, 4])
def test_a_checkpoint_holds_scale_counter_and_slots_and_keras_reads_it(tmp_path, more):
    model = steered(LossScaleOptimizer(SGD(1.0, momentum=0.5), initial_scale=64.0, dynamic_growth_steps=9))
    for row in (NAN, 1.0, 1.0):
        train(model, row, 1.0)
    model.save(tmp_path / "model.keras")
    wanted = [v.numpy() for v in model.optimizer.variables]
    path = tmp_path / "model.keras"
    plain = keras.models.load_model(path, compile=False)
    plain.compile(LossScaleOptimizer(SGD(1.0, momentum=0.5), initial_scale=64.0, dynamic_growth_steps=9), "mse")
    plain.optimizer.build(plain.trainable_variables)
    model.save_weights(tmp_path / "model.weights.h5")
    plain.load_weights(tmp_path / "model.weights.h5")
    other = steered(LossScaleOptimizer(SGD(1.0, momentum=0.5), initial_scale=64.0, dynamic_growth_steps=9), replicas=more)
    train(other, 1.0)
    other.load_weights(tmp_path / "model.weights.h5")
    for loaded in (plain, other):
        for a, b in zip(wanted, loaded.optimizer.variables, strict=True):
            np.testing.assert_array_equal(a, b.numpy(), err_msg=b.path)


@pytest.mark.parametrize(("initial", "floor"), [(4.0, 1.0), (0.25, 0.25)])
def test_the_scale_stays_above_its_floor_and_two_bad_steps_there_stop_training(initial, floor):
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=initial))
    train(model, NAN)
    while float(on_replicas(model.optimizer.dynamic_scale)) > floor:
        train(model, NAN)
    assert float(on_replicas(model.optimizer.dynamic_scale)) == floor
    train(model, 1.0)
    train(model, NAN)
    with pytest.raises(FloatingPointError, match=rf"2 steps in a row(.|\n)*down to {floor:g}(.|\n)*is {initial:g} again"):
        train(model, NAN)
    assert weight(model) == 4.0
    assert float(on_replicas(model.optimizer.dynamic_scale)) == initial


def test_bad_steps_count_in_a_row_across_calls_of_fit():
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=2.0))
    x, y = np.full((2, 1), NAN, "float32"), np.zeros((2, 1), "float32")
    for _ in range(2):
        model.fit(x, y, verbose=0)
    assert model.loss_scaling[0].skipped_in_a_row == 2
    with pytest.raises(FloatingPointError):
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize("restored", [0.0, NAN, np.inf, -1.0, 0.25, 2.0**-30])
def test_a_scale_below_the_floor_comes_back_after_one_skipped_step(restored):
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=64.0))
    train(model, 1.0)
    model.optimizer.dynamic_scale.assign(restored)
    train(model, 1.0)
    assert (weight(model), float(on_replicas(model.optimizer.dynamic_scale))) == (4.0, 64.0)
    train(model, 1.0)
    assert weight(model) == 3.0


def test_growth_steps_of_0_never_let_it_grow_as_in_keras():
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=4.0, dynamic_growth_steps=0))
    for _ in range(3):
        train(model, 1.0)
    assert float(on_replicas(model.optimizer.dynamic_scale)) == 4.0


def test_fifty_bad_steps_in_a_row_stop_training_whatever_the_scale():
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=2.0**100), steps_per_execution=4)
    data = tf.data.Dataset.from_tensors((np.full((2, 1), NAN, "float32"), np.zeros((2, 1), "float32"))).repeat()
    with pytest.raises(FloatingPointError, match=r"52 steps in a row(.|\n)*inputs of the batch"):
        model.fit(data, steps_per_epoch=100, verbose=0)
    assert (weight(model), model.loss_scaling[0].skipped) == (5.0, 52)
    # The user cleans the data and goes on.
    model.fit(np.ones((2, 1), "float32"), np.zeros((2, 1), "float32"), verbose=0)
    assert weight(model) == 4.0


def test_a_scale_that_can_grow_to_infinity_does_not():
    model = steered(LossScaleOptimizer(SGD(0.0), initial_scale=2.0**126, dynamic_growth_steps=1))
    for _ in range(4):
        train(model, 2.0**-20, 2.0**-20)
    assert float(on_replicas(model.optimizer.dynamic_scale)) == 2.0**127
    assert model.loss_scaling[0].skipped == 0


def test_gradients_of_embeddings_that_overflow_only_as_a_sum_are_skipped():
    def build():
        return keras.Sequential([keras.Input((2,)), layers.Embedding(3, 1), layers.GlobalAveragePooling1D()])

    model = MirroredFitter(build, devices="cpu:2", seed=1)
    model.compile(LossScaleOptimizer(SGD(1.0), initial_scale=1.0), lambda y_true, y_pred: 3e38 * y_pred[:, 0] * y_true[:, 0])
    before = model.get_weights()[0]
    x, y = np.array([[1, 1], [0, 2]]), np.array([[3.0], [1.0]], "float32")
    model.train_on_batch(x, y)
    np.testing.assert_array_equal(model.get_weights()[0], before)
    assert model.loss_scaling[0].skipped == 1
    model.train_on_batch(x, y * 1e-38)
    assert model.loss_scaling[0].skipped == 1
    assert np.all(np.isfinite(model.get_weights()[0]))
    assert np.any(model.get_weights()[0] != before)


# -- what a skipped step changes


def half(**dense):
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, **dense),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(1, dtype="float32"),
        ]
    )


def batch(bad=None, rows=6):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(rows, 3)).astype("float32"), rng.normal(size=(rows, 1)).astype("float32")
    if bad is not None:
        x[bad] = 1e6  # more than float16 holds
    return x, y


def everything(model):
    skip = ("dynamic_scale", "step_counter")
    inner = model.optimizer.inner_optimizer
    found = {v.path: on_replicas(v) for v in model.variables}
    found.update({f"{i}{v.path}": on_replicas(v) for i, v in enumerate(inner.variables)})
    return {path: value for path, value in found.items() if not path.endswith(skip)}


OPTIMIZERS = {
    "AdamW, EMA, schedule, clipping": lambda: optimizers.AdamW(
        optimizers.schedules.ExponentialDecay(0.01, 2, 0.5),
        weight_decay=0.1,
        use_ema=True,
        ema_overwrite_frequency=2,
        clipnorm=1.0,
    ),
    "accumulation": lambda: SGD(0.01, momentum=0.9, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_but_the_scale(optimizer, replicas):
    model = MirroredFitter(half, devices=f"cpu:{replicas}", seed=1, precision="mixed_float16")
    model.compile(OPTIMIZERS[optimizer](), "mse")
    assert loss_scale.is_loss_scaled(model.optimizer)
    for _ in range(3):
        model.train_on_batch(*batch())
    before, scale = everything(model), float(on_replicas(model.optimizer.dynamic_scale))
    model.train_on_batch(*batch(bad=-1))
    after = everything(model)
    assert any("moving_mean" in path for path in after)
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path], err_msg=path)
    assert float(on_replicas(model.optimizer.dynamic_scale)) == scale / 2
    model.train_on_batch(*batch())
    again = everything(model)
    assert all(np.all(np.isfinite(value)) for value in again.values())
    assert all(np.any(again[path] != before[path]) for path in before if "moving_mean" in path)


def test_statistics_of_a_finite_batch_are_taken_up_even_if_its_gradients_overflow():
    model = MirroredFitter(half, devices="cpu:2", seed=1, precision="mixed_float16")
    model.compile(LossScaleOptimizer(Adam(), initial_scale=2.0**127), "mse")
    before = everything(model)
    model.train_on_batch(*batch())
    after = everything(model)
    changed = {path.split("/")[-1] for path in before if np.any(before[path] != after[path])}
    assert changed == {"moving_mean", "moving_variance"}


def test_without_loss_scaling_statistics_are_keras_own():
    model = MirroredFitter(half, devices="cpu:2", seed=1)
    model.compile("sgd", "mse")
    x, y = batch()
    x[0] = np.inf
    model.train_on_batch(x, y)
    assert model.loss_scaling == ()
    assert not np.all(np.isfinite(on_replicas(model.layers[1].moving_mean)))


# -- whose loss is scaled


def only_layers():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu", dtype="mixed_float16"), layers.Dense(1, dtype="float32")])


def compiled_by_the_factory():
    model = only_layers()
    model.compile("adam", "mse")
    return model


class MakesLayersLate(keras.Model):
    def build(self, shape):
        self.dense = layers.Dense(4, dtype="mixed_float16")
        self.out = layers.Dense(1, dtype="float32")
        self.dense.build(shape)
        self.out.build((*shape[:-1], 4))

    def call(self, x):
        return self.out(self.dense(x))


@pytest.mark.parametrize("factory", [only_layers, compiled_by_the_factory, MakesLayersLate])
def test_float16_layers_alone_are_enough_for_the_loss_to_be_scaled(factory):
    model = MirroredFitter(factory, devices="cpu:2", seed=1)
    if not model.compiled:
        model.compile("adam", "mse")
    model.fit(*batch(), batch_size=3, epochs=2, verbose=0)
    assert loss_scale.is_loss_scaled(model.optimizer)
    (found,) = loss_scaling(model)
    assert (found.steps, found.skipped, found.scale) == (4, 0, 2.0**15)
    assert model.verify(*batch()).passed


@pytest.mark.parametrize("policy", [None, "mixed_float16"])
def test_auto_scale_loss_false_is_kept_and_a_fixed_scale_is_the_optimizers_own(policy):
    model = MirroredFitter(only_layers, devices="cpu:2", seed=1, precision=policy)
    model.compile(Adam(loss_scale_factor=128.0), "mse", auto_scale_loss=False)
    model.fit(*batch(), batch_size=3, verbose=0)
    assert isinstance(model.optimizer, Adam)
    assert (model.optimizer.loss_scale_factor, model.loss_scaling) == (128.0, ())


class CompilesItsWay(keras.Sequential):
    def compile(self, rate):
        super().compile(Adam(rate, loss_scale_factor=128.0), "mse", auto_scale_loss=False)


def test_auto_scale_loss_false_is_kept_however_it_is_given():
    def compiled():
        model = only_layers()
        model.compile(Adam(loss_scale_factor=128.0), "mse", None, None, None, False, 1, "auto", False)
        return model

    def overridden():
        model = CompilesItsWay(only_layers().layers)
        model.compile(0.01)
        return model

    for factory in (compiled, overridden):
        model = MirroredFitter(factory, devices="cpu:2", seed=1)
        model.fit(*batch(), batch_size=3, verbose=0)
        assert isinstance(model.optimizer, Adam)
        assert model.optimizer.loss_scale_factor == 128.0


class MakesLayersInBuild(keras.Model):
    def build(self, shape):
        self.dense = layers.Dense(4)
        self.out = layers.Dense(1, dtype="float32")
        self.dense.build(shape)
        self.out.build((*shape[:-1], 4))

    def call(self, x):
        return self.out(self.dense(x))


def test_layers_that_are_made_in_build_have_the_factorys_policy():
    model = MirroredFitter(MakesLayersInBuild, devices="cpu:2", seed=1, precision="mixed_float16")
    model.compile("adam", "mse")
    assert model.predict(batch()[0], verbose=0).shape == (6, 1)
    model.fit(*batch(), verbose=0)
    assert (model.dense.compute_dtype, model.out.compute_dtype) == ("float16", "float32")
    assert loss_scale.is_loss_scaled(model.optimizer)
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16", "float32"])
def test_nothing_is_scaled_without_float16(policy):
    model = MirroredFitter(half, devices="cpu:2", seed=1, precision=policy)
    model.compile("adam", "mse")
    model.fit(*batch(), verbose=0)
    assert isinstance(model.optimizer, Adam)


def test_the_users_own_instance_is_used_and_not_wrapped_twice():
    mine = LossScaleOptimizer(Adam(0.01), initial_scale=256.0)
    model = MirroredFitter(half, devices="cpu:2", seed=1, precision="mixed_float16")
    model.compile(mine, "mse")
    model.fit(*batch(), verbose=0)
    assert model.optimizer is mine
    assert isinstance(mine.inner_optimizer, Adam)
    assert type(mine) is LossScaleOptimizer


class Adversarial(keras.Model):
    """Two optimizers in a train_step that scales and clips by hand."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(1, dtype="float32"), layers.Dense(1, dtype="float32")
        self.scales = True

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def call(self, x):
        return self.one(x), self.two(x)

    def train_step(self, data):
        x, y = data
        losses = []
        for optimizer, layer, target in ((self.first, self.one, y[:, :1]), (self.second, self.two, y[:, 1:])):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((keras.ops.cast(layer(x), "float32") - target) ** 2)
                scaled = optimizer.scale_loss(loss) if self.scales else loss
            optimizer.apply(tape.gradient(scaled, layer.trainable_weights), layer.trainable_weights)
            losses.append(loss)
        return {"one": losses[0], "two": losses[1]}


def test_each_optimizer_of_a_custom_step_has_a_scale_of_its_own():
    model = MirroredFitter(Adversarial, devices="cpu:3", seed=1)
    model.compile(
        LossScaleOptimizer(SGD(0.1), name="first", initial_scale=16.0),
        LossScaleOptimizer(SGD(0.1), name="second", initial_scale=16.0),
    )
    x, y = np.ones((4, 2), "float32"), np.ones((4, 2), "float32")
    model.fit(x, y, epochs=2, verbose=0)
    y[3, 1] = np.inf
    before = [on_replicas(v) for v in model.two.variables]
    model.fit(x, y, verbose=0)
    for a, b in zip(before, model.two.variables, strict=True):
        np.testing.assert_array_equal(a, on_replicas(b))
    found = {state.optimizer: (state.scale, state.steps, state.skipped) for state in model.loss_scaling}
    assert found == {"first": (16.0, 3, 0), "second": (8.0, 3, 1)}


def test_a_step_that_forgets_to_scale_is_told_so_once():
    def build():
        model = Adversarial()
        model.scales = False
        return model

    model = MirroredFitter(build, devices="cpu:2", seed=1)
    model.compile(LossScaleOptimizer(SGD(0.1), name="first"), SGD(0.1))
    x, y = np.ones((4, 2), "float32"), np.ones((4, 2), "float32")
    with pytest.warns(UserWarning, match=r"'first' was given gradients without its scale_loss"):
        model.fit(x, y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y, verbose=0)


class HalfAdversarial(Adversarial):
    def __init__(self):
        super().__init__()
        self.one = layers.Dense(1, dtype="mixed_float16")


def test_a_custom_step_that_trains_float16_layers_unscaled_is_told_so_once():
    model = MirroredFitter(HalfAdversarial, devices="cpu:2", seed=1)
    model.compile(SGD(0.1, name="first"), LossScaleOptimizer(SGD(0.1), name="second"))
    x, y = np.ones((4, 2), "float32"), np.ones((4, 2), "float32")
    with pytest.warns(UserWarning, match=r"'first' \(SGD\) scales no loss") as caught:
        model.fit(x, y, verbose=0)
    assert sum("scales no loss" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("seed", range(3))
def test_verify_passes_where_the_search_for_the_scale_would_skip_different_steps(seed):
    def build():
        return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1, dtype="float32")])

    model = MirroredFitter(build, devices="cpu:2", seed=seed, precision="mixed_float16")
    model.compile("adam", "mse")
    report = model.verify(*batch(rows=40), batch_size=16)
    assert report.passed, str(report)
    assert report.notes == ()


def test_a_bounded_optimizer_in_a_loop_of_the_users_own_is_keras_own():
    model = steered(LossScaleOptimizer(SGD(1.0), initial_scale=4.0))
    train(model, 1.0)
    (kernel,) = model.trainable_variables

    def step():
        model.optimizer.apply([tf.fill([1, 1], 4.0)], [kernel])

    model.strategy.run(tf.function(step))
    assert int(model.optimizer.iterations) == 2


# -- the error's words


def test_the_first_layer_whose_output_is_not_finite_is_named():
    model = MirroredFitter(half, devices="cpu:2", seed=1, precision="mixed_float16")
    model.compile(LossScaleOptimizer(Adam(), initial_scale=2.0), "mse")
    model.fit(*batch(), verbose=0)
    model.layers[0].kernel.assign(np.full((3, 4), 1e6))
    with pytest.raises(FloatingPointError, match=r"first layer whose output isn't finite is '.*dense.*' \(Dense\)"):
        model.fit(*batch(), batch_size=1, epochs=9, verbose=0)
    assert all("call" not in vars(layer) for layer in model.layers)


def test_a_gradient_that_overflows_alone_is_named():
    model = MirroredFitter(half, devices="cpu:2", seed=1, precision="mixed_float16")
    model.compile(LossScaleOptimizer(Adam(), initial_scale=2.0), "mse")
    x, y = batch()
    with pytest.raises(FloatingPointError, match=r"\d of 6 gradients weren't finite(.|\n)*'.*/(kernel|bias|gamma|beta)'"):
        model.fit(x, y * 1e8, batch_size=1, epochs=9, verbose=0)


# -- outside judges


def test_keras_own_tests_pass_with_the_bounds_on(monkeypatch):
    try:
        from keras.src.optimizers import loss_scale_optimizer_test as judge
    except ImportError:
        assert keras.__version__.startswith("3.10."), "the installed Keras no longer ships its tests"
        pytest.skip("Keras 3.10 doesn't ship its tests")

    precision.install()
    made, updated = [], []
    original, update = LossScaleOptimizer.__init__, precision._grow
    monkeypatch.setattr(precision, "_grow", lambda optimizer, scale: (updated.append(optimizer), update(optimizer, scale)))

    def bounded(self, *args, **kwargs):
        original(self, *args, **kwargs)
        loss_scale.bound(self)
        made.append(self)

    monkeypatch.setattr(LossScaleOptimizer, "__init__", bounded)
    result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromModule(judge))
    assert result.wasSuccessful(), result.failures + result.errors
    assert result.testsRun >= 20
    assert all("stateless" in reason for _, reason in result.skipped)
    assert len(made) >= 15
    assert len(updated) > 10
