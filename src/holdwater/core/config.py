"""The configuration of a run as one frozen record, stored as the run's `run.json`.

A field that users set says its flag, help and parser here, and nowhere else (`options.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec

from .endpoints import BaseUrl, ServerEndpoint, parse_endpoints
from .fork_origin import ForkOrigin
from .image import ImageRecipe
from .judge import JudgeModel
from .option_values import parse_agent_options, parse_model_map, parse_sampling, parse_shard, parse_slots
from .options import ConfigOption, OptionGroup
from .prices import ModelPrice, RunBudget
from .records import GiB, Limits, MiB, Network, Record
from .sandbox_protocol import RemoteAddress
from .serving_config import ServingConfig
from .token_sequences import TokenServer

SAME_DIALECT = "same"  # calls go to the server in the dialect of the agent
AUTO_DIALECT = "auto"  # the same, unless the server does not have that dialect
SLOTS_A_WORKER = 32  # the default: more attempts would wait for each other on one core
_, CHOICE, ATTEMPTS, LIMITS, BUDGETS, MACHINE = OptionGroup

__all__ = ["CriticKind", "KeepRule", "Network", "RunConfig", "SandboxRoot", "ServingConfig"]


class SandboxRoot(StrEnum):
    """The part of this machine's file system that a process sandbox shows."""

    SYSTEM = "system"  # its programs, and the requested paths
    HOST = "host"  # every file that this user can read, except some secrets


class CriticKind(StrEnum):
    """The built-in critics: each decides by the verdict alone whether a sample needs another attempt."""

    GRADE = "grade"  # satisfied by a pass
    FINISHED = "finished"  # satisfied by an end without a failure
    FINISHED_WITH_PATCH = "finished-with-patch"  # satisfied by an end without a failure that left work
    PATCH = "patch"  # satisfied by any end that left work


class KeepRule(StrEnum):
    """The closed samples whose files are kept. The ledger's rows of an attempt stay in any case."""

    ALL = "all"
    FAILURES = "failures"  # files of samples that did not pass
    NONE = "none"


class SelectionRecord(Record, frozen=True):
    """A list of instance ids that a run directory has as `select.txt`."""

    file: str  # its source
    ids: int
    digest: str  # blake3 of its content


