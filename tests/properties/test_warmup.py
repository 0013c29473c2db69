"""The rate that an optimizer uses is the closed formula, whatever the run looks like: observed from its updates."""

import fractions
import warnings

import keras
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from observed import Observed, data

from keras_mirror import LinearScalingWarmup
from keras_mirror.callbacks.curve import Curve

factors = st.one_of(st.just(1.0), st.integers(2, 1024).map(float), st.floats(1.0, 1e4))
lengths = st.integers(1, 10_000)
# Each example traces a fit anew: few of them, and no shrinking.
slow = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)


def formula(start, k, updates, t):
    """Written anew, in exact arithmetic: the straight line through (0, start) and (T - 1, k), then k."""
    if t >= updates - 1:
        return fractions.Fraction(k)
    return fractions.Fraction(start) + (fractions.Fraction(k) - fractions.Fraction(start)) * fractions.Fraction(t, updates - 1)


@given(k=factors, updates=lengths, start=st.floats(1e-3, 1.0), data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_curve_is_the_formula_monotone_and_never_above_its_end(k, updates, start, data):
    curve = Curve(start, k, updates)
    first, second = sorted(data.draw(st.tuples(st.integers(0, updates + 5), st.integers(0, updates + 5))))
    for t in (first, second):
        assert abs(fractions.Fraction(curve.at(t)) - formula(start, k, updates, t)) <= 4e-16 * k
    assert curve.at(first) <= curve.at(second) <= k
    assert curve.at(max(updates - 1, 0)) == curve.at(updates) == k
    assert updates == 1 or curve.at(0) == start


@given(
    base=st.floats(1e-6, 10.0),
    k=factors,
    start=st.one_of(st.none(), st.floats(1e-3, 1.0)),
    epochs_of_warmup=st.floats(0.1, 3.0),
    steps=st.integers(1, 12),
    epochs=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    steps_per_execution=st.integers(1, 5),
    resumed_at=st.integers(0, 40),
)
@slow
def test_the_rate_of_every_update_of_fit_is_the_formula(
    base, k, start, epochs_of_warmup, steps, epochs, accumulation, steps_per_execution, resumed_at
):
    keras.config.set_floatx("float64")
    model = Observed(batches=steps * epochs)
    optimizer = keras.optimizers.SGD(base, gradient_accumulation_steps=accumulation if accumulation > 1 else None)
    model.compile(optimizer, steps_per_execution=steps_per_execution, jit_compile=False)
    optimizer.build(model.trainable_variables)
    optimizer.variables[0].assign(resumed_at * accumulation)  # its count of batches, as a checkpoint restores it
    warmup = LinearScalingWarmup(epochs_of_warmup, scale=k, start_factor=start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # many of these runs are shorter than their warmup
        history = model.fit(data(steps), epochs=epochs, callbacks=[warmup], verbose=0).history

    rates = model.rates()
    assert len(rates) == steps * epochs // accumulation
    updates = max(1, round(epochs_of_warmup * steps / accumulation))
    first = 1.0 if start is None else start
    expected = [float(fractions.Fraction(base) * formula(first, k, updates, resumed_at + i)) for i in range(len(rates))]
    np.testing.assert_allclose(rates, expected, rtol=4e-15)
    assert np.all(np.diff(rates) >= 0), "monotone"
    assert np.all(rates <= base * k), "never above k times base"
    assert np.all(rates[max(updates - 1 - resumed_at, 0) :] == base * k), "the end is exact"
    if len(rates):
        assert history["effective_learning_rate"][-1] == rates[-1]
        assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == base
