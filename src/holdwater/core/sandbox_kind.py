"""The interface of a kind of sandbox, which `--sandbox NAME` chooses, and the shared names of containers.

A package brings a kind with the entry point group `holdwater.sandboxes`; `rollout/sandbox_kinds.py` finds it.
A conductor and its workers share the names of a run's containers: `sandbox/docker/` makes the containers, the
conductor manages networks, images and orphans in `run/`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .authoring import Agent, SandboxProvider
from .config import RunConfig
from .records import AttemptFailure, Network, Record

RUN_LABEL = "io.holdwater.run"  # the run's id, on every container and network
ATTEMPT_LABEL = "io.holdwater.attempt"
CONTAINER_PORTS = range(41410, 41540)  # gateways listen for containers on these: one port for each worker
HOME_LABEL = "io.holdwater.home"  # identifies the holdwater home: only orphans of the same home are removed


class SandboxSite(NamedTuple):
    """The surroundings in which a worker opens its sandboxes."""

    config: RunConfig
    directory: Path  # of the run; no sandbox may show it
    scratch: Path  # for files of sandboxes; it belongs to this run alone
    path: str  # the operator's PATH
    programs: tuple[str, ...] = ()  # programs of this machine that the agent names
    hidden: tuple[str, ...] = ()  # files of the suite that no sandbox may show
    provided: Any = None  # from the kind's provision in the conductor


ListenerService = Callable[[Any, int], Awaitable[Callable[[], None]]]
"""Serves the gateway to an attempt's commands, on a listening `socket`; returns a function that ends it."""


class OpenedSandboxes(NamedTuple):
    """The sandboxes of a worker."""

    provider: SandboxProvider
    gateway_address: str = ""  # of this machine, if sandboxes reach the gateway on an address of their own
    # Called when an attempt begins; returns a function that returns how its sandbox was lost, if it was.
    watch_loss: Callable[[int], Callable[[], AttemptFailure | None]] | None = None
    # Takes the gateway's service, if commands can have listening sockets in networks of their own.
    use_service: Callable[[ListenerService], None] | None = None


class ProvisionSite(NamedTuple):
    """The surroundings in which the conductor provides for sandboxes."""

    config: RunConfig
    logs: Path
    environment: Any  # `run.setup.config.ProcessEnvironment`
    ledger: Any  # `ledger.ledger.Ledger`


class SandboxProvision:
    """Everything that the conductor keeps open for the sandboxes of a run. Subclasses replace the parts."""

    provided: Any = None  # values of JSON types for `SandboxSite.provided` of each worker
    images: Any = None  # the `ImageSupply` of attempts
    store: Any = None  # the `ExternalStore` whose disk counts as the run's

    def periodic_tasks(self, run: Any, leases: Any) -> Sequence[Any]:
        """Return the tasks that run beside the attempts, given the run's scheduler and leases."""
        return ()


class SandboxKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of sandbox: everything in which one kind differs from another."""

    # Called in each worker.
    open: Callable[[SandboxSite], AbstractAsyncContextManager[OpenedSandboxes]]
    # Called before a run is created; raises BadInput for a run that can never work.
    check: Callable[[RunConfig, Agent], None] = lambda config, agent: None
    # Called when a run is about to start; raises an error if sandboxes cannot be made at present.
    check_start: Callable[[RunConfig], Awaitable[None]] | None = None
    # Called in the conductor, and open as long as the run goes on.
    provision: Callable[[ProvisionSite], AbstractAsyncContextManager[SandboxProvision]] | None = None
    # Returns an event and a sentence that the user must read before anything runs.
    warn: Callable[[RunConfig], tuple[str, str] | None] = lambda config: None
    takes_images: bool = False  # each sandbox starts from an image
    shows_machine: bool = False  # programs of this machine are there
    elsewhere: bool = False  # on another machine, which governs their memory and disk


class Containers(Record, frozen=True):
    """The docker daemon, networks and mounts of a run's containers."""

    host: str  # the daemon's address
    run: str
    home: str
    gateway: str = ""  # the address of this machine in the network `gateway`; empty: there is no such network
    mounts: tuple[tuple[str, str], ...] = ()  # (here, there), read-only
    read_only: bool = False

    def network(self, kind: Network) -> str:
        """Return the name of the run's own network of this kind."""
        return f"holdwater-{self.run}" if kind is Network.GATEWAY else f"holdwater-{self.run}-{kind}"

    def labels(self, attempt: int | None = None) -> dict[str, str]:
        """Return the labels of a resource of this run."""
        of_attempt = {} if attempt is None else {ATTEMPT_LABEL: str(attempt)}
        return {RUN_LABEL: self.run, HOME_LABEL: self.home, **of_attempt}
