"""What an attempt begins with and how its end is read: decisions of `attempt.py` that wait for nothing."""

from __future__ import annotations

import msgspec

from ..core.authoring import Session
from ..core.errors import GradeFailed, RunFailed
from ..core.failures import RULES, Scored
from ..core.policy import verdict_kind
from ..core.records import Failure, Grade, Limits, Salvage, Where
from .wire import Job


def leased(limits: Limits, job: Job) -> Limits:
    """The limits with the leased memory, and the whole budget of disk where they say nothing of it."""
    if job.lease:
        limits = msgspec.structs.replace(limits, **{"memory" if limits.memory else "lease": job.lease})
    return limits if limits.disk or not job.quota else msgspec.structs.replace(limits, disk=job.quota)


def model_first(failure: Failure | None, session: Session | None) -> Failure | None:
    """A failed call of the conversation's main thread is why the agent ended: never a zero for the agent.

    An agent that failed itself may have failed of any call that nothing later made good.
    """
    cause = session.failure if session else None
    if cause is None and session and failure and failure.where in (Where.AGENT, Where.MODEL):
        cause = session.unanswered
    blames_agent = failure is None or failure.where in (Where.AGENT, Where.LIMIT, Where.MODEL)
    return cause if cause is not None and blames_agent else failure


def in_doubt(failure: Failure | None, grade: Grade | None) -> bool:
    """Whether a full disk, or a daemon that died, may be why it ended badly; a pass is a pass."""
    if failure is not None and failure.where in (Where.RUN, Where.INTERRUPTED):
        return False
    return verdict_kind(failure, grade.passed if grade else None) != "passed"


def unwritable(error: OSError) -> RunFailed:
    """A failed write is the run's failure, never an agent's."""
    return RunFailed(f"the run directory cannot be written: {error.strerror}", kind="record")


def left_out(salvage: Salvage | None) -> str:
    """Why a salvage is not all of the work; empty: it is."""
    count = salvage.left_out if salvage is not None else 0
    return f"{count} changed files are too large to be kept, or not readable" if count else ""


def unfresh(lost: str) -> GradeFailed:
    """Work that cannot be brought into a fresh sandbox is not graded beside what else the agent left."""
    return GradeFailed(
        f"the work cannot be moved to a fresh sandbox: {lost}",
        "a suite with `fresh=False` grades in the agent's own",
        kind="unfresh",
        again=False,
    )


def worth_grading(failure: Failure | None) -> bool:
    """Whether a grade could count after this failure."""
    return failure is None or RULES[failure.where].scored is not Scored.NO
