"""holdwater: agent evaluations and RL rollouts inside a fixed memory and disk budget, with nothing lost.

A name is loaded when it is first used: `holdwater --help` and workers pay for what they need alone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import (
        Options,
        aregrade,
        areplay,
        aresume,
        arun,
        audit,
        export,
        regrade,
        replay,
        resume,
        run,
        show,
        transcript,
    )
    from .api.attacking import Attacked, aattack, attack
    from .api.checking import Checked, acheck, check
    from .api.grading import grade
    from .api.images import audit_images, build_images, plan_images
    from .api.reading import Tokens, Trajectory, TrajectoryReader, read
    from .core.authoring import (
        Agent,
        Born,
        Defaults,
        GradingSandbox,
        GroupMember,
        Model,
        Parent,
        Sandbox,
        Suite,
        Tried,
    )
    from .core.errors import (
        AgentFailed,
        BadInput,
        GradeFailed,
        HoldwaterError,
        ImageFailed,
        LimitReached,
        ModelFailed,
        ResourceExhausted,
        RunFailed,
        SandboxFailed,
    )
    from .core.records import Ask, CommandResult, Grade, Health, Instance, Limits, Network, Start, Verdict
    from .core.summary import Summary

__all__ = [
    "Agent",
    "AgentFailed",
    "Ask",
    "Attacked",
    "BadInput",
    "Born",
    "Checked",
    "CommandResult",
    "Defaults",
    "Grade",
    "GradeFailed",
    "GradingSandbox",
    "GroupMember",
    "Health",
    "HoldwaterError",
    "ImageFailed",
    "Instance",
    "LimitReached",
    "Limits",
    "Model",
    "ModelFailed",
    "Network",
    "Options",
    "Parent",
    "ResourceExhausted",
    "RunFailed",
    "Sandbox",
    "SandboxFailed",
    "Start",
    "Suite",
    "Summary",
    "Tokens",
    "Trajectory",
    "TrajectoryReader",
    "Tried",
    "Verdict",
    "__version__",
    "aattack",
    "acheck",
    "aregrade",
    "areplay",
    "aresume",
    "arun",
    "attack",
    "audit",
    "audit_images",
    "build_images",
    "check",
    "export",
    "grade",
    "plan_images",
    "read",
    "regrade",
    "replay",
    "resume",
    "run",
    "show",
    "transcript",
]


# Where each name is found. A suite that only wants `hw.Instance` does not load the conductor.
_HOMES = (
    ".core.records",
    ".core.errors",
    ".core.authoring",
    ".api",
    ".api.grading",
    ".api.images",
    ".api.attacking",
    ".api.checking",
    ".api.reading",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            found = vars(import_module(home, __name__)).get(name)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module `holdwater` has no attribute `{name}`")


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """`holdwater.run` is the function; the room of that name is imported by its path."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
