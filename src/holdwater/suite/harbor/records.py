"""`task.toml` as typed records, schema 1.4. `task_file.py` reads the file; `stages.py` interprets it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SCHEMA = "1.4"  # the newest supported version

Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]
Variables = dict[str, str]  # values may be `${NAME}` and `${NAME:-default}`


class TomlSection(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the file. Unknown keys are ignored here; `task_file.py` reports them."""


class NetworkMode(StrEnum):
    PUBLIC = "public"
    NO_NETWORK = "no-network"
    ALLOWLIST = "allowlist"


class VerifierMode(StrEnum):
    """Where the verifier runs."""

    SHARED = "shared"
    SEPARATE = "separate"


class RewardStrategy(StrEnum):
    """How the rewards of steps are combined."""

    MEAN = "mean"
    FINAL = "final"


class OperatingSystem(StrEnum):
    LINUX = "linux"
    WINDOWS = "windows"


class TaskAuthor(TomlSection, frozen=True):
    name: str
    email: str | None = None


class PackageSection(TomlSection, frozen=True):
    """`[task]`"""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    version: Text | None = None
    description: str = ""
    authors: tuple[TaskAuthor, ...] = ()
    keywords: tuple[str, ...] = ()


class HealthcheckSection(TomlSection, frozen=True):
    command: Text
    interval_sec: Pause = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Pause = 0.0
    start_interval_sec: Pause = 5.0
    retries: Count = 3


class TpuSection(TomlSection, frozen=True):
    type: Text
    topology: Text


class McpServer(TomlSection, frozen=True):
    """`[[environment.mcp_servers]]`"""

    name: str
    transport: str = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = {}


class EnvironmentSection(TomlSection, frozen=True):
    build_timeout_sec: Seconds = 600.0
    docker_image: Text | None = None
    os: OperatingSystem = OperatingSystem.LINUX
    cpus: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Count | None = None
    storage_mb: Count | None = None
    gpus: Annotated[int, Meta(ge=0)] | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: TpuSection | None = None
    mcp_servers: tuple[McpServer, ...] = ()
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckSection | None = None
    workdir: Annotated[str, Meta(pattern="^/")] | None = None
    network_mode: NetworkMode | None = None  # None: the run's setting applies
    allowed_hosts: tuple[str, ...] | None = None
    allow_internet: bool | None = None  # deprecated, replaced by `network_mode`


class CollectHook(TomlSection, frozen=True):
    """`[[verifier.collect]]`: a command that runs after the agent and before the verifier."""

    command: Text
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class AgentSection(TomlSection, frozen=True):
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None


class VerifierSection(TomlSection, frozen=True):
    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None
    environment_mode: VerifierMode | None = None
    environment: EnvironmentSection | None = None
    collect: tuple[CollectHook, ...] = ()


class ArtifactSection(TomlSection, frozen=True):
    source: Text
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None


class SolutionSection(TomlSection, frozen=True):
    env: Variables = {}


class StepSection(TomlSection, frozen=True):
    """`[[steps]]`"""

    name: Text
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckSection | None = None
    artifacts: tuple[str | ArtifactSection, ...] = ()


class TaskToml(TomlSection, frozen=True):
    """The whole file."""

    schema_version: str = SCHEMA
    source: str | None = None
    multi_step_reward_strategy: RewardStrategy | None = None
    artifacts: tuple[str | ArtifactSection, ...] = ()
    task: PackageSection | None = None
    metadata: dict[str, Any] = {}
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    steps: tuple[StepSection, ...] = ()
