"""An agent that acts in steps in one sandbox: what a suite's `step` says, and each step's own terms.

The loop is `attempt.py`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from ..core.authoring import KeptSandbox, Session
from ..core.errors import AgentFailed, AttemptError, GradeFailed, as_failure, let_go
from ..core.failures import RULES, Scored
from ..core.records import Failure, Instance, Phase
from .ends import model_first
from .health import healthy
from .limit import PhaseLimit
from .views import SandboxView


async def next_step(step: Callable[..., Awaitable[Any]], *arguments: Any) -> Instance | None:
    """What the suite gives the agent next. What its code raises is its own failure, never the agent's."""
    try:
        following = await step(*arguments)
    except (AttemptError, MemoryError):
        raise
    except Exception as error:  # boundary: the suite's code
        message = as_failure(error, GradeFailed, Phase.ACTING).message
        raise GradeFailed(message, kind="exception") from error
    if following is not None and not isinstance(following, Instance):
        raise GradeFailed(
            f"the step function returned {type(following).__name__}: expected `Instance` or None", kind="type"
        )
    return following


def step_failure(error: Exception, session: Session | None) -> Failure | None:
    """How the agent failed in a step that is judged all the same; None: the error ends the attempt."""
    failure = model_first(as_failure(error, AgentFailed, Phase.ACTING), session)
    if failure is None or RULES[failure.where].scored is not Scored.YES:
        return None
    let_go(error)
    return failure


async def make_ready(instance: Instance, sandbox: KeptSandbox, view: SandboxView) -> None:
    """The sandbox as this step wants it."""
    if instance.start.network is not None:
        await sandbox.reach(instance.start.network)
    if instance.start.health is not None:
        await healthy(view, instance.start.health)


def own_limit(instance: Instance) -> AbstractAsyncContextManager[None]:
    """The time that this step may take, beside the limit for them all."""
    seconds = instance.limits.acting
    return nullcontext() if seconds is None else PhaseLimit(lambda: seconds, Phase.ACTING)
