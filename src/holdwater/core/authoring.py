"""What people write: suites and agents; and what they are handed: a sandbox and a model.

The protocols are the seams between rooms. `rollout/` calls what is written here, sync or async alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from .records import (
    NO_USAGE,
    CommandResult,
    Exchange,
    Failure,
    Grade,
    Instance,
    LeftOut,
    Limits,
    Network,
    Salvage,
    Start,
    Usage,
)


@runtime_checkable
class Sandbox(Protocol):
    """Where the agent acts. A `def` agent gets the same methods without `await`."""

    @property
    def workdir(self) -> str:
        """The absolute path of the working directory, as seen from inside."""

    @property
    def private(self) -> str:
        """A directory beside the working directory, as seen from inside: nothing in it counts as work.

        `write` and `read` take absolute paths below it.
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
        """The content of a file, by its path in the sandbox."""

    async def write(self, path: str, content: str | bytes) -> None:
        """Create or replace a file, and the directories above it."""


class WholeSandbox(Sandbox, Protocol):
    """What can be done with a sandbox beside what agents need."""

    async def put(self, source: Path, path: str) -> None:
        """Copy a file, or what is in a directory, of this machine to `path` in the sandbox."""

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[LeftOut, ...]:
        """Copy a file or a directory out, to `into`, without what matches `exclude` (patterns as in a shell).

        Links that stay inside come out as links. Links that lead out, devices and pipes are left out.
        """

    async def renew(self, start: Start | None = None) -> None:
        """Begin anew, as the agent found it or from another start: what ran and what was written is gone."""

    async def reach(self, network: Network | None) -> None:
        """From now on its commands reach this; None: what the run says."""

    async def end_processes(self) -> bool:
        """End all that runs in it; services of its image start again. False: nothing ran."""


class GradingSandbox(WholeSandbox, Protocol):
    """What suites are handed."""

    @property
    def artifacts(self) -> Path:
        """A directory of this machine for what a suite takes out: it is kept with the attempt."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment of holdwater, without the keys of model providers: see `core/variables.py`."""


class KeptSandbox(WholeSandbox, Protocol):
    """What rollout needs of a sandbox: to measure it, to keep its work and to put it back."""

    @property
    def leftovers(self) -> list[str]:
        """What closing it could not clean."""

    @property
    def memory(self) -> int:
        """Bytes that its processes use now, without the page cache; 0 where that is not known."""

    @property
    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far; 0 where that is not known."""

    def allow(self, memory: int) -> None:
        """From now on it may use so many bytes."""

    @property
    def peak_memory(self) -> int:
        """The most bytes that it used at once; 0 where that is not known."""

    @property
    def disk(self) -> int:
        """Bytes that its directory takes, as last measured."""

    @property
    def peak_disk(self) -> int:
        """The most bytes that its directory was seen to take."""

    async def salvage(self, into: Path) -> Salvage | None:
        """Write what changed since `mark` to the file `into`; None when nothing did."""

    @property
    def outside(self) -> int:
        """Paths outside the working directory that changed since `mark`, as the last `salvage` found."""

    async def restore(self, source: Path) -> None:
        """Put salvaged work back."""

    async def mark(self) -> None:
        """Set-up is over: what changes from now on is the agent's work."""

    async def clear_outside(self) -> bool:
        """Make it what it was at `mark`, but for the working directory; False: only `renew` can."""


class Model(Protocol):
    """The agent's way to its model, through the gateway."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str:
        """The base URL (`.../v1`) for code that runs in the worker."""

    @property
    def sandbox_url(self) -> str:
        """The base URL (`.../v1`) for code that runs in the sandbox."""

    @property
    def key(self) -> str: ...

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """One Chat Completions call; the reply's JSON."""


class ExchangeLog(Protocol):
    """Where the gateway writes: one attempt's segment, and the run's blobs."""

    def append(self, exchange: Exchange) -> None:
        """Write it so that it survives kill -9."""

    def blob(self, content: bytes) -> str:
        """Keep `content` once in the run; its hash."""

    def read(self, number: int) -> Exchange:
        """An exchange that was written, as it stands in the record."""


class Recorded(NamedTuple):
    """A reply that was paid for once."""

    reply: bytes  # JSON
    usage: Usage
    version: str = ""  # of the policy that gave it
    chunks: bytes | None = None  # as in `Exchange`
    attempt: int = 0  # whose exchange it is
    number: int = 0  # of the exchange


class DriftedCall(NamedTuple):
    """A call of a replay that differs from the recorded one whose reply it was given."""

    identity: str  # of the call
    attempt: int  # of the recorded one
    number: int


class Recording(Protocol):
    """Replies of earlier attempts at the same sample."""

    def take(self, identity: str) -> Recorded | None:
        """The reply to the same request, each once and in their order."""

    def nearest(self, dialect: str, messages: int) -> Recorded | None:
        """A reply to a request of as many messages: each once."""


class Session(Protocol):
    """One attempt's place in the gateway."""

    @property
    def key(self) -> str: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def exchanges(self) -> int:
        """How many of its calls are in the record."""

    @property
    def saved(self) -> Usage:
        """What was answered from the record and not used again."""

    @property
    def drifted(self) -> int:
        """Calls of a replay that were answered although they differ from the recorded ones."""

    @property
    def drifts(self) -> Sequence[DriftedCall]:
        """The first of them."""

    @property
    def waited(self) -> float:
        """Seconds spent waiting for a rate limit so far."""

    @property
    def throttled(self) -> bool:
        """Whether a call waits for a rate limit now."""

    @property
    def failure(self) -> Failure | None:
        """Why the last model call of the conversation's main thread failed, if it did."""

    @property
    def unanswered(self) -> Failure | None:
        """Why the last failed call of any thread failed, where no later call succeeded."""


