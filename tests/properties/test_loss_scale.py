"""Loss scaling on 1 to 4 replicas is its algorithm, written in plain Python, for any sequence of gradients.

`--hypothesis-profile=nightly` runs 10,000 examples of each instead of 200.
"""

import functools
import math
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from loss_scale_model import LEARNING_RATE, MOMENTUM, Reference

from keras_mirror import MirroredFitter
from keras_mirror.engine import precision
from keras_mirror.seams import keras3, loss_scale
from keras_mirror.seams import tensorflow as tf_seams

# (accumulated batches, good steps until the scale doubles); each is compiled once for each number of replicas.
SETTINGS = [(1, 1), (2, 3)]
WEIGHTS = [0.5, -0.25]

# What one row adds to the gradient's first entry. Huge values have one sign: whether huge ones of both signs cancel or
# overflow depends on the order of the sum, on one device too.
usual = st.builds(lambda sign, e: sign * 2.0**e, st.sampled_from([-1.0, 1.0]), st.integers(-24, 10))
huge = st.integers(90, 126).map(lambda e: 2.0**e)
denormal = st.integers(-149, -127).map(lambda e: 2.0**e)
not_finite = st.sampled_from([math.inf, -math.inf, math.nan])
values = st.one_of(usual, usual, huge, denormal, not_finite, st.just(0.0))
good = st.one_of(usual, denormal, st.just(0.0))
scales = st.sampled_from([2.0**e for e in (0, 1, 2, 15, 100, 125, 126, 127)])


def gradient_is_the_row(y_true, y_pred):
    return y_pred[:, 0]


def optimizer(accumulation: int, growth: int) -> keras.Optimizer:
    inner = keras.optimizers.SGD(
        LEARNING_RATE, momentum=MOMENTUM, gradient_accumulation_steps=accumulation if accumulation > 1 else None
    )
    return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=growth)


def linear() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])


@functools.cache
def fitter(replicas: int, accumulation: int, growth: int) -> MirroredFitter:
    model = MirroredFitter(linear, devices=f"cpu:{replicas}")
    model.compile(optimizer(accumulation, growth), gradient_is_the_row)
    model.train_on_batch(np.zeros((replicas, 2), "float32"), np.zeros((replicas, 1), "float32"))
    return model


@functools.cache
def plain(accumulation: int, growth: int) -> keras.Model:
    model = linear()
    model.compile(optimizer(accumulation, growth), gradient_is_the_row, jit_compile=False)
    model.train_on_batch(np.zeros((1, 2), "float32"), np.zeros((1, 1), "float32"))
    return model


def restart(model, scale: float) -> None:
    """Weights, slots, counters and scale as at the start of training."""
    for variable in model.optimizer.variables:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    model.optimizer.inner_optimizer._learning_rate.assign(LEARNING_RATE)
    model.optimizer.dynamic_scale.assign(scale)
    model.set_weights([np.array(WEIGHTS, "float32")[:, None]])


def zero_counts(model: MirroredFitter) -> None:
    counts = model._engine.loss_scales.of(model.optimizer)
    for component in tf_seams.components(counts._variable):
        component.assign(tf.zeros_like(component))


