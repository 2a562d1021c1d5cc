"""holdwater: agent evaluations and RL rollouts inside a fixed memory and disk budget, with nothing lost.

A name is loaded on first use, so that `holdwater --help` and workers load only the modules that they need.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api.bisection import abisect, bisect
    from .api.checking import Attacked, Checked, aattack, acheck, attack, check
    from .api.comparison import compare
    from .api.control import cancel, change, note, pause, retry, stop, unpause
    from .api.forking import ForkOptions, afork, fork
    from .api.grading import grade
    from .api.images import audit_images, build_images, plan_images
    from .api.reading import (
        TokenSequence,
        Trajectory,
        TrajectoryReader,
        audit,
        export,
        read,
        show,
        transcript,
    )
    from .api.runs import RunOptions, aregrade, areplay, aresume, arun, regrade, replay, resume, run
    from .core.authoring import (
        Agent,
        AttemptHandle,
        ChildResult,
        CriticInput,
        GradingSandbox,
        GroupMember,
        Model,
        Sandbox,
        Suite,
        SuiteDefaults,
    )
    from .core.comparison import ComparisonReport, RunComparison
    from .core.environment import AgentSandbox
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
    from .core.records import (
        CommandResult,
        Grade,
        Health,
        Instance,
        LimitOverrides,
        Limits,
        Network,
        SandboxSpec,
        Verdict,
    )
    from .core.sandbox_kind import OpenedSandboxes, SandboxKind, SandboxSite
    from .core.summary import RunSummary

__all__ = [
    "Agent",
    "AgentFailed",
    "AgentSandbox",
    "Attacked",
    "AttemptHandle",
    "BadInput",
    "Checked",
    "ChildResult",
    "CommandResult",
    "ComparisonReport",
    "CriticInput",
    "ForkOptions",
    "Grade",
    "GradeFailed",
    "GradingSandbox",
    "GroupMember",
    "Health",
    "HoldwaterError",
    "ImageFailed",
    "Instance",
    "LimitOverrides",
    "LimitReached",
    "Limits",
    "Model",
    "ModelFailed",
    "Network",
    "OpenedSandboxes",
    "ResourceExhausted",
    "RunComparison",
    "RunFailed",
    "RunOptions",
    "RunSummary",
    "Sandbox",
    "SandboxFailed",
    "SandboxKind",
    "SandboxSite",
    "SandboxSpec",
    "Suite",
    "SuiteDefaults",
    "TokenSequence",
    "Trajectory",
    "TrajectoryReader",
    "Verdict",
    "__version__",
    "aattack",
    "abisect",
    "acheck",
    "afork",
    "aregrade",
    "areplay",
    "aresume",
    "arun",
    "attack",
    "audit",
    "audit_images",
    "bisect",
    "build_images",
    "cancel",
    "change",
    "check",
    "compare",
    "export",
    "fork",
    "grade",
    "note",
    "pause",
    "plan_images",
    "read",
    "regrade",
    "replay",
    "resume",
    "retry",
    "run",
    "show",
    "stop",
    "transcript",
    "unpause",
]


# The modules that are searched for a name, in order. A suite that only uses `hw.Instance` does not load the
# conductor.
_HOMES = (
    ".core.records",
    ".core.errors",
    ".core.authoring",
    ".core.sandbox_kind",
    ".core.environment",
    ".api.reading",
    ".api.runs",
    ".api.grading",
    ".api.images",
    ".api.checking",
    ".api.comparison",
    ".api.forking",
    ".api.bisection",
    ".api.control",
    ".core.comparison",
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
    """Keeps `holdwater.run` the function: the package of that name is imported by its path."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
