"""Decisions of an attempt: its limits, the failure that counts at its end, and the steps of its agent.

`attempt.py` and `attempt_phases.py` act on them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec

from ..core.authoring import ManagedSandbox, SessionStatus
from ..core.errors import AgentFailed, AttemptError, GradeFailed, RunFailed, as_failure, drop_tracebacks
from ..core.failures import RULES, ScoreRule
from ..core.fork_origin import SEED_STRIDE, ForkOrigin, make_drift_failure
from ..core.policy import verdict_kind
from ..core.records import (
    Attempt,
    AttemptFailure,
    AttemptPhase,
    FailureOrigin,
    Grade,
    Instance,
    Limits,
    Salvage,
)
from .attempt_state import AttemptState
from .views import SandboxView, wait_healthy
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


def find_acting_failure(
    failure: AttemptFailure | None, session: SessionStatus | None
) -> AttemptFailure | None:
    """Return why the agent ended. An agent that did not repeat the forked attempt is never a zero."""
    failure = prefer_model_failure(failure, session)
    scored = failure is None or RULES[failure.where].scored in (ScoreRule.YES, ScoreRule.PASS_OR_SPENT)
    unrepeated = session.unrepeated if session is not None and scored else ""
    return make_drift_failure(unrepeated) if unrepeated else failure


def choose_seed(attempt: Attempt, fork: ForkOrigin | None) -> int:
    """Return the seed that an agent sees; in a fork that of its origin, since it has to do the same again.

    `conversation/forked_replies.py` changes the seeds of the calls after that.
    """
    return attempt.sample * SEED_STRIDE + attempt.round if fork is None else fork.seed


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


async def next_step(step: Callable[..., Awaitable[Any]], *arguments: Any) -> Instance | None:
    """Return the instance of the next step. An error in the suite's code is never the agent's failure."""
    try:
        following = await step(*arguments)
    except (AttemptError, MemoryError):
        raise
    except Exception as error:  # boundary: the suite's code
        message = as_failure(error, GradeFailed, AttemptPhase.ACTING).message
        raise GradeFailed(message, kind="exception") from error
    if following is not None and not isinstance(following, Instance):
        raise GradeFailed(
            f"the step function returned {type(following).__name__}: expected `Instance` or None", kind="type"
        )
    return following


def step_failure(error: Exception, session: SessionStatus | None) -> AttemptFailure | None:
    """Return the agent's failure in a step that is graded all the same; None: the error ends the attempt."""
    failure = prefer_model_failure(as_failure(error, AgentFailed, AttemptPhase.ACTING), session)
    if failure is None or RULES[failure.where].scored is not ScoreRule.YES:
        return None
    drop_tracebacks(error)
    return failure


async def prepare_sandbox(instance: Instance, sandbox: ManagedSandbox, view: SandboxView) -> None:
    """Apply the step's network and wait for its health check."""
    if instance.start.network is not None:
        await sandbox.set_network(instance.start.network)
    if instance.start.health is not None:
        await wait_healthy(view, instance.start.health)


def limit_step(instance: Instance, state: AttemptState) -> AbstractAsyncContextManager[None]:
    """Return the time limit of this step alone, beside the limit for all steps."""
    seconds = instance.limits.acting
    return nullcontext() if seconds is None else state.limit(lambda: seconds, AttemptPhase.ACTING)