Enclose = Callable[[str, AbstractAsyncContextManager[Any]], AbstractAsyncContextManager[Any]]
"""What each thing that an attempt opens is put into, by its name: faults and traces enter here."""

Instances = Iterable[Instance] | AsyncIterable[Instance]
GradeResult = bool | int | float | Grade
GroupGrades = Sequence[GradeResult | None] | None  # in the order of the members; None: all keep their own


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a suite suggests where the user says nothing."""

    agent: str | None = None
    model: str | None = None
    attempts: int | None = None
    timeout: float | None = None
    sandbox: str | None = None  # `process` or `docker`


class Need(NamedTuple):
    """A variable that must be set before an instance can be tried."""

    instance: str
    variable: str
    place: str  # where it is asked for


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """Yields instances lazily, and grades."""

    name: str
    instances: Callable[[], Instances]
    grade: Callable[..., GradeResult | Awaitable[GradeResult]] | None = None  # (instance, sandbox, answer)
    setup: Callable[..., Awaitable[None] | None] | None = None  # (instance, sandbox)
    check: Callable[[], None] | None = None  # raises BadInput before anything is started
    image: Callable[[Instance], str] | None = None  # in the place of an instance's own `start.image`
    # (instance, sandbox, answer) -> the agent's work as a patch: taken when its time is over, however that
    # ended, kept as an artifact, and graded in the place of the answer.
    patch: Callable[..., str | Awaitable[str]] | None = None
    # (instance, sandbox, answer, n) -> the instance as the agent is given it in its step n, counted from 0;
    # None: it has acted. `answer` is that of the step before. Steps share the sandbox and the acting limit;
    # `limits.acting`, `start.network` and `start.health` of a step's instance are for that step.
    step: Callable[..., Awaitable[Instance | None] | Instance | None] | None = None
    solve: Callable[..., Awaitable[Any] | Any] | None = None  # (instance, sandbox): the oracle's way
    # (instance, members) -> a grade for each, None where its own stays: scores a group when its last member
    # has been graded. Members are `GroupMember`s, alive until this returns.
    group: Callable[..., GroupGrades | Awaitable[GroupGrades]] | None = None
    needs: Callable[[], Iterable[Need]] | None = None  # what its instances ask of the environment
    hidden: tuple[str, ...] = ()  # paths of this machine that nothing in a sandbox may see
    # Before grading, everything but the working directory is as set-up left it, and no process of the agent
    # runs. False: a container is left as it is, because `grade` renews it, or judges what else is in it.
    fresh: bool = True
    size: int | None = None
    defaults: Defaults = Defaults()
    description: str = ""


# (instance, sandbox, model) -> answer, plain or async; one with a parameter `attempt` is given a `Parent`.
Act = Callable[..., Any]


class Born(msgspec.Struct, frozen=True, kw_only=True):
    """What a child attempt came to."""

    answer: Any = None
    failure: Failure | None = None
    usage: Usage = NO_USAGE


class Parent(Protocol):
    """An attempt that can have children. They spend its lease and its budget, and end before it does."""

    async def child(
        self,
        agent: str | Act | Agent,
        instruction: str | None = None,
        *,
        name: str = "",
        sandbox: bool = True,
        model: bool = True,
        timeout: float | None = None,
    ) -> Born:
        """Have `agent` act in this attempt's sandbox and with its model, as far as these are lent.

        Its model calls are in this attempt's record, under its name. What it raises is the result's failure.
        """


class GroupMember(Parent, Protocol):
    """A member of a group that is being scored: everything of it is still there."""

    @property
    def number(self) -> int:
        """0, 1, 2, ... among those that are scored."""

    @property
    def answer(self) -> Any: ...

    @property
    def grade(self) -> Grade | None:
        """Its own, by the suite's `grade`."""

    @property
    def failure(self) -> Failure | None: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def sandbox(self) -> GradingSandbox: ...

    @property
    def model(self) -> Model: ...

    def exchanges(self) -> Iterable[Exchange]:
        """What is in its record, from disk, one at a time."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What a critic is shown of an attempt that has been graded."""

    answer: Any = None
    patch: str | None = None  # None: the suite takes none, or it could not be taken
    failure: Failure | None = None
    grade: Grade | None = None
    usage: Usage = NO_USAGE


Critique = Callable[[Instance, Tried], bool | Awaitable[bool]]  # is it good enough?


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """What acts. `limits` lets an agent ask, for example, for more output."""

    name: str
    act: Act
    uses_model: bool = True
    needs_model: bool = False  # it is known to call the model: without one no instance can be tried
    solves: bool = False  # the oracle: a suite that has a `solve` is asked in its place
    check: Callable[[], None] | None = None  # raises BadInput or RunFailed before anything is started
    description: str = ""
    paths: tuple[str, ...] = ()  # of this machine, that its sandbox has to show
    notes: tuple[str, ...] = ()  # for the user, at the start of a run


class Sandboxes(Protocol):
    """Opens sandboxes of one kind."""

    def open(
        self, attempt: int, limits: Limits, gateway: Path | None, start: Start
    ) -> AbstractAsyncContextManager[KeptSandbox]:
        """A sandbox for this attempt; nothing is made before it is used."""

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """The base URL of the gateway for code in a sandbox that reaches this, or what the run says."""
