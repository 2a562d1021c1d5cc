"""An agent that acts in steps in one sandbox: what a suite's `step` says, and each step's own terms.

The loop is `attempt.py`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from ..core.authoring import KeptSandbox
from ..core.errors import AttemptError, GradeFailed, as_failure
from ..core.records import Instance, Phase
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
