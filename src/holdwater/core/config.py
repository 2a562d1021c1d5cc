"""The configuration of a run as one frozen record.

It is built from the user's input and stored as the run's `run.json`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .image import ImageRecipe
from .prices import ModelPrice, RunBudget
from .records import GiB, Limits, MiB, Network, Record

SLOTS_A_WORKER = 32  # the default: more attempts would wait for each other on one core


__all__ = ["CriticKind", "KeepRule", "Network", "RunConfig", "SandboxKind", "SandboxRoot"]


class SandboxKind(StrEnum):
    """The kinds of sandboxes that agents act in."""

    PROCESS = "process"
    DOCKER = "docker"


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


class ServingConfig(Record, frozen=True):
    """The settings of a server."""

    listen: str = "127.0.0.1:8400"  # HOST:PORT, or unix:PATH
    queue: int = 4096  # open rollouts at once, including waiting and undelivered ones
    largest_order: int = 64 * MiB  # bytes of a request body
    grace: float = 3.0  # seconds in which a client must reconnect before its work is cancelled
    return_grace: float = 60.0  # the same after a restart of the server
    policy: str | None = None  # `path.py:name` or `module:name` of the function that answers model calls
    least_workers: int = 1
    quiet: float = 30.0  # seconds that a worker must be idle before it is removed
    starting: float = 60.0  # seconds in which a worker must become ready


class RunConfig(Record, frozen=True):
    """A run: a suite, an agent, a model, budgets.

    It holds no secrets: keys come from the environment each time.
    """

    id: str
    suite: str
    agent: str
    created: float
    version: str
    model: str | None = None
    base_url: str | None = None  # the upstream; None: from the environment
    concurrency: int | None = None  # attempts at once; None: as many as the budget allows
    workers: int = 2
    attempts: int = 1
    retries: int = 2
    samples: int = 1
    critic: str = CriticKind.GRADE  # a `CriticKind`, `command:LINE`, `path.py:name` or `module:name`
    only: tuple[str, ...] = ()  # glob patterns over ids
    replays: str | None = None  # directory of the run whose recorded replies are replayed
    limit: int | None = None
    shard: tuple[int, int] | None = None  # i of n, from 1
    limits: Limits = Limits()
    budget: RunBudget = RunBudget()
    price: ModelPrice | None = None  # price of the model when the run was created; None: unknown
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)  # imposed on every request
    largest_request: int = 256 * MiB  # bytes of a model request, unpacked
    rpm: float | None = None  # requests a minute, over all workers
    tpm: float | None = None  # tokens a minute
    sandbox: SandboxKind = SandboxKind.PROCESS
    image: str | None = None  # default image for instances that name none
    images: ImageRecipe | None = None  # the recipe that provides the instances' images
    mounts: tuple[tuple[str, str], ...] = ()  # (here, there): read-only in every sandbox
    sandbox_root: SandboxRoot = SandboxRoot.SYSTEM
    read_only: bool = False  # containers have a read-only root, except their own directories
    network: Network = Network.GATEWAY
    pass_env: tuple[str, ...] = ()  # variables of the operator's environment that `${NAME}` may refer to
    scratch: str | None = None  # parent of the sandboxes' directories; None: the run directory
    keep: KeepRule = KeepRule.ALL  # applies to a closed sample's exchanges, logs and salvaged work
    memory: int | None = None  # budget for conductor and workers; None: the limit of the container
    # The budget for the run directory and scratch together. With containers: for the daemon's disk use beyond
    # its use at the start.
    disk: int | None = None
    disk_patience: float = 600.0  # seconds with a full disk before the run stops
    ungoverned: bool = False  # attempts start without waiting for memory
    worker_memory: int = 1 * GiB  # a worker above this is drained and replaced
    recycle_after: int = 5000  # attempts
    silence: float = 20.0  # seconds without a heartbeat or CPU use before a worker counts as hung
    grace: float = 30.0  # seconds that running attempts get after the first signal
    suite_timeout: float = 600.0  # seconds without an instance before a suite counts as hung
    backoff: float = 1.0  # seconds before the first retry; doubles, with jitter
    stall: float = 600.0  # seconds without a byte from the model's server before a call fails
    salvaging: float = 60.0  # seconds for saving an agent's work
    closing: float = 15.0  # seconds for closing each resource of an attempt
    patience: float = 30.0  # seconds beyond all its limits before an attempt counts as hung
    recipe: ImageRecipe | None = None  # set if the run is a build of images
    serving: ServingConfig | None = None  # set if the run is a server, whose samples clients order

    @property
    def slots(self) -> int:
        """The upper bound on concurrent attempts, independent of the budget."""
        return self.concurrency or SLOTS_A_WORKER * max(1, self.workers)
