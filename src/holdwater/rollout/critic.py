"""Critics of the user's own: a command in the sandbox, or a function. The result goes into the verdict.

A worker loads the critic from its spec, so only the spec crosses the process boundary. `core/policy.py` has
the critics that use the verdict alone, and decides what follows from a critic's result.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from .. import plugin
from ..core.authoring import CriticFunction, CriticInput, Sandbox
from ..core.config import CriticKind
from ..core.errors import BadInput
from ..core.records import Instance
from ..plugin import PluginEntry

COMMAND = "command:"
OTHERS = "`command:LINE`, `path.py:name` or `module:name`"


class UserCritic(msgspec.Struct, frozen=True):
    """Decides whether an attempt is good enough: a command before grading, or a function after it."""

    command: str = ""
    function: CriticFunction | None = None

    @property
    def before(self) -> bool:
        return self.function is None

    async def satisfied(
        self, call: Callable[..., Awaitable[Any]], instance: Instance, sandbox: Any, tried: CriticInput
    ) -> bool:
        """Run the critic and return its result; `call` calls foreign code."""
        if self.function is None:
            return await _ends_well(sandbox, self.command)
        answer = await call(self.function, instance, tried)
        if not isinstance(answer, bool):
            raise TypeError(f"the critic returned {type(answer).__name__}: expected bool")
        return answer


def load_critic(critic: CriticFunction | str) -> UserCritic | None:
    """Load the critic of a function or a spec; None for a built-in critic, which uses the verdict alone."""
    if not isinstance(critic, str):
        return UserCritic(function=_check_critic(critic, spec_of(critic)))
    if critic in tuple(CriticKind):
        return None
    if critic.startswith(COMMAND):
        if not critic.removeprefix(COMMAND).strip():
            raise BadInput("the critic's command is empty", "for example `--critic 'command:make test'`")
        return UserCritic(command=critic.removeprefix(COMMAND))
    if ":" not in critic:
        raise plugin.make_unknown_error(
            "critic", critic, [PluginEntry(name=name) for name in CriticKind], OTHERS
        )
    return UserCritic(function=_check_critic(plugin.find_object(critic), critic))


def spec_of(critic: CriticFunction | str) -> str:
    """Return the spec under which a run stores the critic; it is valid from any directory.

    The spec of a function is the place of its definition.
    """
    if isinstance(critic, str):
        return critic if critic.startswith(COMMAND) else plugin.make_absolute(critic)
    return f"{critic.__module__}:{getattr(critic, '__qualname__', type(critic).__name__)}"


async def _ends_well(sandbox: Sandbox, command: str) -> bool:
    return (await sandbox.run(command)).ok


def _check_critic(found: object, name: str) -> CriticFunction:
    if not callable(found):
        hint = "a critic is a function `(instance, tried)` that returns whether an attempt is good enough"
        raise BadInput(f"not a critic: `{name}` is of type `{type(found).__name__}`", hint)
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError):
        raise BadInput(f"`{name}` must take two arguments: `(instance, tried)`") from None
    return found
