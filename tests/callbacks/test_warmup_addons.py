"""LinearScalingWarmup with tensorflow-addons' optimizers and schedules: a factor of 3 is a rate three times as high."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import stack
from stack import keras, layers

from keras_mirror import LinearScalingWarmup, MirroredFitter

if stack.GENERATION == 3:
    pytest.skip("Keras 2's own", allow_module_level=True)
tfa = pytest.importorskip("tensorflow_addons")

legacy = keras.optimizers.legacy
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(24, 2)).astype("float32")


_last: list[keras.Model] = []  # For MultiOptimizer, which is given layers.


def cyclical(rate: float) -> Any:
    return tfa.optimizers.TriangularCyclicalLearningRate(rate, 4 * rate, step_size=4)


OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "LAMB": lambda rate: tfa.optimizers.LAMB(rate, weight_decay=0.1),
    "LazyAdam": tfa.optimizers.LazyAdam,
    "RectifiedAdam": lambda rate: tfa.optimizers.RectifiedAdam(rate, weight_decay=0.01),
    "NovoGrad": lambda rate: tfa.optimizers.NovoGrad(rate, weight_decay=0.01),
    "SGDW": lambda rate: tfa.optimizers.SGDW(weight_decay=0.01, learning_rate=rate, momentum=0.9),
    "AdamW": lambda rate: tfa.optimizers.AdamW(weight_decay=0.01, learning_rate=rate),
    "Yogi": tfa.optimizers.Yogi,
    "AdaBelief": tfa.optimizers.AdaBelief,
    "ProximalAdagrad": tfa.optimizers.ProximalAdagrad,
    "Lookahead": lambda rate: tfa.optimizers.Lookahead(legacy.Adam(rate), sync_period=3),
    "MovingAverage": lambda rate: tfa.optimizers.MovingAverage(legacy.SGD(rate, momentum=0.9)),
    "SWA": lambda rate: tfa.optimizers.SWA(legacy.SGD(rate), start_averaging=2, average_period=2),
    "MultiOptimizer": lambda rate: tfa.optimizers.MultiOptimizer(
        [(legacy.Adam(rate), _last[0].layers[0]), (legacy.SGD(rate, momentum=0.5), _last[0].layers[1:])]
    ),
    "schedule": lambda rate: legacy.SGD(cyclical(rate)),
}


def trained(make: Callable[[], Any], *callbacks: Any) -> tuple[list[Any], dict[str, Any]]:
    keras.utils.set_random_seed(0)

    def build() -> keras.Model:
        _last[:] = [keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])]
        return _last[0]

    model = MirroredFitter(build, devices="cpu:2")
    model.compile(make(), "mse")
    history = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights(), history.history


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_factor_multiplies_the_rate(name: str) -> None:
    expected, _ = trained(lambda: OPTIMIZERS[name](0.03))
    plain, _ = trained(lambda: OPTIMIZERS[name](0.01))
    warmup = LinearScalingWarmup(warmup_steps=3, scale=3.0, start_factor=3.0)
    found, logs = trained(lambda: OPTIMIZERS[name](0.01), warmup)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)
    assert np.abs(found[0] - plain[0]).max() > 1e-4
    if name != "schedule":
        assert logs["effective_learning_rate"] == [pytest.approx(0.03)]


@pytest.mark.parametrize("make", [tfa.optimizers.COCOB, lambda: tfa.optimizers.ConditionalGradient(0.9, lambda_=1.0)])
def test_an_optimizer_without_a_rate_to_scale_is_refused_before_training(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="LinearScalingWarmup"):
        trained(make, LinearScalingWarmup(warmup_steps=3, scale=3.0))
