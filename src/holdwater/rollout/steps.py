"""Helpers for an agent that acts in several steps in one sandbox: calls a suite's `step`, prepares each step.

`attempt_phases.py` has the loop over the steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from ..core.authoring import ManagedSandbox, SessionStatus
from ..core.errors import AgentFailed, AttemptError, GradeFailed, as_failure, drop_tracebacks
from ..core.failures import RULES, ScoreRule
from ..core.records import AttemptFailure, AttemptPhase, Instance
from .attempt_rules import prefer_model_failure
from .health import wait_healthy
from .limit import PhaseLimit
from .views import SandboxView


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


def limit_step(instance: Instance) -> AbstractAsyncContextManager[None]:
    """Return the time limit of this step alone, beside the limit for all steps."""
    seconds = instance.limits.acting
    return nullcontext() if seconds is None else PhaseLimit(lambda: seconds, AttemptPhase.ACTING)
