"""Agents written as a function: `solve(instance, sandbox, model)`, plain or async.

`act` stays the author's own function: how it is run (on the loop, or in a thread) is decided in `rollout/`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from ..core.authoring import Act, Agent
from ..core.errors import BadInput

# A run without a model has none of these.
OF_A_MODEL = frozenset(("name", "url", "sandbox_url", "key", "chat"))


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
    return Agent(name=name, act=function, needs_model=calls_model(function), description=described)


def takes_attempt(function: Act) -> bool:
    """Whether it has a parameter `attempt`, and so is given a `Parent`."""
    try:
        return "attempt" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def calls_model(function: Act) -> bool:
    """Whether the function itself uses its third argument; one that hands it on may do without a model."""
    body: Callable[..., Any] = function if inspect.isroutine(function) else type(function).__call__
    try:
        model = list(inspect.signature(function).parameters)[2]
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(body))))
    except (IndexError, OSError, SyntaxError, TypeError, ValueError):
        return False  # written where its source cannot be found
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == model
        and node.attr in OF_A_MODEL
        for node in ast.walk(tree)
    )
