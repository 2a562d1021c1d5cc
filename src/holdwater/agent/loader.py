"""Finds an agent by the spec that the user typed: a name, `command:PROGRAM ...`, `path.py:name` and others.

A preset's name may be followed by arguments for its program. A worker loads the same spec again, so only the
spec crosses a process boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import plugin
from ..core.authoring import Agent
from ..core.errors import BadInput
from ..plugin import PluginEntry
from .attack import attack
from .bash import bash
from .command import command
from .nop import nop
from .oracle import oracle
from .predictions import empty, gold, predictions
from .presets import PRESETS, preset
from .python import python

__all__ = ["PluginEntry", "list_agents", "load", "make_absolute"]

ENTRY_POINT_GROUP = "holdwater.agents"
COMMAND = "command"
PREDICTIONS = "predictions"
ATTACK = "attack"  # for `holdwater check --attack`; not listed, because it does no work
OTHER_SPECS = "`command:PROGRAM ...`, `predictions:FILE`, `path.py:name` or `module:name`"


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
}


def load(spec: str) -> Agent:
    """Return the agent that `spec` names; raise BadInput if there is none or it is invalid."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    name, _, extra = spec.partition(" ")
    if name in PRESETS:
        return preset(name, extra)
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
        raise plugin.make_unknown_error("agent", spec, list_agents(), OTHER_SPECS)
    return _as_agent(found, spec)


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
    if spec.startswith(f"{PREDICTIONS}:"):
        return f"{PREDICTIONS}:{Path(spec.partition(':')[2]).absolute()}"
    foreign = spec.startswith(f"{COMMAND}:") or spec.partition(" ")[0] in PRESETS
    return spec if foreign else plugin.make_absolute(spec)


def _as_agent(found: object, spec: str) -> Agent:
    if isinstance(found, Agent):
        return found
    if not callable(found):
        hint = "it must be a function `(instance, sandbox, model)` or a `holdwater.Agent`"
        raise BadInput(f"not an agent: `{spec}` is of type `{type(found).__name__}`", hint=hint)
    left, _, name = spec.rpartition(":")
    return python(found, f"{Path(left).name}:{name}" if left else spec)
