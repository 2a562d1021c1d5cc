"""Groups in a worker: members that have been graded wait here, alive, and are scored together.

When a group is scored is said by the conductor; who belongs to it and how it is settled is `core/groups.py`.
After it is scored nothing of it is left here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import Act, Agent, Born
from ..core.errors import AttemptOver, GradeFailed, as_failure, let_go
from ..core.records import Exchange, Failure, Grade, Instance, Phase, Usage, Where
from .calls import Calls
from .children import Children
from .foreign import as_grades
from .life import Life
from .limit import PhaseLimit
from .views import BlockingModel, BlockingSandbox, ModelView, SandboxView, View, for_caller, wait_for

Hook = Callable[..., Any]  # a suite's `group`


class Settled(NamedTuple):
    """What scoring its group came to for a member."""

    together: bool = False  # the suite's hook was asked
    grade: Grade | None = None  # in the place of its own
    failure: Failure | None = None


class Groups:
    """The members that wait in one host, by group. One leaves by its scope, whatever ends its wait."""

    def __init__(self, hook: Hook | None, arrived: Callable[[int], None]) -> None:
        self._hook = hook
        self._arrived = arrived
        self._waiting: dict[int, list[Member]] = {}  # bound: the run's concurrency

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def joined(self, member: Member) -> AsyncIterator[None]:
        """A place for `member` in its group, which is open while anyone has one."""
        waiting = self._waiting.setdefault(member.group, [])
        waiting.append(member)
        self._arrived(member.attempt)
        try:
            yield
        finally:
            if member in waiting:
                waiting.remove(member)
            if not waiting and self._waiting.get(member.group) is waiting:
                del self._waiting[member.group]
            await member.leave()

    def score(self, group: int, *, together: bool) -> None:
        """Nobody else will come: score those who wait, or let each keep its own grade."""
        waiting = self._waiting.pop(group, [])
        members = sorted(waiting, key=lambda member: (member.sample, member.attempt))
        waiting.clear()
        scoring = Scoring(group, members, self._hook if together else None)
        for member in members:
            member.summon(scoring)


class Scoring:
    """One scoring of a group: begun by the first that comes to it, ended with the last that leaves."""

    def __init__(self, group: int, members: list[Member], hook: Hook | None) -> None:
        self.calls = Calls(f"group-{group}")
        self._members = members  # those who are still here
        self._hook = hook
        self._task: asyncio.Task[dict[int, Grade | None] | Failure] | None = None

    async def settled(self, member: Member) -> Settled:
        """What it came to for `member`, who has to be one of those who were summoned."""
        if self._hook is None:
            return Settled()
        if self._task is None:  # in the context of whoever is first, so that it logs somewhere
            work = self._score(self._hook, member.instance, member.seconds)
            self._task = asyncio.get_running_loop().create_task(work)  # awaited by all, ended by `leave`
        scored = await asyncio.shield(self._task)
        if isinstance(scored, Failure):
            return Settled(together=True, failure=scored)
        return Settled(together=True, grade=scored[member.attempt])

    async def leave(self, member: Member) -> bool:
        """`member` is scored or gone; the last one ends what is left. Whether it was the last."""
        self._members.remove(member)
        if self._members:
            return False
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})  # `Calls` gives up on what ignores its cancellation
        return True

    async def _score(
        self, hook: Hook, instance: Instance, seconds: float
    ) -> dict[int, Grade | None] | Failure:
        try:
            async with PhaseLimit(lambda: seconds, Phase.SCORING):
                return await self._ask(hook, instance)
        except Exception as error:  # boundary: the suite's code  # noqa: BLE001
            failure = as_failure(error, GradeFailed, Phase.SCORING)
            let_go(error)
        # Whatever a hook raises is its own failure, and must never become a member's zero.
        if failure.where is Where.RUN:
            return failure
        return msgspec.structs.replace(failure, where=GradeFailed.where)

    async def _ask(self, hook: Hook, instance: Instance) -> dict[int, Grade | None]:
        """Ask the hook; once more over the others, where it failed because a member had left it."""
        while True:
            members = tuple(self._members)
            for number, member in enumerate(members):
                member.number = number
            try:
                views = for_caller(hook, *members)
                result = await self.calls.call(hook, instance, views)
                return dict(zip((m.attempt for m in members), as_grades(result, len(members)), strict=True))
            except Exception as error:  # boundary: the suite's code
                if len(self._members) == len(members):
                    raise
                let_go(error)


class Reach(NamedTuple):
    """What of an attempt can be reached while it waits."""

    life: Life
    children: Children
    exchanges: Callable[[], Iterable[Exchange]]


class Member(View):
    """Implements `core.authoring.GroupMember` for as long as its attempt waits."""

    number = 0

    def __init__(self, reach: Reach, sandbox: SandboxView, model: ModelView, seconds: float) -> None:
        super().__init__()
        life = reach.life
        attempt = life.job.attempt
        assert attempt.group is not None
        self.group = attempt.group
        self.attempt = attempt.id
        self.sample = attempt.sample
        self.instance = life.instance
        self.answer = life.answer
        self.grade = life.grade
        self.failure = life.failure
        self.sandbox = sandbox
        self.model = model
        self.seconds = seconds  # what the hook may take
        self._reach: Reach | None = reach
        self._scoring: Scoring | None = None
        self._summoned = asyncio.Event()

    @property
    def usage(self) -> Usage:
        return self._alive().life.used_by_agent

    def exchanges(self) -> Iterable[Exchange]:
        """What is in its record, from disk, one at a time."""
        return self._alive().exchanges()

    async def child(self, agent: str | Act | Agent, instruction: str | None = None, **terms: Any) -> Born:
        """See `core.authoring.Parent`."""
        return await self._alive().children.child(agent, instruction, **terms)

    def blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingMember:
        return BlockingMember(self, loop)

    async def settled(self) -> Settled:
        """Wait until its group is scored."""
        await self._summoned.wait()
        assert self._scoring is not None
        return await self._scoring.settled(self)

    def summon(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self._summoned.set()

    async def leave(self) -> None:
        """Nothing of the attempt can be reached through this any more."""
        life, scoring = self._alive().life, self._scoring
        self.end()
        self._reach = self._scoring = None
        if scoring is not None and await scoring.leave(self):
            life.shared = scoring.calls

    def _alive(self) -> Reach:
        if self._reach is None:
            raise AttemptOver("the attempt is over, and not in its group any more")
        return self._reach


class BlockingMember:
    """A `Member` for a thread."""

    def __init__(self, view: Member, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    @property
    def sandbox(self) -> BlockingSandbox:
        return self._view.sandbox.blocking(self._loop)

    @property
    def model(self) -> BlockingModel:
        return self._view.model.blocking(self._loop)

    def child(self, agent: str | Act | Agent, instruction: str | None = None, **terms: Any) -> Born:
        return wait_for(self._view, self._view.child(agent, instruction, **terms), self._loop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)
