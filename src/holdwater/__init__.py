"""holdwater: agent evaluations and RL rollouts inside a fixed memory and disk budget, with nothing lost."""

from __future__ import annotations

from .api import (
    Options,
    aregrade,
    aresume,
    arun,
    audit,
    export,
    regrade,
    resume,
    run,
    show,
)
from .core.authoring import Agent, Defaults, Model, Sandbox, Suite
from .core.errors import (
    AgentFailed,
    BadInput,
    GradeFailed,
    HoldwaterError,
    LimitReached,
    ModelFailed,
    ResourceExhausted,
    RunFailed,
    SandboxFailed,
)
from .core.records import Ask, CommandResult, Grade, Instance, Limits, Summary, Verdict
from .version import __version__

__all__ = [
    "Agent",
    "AgentFailed",
    "Ask",
    "BadInput",
    "CommandResult",
    "Defaults",
    "Grade",
    "GradeFailed",
    "HoldwaterError",
    "Instance",
    "LimitReached",
    "Limits",
    "Model",
    "ModelFailed",
    "Options",
    "ResourceExhausted",
    "RunFailed",
    "Sandbox",
    "SandboxFailed",
    "Suite",
    "Summary",
    "Verdict",
    "__version__",
    "aregrade",
    "aresume",
    "arun",
    "audit",
    "export",
    "regrade",
    "resume",
    "run",
    "show",
]
