"""The services that an attempt uses in its worker: sandboxes, sessions, files, the suite, the agent.

`host.py` implements them; tests use another implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..core.authoring import Agent, Model, ResourceWrapper, SandboxProvider, SessionStatus, Suite
from ..core.exchange import DriftedCall, Exchange, ExchangeLog, ReplyRecording
from ..core.fork_origin import ForkOrigin
from ..core.records import AttemptFailure, Limits, Network
from ..core.serving_protocol import MessageNode, TrajectoryReference
from ..ledger.attempt_files import (
    answer_path,
    log_path,
    output_path,
    patch_path,
    salvage_path,
    taken_out_path,
)
from ..ledger.directory import RunDirectory
from .critic import UserCritic
from .worker_protocol import AttemptJob

if TYPE_CHECKING:
    from .group import WaitingGroups  # not at run time: it imports `views`, which imports this module


class SegmentLog(ExchangeLog, Protocol):
    """The log of an attempt's exchanges, with the methods that its worker needs."""

    count: int

    def sync(self) -> None: ...

    def close(self) -> None: ...


class AttemptStorage(Protocol):
    """The files of attempts in the run directory."""

    def paths(self, attempt: int, name: str) -> AttemptPaths: ...

    def open_log(self, attempt: int) -> SegmentLog: ...

    def trajectory(self, attempt: int) -> Iterator[Exchange]:
        """Read the exchanges of an attempt's segment from disk."""

    def recording(self, job: AttemptJob) -> ReplyRecording | None:
        """Return the recorded replies that an attempt gets. Reads segments: call it in a thread."""

    def describe_drift(self, attempt: int, drifts: Sequence[DriftedCall]) -> str:
        """Describe how a replay's requests differ from the recorded ones. Reads files: call in a thread."""


class ModelAccess(Protocol):
    """The model of attempts, through sessions of the gateway."""

    def open_session(
        self, attempt: int, log: SegmentLog, limits: Limits, recording: ReplyRecording | None
    ) -> AbstractAsyncContextManager[SessionStatus | None]: ...

    def lend(
        self, session: SessionStatus, by: str, *, limited: bool = True
    ) -> AbstractAsyncContextManager[SessionStatus]:
        """Open a session for the borrower `by`; it writes to the same log and is closed before its lender.

        The limits of the attempt bind its calls only if it is `limited`.
        """

    def model(self, session: SessionStatus | None, network: Network | None) -> Model | None:
        """Return the model for an agent whose sandbox has `network`; None: the run's network."""


class AttemptServices(AttemptStorage, ModelAccess, Protocol):
    """Everything that surrounds an attempt in its worker."""

    suite: Suite
    agent: Agent
    critic: UserCritic | None
    limits: Limits
    salvage_seconds: float
    enclose: ResourceWrapper
    token: int
    gateway: Path | None
    variables: Mapping[str, str]
    agent_env: Mapping[str, str]  # variables of the agent's commands
    groups: WaitingGroups
    fork: ForkOrigin | None  # the attempt of another run that each attempt repeats up to a turn
    spawns_children: bool  # the agent takes an `attempt` argument, by which it spawns children

    @property
    def sandboxes(self) -> SandboxProvider: ...

    def locate_record(self, attempt: int) -> TrajectoryReference:
        """Return the location of an attempt's record on disk."""

    def read_nodes(self, attempt: int) -> list[MessageNode]:
        """Read the messages of an attempt's agent from disk, media inline: call it in a thread."""

    def watch_surroundings(self, attempt: int) -> Callable[[], AttemptFailure | None]:
        """Return a check that returns the failure since this call: a full disk, or a lost sandbox."""


class AttemptPaths:
    """The paths of one attempt's files, built on demand: most attempts of a quiet agent leave no files."""

    def __init__(self, directory: RunDirectory, attempt: int, name: str) -> None:
        self._directory = directory
        self._attempt = attempt
        self._name = name

    def log(self) -> Path:
        """The log records and prints of the agent and the suite."""
        return log_path(self._directory, self._attempt, self._name)

    def output(self) -> Path:
        """The output of its commands."""
        return output_path(self._directory, self._attempt, self._name)

    def salvage(self) -> Path:
        return salvage_path(self._directory, self._attempt)

    def patch(self) -> Path:
        return patch_path(self._directory, self._attempt)

    def answer(self) -> Path:
        """An answer that is too long for the verdict."""
        return answer_path(self._directory, self._attempt)

    def kept_file(self, name: str) -> Path:
        """A file that this attempt, or an earlier one of the run, kept."""
        return self._directory.artifacts / name

    def artifacts(self) -> Path:
        """A directory for the files that the suite takes out of the sandbox."""
        return taken_out_path(self._directory, self._attempt)
