"""Finds an agent by what the user typed: a name, `command:PROGRAM ...`, `predictions:FILE`, `path.py:name`...

The name of a preset may be followed by arguments for its program. A worker loads the same spec again, so a
spec is all that crosses a process boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import plugin
from ..core.authoring import Agent
from ..core.errors import BadInput
from ..plugin import Known
from .attack import attack
from .bash import bash
from .command import command
from .nop import nop
from .oracle import oracle
from .predictions import empty, gold, predictions
from .presets import PRESETS, preset
from .python import python

__all__ = ["Known", "absolute", "known", "load"]

GROUP = "holdwater.agents"
COMMAND = "command"
PREDICTIONS = "predictions"
ATTACK = "attack"  # of `holdwater check --attack`: it is no agent that does work, so it is in no list
OTHERS = "`command:PROGRAM ...`, `predictions:FILE`, `path.py:name` or `module:name`"


class KnownPreset(Known, frozen=True):
    """A well-known program: the versions that it was tested with, and how it is installed."""

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
    """The agent that `spec` stands for; BadInput says what is wrong with it."""
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
        return _made(plugin.find(spec), spec)
    if spec.endswith(".py"):
        raise BadInput(f"which agent in `{spec}`?", hint=f"name it: `{spec}:solve`")
    found = plugin.entry(GROUP, spec)
    if found is None:
        raise plugin.unknown("agent", spec, known(), OTHERS)
    return _made(found, spec)


def known() -> list[Known]:
    """What `load` knows by name: ours, then what installed distributions bring."""
    ours = [Known(name=name, description=make().description) for name, make in BUILT_IN.items()]
    ours.append(
        Known(name=COMMAND, description="any program: `--agent command --command 'PROGRAM {instruction}'`")
    )
    ours += [
        KnownPreset(name=name, description=made.description, tested=made.versions, install=made.install)
        for name, made in PRESETS.items()
    ]
    return ours + [brought for brought in plugin.entries(GROUP) if brought.name not in {*BUILT_IN, *PRESETS}]


def absolute(spec: str) -> str:
    """The same spec, meaning the same from any directory."""
    if spec.startswith(f"{PREDICTIONS}:"):
        return f"{PREDICTIONS}:{Path(spec.partition(':')[2]).absolute()}"
    foreign = spec.startswith(f"{COMMAND}:") or spec.partition(" ")[0] in PRESETS
    return spec if foreign else plugin.absolute(spec)


def _made(found: object, spec: str) -> Agent:
    if isinstance(found, Agent):
        return found
    if not callable(found):
        hint = "it must be a function `(instance, sandbox, model)` or a `holdwater.Agent`"
        raise BadInput(f"not an agent: `{spec}` is of type `{type(found).__name__}`", hint=hint)
    left, _, name = spec.rpartition(":")
    return python(found, f"{Path(left).name}:{name}" if left else spec)