def rows(first: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose gradient's first entry is given; the second is 1."""
    return np.stack([first, np.ones(len(first))], axis=1).astype("float32"), np.zeros((len(first), 1), "float32")


def mean_gradient(first: list[float]) -> list[float]:
    return [math.fsum(first) / len(first) if all(map(math.isfinite, first)) else math.nan, 1.0]


def train(model, first: list[float]) -> bool:
    """One batch; whether training was stopped as hopeless."""
    try:
        model.train_on_batch(*rows(first))
    except FloatingPointError:
        return True
    return False


def check_equal(model, expected: Reference) -> None:
    lso = model.optimizer
    assert float(lso.dynamic_scale) == expected.scale
    assert int(lso.step_counter) == expected.counter
    assert int(lso.iterations) == expected.iterations
    np.testing.assert_allclose(model.get_weights()[0][:, 0], expected.weights, rtol=2e-6, atol=1e-37)


def check_replicas(model: MirroredFitter) -> None:
    held = {id(v) for v in keras3.accumulators(model.optimizer.inner_optimizer)}
    for variable in [*model.variables, *(v for v in model.optimizer.variables if id(v) not in held)]:
        first, *others = [c.numpy().tobytes() for c in tf_seams.components(keras3.raw_variable(variable))]
        assert all(other == first for other in others), variable.path


class LossScaling(RuleBasedStateMachine):
    """The real optimizer in the real engine against the algorithm: any gradients on any replica, saved and restored anywhere."""

    @initialize(replicas=st.integers(1, 4), setting=st.sampled_from(SETTINGS), scale=scales)
    def start(self, replicas, setting, scale):
        self.setting = setting
        self.model = fitter(replicas, *setting)
        restart(self.model, scale)
        zero_counts(self.model)
        self.expected = Reference(WEIGHTS, scale, growth=setting[1], accumulation=setting[0])

    @rule(data=st.data(), kind=st.sampled_from([values, good, good, not_finite]))
    def train(self, data, kind):
        # From one row (all replicas but the first are without) to two and more on each.
        first = data.draw(st.lists(kind, min_size=1, max_size=2 * self.model.num_replicas + 1))
        gradient = mean_gradient(first)
        assume(not self.expected.is_near_overflow(gradient))
        self.step(gradient, first)

    @rule(number=st.integers(2, 6))
    def one_bad_batch_after_another(self, number):
        for _ in range(number):
            self.step([math.nan], [math.nan])

    @rule(scale=st.sampled_from([0.0, math.inf, math.nan, -1.0, 0.25, 2.0**-30]))
    def restore_a_broken_scale(self, scale):
        self.model.optimizer.dynamic_scale.assign(scale)
        self.expected.scale = scale
        self.train_good_batch()

    @rule(counter=st.integers(0, 9))
    def restore_a_counter(self, counter):
        self.model.optimizer.step_counter.assign(counter)
        self.expected.counter = counter

    @rule(replicas=st.integers(1, 4))
    def save_and_restore(self, replicas):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "all.weights.h5"
            self.model.save_weights(path)
            self.model = fitter(replicas, *self.setting)
            restart(self.model, 3.0)
            self.model.load_weights(path)
        # Which steps were skipped is counted for a process, and isn't part of the model.
        zero_counts(self.model)
        expected = self.expected
        expected.steps = expected.skipped = expected.in_a_row = expected.at_floor = 0

    def train_good_batch(self):
        self.step([0.5, 1.0], [0.5])

    def step(self, gradient, first):
        self.expected.step(gradient)
        assert train(self.model, first) == self.expected.hopeless
        if self.expected.hopeless:
            self.expected.start_again()

    @invariant()
    def agrees(self):
        if not hasattr(self, "model"):
            return
        expected = self.expected
        note(f"scale {expected.scale}, counter {expected.counter}, applied {expected.applied}")
        check_equal(self.model, expected)
        check_replicas(self.model)
        assert 1.0 <= expected.scale < math.inf
        (found,) = self.model.loss_scaling
        assert (found.steps, found.skipped, found.skipped_in_a_row) == (expected.steps, expected.skipped, expected.in_a_row)


TestLossScaling = LossScaling.TestCase


@given(
    batches=st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=8),
    replicas=st.integers(1, 4),
    setting=st.sampled_from(SETTINGS),
)
def test_replicas_equal_plain_keras_on_one_device_within_the_bounds(batches, replicas, setting):
    one, many = plain(*setting), fitter(replicas, *setting)
    expected = Reference(WEIGHTS, 2.0**15, growth=setting[1], accumulation=setting[0])
    for model in (one, many):
        restart(model, 2.0**15)
    zero_counts(many)
    for first in batches:
        assume(not expected.is_near_overflow(mean_gradient(first)))
        expected.step(mean_gradient(first))
        one.train_on_batch(*rows(first))
        many.train_on_batch(*rows(first))
        for a, b in zip(one.optimizer.variables[:3], many.optimizer.variables[:3], strict=True):
            assert a.numpy() == b.numpy(), a.path
        assert int(one.optimizer.iterations) == int(many.optimizer.iterations)
        np.testing.assert_allclose(one.get_weights()[0], many.get_weights()[0], rtol=2e-6, atol=1e-37)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
