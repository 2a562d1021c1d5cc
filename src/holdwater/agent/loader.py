"""Finds an agent by the spec that the user typed: a name, `command:PROGRAM ...`, `path.py:name` and others.

A preset's name may be followed by arguments for its program. A worker loads the same spec again, so only the
spec crosses a process boundary. The `act` of an agent in Python stays the author's own function; `rollout/`
decides whether it runs on the event loop or in a thread.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import evaluation, plugin
from ..core.authoring import Agent, AgentFunction
from ..core.errors import BadInput
from ..plugin import PluginEntry
from .attack import attack
from .baselines import empty, gold, nop, oracle, predictions
from .bash import bash
from .command import command
from .openhands import openhands_evaluation, openhands_sdk
from .presets import PRESETS, preset

__all__ = ["PluginEntry", "find_agent", "list_agents", "load", "make_absolute"]

ENTRY_POINT_GROUP = "holdwater.agents"
COMMAND = "command"
PREDICTIONS = "predictions"
ATTACK = "attack"  # for `holdwater check --attack`; not listed, because it does no work
OTHER_AGENTS = "`command:PROGRAM ...`, `predictions:FILE`, `path.py:name` or `module:name`"
OBJECT_HINT = "it must be a function `(instance, sandbox, model)` or a `holdwater.Agent`"
# Attributes of a model; a run without a model has none of them.
MODEL_ATTRIBUTES = frozenset(("name", "side_name", "url", "sandbox_url", "key", "chat"))


class PresetEntry(PluginEntry, frozen=True):
    """A preset: a well-known program, its tested versions and its install command."""

    tested: str = ""
    install: str = ""


BUILT_IN: dict[str, Callable[[], Agent]] = {
    "bash": bash,
    "oracle": oracle,
    "nop": nop,
    "gold": gold,
    "empty": empty,
    "openhands-sdk": openhands_sdk,
}


def load(spec: str) -> Agent:
    """Return the agent that `spec` names; raise BadInput if there is none or it is invalid."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    name, _, extra = spec.partition(" ")
    if name in PRESETS:
        return preset(name, extra)
    if spec.startswith(evaluation.PREFIX):
        return openhands_evaluation(spec)
    head, colon, template = spec.partition(":")
    if head == COMMAND:
        return command(template)
    if head == PREDICTIONS:
        return predictions(Path(template))
    if head == ATTACK:
        return attack(template)
    if colon:
        return _as_agent(plugin.find_object(spec), spec)
    if spec.endswith(".py"):
        raise BadInput(f"missing agent name: `{spec}`", hint=f"name it: `{spec}:solve`")
    found = plugin.load_entry(ENTRY_POINT_GROUP, spec)
    if found is None:
        raise plugin.make_unknown_error("agent", spec, list_agents(), OTHER_AGENTS)
    return _as_agent(found, spec)


def find_agent(agent: Agent | AgentFunction | str, options: Mapping[str, Any]) -> Agent:
    """Return the agent with the options of a run; raise BadInput if one is invalid or it takes none."""
    named = load(agent) if isinstance(agent, str) else agent
    found = named if isinstance(named, Agent) else python(named)
    if not options:
        return found
    if found.configure is None:
        raise BadInput(f"agent `{found.name}` has no options: `--agent-option {next(iter(options))}`")
    return found.configure(options)


def list_agents() -> list[PluginEntry]:
    """List the agents that `load` finds by name: built-in agents first, then installed plugins."""
    ours = [PluginEntry(name=name, description=make().description) for name, make in BUILT_IN.items()]
    ours.append(
        PluginEntry(
            name=COMMAND, description="any program: `--agent command --command 'PROGRAM {instruction}'`"
        )
    )
    ours += [
        PresetEntry(name=name, description=made.description, tested=made.versions, install=made.install)
        for name, made in PRESETS.items()
    ]
    return ours + [
        brought
        for brought in plugin.list_entries(ENTRY_POINT_GROUP)
        if brought.name not in {*BUILT_IN, *PRESETS}
    ]


def make_absolute(spec: str) -> str:
    """Return the spec with absolute paths, so that it is valid from any directory."""
    if spec.startswith(evaluation.PREFIX):
        return evaluation.make_absolute(spec)
    if spec.startswith(f"{PREDICTIONS}:"):
        return f"{PREDICTIONS}:{Path(spec.partition(':')[2]).absolute()}"
    foreign = spec.startswith(f"{COMMAND}:") or spec.partition(" ")[0] in PRESETS
    return spec if foreign else plugin.make_absolute(spec)


def _as_agent(found: object, spec: str) -> Agent:
    if isinstance(found, Agent):
        return found
    if not callable(found):
        raise BadInput(f"not an agent: `{spec}` is of type `{type(found).__name__}`", hint=OBJECT_HINT)
    left, _, name = spec.rpartition(":")
    return python(found, f"{Path(left).name}:{name}" if left else spec)


def python(function: AgentFunction, name: str = "") -> Agent:
    """Return an agent that runs `function`; by default its name is the function's qualified name."""
    if not callable(function):
        raise BadInput(f"not an agent: an object of type `{type(function).__name__}`", hint=OBJECT_HINT)
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
