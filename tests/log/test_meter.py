"""Times and counts of steps, with a clock of our own."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_mirror.log import text
from keras_mirror.log.meter import Meter

CALLS = st.lists(st.tuples(st.integers(1, 5_000), st.integers(1, 4), st.integers(0, 50)), min_size=1, max_size=30)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@given(CALLS, st.integers(1, 7))
def test_windows_and_epoch_account_for_every_step_but_the_first_call(calls, each):
    clock = Clock()
    meter = Meter(clock)
    meter.begin_epoch()
    windows = []
    for number, (took, steps, examples) in enumerate(calls, 1):
        clock.now += took / 1000
        meter.executed(steps, examples)
        if number % each == 0:
            windows.append(meter.window())
    windows.append(meter.window())
    epoch, rest = meter.epoch(), calls[1:]
    assert meter.first == pytest.approx(calls[0][0] / 1000)
    assert meter.steps == sum(steps for _, steps, _ in calls)
    assert sum(each.steps for each in windows) == epoch.steps == sum(steps for _, steps, _ in rest)
    assert sum(each.examples for each in windows) == epoch.examples == sum(examples for *_, examples in rest)
    assert sum(each.seconds for each in windows) == pytest.approx(epoch.seconds)
    assert epoch.seconds == pytest.approx(sum(took for took, _, _ in rest) / 1000)
    single = sorted(took / 1000 / steps for took, steps, _ in rest for _ in range(steps))
    if single:
        assert epoch.median == pytest.approx(statistics.median_low(single))
        assert epoch.p95 == pytest.approx(single[math.ceil(0.95 * len(single)) - 1])
        assert epoch.examples_per_second == pytest.approx(epoch.examples / epoch.seconds)
    else:
        assert math.isnan(epoch.median)
        assert epoch.examples_per_second is None


def test_an_epochs_beginning_starts_the_clock_anew():
    clock = Clock()
    meter = Meter(clock)
    meter.executed(1, None)
    clock.now += 100  # Validation.
    meter.begin_epoch()
    clock.now += 0.5
    meter.executed(1, None)
    assert meter.window().seconds == meter.epoch().seconds == meter.epoch_elapsed == 0.5
    assert meter.epoch().examples_per_second is None
    assert meter.elapsed == 100.5


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.number(0.123456), "0.1235"),
        (text.number(1234.5), "1234.5"),
        (text.number(1e-7), "1.000e-07"),
        (text.number(math.nan), "nan"),
        (text.number([1.0]), "..."),
        (text.count(523), "523"),
        (text.count(52_340), "52.3k"),
        (text.count(999_700), "1M"),
        (text.count(2.5e12), "2.5e+03G"),
        (text.milliseconds(0.00123), "1.23 ms"),
        (text.milliseconds(1.5), "1.50 s"),
        (text.duration(8.21), "8.2 s"),
        (text.duration(3805), "1:03:25"),
    ],
)
def test_numbers_are_short(shown, expected):
    assert shown == expected
