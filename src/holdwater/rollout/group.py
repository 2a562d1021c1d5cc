"""Groups in a worker: graded members wait here with open sandboxes until they are scored together.

The conductor decides when to score a group; `core/groups.py` decides its members and how it is settled. No
state of a group remains here after its scoring.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import Agent, AgentFunction, ChildResult
from ..core.errors import AttemptOver, GradeFailed, as_failure, drop_tracebacks
from ..core.exchange import Exchange
from ..core.records import AttemptFailure, AttemptPhase, FailureOrigin, Grade, Instance, ModelUsage
from ..core.serving_protocol import MessageNode
from .attempt_services import AttemptServices
from .attempt_state import AttemptState, PhaseLimit
from .children import ChildSpawner
from .user_calls import UserCalls, as_grades
from .views import (
    AttemptView,
    BlockingModel,
    BlockingSandbox,
    BlockingView,
    ModelView,
    SandboxView,
    adapt_arguments,
    mirror,
)

GroupHook = Callable[..., Any]  # a suite's `group`


class ScoringResult(NamedTuple):
    """The result of a group's scoring for one member."""

    group_scored: bool = False  # the suite's hook was called
    grade: Grade | None = None  # replaces the member's own
    failure: AttemptFailure | None = None


class WaitingGroups:
    """The members that wait in one host, by group. A member's scope removes it, however its wait ends."""

    def __init__(self, hook: GroupHook | None, arrived: Callable[[int], None]) -> None:
        self._hook = hook
        self._on_arrived = arrived
        self._waiting: dict[int, list[WaitingMember]] = {}  # bound: the run's concurrency

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def join_group(self, member: WaitingMember) -> AsyncIterator[None]:
        """Add `member` to its group until the block ends; the group exists while it has members."""
        waiting = self._waiting.setdefault(member.group, [])
        waiting.append(member)
        self._on_arrived(member.attempt)
        try:
            yield
        finally:
            if member in waiting:
                waiting.remove(member)
            if not waiting and self._waiting.get(member.group) is waiting:
                del self._waiting[member.group]
            await member.leave()

    def score(self, group: int, *, together: bool) -> None:
        """Score the waiting members together, or let each keep its own grade: no other member will come."""
        waiting = self._waiting.pop(group, [])
        members = sorted(waiting, key=lambda member: (member.sample, member.attempt))
        waiting.clear()
        scoring = GroupScoring(group, members, self._hook if together else None)
        for member in members:
            member.begin_scoring(scoring)


class GroupScoring:
    """One scoring of a group: the first member to wait for it starts it, the last member to leave ends it."""

    def __init__(self, group: int, members: list[WaitingMember], hook: GroupHook | None) -> None:
        self.calls = UserCalls(f"group-{group}")
        self._members = members  # the members that have not left
        self._hook = hook
        self._task: asyncio.Task[dict[int, Grade | None] | AttemptFailure] | None = None

    async def wait_scored(self, member: WaitingMember) -> ScoringResult:
        """Wait for the scoring and return its result for `member`, which must be one of its members."""
        if self._hook is None:
            return ScoringResult()
        if self._task is None:  # in the context of the first member, for its log file
            work = self._score(self._hook, member.instance, member.limit_scoring())
            self._task = asyncio.get_running_loop().create_task(
                work
            )  # awaited by all members, ended by `leave`
        scored = await asyncio.shield(self._task)
        if isinstance(scored, AttemptFailure):
            return ScoringResult(group_scored=True, failure=scored)
        return ScoringResult(group_scored=True, grade=scored[member.attempt])

    async def leave(self, member: WaitingMember) -> bool:
        """Remove `member`; the last one ends a scoring that still runs. Return whether it was the last."""
        self._members.remove(member)
        if self._members:
            return False
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})  # `UserCalls` abandons code that ignores its cancellation
        return True

    async def _score(
        self, hook: GroupHook, instance: Instance, limit: PhaseLimit
    ) -> dict[int, Grade | None] | AttemptFailure:
        try:
            async with limit:
                return await self._call_hook(hook, instance)
        except Exception as error:  # boundary: the suite's code  # noqa: BLE001
            failure = as_failure(error, GradeFailed, AttemptPhase.SCORING)
            drop_tracebacks(error)
        # An error in the hook is a failure of the suite, and must never become a member's zero.
        if failure.where is FailureOrigin.RUN:
            return failure
        return msgspec.structs.replace(failure, where=GradeFailed.where)

    async def _call_hook(self, hook: GroupHook, instance: Instance) -> dict[int, Grade | None]:
        """Call the hook. If it failed after a member had left, call it again with the remaining members."""
        while True:
            members = tuple(self._members)
            for number, member in enumerate(members):
                member.number = number
            try:
                views = adapt_arguments(hook, *members)
                result = await self.calls.call(hook, instance, views)
                return dict(zip((m.attempt for m in members), as_grades(result, len(members)), strict=True))
            except Exception as error:  # boundary: the suite's code
                if len(self._members) == len(members):
                    raise
                drop_tracebacks(error)


