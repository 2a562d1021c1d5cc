"""The interfaces through which an attempt uses its worker: sandboxes, sessions, files, the suite, the agent.

`host.py` implements them; tests use other implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..core.authoring import Agent, Model, ResourceWrapper, SandboxProvider, SessionStatus, Suite
from ..core.exchange import DriftedCall, Exchange, ExchangeLog, ReplyRecording
from ..core.records import AttemptFailure, Limits, Network
from .critic import UserCritic

if TYPE_CHECKING:
    from .group import WaitingGroups  # not at run time: it imports `views`, which imports this module


class SegmentLog(ExchangeLog, Protocol):
    """The log of an attempt's exchanges, with the methods that its worker needs."""

    count: int

    def sync(self) -> None: ...

    def close(self) -> None: ...


class AttemptServices(Protocol):
    """The services that an attempt uses in its worker."""

    suite: Suite
    agent: Agent
    critic: UserCritic | None
    limits: Limits
    salvage_seconds: float
    enclose: ResourceWrapper
    token: int
    gateway: Path | None
    variables: Mapping[str, str]
    groups: WaitingGroups
    spawns_children: bool  # the agent takes an `attempt` argument, by which it spawns children

    @property
    def sandboxes(self) -> SandboxProvider: ...

    def paths(self, attempt: int, name: str) -> ArtifactPaths: ...

    def open_log(self, attempt: int) -> SegmentLog: ...

    def trajectory(self, attempt: int) -> Iterator[Exchange]:
        """Read the exchanges of an attempt's segment from disk."""

    def recording(self, earlier: tuple[int, ...]) -> ReplyRecording | None:
        """Return the recorded replies of earlier attempts. Reads their segments: call it in a thread."""

    def describe_drift(self, attempt: int, drifts: Sequence[DriftedCall]) -> str:
        """Describe how a replay's requests differ from the recorded ones. Reads files: call in a thread."""

    def open_session(
        self, attempt: int, log: SegmentLog, limits: Limits, recording: ReplyRecording | None
    ) -> AbstractAsyncContextManager[SessionStatus | None]: ...

    def lend(self, session: SessionStatus, by: str) -> AbstractAsyncContextManager[SessionStatus]:
        """Open a session for the borrower `by`; it writes to the same log and is closed before its lender."""

    def model(self, session: SessionStatus | None, network: Network | None) -> Model | None:
        """Return the model for an agent whose sandbox has `network`; None: the run's network."""

    def watch_surroundings(self) -> Callable[[], AttemptFailure | None]:
        """Return a check that returns the failure since this call: a full disk, or a dead docker daemon."""


class ArtifactPaths(Protocol):
    """The paths of an attempt's files."""

    def log(self) -> Path:
        """The log records and prints of the agent and the suite."""

    def output(self) -> Path:
        """The output of its commands."""

    def salvage(self) -> Path:
        """The salvage: the work that the attempt left."""

    def patch(self) -> Path:
        """The work as a patch."""

    def answer(self) -> Path:
        """An answer that is too long for the verdict."""

    def kept_file(self, name: str) -> Path:
        """A file that this attempt, or an earlier one of the run, kept."""

    def artifacts(self) -> Path:
        """A directory for the files that the suite takes out of the sandbox."""
