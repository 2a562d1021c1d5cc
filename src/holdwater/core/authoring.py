"""The interfaces of suites and agents, and of the sandbox and model that they receive.

The protocols separate the packages. `rollout/` calls the functions of suites and agents, sync or async.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from .agent import Agent as Agent
from .agent import AgentFunction as AgentFunction
from .exchange import DriftedCall, Exchange
from .records import (
    NO_USAGE,
    AttemptFailure,
    CommandResult,
    Grade,
    Instance,
    Limits,
    ModelUsage,
    Network,
    Salvage,
    SandboxSpec,
    SkippedEntry,
)
from .serving_protocol import MessageNode, TrajectoryReference


@runtime_checkable
class Sandbox(Protocol):
    """The environment in which the agent acts. A `def` agent gets the same methods without `await`."""

    @property
    def workdir(self) -> str:
        """The absolute path of the working directory, as seen from inside."""

    @property
    def private(self) -> str:
        """A directory beside the working directory, as seen from inside: its files do not count as work.

        `write` and `read` accept absolute paths below it.
        """

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        workdir: str | None = None,
        log: Path | None = None,
    ) -> CommandResult:
        """Run a shell line, or a program with its arguments; a non-zero status is a result, not an error."""

    async def read(self, path: str) -> bytes:
        """Return the content of a file, by its path in the sandbox."""

    async def write(self, path: str, content: str | bytes) -> None:
        """Create or replace a file, and the directories above it."""


class WholeSandbox(Sandbox, Protocol):
    """A sandbox with the operations that only holdwater and suites need."""

    async def put(self, source: Path, path: str) -> None:
        """Copy a file, or the content of a directory, from this machine to `path` in the sandbox."""

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[SkippedEntry, ...]:
        """Copy a file or directory out to `into`, without paths that match `exclude` (shell patterns).

        Links that stay inside are copied as links. Links that lead outside, devices and pipes are skipped.
        """

    async def renew(self, start: SandboxSpec | None = None) -> None:
        """Reset the sandbox to its state before the agent, or to another spec.

        Processes and files are lost.
        """

    async def set_network(self, network: Network | None) -> None:
        """Set the network access of subsequent commands; None: the run's setting."""

    async def end_processes(self) -> bool:
        """End all processes; services of its image restart. Return False if none was running."""


class GradingSandbox(WholeSandbox, Protocol):
    """The sandbox that suites receive."""

    @property
    def artifacts(self) -> Path:
        """A directory of this machine for files that a suite copies out: it is kept with the attempt."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment of holdwater, without the keys of model providers: see `core/environment.py`."""


class ManagedSandbox(WholeSandbox, Protocol):
    """The sandbox that `rollout/` needs: it can be measured, and its work can be saved and restored."""

    @property
    def leftovers(self) -> list[str]:
        """Resources that could not be removed when the sandbox was closed."""

    @property
    def memory(self) -> int:
        """Bytes that its processes use now, without the page cache; 0 if unknown."""

    @property
    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far; 0 if unknown."""

    def allow_memory(self, memory: int) -> None:
        """Set the memory limit to so many bytes from now on."""

    @property
    def peak_memory(self) -> int:
        """The most bytes of memory in use at once; 0 if unknown."""

    @property
    def disk(self) -> int:
        """Bytes that its directory takes, by the last measurement."""

    @property
    def peak_disk(self) -> int:
        """The most bytes of its directory over all measurements."""

    async def salvage(self, into: Path) -> Salvage | None:
        """Write all changes since `mark` to the file `into`; return None if there are none."""

    @property
    def outside(self) -> int:
        """Number of paths outside the working directory that changed since `mark`, by the last `salvage`."""

    async def restore(self, source: Path) -> None:
        """Restore salvaged work."""

    async def mark(self) -> None:
        """Record the end of set-up: later changes are the agent's work."""

    async def clear_outside(self) -> bool:
        """Restore everything but the working directory as at `mark`; return False if only `renew` can."""


