"""Sandboxes that are lost with their machine: a free retry each time, up to a bound."""

from __future__ import annotations

import pytest

from holdwater.core.events import CloseSample, SampleOpened, StartAttempt, SuiteExhausted, VerdictCommitted
from holdwater.core.failures import MOST_OUTAGES, OUTAGES
from holdwater.core.plan import RunPlanner
from holdwater.core.policy import PlannerPolicy, VerdictSummary
from holdwater.core.records import Attempt, AttemptFailure, FailureOrigin, Outcome, Verdict

LOST = AttemptFailure(where=FailureOrigin.INTERRUPTED, kind="server", message="it is gone")


def open_sample(plan: RunPlanner, outages: int = 0) -> Attempt:
    commands = plan.handle(SampleOpened(instance=1, sample=0, outages=outages), 0.0)
    plan.handle(SuiteExhausted(), 0.0)
    (attempt,) = [command.attempt for command in commands if isinstance(command, StartAttempt)]
    return attempt


def settle(
    plan: RunPlanner, attempt: Attempt, failure: AttemptFailure
) -> tuple[Attempt | None, Outcome | None, AttemptFailure]:
    """Settle as the scheduler does: the next attempt, the outcome, and the recorded failure."""
    recorded = plan.limit_outages(attempt.id, failure)
    verdict = Verdict(attempt=attempt.id, token=1, failure=recorded)
    commands = plan.handle(VerdictCommitted(result=VerdictSummary.of(verdict)), 0.0)
    following = [command.attempt for command in commands if isinstance(command, StartAttempt)]
    closed = [command.outcome for command in commands if isinstance(command, CloseSample)]
    return (following or [None])[0], (closed or [None])[0], recorded


@pytest.mark.parametrize("kind", sorted(OUTAGES))
def test_a_sample_that_always_loses_its_sandbox_is_an_infrastructure_failure(kind: str) -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=1, retries=2))
    attempt: Attempt | None = open_sample(plan)
    lost = AttemptFailure(where=FailureOrigin.INTERRUPTED, kind=kind, message="it is gone")

    for _ in range(MOST_OUTAGES - 1):
        assert attempt is not None and attempt.round == 1
        attempt, outcome, recorded = settle(plan, attempt, lost)
        assert outcome is None and recorded == lost
    assert attempt is not None
    attempt, outcome, recorded = settle(plan, attempt, lost)

    assert attempt is None and plan.complete
    assert outcome is not None and (outcome.kind, outcome.score) == ("sandbox", None)
    assert (recorded.where, recorded.kind, recorded.again) == (FailureOrigin.SANDBOX, kind, False)
    assert "lost its sandbox 10 times, at last because: it is gone" in recorded.message


def test_losses_before_a_resume_count_too() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    attempt = open_sample(plan, outages=MOST_OUTAGES - 1)

    _, outcome, _ = settle(plan, attempt, LOST)

    assert outcome is not None and outcome.kind == "sandbox"


def test_an_interruption_of_the_run_itself_is_never_counted() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    attempt: Attempt | None = open_sample(plan)
    stopped = AttemptFailure(where=FailureOrigin.INTERRUPTED, kind="interrupted", message="a signal")

    for _ in range(2 * MOST_OUTAGES):
        assert attempt is not None
        attempt, outcome, _ = settle(plan, attempt, stopped)
        assert outcome is None
    assert attempt is not None
    _, outcome, recorded = settle(plan, attempt, LOST)

    assert outcome is None and recorded == LOST
