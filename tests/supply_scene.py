"""A scheduler with its governor and its space, over instances that want images; a test says what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.ledger_scene import new_run

from holdwater.core.authoring import Suite
from holdwater.core.config import SandboxKind
from holdwater.core.errors import HoldwaterError
from holdwater.core.records import Grade, Instance, Verdict
from holdwater.core.summary import Summary
from holdwater.governor.meter import Meter
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import Reader
from holdwater.rollout.duty import Duty
from holdwater.rollout.wire import Done, Job
from holdwater.run.feed import RunFeed
from holdwater.run.fleet import Census, Emit, Use
from holdwater.run.governor import Governor
from holdwater.run.observers import Observers
from holdwater.run.replay import earlier_in
from holdwater.run.scheduler import Scheduler
from holdwater.run.source import Source
from holdwater.run.space import Levers, Space
from holdwater.run.wanted import Supplies

Act = Callable[[Job], Coroutine[Any, Any, None]]


async def nothing(job: Job) -> None:
    return


class Acting:
    """A fleet: each attempt does `act`, and passes."""

    def __init__(self, token: int, act: Act, group: asyncio.TaskGroup) -> None:
        self._token = token
        self._act = act
        self._group = group
        self._uses: dict[int, Use] = {}
        self.emit: Emit = lambda news: None
        self.jobs: list[Job] = []
        self.news = 0

    async def start(self, job: Job) -> None:
        self.jobs.append(job)
        self.news += 1
        self._group.create_task(self._lived(job))

    async def _lived(self, job: Job) -> None:
        await self._act(job)
        grade = Grade(passed=True, score=1.0)
        self.emit(Done(verdict=Verdict(attempt=job.attempt.id, token=self._token, grade=grade)))

    def interrupt(self, attempt: int, reason: str) -> None:
        raise AssertionError("these are not interrupted")

    def give_up(self, attempt: int) -> str:
        return "nowhere"

    def census(self) -> Census:
        return Census(workers=0)

    def allow(self, attempt: int, memory: int) -> None: ...

    def permit(self, leases: Mapping[int, int], room: int) -> None: ...

    def trim(self) -> str:
        return ""

    def recycle(self, least: int, *, at_once: bool) -> str:
        return ""


class Conducted(msgspec.Struct):
    """What came of it."""

    summary: Summary
    jobs: list[Job]
    error: HoldwaterError | None


async def conducted(
    place: Path,
    instances: Sequence[Instance],
    supply: Any,
    act: Act = nothing,
    begun: Callable[[Scheduler, Governor], None] = lambda scheduler, governor: None,
    **asked: Any,
) -> Conducted:
    """A whole run. A supply that is a store too, as the real one, is what its budget is about."""
    directory = new_run(place, sandbox=SandboxKind.DOCKER, backoff=0.01, **asked)
    config = directory.read_config()
    places = {"run": directory.path, "scratch": directory.path, "temp": directory.path}
    space = Space(config, directory, places)
    supplies: Supplies = supply
    error: HoldwaterError | None = None
    async with Ledger(directory) as ledger, asyncio.TaskGroup() as group:
        source = Source(Suite(name="s", instances=lambda: list(instances)), config)
        feed = RunFeed(config, ledger, source, resumed=False)
        earlier = earlier_in(config, ledger)
        observers = Observers((), lambda kind, message: None)
        scheduler = Scheduler(config, ledger, feed, observers, earlier, 1, lambda line: None)
        meter = Meter(places)
        governor = Governor(config, meter, space.bound, scheduler.preempt, scheduler.note)
        scheduler.govern(governor, space, supplies)
        duties: list[Duty] = []
        if hasattr(supply, "duties"):
            space.keep_in(supply)
            duties += supply.duties(governor)
        fleet = Acting(ledger.token, act, group)
        fleet.emit = scheduler.hear
        levers = Levers(
            governor.hold, governor.release, scheduler.note, scheduler.stop, lambda: scheduler.running
        )
        begun(scheduler, governor)
        with space.begun(levers) as watches:
            try:
                await scheduler.run(fleet, (*duties, governor.duty(fleet), *watches))
            except HoldwaterError as raised:
                error = raised
    space.close()
    with Reader(directory) as reader:
        return Conducted(summary=reader.summary(), jobs=fleet.jobs, error=error)