class RunConfig(Record, frozen=True):
    """A run: a suite, an agent, a model, budgets.

    It holds no secrets: keys come from the environment each time.
    """

    id: str
    suite: str
    agent: str
    created: float
    version: str
    model: Annotated[
        str | None,
        ConfigOption(
            CHOICE, "The model's name; `OPENAI_API_KEY` and `OPENAI_BASE_URL` set its key and server"
        ),
    ] = None
    # Imposed on requests that name one of these patterns, in place of `model`.
    model_map: Annotated[
        dict[str, str],
        ConfigOption(
            CHOICE,
            "The model for a name that agents use for side calls: `small=qwen3-4b`, `*haiku*=qwen3-4b`; "
            "may be repeated",
            accepts=list[str],
            file=list[str] | dict[str, str],
            parse=parse_model_map,
        ),
    ] = msgspec.field(default_factory=dict)
    base_url: Annotated[
        BaseUrl | None,
        ConfigOption(
            CHOICE,
            "The URL of the model's server; may be repeated; overrides `OPENAI_BASE_URL`",
            accepts=list[str],
            file=str | ServerEndpoint | list[str | ServerEndpoint],
            parse=parse_endpoints,
            resume="The URL of the model's server; may be repeated",
            live=False,
        ),
    ] = None
    upstream_dialect: Annotated[
        str,
        ConfigOption(
            CHOICE,
            "The API of the model's server, to which calls are translated; `same`: the agent's; "
            "`auto`: the agent's if the server has it (auto)",
            resume="The API of the model's server",
            live=False,
        ),
    ] = AUTO_DIALECT
    token_ids: Annotated[
        TokenServer,
        ConfigOption(
            CHOICE,
            "Ask the model's server for token ids and log probabilities: `auto`, `vllm`, `sglang` or `nemo`",
            resume="Ask the model's server for token ids: `auto`, `vllm`, `sglang` or `nemo`",
            live=False,
        ),
    ] = TokenServer.NONE
    judge: JudgeModel = JudgeModel()
    # What the agent's `configure` takes.
    agent_options: Annotated[
        dict[str, Any],
        ConfigOption(
            CHOICE,
            "A setting of the agent: `max_iterations=100`; may be repeated",
            name="agent_option",
            accepts=list[str],
            parse=parse_agent_options,
        ),
    ] = msgspec.field(default_factory=dict)
    # Imposed on every request.
    sampling: Annotated[
        dict[str, Any],
        ConfigOption(
            CHOICE,
            "Set in every request: `temperature=0.7`; may be repeated",
            accepts=list[str],
            parse=parse_sampling,
        ),
    ] = msgspec.field(default_factory=dict)
    only: Annotated[
        tuple[str, ...],
        ConfigOption(
            CHOICE, "Only instances whose id matches this pattern; may be repeated", serve=False, fork=False
        ),
    ] = ()
    select: Annotated[
        SelectionRecord | None,
        ConfigOption(
            CHOICE,
            "A file with the ids of the instances, one per line; `-` is standard input",
            accepts=str,
            serve=False,
            fork=False,
        ),
    ] = None
    replays: str | None = None  # directory of the run whose recorded replies are replayed
    fork: ForkOrigin | None = None  # the attempt of another run that each attempt repeats up to a turn
    limit: Annotated[
        int | None, ConfigOption(CHOICE, "Only the first N instances", least=1, serve=False, fork=False)
    ] = None
    # i of n, from 1.
    shard: Annotated[
        tuple[int, int] | None,
        ConfigOption(
            CHOICE, "Only part i of n: `1/4`", accepts=str, parse=parse_shard, serve=False, fork=False
        ),
    ] = None
    retries: Annotated[
        int,
        ConfigOption(
            ATTEMPTS,
            "Retries after an infrastructure failure (2)",
            least=0,
            resume="Retries after an infrastructure failure",
        ),
    ] = 2
    attempts: Annotated[
        int,
        ConfigOption(
            ATTEMPTS,
            "Attempts per instance until the critic accepts one (1)",
            least=1,
            resume="Attempts per instance",
            serve=False,
        ),
    ] = 1
    critic: Annotated[
        str,
        ConfigOption(
            ATTEMPTS,
            "`grade`: it passed (default); `finished`; `finished-with-patch`; `patch`; `command:LINE`; "
            "`path.py:name`",
            serve=False,
        ),
    ] = CriticKind.GRADE
    samples: Annotated[
        int,
        ConfigOption(ATTEMPTS, "Independent samples of each instance, for pass@k (1)", least=1, serve=False),
    ] = 1
    limits: Limits = Limits()
    # The budget for conductor and workers; None: the limit of the container.
    memory: Annotated[
        int | None,
        ConfigOption(
            LIMITS,
            "The run's budget: attempts wait until they fit (default: the container's limit)",
            size=True,
            resume="The memory budget, such as `8GiB`",
        ),
    ] = None
    # The budget for the run directory and scratch together. With containers: for the daemon's disk use beyond
    # its use at the start.
    disk: Annotated[
        int | None,
        ConfigOption(
            LIMITS,
            "The budget for the run directory and scratch (default: the whole disk)",
            size=True,
            positive=True,
            resume="The disk budget, such as `80GiB`",
        ),
    ] = None
    disk_patience: Annotated[
        float, ConfigOption(LIMITS, "Seconds that a run waits for free disk space before it stops (600)")
    ] = 600.0
    worker_memory: Annotated[
        int, ConfigOption(LIMITS, "A worker above this is replaced (1GiB)", size=True)
    ] = 1 * GiB
    budget: RunBudget = RunBudget()
    largest_request: Annotated[
        int,
        ConfigOption(
            BUDGETS, "Uncompressed size of a model request; larger ones are rejected (256MiB)", size=True
        ),
    ] = 256 * MiB
    rpm: Annotated[
        float | None,
        ConfigOption(
            BUDGETS,
            "Model calls per minute, over all workers",
            positive=True,
            resume="Model calls per minute",
        ),
    ] = None
    tpm: Annotated[
        float | None,
        ConfigOption(
            BUDGETS, "Tokens per minute, over all workers", positive=True, resume="Tokens per minute"
        ),
    ] = None
    mapped_prices: dict[str, ModelPrice | None] = msgspec.field(default_factory=dict)  # of `model_map`
    # The price of the model when the run was created; None: unknown.
    price: Annotated[
        ModelPrice | None,
        ConfigOption(
            BUDGETS,
            "A TOML file with prices by model; see `holdwater help models`",
            name="prices",
            accepts=str,
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        ConfigOption(
            MACHINE,
            "Concurrent attempts, or `auto`: as many as the budget and the CPU allow (auto)",
            accepts=int | Literal["auto"],
            parse=parse_slots,
            least=1,
            resume="Concurrent attempts, or `auto`",
        ),
    ] = None
    ungoverned: Annotated[bool, ConfigOption(MACHINE, "Only measure memory; attempts do not wait for it")] = (
        False
    )
    workers: Annotated[
        int,
        ConfigOption(
            MACHINE,
            "Worker processes that host the attempts; 0: only this process (one per core)",
            least=0,
            resume="Worker processes that host the attempts",
            live=False,
        ),
    ] = 2
    sandbox: Annotated[
        str,
        ConfigOption(
            MACHINE, "Where agents act: `process`, `docker`, `remote` (default: the suite's suggestion)"
        ),
    ] = "process"
    remote: RemoteAddress = RemoteAddress()
    image: Annotated[
        str | None,
        ConfigOption(MACHINE, "With `docker`: the image for instances without one, such as `debian:12`"),
    ] = None
    # (here, there): read-only in every sandbox.
    mounts: Annotated[
        tuple[tuple[str, str], ...],
        ConfigOption(
            MACHINE,
            "`tools:/opt/tools`: shown in sandboxes, read-only, its `bin` on PATH; may be repeated",
            name="mount",
        ),
    ] = ()
    sandbox_root: Annotated[
        SandboxRoot,
        ConfigOption(
            MACHINE, "Files that a process sandbox shows: `system` (default) or `host`, all of this machine"
        ),
    ] = SandboxRoot.SYSTEM
    # Containers have a read-only root, except their own directories.
    read_only: Annotated[
        bool,
        ConfigOption(
            MACHINE, "With `docker`: only the working directory is writable", name="sandbox_read_only"
        ),
    ] = False
    network: Annotated[
        Network,
        ConfigOption(MACHINE, "The network of a sandbox: `gateway` (default), `none` or `open`"),
    ] = Network.GATEWAY
    # Names of variables that the agent gets. Their values are in no file.
    env: Annotated[
        tuple[str, ...],
        ConfigOption(
            MACHINE,
            "`NAME` or `NAME=VALUE`: a variable for the agent, whose value is in no file; may be repeated",
            resume="A variable for the agent: `NAME=VALUE`, or `NAME` for its value here; may be repeated",
            live=False,
        ),
    ] = ()
    # Variables of the operator's environment that `${NAME}` may refer to.
    pass_env: Annotated[
        tuple[str, ...],
        ConfigOption(
            MACHINE,
            "A variable that a suite may use as `${NAME}`; may be repeated (none)",
            resume="A variable that a suite may use as `${NAME}`; may be repeated",
            live=False,
        ),
    ] = ()
    # The recipe that provides the instances' images.
    images: Annotated[
        ImageRecipe | None,
        ConfigOption(
            MACHINE, "With containers: an `images.toml` that gives instances their images", accepts=str
        ),
    ] = None
    # The parent of the sandboxes' directories; None: the run directory.
    scratch: Annotated[
        str | None,
        ConfigOption(MACHINE, "Where sandboxes keep their files (default: the run directory)"),
    ] = None
    # Applies to a closed sample's exchanges, logs and salvaged work.
    keep: Annotated[
        KeepRule,
        ConfigOption(
            MACHINE, "Samples whose files stay when they are closed: `all` (default), `failures` or `none`"
        ),
    ] = KeepRule.ALL
    silence: Annotated[
        float,
        ConfigOption(MACHINE, "Seconds without a heartbeat after which a worker counts as hung (20)"),
    ] = 20.0
    recycle_after: Annotated[
        int, ConfigOption(MACHINE, "Attempts after which a worker is replaced (5000)", least=1)
    ] = 5000
    suite_timeout: Annotated[
        float, ConfigOption(MACHINE, "Seconds without an instance after which a suite counts as hung (600)")
    ] = 600.0
    backoff: Annotated[float, ConfigOption(MACHINE, "Seconds before the first retry; doubles (1)")] = 1.0
    grace: Annotated[
        float,
        ConfigOption(MACHINE, "Seconds that running attempts get after the first Ctrl-C (30)", serve=False),
    ] = 30.0
    # Seconds without a byte from the model's server before a call fails.
    stall: Annotated[float, ConfigOption()] = 600.0
    salvaging: Annotated[float, ConfigOption()] = 60.0  # seconds for saving an agent's work
    closing: Annotated[float, ConfigOption()] = 15.0  # seconds for closing each resource of an attempt
    # Seconds beyond all its limits before an attempt counts as hung.
    patience: Annotated[float, ConfigOption()] = 30.0
    recipe: ImageRecipe | None = None  # set if the run is a build of images
    serving: ServingConfig | None = None  # set if the run is a server, whose samples clients order

    @property
    def slots(self) -> int:
        """The upper bound on concurrent attempts, independent of the budget."""
        return self.concurrency or SLOTS_A_WORKER * max(1, self.workers)
