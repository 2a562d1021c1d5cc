"""A run that is stopped ends as soon as its attempts have, whatever stage of their start they are in."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.host_scene import suite

import holdwater as hw
from holdwater.core.config import Network, RunConfig
from holdwater.core.errors import RunStopped
from holdwater.core.events import Opened
from holdwater.core.records import Instance
from holdwater.governor.meter import Meter
from holdwater.ledger.book import Planned
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import Reader
from holdwater.rollout.wire import Welcome
from holdwater.run.feed import NoFeed
from holdwater.run.governor import Governor
from holdwater.run.inline import InlineFleet
from holdwater.run.observers import Observers
from holdwater.run.replay import earlier_in
from holdwater.run.scheduler import ABORT_SECONDS, Scheduler
from holdwater.run.space import Space

COUNT = 4


class StartingFeed(NoFeed):
    """Gives all samples at once, and says when it did."""

    def __init__(self, rows: list[int]) -> None:
        self._opened = [Opened(instance=row, sample=0) for row in rows]
        self.given = asyncio.Event()

    async def take(self, count: int) -> list[Opened]:
        opened, self._opened = self._opened, []
        self.given.set()
        return opened


class Stage:
    """A scheduler with all that surrounds it, and attempts that would never end by themselves."""

    scheduler: Scheduler
    governor: Governor
    ledger: Ledger
    feed: StartingFeed


@asynccontextmanager
async def staged(place: Path) -> AsyncIterator[tuple[Stage, InlineFleet]]:
    directory = RunDirectory.create(place)
    Ledger.create(directory)
    config = RunConfig(
        id=place.name,
        suite="s",
        agent="a",
        created=0.0,
        version="0",
        workers=0,
        concurrency=COUNT,
        network=Network.OPEN,
    )
    directory.write_config(config)
    places = {"run": directory.path, "scratch": directory.scratch}
    stage = Stage()

    async def act(instance: object, sandbox: object, model: object) -> None:
        await asyncio.Event().wait()

    async with Ledger(directory) as stage.ledger:
        payload = msgspec.msgpack.encode(Instance(id="i"))
        planned = [Planned(name=f"i{n}", digest=b"", payload=payload, place="here") for n in range(COUNT)]
        stage.feed = StartingFeed(await stage.ledger.plan(planned))
        observers = Observers((), lambda kind, message: None)
        earlier = earlier_in(config, stage.ledger)
        space = Space(config, directory, places)
        stage.scheduler = Scheduler(config, stage.ledger, stage.feed, observers, earlier, 1, print)
        meter = Meter(places, None, None)
        scheduler = stage.scheduler
        stage.governor = Governor(config, meter, space.bound, scheduler.preempt, scheduler.note)
        stage.scheduler.govern(stage.governor, space)
        welcome = Welcome(config=config, directory=str(place), worker=0, token=stage.ledger.token)
        welcome = msgspec.structs.replace(welcome, path=os.defpath)
        agent = hw.Agent(name="a", act=act)
        async with InlineFleet(welcome, scheduler.hear, suite(), agent) as fleet:
            yield stage, fleet
        space.close()


@pytest.mark.parametrize("turns", range(0, 40, 2))
async def test_an_abort_in_any_loop_turn_settles_all_and_returns_all(tmp_path: Path, turns: int) -> None:
    place = tmp_path / f"run-{os.getpid()}-{turns}"
    async with staged(place) as (stage, fleet):
        running = asyncio.create_task(stage.scheduler.run(fleet))
        await stage.feed.given.wait()
        for _ in range(turns):
            await asyncio.sleep(0)

        began = time.monotonic()
        stage.scheduler.stop(RunStopped("the run's time is used up"))
        with pytest.raises(RunStopped):
            await running

        assert time.monotonic() - began < ABORT_SECONDS / 2, "it waited for attempts that had ended"
        assert stage.governor.leased == 0
        assert list(stage.scheduler.living()) == []
        assert stage.scheduler.plan.running == 0
        assert await stage.ledger.unsettled() == []
    with Reader(place) as reader:
        kinds = {row.kind for row in reader.attempts()}
    assert kinds <= {"interrupted"}