class Model(Protocol):
    """The agent's access to its model, through the gateway."""

    @property
    def name(self) -> str: ...

    @property
    def side_name(self) -> str: ...  # for side calls, such as titles

    @property
    def url(self) -> str:
        """The base URL (`.../v1`) for code that runs in the worker."""

    @property
    def sandbox_url(self) -> str:
        """The base URL (`.../v1`) for code that runs in the sandbox."""

    @property
    def key(self) -> str: ...

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Make one Chat Completions call; return the reply's JSON."""


class SessionStatus(Protocol):
    """The state of one attempt's session in the gateway."""

    @property
    def key(self) -> str: ...

    @property
    def usage(self) -> ModelUsage: ...

    @property
    def exchanges(self) -> int:
        """Number of recorded calls."""

    @property
    def replayed_usage(self) -> ModelUsage:
        """Usage of replies that came from the record, and cost nothing."""

    @property
    def version(self) -> str:
        """The version of the policy that answered the last call, if it was reported."""

    @property
    def drifted(self) -> int:
        """Number of replayed calls that were answered although they differ from the recorded ones."""

    @property
    def drifts(self) -> Sequence[DriftedCall]:
        """The first of the drifted calls."""

    @property
    def unrepeated(self) -> str:
        """Why an attempt that ends now has not repeated the attempt that it forks; empty: it has."""

    @property
    def waited(self) -> float:
        """Seconds spent waiting for a rate limit so far."""

    @property
    def throttled(self) -> bool:
        """Whether a call is waiting for a rate limit."""

    @property
    def failure(self) -> AttemptFailure | None:
        """The failure of the last model call in the main thread of the conversation, if it failed."""

    @property
    def unanswered(self) -> AttemptFailure | None:
        """The failure of the last failed call of any thread, if no later call succeeded."""


ResourceWrapper = Callable[[str, AbstractAsyncContextManager[Any]], AbstractAsyncContextManager[Any]]
"""Wraps each resource that an attempt opens, by name: the hook for faults and traces."""

Instances = Iterable[Instance] | AsyncIterable[Instance]
GradeResult = bool | int | float | Grade
# In the order of the members; None: all members keep their own grades.
GroupGrades = Sequence[GradeResult | None] | None


class SuiteDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of a suite for settings that the user does not give."""

    agent: str | None = None
    model: str | None = None
    attempts: int | None = None
    timeout: float | None = None
    sandbox: str | None = None  # `process` or `docker`


class RequiredVariable(NamedTuple):
    """An environment variable that must be set before an instance can run."""

    instance: str
    variable: str
    place: str  # the location that requires it


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """Yields instances lazily, and grades."""

    name: str
    instances: Callable[[], Instances]
    # (instance, sandbox, answer); a function with a parameter `attempt` receives a `GradedAttempt`.
    grade: Callable[..., GradeResult | Awaitable[GradeResult]] | None = None
    setup: Callable[..., Awaitable[None] | None] | None = None  # (instance, sandbox)
    check: Callable[[], None] | None = None  # raises BadInput before anything is started
    check_agent: Callable[[Agent], None] | None = None  # the same, about an agent
    image: Callable[[Instance], str] | None = None  # overrides an instance's own `start.image`
    # (instance, sandbox, answer) -> the agent's work as a patch. It is taken when acting is over, however
    # that ended, kept as an artifact, and graded in place of the answer.
    patch: Callable[..., str | Awaitable[str]] | None = None
    # (instance, sandbox, answer, n) -> the instance that the agent receives in step n, counted from 0; None:
    # no more steps. `answer` is the answer of the previous step. Steps share the sandbox and the acting
    # limit; `limits.acting`, `start.network` and `start.health` of a step's instance apply to that step.
    step: Callable[..., Awaitable[Instance | None] | Instance | None] | None = None
    solve: Callable[..., Awaitable[Any] | Any] | None = None  # (instance, sandbox): the oracle's solution
    # (instance, members) -> a grade for each member, or None to keep its own. It scores a group once its last
    # member is graded. Members are `GroupMember`s and stay open until it returns.
    group: Callable[..., GroupGrades | Awaitable[GroupGrades]] | None = None
    needs: Callable[[], Iterable[RequiredVariable]] | None = None  # the environment variables to be set
    hidden: tuple[str, ...] = ()  # paths of this machine that must be invisible in a sandbox
    # True: before grading, everything but the working directory is restored to its state after set-up, and
    # the agent's processes are ended. False: a container is left unchanged, because `grade` renews it or
    # judges its other content.
    fresh: bool = True
    size: int | None = None
    defaults: SuiteDefaults = SuiteDefaults()
    description: str = ""


class ChildResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a child attempt."""

    answer: Any = None
    failure: AttemptFailure | None = None
    usage: ModelUsage = NO_USAGE