tiny, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Keep(keras.optimizers.Optimizer):
    """Sets each variable to its gradient."""

    def update_step(self, gradient, variable, learning_rate):
        variable.assign(gradient)


def compiled(instance, variable):
    return tf.function(lambda gradient: instance.apply([gradient], [variable]))


@functools.cache
def kept(size: int):
    lso = keras.optimizers.LossScaleOptimizer(Keep(0.0))
    loss_scale.bound(lso)
    precision.install()
    variable = keras.Variable(np.zeros(size, "float32"))
    lso.build([variable])
    return lso, variable, compiled(lso, variable)


@given(gradient=st.lists(floats, min_size=8, max_size=8), exponent=st.integers(0, 127))
def test_scaling_by_a_power_of_two_and_back_changes_no_bit_but_by_over_or_underflow(gradient, exponent):
    lso, variable, apply = kept(8)
    gradient = np.array(gradient, "float32")
    with np.errstate(over="ignore", under="ignore"):
        scaled = gradient * np.float32(2.0**exponent)
    # TensorFlow's kernels take denormal numbers for 0, scaled or not.
    gradient[(abs(gradient) < tiny)] = 0.0
    scaled[(abs(scaled) < tiny)] = 0.0
    variable.assign(np.full(8, 7.0, "float32"))
    lso.dynamic_scale.assign(2.0**exponent)
    apply(scaled)
    if np.all(np.isfinite(scaled)):
        np.testing.assert_array_equal(variable.numpy(), gradient)
    else:
        np.testing.assert_array_equal(variable.numpy(), np.full(8, 7.0))


INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam with clipping": lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0),
    "AdamW with EMA": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2, clipvalue=0.5),
}


@functools.cache
def pair(name: str):
    """The same optimizer bare and loss-scaled, each with a variable and a compiled step."""
    made = []
    for wrap in (lambda o: o, lambda o: keras.optimizers.LossScaleOptimizer(o, dynamic_growth_steps=3)):
        instance = wrap(INNER[name]())
        precision.install()
        if loss_scale.is_loss_scaled(instance):
            loss_scale.bound(instance)
        variable = keras.Variable(np.zeros(3, "float32"))
        instance.build([variable])
        start = [v.numpy() for v in instance.variables]
        made.append((instance, variable, start, compiled(instance, variable)))
    return made


moderate = st.floats(-1e4, 1e4, width=32).filter(lambda g: g == 0 or abs(g) > 1e-4)


@pytest.mark.parametrize("name", INNER)
@given(gradients=st.lists(st.lists(moderate, min_size=3, max_size=3), min_size=1, max_size=7), exponent=st.integers(0, 30))
def test_a_scaled_step_equals_the_unscaled_step(name, gradients, exponent):
    (bare, variable, start, apply), (lso, scaled_variable, scaled_start, scaled_apply) = pair(name)
    for instance, one, values_at_start in ((bare, variable, start), (lso, scaled_variable, scaled_start)):
        one.assign(np.array([0.5, -1.0, 2.0], "float32"))
        for v, value in zip(instance.variables, values_at_start, strict=True):
            v.assign(value)
    lso.dynamic_scale.assign(2.0**exponent)
    for gradient in gradients:
        apply(np.array(gradient, "float32"))
        scaled_apply(np.array(gradient, "float32") * np.float32(float(lso.dynamic_scale)))
    np.testing.assert_array_equal(variable.numpy(), scaled_variable.numpy())
    for a, b in zip(bare.variables, lso.inner_optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
