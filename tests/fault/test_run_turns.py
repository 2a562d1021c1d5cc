"""Moments that share a loop turn: an abort while attempts start, an order that returns as it is given up."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.host_scene import suite

import holdwater as hw
from holdwater.core.config import Network, RunConfig, Serving
from holdwater.core.errors import RunStopped
from holdwater.core.events import Opened
from holdwater.core.records import Instance
from holdwater.core.serving import ModelChoice, Order, Source
from holdwater.governor.meter import Meter
from holdwater.ledger.book import Planned
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.orders import OrderRow
from holdwater.ledger.reader import Reader
from holdwater.rollout.wire import Welcome
from holdwater.run.catalogue import Catalogue
from holdwater.run.desk import Desk
from holdwater.run.feed import NoFeed
from holdwater.run.governor import Governor
from holdwater.run.inline import InlineFleet
from holdwater.run.observers import Observers
from holdwater.run.replay import earlier_in
from holdwater.run.scheduler import ABORT_SECONDS, Scheduler
from holdwater.run.service import Service
from holdwater.run.space import Space
from holdwater.run.timeline import Timeline

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
    """A scheduler with all that surrounds it."""

    config: RunConfig
    space: Space
    scheduler: Scheduler
    governor: Governor
    ledger: Ledger
    feed: StartingFeed


async def never_end(instance: object, sandbox: object, model: object) -> None:
    await asyncio.Event().wait()


async def pass_at_once(instance: object, sandbox: object, model: object) -> None:
    return


def agent(act: Callable[..., Any]) -> hw.Agent:
    return hw.Agent(name="a", act=act)


@asynccontextmanager
async def staged(
    place: Path, act: Callable[..., Any] = never_end, serving: Serving | None = None
) -> AsyncIterator[tuple[Stage, InlineFleet]]:
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
        serving=serving,
    )
    directory.write_config(config)
    places = {"run": directory.path, "scratch": directory.scratch}
    stage = Stage()
    stage.config = config
    async with Ledger(directory) as stage.ledger:
        payload = msgspec.msgpack.encode(Instance(id="i"))
        planned = [Planned(name=f"i{n}", digest=b"", payload=payload, place="here") for n in range(COUNT)]
        stage.feed = StartingFeed(await stage.ledger.plan(planned))
        observers = Observers((), lambda kind, message: None)
        earlier = earlier_in(config, stage.ledger)
        stage.space = space = Space(config, directory, places)
        stage.scheduler = Scheduler(config, stage.ledger, stage.feed, observers, earlier, 1, print)
        meter = Meter(places, None, None)
        scheduler = stage.scheduler
        stage.governor = Governor(config, meter, space.bound, scheduler.preempt, scheduler.note)
        stage.scheduler.govern(stage.governor, space)
        welcome = Welcome(config=config, directory=str(place), worker=0, token=stage.ledger.token)
        welcome = msgspec.structs.replace(welcome, path=os.defpath)
        async with InlineFleet(welcome, scheduler.hear, suite(), agent(act)) as fleet:
            yield stage, fleet
        space.close()


async def test_an_order_that_returns_as_it_is_given_up_has_one_ticket(tmp_path: Path) -> None:
    async with staged(tmp_path / f"run-{os.getpid()}", act=pass_at_once, serving=Serving()) as (stage, fleet):
        # given an order that an earlier conductor left open
        ledger, scheduler = stage.ledger, stage.scheduler
        order = Order(key="k", instance="i0", model=ModelChoice(source=Source.TRAINER))
        row = OrderRow(0, "k", msgspec.msgpack.encode(order), 0.0, 1, ())
        await ledger.place(row, size=1)
        service = Service(fleet, scheduler, stage.governor, Timeline(ledger, stage.space))
        catalogue = Catalogue(suite(), agent(pass_at_once), stage.config, ledger)
        desk = Desk(stage.config, catalogue, scheduler, fleet, service)
        scheduler.serve(desk)
        running = asyncio.create_task(scheduler.run(fleet))
        async with asyncio.timeout(30), desk.opened():
            assert list(desk._parked) == ["k"]

            desk._give_up()
            ticket = await desk.place(order)

            async with ticket.attended():
                while not ticket.finished:
                    await ticket.changed(ticket.version)
                assert (desk.open, len(desk._tickets), desk._tickets["k"]) == (1, 1, ticket)
                result = await ticket.result()
        scheduler.finish()
        await running

    assert [rollout.outcome for rollout in result.rollouts] == ["passed"]
    assert desk.open == 0


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
