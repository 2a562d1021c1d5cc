"""What the user asked for, as one frozen record: built at the edge, stored as the run's `run.json`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .budget import RunBudget
from .image import Recipe
from .prices import Price
from .records import GiB, Limits, MiB, Network, Record

SLOTS_A_WORKER = 32  # where nothing is said: more would wait for each other on one core


__all__ = ["Critic", "Keep", "Network", "RunConfig", "SandboxKind", "SandboxRoot"]


class SandboxKind(StrEnum):
    """Where agents act."""

    PROCESS = "process"
    DOCKER = "docker"


class SandboxRoot(StrEnum):
    """What of this machine a process sandbox shows."""

    SYSTEM = "system"  # its programs, and what is asked for
    HOST = "host"  # every file that this user can read, but for some secrets


class Critic(StrEnum):
    """Who says, by the verdict alone, that a sample needs no further attempt. Others are the user's own."""

    GRADE = "grade"  # it passed
    FINISHED = "finished"  # it ended without a failure
    FINISHED_WITH_PATCH = "finished-with-patch"  # the same, and left work
    PATCH = "patch"  # it left work, however it ended


class Keep(StrEnum):
    """Whose files stay once a sample is closed. What the ledger has of an attempt stays in any case."""

    ALL = "all"
    FAILURES = "failures"  # of samples that did not pass
    NONE = "none"


class Serving(Record, frozen=True):
    """How clients are served."""

    listen: str = "127.0.0.1:8400"  # HOST:PORT, or unix:PATH
    queue: int = 4096  # rollouts that may be open at once, waiting ones and undelivered ones included
    largest_order: int = 64 * MiB  # bytes of a body
    grace: float = 3.0  # seconds that a client has to come back before its work is cancelled
    return_grace: float = 60.0  # the same after the server itself was gone
    policy: str | None = None  # `path.py:name` or `module:name` of the function that answers model calls
    least_workers: int = 1
    quiet: float = 30.0  # seconds for which a worker must be spare before it goes
    starting: float = 60.0  # seconds that a worker has to become ready


class RunConfig(Record, frozen=True):
    """A run: a suite, an agent, a model, budgets. No secrets: keys come from the environment each time."""

    id: str
    suite: str
    agent: str
    created: float
    version: str
    model: str | None = None
    base_url: str | None = None  # the upstream, where it is not the environment's
    concurrency: int | None = None  # attempts at once; None: as many as the budget allows
    workers: int = 2
    attempts: int = 1
    retries: int = 2
    samples: int = 1
    critic: str = Critic.GRADE  # a `Critic`, `command:LINE`, `path.py:name` or `module:name`
    only: tuple[str, ...] = ()  # glob patterns over ids
    replays: str | None = None  # the directory of the run whose recorded replies are given again
    limit: int | None = None
    shard: tuple[int, int] | None = None  # i of n, from 1
    limits: Limits = Limits()
    budget: RunBudget = RunBudget()
    price: Price | None = None  # the model's, as it was when the run was made; None: unknown
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)  # imposed on every request
    largest_request: int = 256 * MiB  # bytes of a model request, unpacked
    rpm: float | None = None  # requests a minute, over all workers
    tpm: float | None = None  # tokens a minute
    sandbox: SandboxKind = SandboxKind.PROCESS
    image: str | None = None  # of instances that name none
    images: Recipe | None = None  # the plan by which instances get their images
    mounts: tuple[tuple[str, str], ...] = ()  # (here, there): read-only in every sandbox
    sandbox_root: SandboxRoot = SandboxRoot.SYSTEM
    read_only: bool = False  # containers have a root that cannot be written, but for their own directories
    network: Network = Network.GATEWAY
    pass_env: tuple[str, ...] = ()  # variables of the operator's environment that `${NAME}` may ask for
    scratch: str | None = None  # where sandboxes keep their directories; the run directory otherwise
    keep: Keep = Keep.ALL  # of a closed sample's exchanges, logs and salvaged work
    memory: int | None = None  # the budget for conductor and workers; what the container allows otherwise
    # The budget for the run directory and scratch together; with containers, for what the daemon may take
    # beyond what was there.
    disk: int | None = None
    disk_patience: float = 600.0  # seconds without room on the disk before the run stops
    ungoverned: bool = False  # attempts do not wait for their memory
    worker_memory: int = 1 * GiB  # a worker above this is drained and replaced
    recycle_after: int = 5000  # attempts
    silence: float = 20.0  # seconds without a sign of life before a worker counts as hung
    grace: float = 30.0  # seconds that running attempts get after the first signal
    suite_timeout: float = 600.0  # seconds without an instance before a suite counts as hung
    backoff: float = 1.0  # seconds before the first retry; doubles, with jitter
    stall: float = 600.0  # seconds without a byte from the model's server before a call has failed
    salvaging: float = 60.0  # seconds for keeping what an agent left
    closing: float = 15.0  # seconds for each thing that an attempt closes
    patience: float = 30.0  # seconds beyond all its limits before an attempt counts as hung
    recipe: Recipe | None = None  # of a build of images, which is a run too
    serving: Serving | None = None  # of a run whose samples are ordered by clients

    @property
    def slots(self) -> int:
        """The most attempts at once, whatever the budget allows."""
        return self.concurrency or SLOTS_A_WORKER * max(1, self.workers)
