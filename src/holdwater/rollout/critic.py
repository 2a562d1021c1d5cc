"""Critics of the user's own: a command in the sandbox, or a function. What they say goes into the verdict.

A worker loads the same spec again, so a spec is all that crosses a process boundary. Critics that look at the
verdict alone, and what follows from what any of them says, are in `core/policy.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from .. import plugin
from ..core.authoring import Critique, Sandbox, Tried
from ..core.config import Critic
from ..core.errors import BadInput
from ..core.records import Instance
from ..plugin import Known

COMMAND = "command:"
OTHERS = "`command:LINE`, `path.py:name` or `module:name`"


class OwnCritic(msgspec.Struct, frozen=True):
    """Says whether an attempt is good enough: a command before it is graded, or a function after it."""

    command: str = ""
    function: Critique | None = None

    @property
    def before(self) -> bool:
        return self.function is None

    async def satisfied(
        self, call: Callable[..., Awaitable[Any]], instance: Instance, sandbox: Any, tried: Tried
    ) -> bool:
        """What it says; `call` is how foreign code is called."""
        if self.function is None:
            return await _ends_well(sandbox, self.command)
        said = await call(self.function, instance, tried)
        if not isinstance(said, bool):
            raise TypeError(f"the critic returned {type(said).__name__}: expected bool")
        return said


def own_critic(critic: Critique | str) -> OwnCritic | None:
    """The critic that a function or a spec stands for; None: one that decides by the verdict alone."""
    if not isinstance(critic, str):
        return OwnCritic(function=_checked(critic, spec_of(critic)))
    if critic in tuple(Critic):
        return None
    if critic.startswith(COMMAND):
        if not critic.removeprefix(COMMAND).strip():
            raise BadInput("the critic's command is empty", "for example `--critic 'command:make test'`")
        return OwnCritic(command=critic.removeprefix(COMMAND))
    if ":" not in critic:
        raise plugin.unknown("critic", critic, [Known(name=name) for name in Critic], OTHERS)
    return OwnCritic(function=_checked(plugin.find(critic), critic))


def spec_of(critic: Critique | str) -> str:
    """What its run knows it by, from any directory: a function by where it was defined."""
    if isinstance(critic, str):
        return critic if critic.startswith(COMMAND) else plugin.absolute(critic)
    return f"{critic.__module__}:{getattr(critic, '__qualname__', type(critic).__name__)}"


async def _ends_well(sandbox: Sandbox, command: str) -> bool:
    return (await sandbox.run(command)).ok


def _checked(found: object, name: str) -> Critique:
    if not callable(found):
        hint = "it must be a function `(instance, tried)` that says whether an attempt is good enough"
        raise BadInput(f"not a critic: `{name}` is of type `{type(found).__name__}`", hint)
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError):
        raise BadInput(f"`{name}` must take two arguments: `(instance, tried)`") from None
    return found