class AttemptHandle(Protocol):
    """An attempt that can have children. Children use its lease and its budget, and end before it does."""

    @property
    def reference(self) -> TrajectoryReference: ...  # its record on disk: while it acts, the calls so far

    async def spawn(
        self,
        agent: str | AgentFunction | Agent,
        instruction: str | None = None,
        *,
        name: str = "",
        sandbox: bool = True,
        model: bool = True,
        timeout: float | None = None,
    ) -> ChildResult:
        """Run `agent` with this attempt's sandbox and model, unless `sandbox` or `model` is False.

        Its model calls are recorded with this attempt, under its name. An exception of the agent becomes
        the failure of the result.
        """


class AgentRecord(Protocol):
    """How an agent ended, and the record of its conversation on disk."""

    @property
    def failure(self) -> AttemptFailure | None: ...

    @property
    def usage(self) -> ModelUsage: ...

    @property
    def reference(self) -> TrajectoryReference: ...

    async def nodes(self) -> Sequence[MessageNode]:
        """Return the messages of the agent and its children, each after its parent, with media inline."""


class GradedAttempt(AgentRecord, Protocol):
    """The attempt that a `grade` function with a parameter `attempt` receives, until it returns."""

    @property
    def grouped(self) -> bool: ...  # whether the suite's `group` scores it later, with other attempts

    @property
    def answer(self) -> Any: ...  # of the agent, also where a patch is graded in its place

    @property
    def model(self) -> Model: ...  # for a judge: its calls are the grader's, beyond the agent's limits


class MemberResult(AgentRecord, Protocol):
    """The result of a graded attempt and its record on disk."""

    @property
    def answer(self) -> Any: ...

    @property
    def grade(self) -> Grade | None:
        """The member's own grade, by the suite's `grade`."""

    def exchanges(self) -> Iterable[Exchange]:
        """Yield its recorded exchanges from disk, one at a time."""


class GroupMember(MemberResult, AttemptHandle, Protocol):
    """A member of a group during scoring: its sandbox, model and record are still open."""

    @property
    def number(self) -> int: ...  # 0, 1, 2, ... among the scored members

    @property
    def sandbox(self) -> GradingSandbox: ...

    @property
    def model(self) -> Model: ...


class CriticInput(msgspec.Struct, frozen=True, kw_only=True):
    """The information about a graded attempt that a critic receives."""

    answer: Any = None
    patch: str | None = None  # None: the suite takes no patch, or taking it failed
    failure: AttemptFailure | None = None
    grade: Grade | None = None
    usage: ModelUsage = NO_USAGE


CriticFunction = Callable[[Instance, CriticInput], bool | Awaitable[bool]]  # is the attempt good enough
Policy = Callable[[dict[str, Any]], Any]
"""Takes a decoded request; returns the text of the reply, its message, or the whole `chat.completion`.

`async def` runs on the loop; a plain function gets a thread of its own.
"""


class SandboxProvider(Protocol):
    """Opens sandboxes of one kind."""

    def open(
        self, attempt: int, limits: Limits, gateway: Path | None, start: SandboxSpec
    ) -> AbstractAsyncContextManager[ManagedSandbox]:
        """Return a sandbox for this attempt; it is created when the context is entered."""

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """Return the gateway's base URL for code in a sandbox with this network (None: the run's)."""
