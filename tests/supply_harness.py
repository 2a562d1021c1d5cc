"""A scheduler with its governor and its space, over instances that want images; a test says what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.ledger_runs import new_run

from holdwater.core.authoring import Suite
from holdwater.core.errors import HoldwaterError
from holdwater.core.records import Grade, Instance, Verdict
from holdwater.core.summary import RunSummary
from holdwater.governor.leases import AttemptLeases
from holdwater.governor.memory_control import LOOK_SECONDS, MemoryControl
from holdwater.governor.meter import ResourceMeter
from holdwater.governor.resource_reading import FleetCensus
from holdwater.governor.run_usage import RunUsage
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader
from holdwater.rollout.periodic_task import PeriodicTask
from holdwater.rollout.worker_protocol import AttemptDone, AttemptJob
from holdwater.run.conductor.admission import AttemptAdmission, ImageSupply
from holdwater.run.conductor.feed import RunFeed
from holdwater.run.conductor.instance_source import InstanceSource
from holdwater.run.conductor.observers import VerdictObservers
from holdwater.run.conductor.replay import make_earlier_lookup
from holdwater.run.conductor.run_tasks import RunInbox
from holdwater.run.conductor.scheduler import AttemptScheduler, RunParts
from holdwater.run.fleet.interface import Emit
from holdwater.run.resources.disk_space import DiskControls, DiskSpace

Act = Callable[[AttemptJob], Coroutine[Any, Any, None]]


async def nothing(job: AttemptJob) -> None:
    return


class Acting:
    """A fleet: each attempt does `act`, and passes."""

    def __init__(self, token: int, act: Act, group: asyncio.TaskGroup, emit: Emit) -> None:
        self._token = token
        self._act = act
        self._group = group
        self._emit = emit
        self.jobs: list[AttemptJob] = []
        self.memory_version = 0

    async def start(self, job: AttemptJob) -> None:
        self.jobs.append(job)
        self.memory_version += 1
        self._group.create_task(self._lived(job))

    async def _lived(self, job: AttemptJob) -> None:
        await self._act(job)
        grade = Grade(passed=True, score=1.0)
        self._emit(AttemptDone(verdict=Verdict(attempt=job.attempt.id, token=self._token, grade=grade)))

    def interrupt(self, attempt: int, reason: str) -> None:
        raise AssertionError("these are not interrupted")

    def give_up(self, attempt: int) -> str:
        return "nowhere"

    def take_census(self) -> FleetCensus:
        return FleetCensus(workers=0)

    def allow_memory(self, attempt: int, memory: int) -> None: ...

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None: ...

    def trim(self) -> str:
        return ""

    def recycle(self, least: int, *, at_once: bool) -> str:
        return ""


class Conducted(msgspec.Struct):
    """What came of it."""

    summary: RunSummary
    jobs: list[AttemptJob]
    error: HoldwaterError | None


async def conducted(
    place: Path,
    instances: Sequence[Instance],
    supply: Any,
    act: Act = nothing,
    begun: Callable[[AttemptScheduler], None] = lambda scheduler: None,
    **asked: Any,
) -> Conducted:
    """A whole run. A supply that is a store too, as the real one, is what its budget is about."""
    directory = new_run(place, sandbox="docker", backoff=0.01, **asked)
    config = directory.read_config()
    places = {"run": directory.path, "scratch": directory.path, "temp": directory.path}
    space = DiskSpace(config, directory, places)
    supplies: ImageSupply = supply
    error: HoldwaterError | None = None
    async with Ledger(directory) as ledger, asyncio.TaskGroup() as group:
        source = InstanceSource(Suite(name="s", instances=lambda: list(instances)), config)
        feed = RunFeed(config, ledger, source, resumed=False)
        earlier = make_earlier_lookup(config, ledger)
        observers = VerdictObservers((), lambda kind, message: None)
        usage = RunUsage(ResourceMeter(places))
        leases = AttemptLeases(config, usage, space.bound)
        inbox = RunInbox(lambda line: None)
        fleet = Acting(ledger.token, act, group, inbox.put)
        admission = AttemptAdmission(ledger, leases, earlier, supplies)
        parts = RunParts(feed, admission, fleet, inbox, space, observers)
        scheduler = AttemptScheduler(config, ledger, 1, parts)
        control = MemoryControl(config, usage, leases, fleet, scheduler.preempt, inbox.note)
        duties = [PeriodicTask("governor", LOOK_SECONDS, control.look_if_due)]
        if hasattr(supply, "periodic_tasks"):
            space.use_store(supply)
            duties += supply.periodic_tasks(leases)
        levers = DiskControls(
            leases.hold, leases.release, inbox.note, scheduler.stop, lambda: scheduler.running
        )
        begun(scheduler)
        with space.watch_run(levers) as watches:
            try:
                await scheduler.run((*duties, *watches))
            except HoldwaterError as raised:
                error = raised
    space.close()
    with LedgerReader(directory) as reader:
        return Conducted(summary=reader.summary(), jobs=fleet.jobs, error=error)
