"""Agents written as a function: `solve(instance, sandbox, model)`, plain or async.

`act` stays the author's own function: how it is run (on the loop, or in a thread) is decided in `rollout/`.
"""

from __future__ import annotations

import inspect

from ..core.authoring import Act, Agent
from ..core.errors import BadInput


def python(function: Act, name: str = "") -> Agent:
    """An agent that is `function`; its name is where the function was defined, unless one is given."""
    name = name or f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    own = {"attempt": None} if takes_attempt(function) else {}
    try:
        inspect.signature(function).bind(None, None, None, **own)
    except (TypeError, ValueError):
        raise BadInput(
            f"`{name}` must take three arguments: `(instance, sandbox, model)`",
            "a fourth that is called `attempt` is given the attempt, which can have children",
        ) from None
    described = (inspect.getdoc(function) or "").partition("\n")[0]
    return Agent(name=name, act=function, description=described)


def takes_attempt(function: Act) -> bool:
    """Whether it has a parameter `attempt`, and so is given a `Parent`."""
    try:
        return "attempt" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
