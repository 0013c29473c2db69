"""The harness itself: an engine that is wrong in one place is found out."""

from typing import Any

import cases_losses
import cases_models
import cases_optimizers
import harness
import pytest

from keras_mirror.engine import state
from keras_mirror.engine.step import Step

ROWS = {case.name: case for module in (cases_losses, cases_models, cases_optimizers) for case in module.CASES}


def mean_of_means(step: Step, dtype: Any) -> Any:
    """Plain Keras's convention: each replica counts the same, however many examples it had."""
    return 1.0 / step.replicas


def own_share_alone(step: Step, values: list[Any], why: str) -> list[Any]:
    """Nothing is summed over the replicas."""
    return values


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "wrong"),
    [
        ("loss-string", Step, "weight", mean_of_means),
        ("optimizer-Adam", Step, "weight", mean_of_means),
        ("clipnorm", Step, "all_reduce", own_share_alone),
        ("reduction-sum", Step, "inverse_weight", lambda step, dtype: 1.0),
        ("layer-with-state-of-its-own", state, "combine", lambda step, variables: None),
    ],
)
def test_a_wrong_engine_fails(name: str, owner: Any, attribute: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError, match=r"not as on one device|left the others"):
        harness.check(ROWS[name], 2)
