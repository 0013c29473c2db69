"""The table: every row trains on N replicas exactly as on one device."""

import cases_losses
import cases_metrics
import cases_models
import cases_optimizers
import cases_steps
import harness


@harness.parametrised(cases_losses.CASES)
def test_losses(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)


@harness.parametrised(cases_metrics.CASES)
def test_metrics(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)


@harness.parametrised(cases_optimizers.CASES)
def test_optimizers(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)


@harness.parametrised(cases_models.CASES)
def test_models(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)


@harness.parametrised(cases_steps.CASES)
def test_steps(case: harness.Case, replicas: int) -> None:
    harness.check(case, replicas)
