"""What surrounds an attempt in its worker, as the attempt sees it. `host.py` is one; tests bring others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..core.authoring import (
    Agent,
    DriftedCall,
    Enclose,
    ExchangeLog,
    Model,
    Recording,
    Sandboxes,
    Session,
    Suite,
)
from ..core.records import Exchange, Failure, Limits, Network
from .critic import OwnCritic

if TYPE_CHECKING:
    from .group import Groups  # which knows views, which know this


class Log(ExchangeLog, Protocol):
    """An attempt's segment, as the worker sees it."""

    count: int

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Place(Protocol):
    """What surrounds an attempt in its worker."""

    suite: Suite
    agent: Agent
    critic: OwnCritic | None
    limits: Limits
    salvaging: float
    enclose: Enclose
    token: int
    gateway: Path | None
    variables: Mapping[str, str]
    groups: Groups
    parental: bool  # the agent is given its attempt, which can have children

    @property
    def sandboxes(self) -> Sandboxes: ...

    def paths(self, attempt: int, name: str) -> Paths: ...

    def exchanges(self, attempt: int) -> Log: ...

    def trajectory(self, attempt: int) -> Iterator[Exchange]:
        """What is in the attempt's segment, from disk."""

    def recording(self, earlier: tuple[int, ...]) -> Recording | None:
        """What the calls of earlier attempts were answered. Reads their segments: call it in a thread."""

    def describe_drift(self, attempt: int, drifts: Sequence[DriftedCall]) -> str:
        """Where the requests of a replay differ from the recorded ones. Reads files: call it in a thread."""

    def session(
        self, attempt: int, log: Log, limits: Limits, recording: Recording | None
    ) -> AbstractAsyncContextManager[Session | None]: ...

    def lend(self, session: Session, by: str) -> AbstractAsyncContextManager[Session]:
        """A session for a borrower of that name, which writes to the same record and is closed first."""

    def model(self, session: Session | None, network: Network | None) -> Model | None:
        """The model for an agent whose sandbox reaches `network`; None: what the run says."""

    def watch_surroundings(self) -> Callable[[], Failure | None]:
        """What has befallen attempts since this was called: a disk was full, or the docker daemon died."""


class Paths(Protocol):
    """Where an attempt keeps what it leaves."""

    def log(self) -> Path:
        """What the agent and the suite log and print."""

    def output(self) -> Path:
        """What its commands print."""

    def salvage(self) -> Path:
        """The work that the attempt left."""

    def patch(self) -> Path:
        """The same as a patch."""

    def answer(self) -> Path:
        """An answer that is too long for the verdict."""

    def kept(self, name: str) -> Path:
        """A file that an attempt of the run kept, this one or an earlier one."""

    def artifacts(self) -> Path:
        """A directory for what the suite takes out of the sandbox."""
