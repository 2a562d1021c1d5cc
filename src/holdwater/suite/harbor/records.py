"""`task.toml` as typed records, schema 1.4. What it means is in `stages.py`; `reading.py` reads it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SCHEMA = "1.4"  # the newest version that is known

Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]
Variables = dict[str, str]  # values may be `${NAME}` and `${NAME:-default}`


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the file. Unknown keys are passed over here: `reading.py` names them."""


class NetworkMode(StrEnum):
    PUBLIC = "public"
    NO_NETWORK = "no-network"
    ALLOWLIST = "allowlist"


class Mode(StrEnum):
    """Where the verifier runs."""

    SHARED = "shared"
    SEPARATE = "separate"


class Strategy(StrEnum):
    """How the rewards of steps become one."""

    MEAN = "mean"
    FINAL = "final"


class System(StrEnum):
    LINUX = "linux"
    WINDOWS = "windows"


class Author(Section, frozen=True):
    name: str
    email: str | None = None


class Package(Section, frozen=True):
    """`[task]`"""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    version: Text | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class Healthcheck(Section, frozen=True):
    command: Text
    interval_sec: Pause = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Pause = 0.0
    start_interval_sec: Pause = 5.0
    retries: Count = 3


class Tpu(Section, frozen=True):
    type: Text
    topology: Text


class Server(Section, frozen=True):
    """`[[environment.mcp_servers]]`"""

    name: str
    transport: str = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = {}


class Environment(Section, frozen=True):
    build_timeout_sec: Seconds = 600.0
    docker_image: Text | None = None
    os: System = System.LINUX
    cpus: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Count | None = None
    storage_mb: Count | None = None
    gpus: Annotated[int, Meta(ge=0)] | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: Tpu | None = None
    mcp_servers: tuple[Server, ...] = ()
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: Annotated[str, Meta(pattern="^/")] | None = None
    network_mode: NetworkMode | None = None  # None: what the run says
    allowed_hosts: tuple[str, ...] | None = None
    allow_internet: bool | None = None  # deprecated: `network_mode`


class Collect(Section, frozen=True):
    """`[[verifier.collect]]`: a command between the agent and the verifier."""

    command: Text
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class Agent(Section, frozen=True):
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None


class Verifier(Section, frozen=True):
    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None
    environment_mode: Mode | None = None
    environment: Environment | None = None
    collect: tuple[Collect, ...] = ()


class Artifact(Section, frozen=True):
    source: Text
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None


class Solution(Section, frozen=True):
    env: Variables = {}


class Step(Section, frozen=True):
    """`[[steps]]`"""

    name: Text
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[str | Artifact, ...] = ()


class Toml(Section, frozen=True):
    """The whole file."""

    schema_version: str = SCHEMA
    source: str | None = None
    multi_step_reward_strategy: Strategy | None = None
    artifacts: tuple[str | Artifact, ...] = ()
    task: Package | None = None
    metadata: dict[str, Any] = {}
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()
    steps: tuple[Step, ...] = ()
