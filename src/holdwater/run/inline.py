"""The fleet without processes: attempts live in the conductor itself. For notebooks and tests.

A hung thread cannot be killed here, nor a task that ignores its cancellation: it is left behind, and nobody
waits for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from ..core.authoring import Agent, Critique, Enclose, Suite
from ..core.failures import interrupted
from ..core.records import Failure
from ..gateway.upstreams.policy import Policy
from ..rollout.host import Host
from ..rollout.scope import abandon
from ..rollout.wire import (
    Answered,
    Broken,
    Done,
    Job,
    Noted,
    Score,
    Steered,
    Take,
    ToConductor,
    Welcome,
)
from .fleet import Census, Condition, Emit, Use

LEAVE_SECONDS = 20.0  # what interrupted attempts get to end when the run is over


class InlineFleet:
    """One host, on the conductor's own loop."""

    def __init__(
        self,
        welcome: Welcome,
        emit: Emit,
        suite: Suite,
        agent: Agent,
        enclose: Enclose | None = None,
        policy: Policy | None = None,
        critic: Critique | None = None,
    ) -> None:
        self._emit = emit
        self._host = Host(welcome, self._hear, suite, agent, enclose, policy, critic)
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()  # bound: the run's concurrency

    async def __aenter__(self) -> InlineFleet:
        await self._stack.enter_async_context(self._host.opened())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for living in self._host.living():
            self._host.interrupt(living.attempt, interrupted("the run is over"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LEAVE_SECONDS)
        for living in self._host.living():
            abandon(self._host.give_up(living.attempt))
        await self._stack.aclose()

    async def start(self, job: Job) -> None:
        self._host.start(job, self)

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """An attempt of this fleet; unlike a `TaskGroup`, the fleet can leave one behind."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def interrupt(self, attempt: int, failure: Failure) -> None:
        self._host.interrupt(attempt, failure)

    def give_up(self, attempt: int) -> str:
        for living in self._host.living():
            if living.attempt == attempt:
                task = self._host.give_up(attempt)
                self._tasks.discard(task)
                abandon(task)
                return f"in {living.phase} for {living.seconds:.0f} s"
        return "nowhere to be found"

    def census(self) -> Census:
        self._host.look()
        living = self._host.living()
        phases = Counter(str(one.phase) for one in living)
        uses = {
            one.attempt: Use(sandbox=one.memory, disk=one.disk, throttled=one.throttled, cpu=one.cpu)
            for one in living
        }
        return Census(workers=0, phases=dict(phases), usage=Census.used(living), uses=uses)

    @property
    def news(self) -> int:
        return self._host.memory

    def allow(self, attempt: int, memory: int) -> None:
        self._host.allow(attempt, memory)

    def trim(self) -> str:
        return ""  # this process is never quiet

    def permit(self, leases: Mapping[int, int], room: int) -> None:
        return  # it is the conductor too, which must not be held to anything

    def recycle(self, least: int, *, at_once: bool) -> str:
        return ""  # nor can it be replaced

    def send(self, attempt: int, message: Take | Answered) -> bool:
        if all(living.attempt != attempt for living in self._host.living()):
            return False
        if isinstance(message, Take):
            self._host.take(message, self._hear)
        else:
            self._host.answer(message)
        return True

    def score(self, group: int, together: bool) -> None:
        self._host.score(Score(group=group, together=together))

    def steer(self, message: Steered) -> None:
        self.create_task(self._host.steer(message))

    def demand(self, running: int, waiting: int, room: int) -> None:
        return  # there is one, whatever is asked of it

    def condition(self) -> Condition:
        return Condition(ready=1, starting=0, draining=0, wanted=1)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._emit(Broken(message=f"internal error: {type(error).__name__}: {error}"))

    def _hear(self, message: ToConductor) -> None:
        if isinstance(message, Done) and message.tainted:
            note = "a thread of the attempt could not be ended and stays until the process exits"
            self._emit(Noted(kind="thread.left", message=note, attempt=message.verdict.attempt))
        self._emit(message)  # type: ignore[arg-type]
