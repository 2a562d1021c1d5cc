"""Pure decisions of `attempt.py`: the limits that an attempt gets, and which failure counts at its end."""

from __future__ import annotations

import msgspec

from ..core.authoring import SessionStatus
from ..core.errors import GradeFailed, RunFailed
from ..core.failures import RULES, ScoreRule
from ..core.policy import verdict_kind
from ..core.records import AttemptFailure, FailureOrigin, Grade, Limits, Salvage
from .worker_protocol import AttemptJob


def apply_lease(limits: Limits, job: AttemptJob) -> Limits:
    """Return the limits with the leased memory, and with the whole disk quota if they set no disk limit."""
    if job.lease:
        limits = msgspec.structs.replace(limits, **{"memory" if limits.memory else "lease": job.lease})
    return limits if limits.disk or not job.quota else msgspec.structs.replace(limits, disk=job.quota)


def prefer_model_failure(
    failure: AttemptFailure | None, session: SessionStatus | None
) -> AttemptFailure | None:
    """Return the failure of a model call if it is why the agent ended: that is never a zero for the agent.

    A failed call of the conversation's main thread is a reason in any case. If the agent failed itself, a
    failed call that no later call made up for is a reason too.
    """
    cause = session.failure if session else None
    if cause is None and session and failure and failure.where in (FailureOrigin.AGENT, FailureOrigin.MODEL):
        cause = session.unanswered
    blames_agent = failure is None or failure.where in (
        FailureOrigin.AGENT,
        FailureOrigin.LIMIT,
        FailureOrigin.MODEL,
    )
    return cause if cause is not None and blames_agent else failure


def in_doubt(failure: AttemptFailure | None, grade: Grade | None) -> bool:
    """Return whether a full disk or a dead daemon may have caused this end; it cannot have caused a pass."""
    if failure is not None and failure.where in (FailureOrigin.RUN, FailureOrigin.INTERRUPTED):
        return False
    return verdict_kind(failure, grade.passed if grade else None) != "passed"


def make_write_error(error: OSError) -> RunFailed:
    """Return the error for a failed write: it is a failure of the run, never of the agent."""
    return RunFailed(f"the run directory cannot be written: {error.strerror}", kind="record")


def describe_left_out(salvage: Salvage | None) -> str:
    """Return why a salvage is incomplete; empty: it is complete."""
    count = salvage.left_out if salvage is not None else 0
    return f"{count} changed files are too large to be kept, or not readable" if count else ""


def make_fresh_error(lost: str) -> GradeFailed:
    """Return the error for work that cannot be moved to a fresh sandbox.

    Such work is not graded: in the agent's own sandbox, other files of the agent could change the grade.
    """
    return GradeFailed(
        f"the work cannot be moved to a fresh sandbox: {lost}",
        "a suite with `fresh=False` grades in the agent's own sandbox",
        kind="unfresh",
        again=False,
    )


def worth_grading(failure: AttemptFailure | None) -> bool:
    """Return whether a grade could count after this failure."""
    return failure is None or RULES[failure.where].scored is not ScoreRule.NO
