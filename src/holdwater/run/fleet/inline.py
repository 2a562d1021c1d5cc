"""A fleet without processes: attempts run in the conductor itself, for notebooks and tests.

A hung thread, or a task that ignores its cancellation, cannot be killed here: it is left behind, and the
fleet does not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from ...core.authoring import Agent, CriticFunction, Policy, ResourceWrapper, Suite
from ...core.config import RunConfig
from ...core.failures import make_interrupt_failure
from ...core.records import AttemptFailure
from ...governor.resource_reading import AttemptUse, FleetCensus
from ...rollout.host import AttemptHost
from ...rollout.scope import abandon
from ...rollout.worker_protocol import (
    AnswerHeldCall,
    AttemptDone,
    AttemptJob,
    ChangeWorker,
    EndpointsUsed,
    EventNoted,
    FetchHeldCall,
    ScoreMembers,
    StandingMessage,
    ToConductor,
    WorkerBroken,
    WorkerSetup,
)
from .endpoint_tally import EndpointTally
from .interface import Emit, FleetCondition, sum_usage

LEAVE_SECONDS = 20.0  # for interrupted attempts to end when the run is over


class InlineFleet:
    """One host, on the conductor's own loop."""

    def __init__(
        self,
        welcome: WorkerSetup,
        emit: Emit,
        suite: Suite,
        agent: Agent,
        enclose: ResourceWrapper | None = None,
        policy: Policy | None = None,
        critic: CriticFunction | None = None,
    ) -> None:
        self._emit = emit
        self._endpoints = EndpointTally()
        self._host = AttemptHost(welcome, self._forward, suite, agent, enclose, policy, critic)
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()  # bound: the run's concurrency

    async def __aenter__(self) -> InlineFleet:
        await self._stack.enter_async_context(self._host.open())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for living in self._host.list_living():
            self._host.interrupt(living.attempt, make_interrupt_failure("the run is over"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LEAVE_SECONDS)
        for living in self._host.list_living():
            abandon(self._host.give_up(living.attempt))
        await self._stack.aclose()

    async def start(self, job: AttemptJob) -> None:
        self._host.start(job, self)

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run an attempt as a task; unlike a `TaskGroup`, the fleet can leave it behind."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        self._host.interrupt(attempt, failure)

    def give_up(self, attempt: int) -> str:
        for living in self._host.list_living():
            if living.attempt == attempt:
                task = self._host.give_up(attempt)
                self._tasks.discard(task)
                abandon(task)
                return f"in {living.phase} for {living.seconds:.0f} s"
        return "(no such attempt)"

    def take_census(self) -> FleetCensus:
        self._host.report_endpoints()
        self._host.check_disks()
        self._host.sample_memory()
        living = self._host.list_living()
        phases = Counter(str(one.phase) for one in living)
        uses = {
            one.attempt: AttemptUse(sandbox=one.memory, disk=one.disk, throttled=one.throttled, cpu=one.cpu)
            for one in living
        }
        return FleetCensus(
            workers=0,
            phases=dict(phases),
            usage=sum_usage(living),
            uses=uses,
            endpoints=self._endpoints.sum_up(),
        )

    @property
    def memory_version(self) -> int:
        return self._host.memory

    def allow_memory(self, attempt: int, memory: int) -> None:
        self._host.allow(attempt, memory)

    def trim(self) -> str:
        return ""  # this process is never idle

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        return  # this process is also the conductor, which must not be limited

    def recycle(self, least: int, *, at_once: bool) -> str:
        return ""  # this process cannot be replaced

    def send(self, attempt: int, message: FetchHeldCall | AnswerHeldCall) -> bool:
        if all(living.attempt != attempt for living in self._host.list_living()):
            return False
        if isinstance(message, FetchHeldCall):
            self._host.take(message, self._forward)
        else:
            self._host.answer(message)
        return True

    def score_group(self, group: int, together: bool) -> None:
        self._host.score(ScoreMembers(group=group, together=together))

    def announce(self, message: StandingMessage) -> None:
        self.create_task(self._host.follow(message))

    def change(self, config: RunConfig) -> None:
        self.announce(ChangeWorker(config=config))

    def adjust_workers(self, running: int, waiting: int, room: int) -> None:
        return  # there is always one host

    def condition(self) -> FleetCondition:
        return FleetCondition(ready=1, starting=0, draining=0, wanted=1)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._emit(WorkerBroken(message=f"internal error: {type(error).__name__}: {error}"))

    def _forward(self, message: ToConductor) -> None:
        if isinstance(message, EndpointsUsed):
            self._endpoints.add(0, message.uses)
            return
        if isinstance(message, AttemptDone) and message.tainted:
            note = "a thread of the attempt could not be ended and stays until the process exits"
            self._emit(EventNoted(kind="thread.left", message=note, attempt=message.verdict.attempt))
        self._emit(message)  # type: ignore[arg-type]