class MemberAccess(NamedTuple):
    """The parts of an attempt that a group hook can use while it waits."""

    state: AttemptState
    children: ChildSpawner
    services: AttemptServices


class WaitingMember(AttemptView):
    """Implements `core.authoring.GroupMember` while its attempt waits."""

    number = 0

    def __init__(self, access: MemberAccess, sandbox: SandboxView, model: ModelView, seconds: float) -> None:
        super().__init__()
        state = access.state
        attempt = state.job.attempt
        assert attempt.group is not None
        self.group = attempt.group
        self.attempt = attempt.id
        self.sample = attempt.sample
        self.instance = state.instance
        self.answer = state.answer
        self.grade = state.grade
        self.failure = state.failure
        self.reference = access.services.locate_record(state.acting_attempt)
        self.sandbox = sandbox
        self.model = model
        self.seconds = seconds  # time limit of the hook
        self._access: MemberAccess | None = access
        self._scoring: GroupScoring | None = None
        self._scoring_begun = asyncio.Event()

    @property
    def usage(self) -> ModelUsage:
        return self._require_access().state.agent_usage

    def exchanges(self) -> Iterable[Exchange]:
        """Yield the recorded exchanges from disk, one at a time."""
        access = self._require_access()
        return access.services.trajectory(access.state.acting_attempt)

    async def nodes(self) -> list[MessageNode]:
        """See `core.authoring.AgentRecord`."""
        state, _, services = self._require_access()
        nodes: list[MessageNode] = await state.calls.call(services.read_nodes, state.acting_attempt)
        return nodes

    async def spawn(
        self, /, agent: str | AgentFunction | Agent, instruction: str | None = None, **terms: Any
    ) -> ChildResult:
        """See `core.authoring.AttemptHandle`."""
        return await self._require_access().children.spawn(agent, instruction, **terms)

    def as_blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingMember:
        return BlockingMember(self, loop)

    async def wait_scored(self) -> ScoringResult:
        """Wait until the group is scored; return the result for this member."""
        await self._scoring_begun.wait()
        assert self._scoring is not None
        return await self._scoring.wait_scored(self)

    def begin_scoring(self, scoring: GroupScoring) -> None:
        self._scoring = scoring
        self._scoring_begun.set()

    def limit_scoring(self) -> PhaseLimit:
        seconds = self.seconds
        return self._require_access().state.limit(lambda: seconds, AttemptPhase.SCORING)

    async def leave(self) -> None:
        """Leave the group and drop every reference to the attempt."""
        state, scoring = self._require_access().state, self._scoring
        self.end()
        self._access = self._scoring = None
        if scoring is not None and await scoring.leave(self):
            state.scoring_calls = scoring.calls

    def _require_access(self) -> MemberAccess:
        if self._access is None:
            raise AttemptOver("the attempt is over and has left its group")
        return self._access


class BlockingMember(BlockingView[WaitingMember]):
    """A `WaitingMember` for a thread."""

    spawn = mirror(WaitingMember.spawn)
    nodes = mirror(WaitingMember.nodes)

    @property
    def sandbox(self) -> BlockingSandbox:
        return self._view.sandbox.as_blocking(self._loop)

    @property
    def model(self) -> BlockingModel:
        return self._view.model.as_blocking(self._loop)
