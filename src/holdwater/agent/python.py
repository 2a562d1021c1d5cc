"""Agents written as a function `solve(instance, sandbox, model)`, plain or async.

`act` stays the author's own function; `rollout/` decides whether it runs on the event loop or in a thread.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from ..core.authoring import Agent, AgentFunction
from ..core.errors import BadInput

# Attributes of a model; a run without a model has none of them.
MODEL_ATTRIBUTES = frozenset(("name", "url", "sandbox_url", "key", "chat"))


def python(function: AgentFunction, name: str = "") -> Agent:
    """Return an agent that runs `function`; by default its name is the function's qualified name."""
    name = name or f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    own = {"attempt": None} if takes_attempt(function) else {}
    try:
        inspect.signature(function).bind(None, None, None, **own)
    except (TypeError, ValueError):
        raise BadInput(
            f"`{name}` must take three arguments: `(instance, sandbox, model)`",
            "a fourth argument named `attempt` receives the attempt, which can have children",
        ) from None
    described = (inspect.getdoc(function) or "").partition("\n")[0]
    return Agent(name=name, act=function, needs_model=calls_model(function), description=described)


def takes_attempt(function: AgentFunction) -> bool:
    """Return whether the function has a parameter `attempt`, which receives an `AttemptHandle`."""
    try:
        return "attempt" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def calls_model(function: AgentFunction) -> bool:
    """Return whether the function itself uses its third argument; if it only passes it on, return False."""
    body: Callable[..., Any] = function if inspect.isroutine(function) else type(function).__call__
    try:
        model = list(inspect.signature(function).parameters)[2]
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(body))))
    except (IndexError, OSError, SyntaxError, TypeError, ValueError):
        return False  # its source is not available
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == model
        and node.attr in MODEL_ATTRIBUTES
        for node in ast.walk(tree)
    )
