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
from tests.host_harness import suite
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.config import Network, RunConfig, ServingConfig
from holdwater.core.errors import RunStopped
from holdwater.core.events import SampleOpened
from holdwater.core.records import Instance
from holdwater.core.serving_protocol import ModelChoice, ModelSource, Order
from holdwater.governor.leases import AttemptLeases
from holdwater.governor.meter import ResourceMeter
from holdwater.governor.run_usage import RunUsage
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.orders import OrderRow
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.resume_state import PlannedInstance
from holdwater.rollout.worker_protocol import WorkerSetup
from holdwater.run.conductor.admission import AttemptAdmission
from holdwater.run.conductor.feed import EmptyFeed
from holdwater.run.conductor.observers import VerdictObservers
from holdwater.run.conductor.replay import make_earlier_lookup
from holdwater.run.conductor.run_tasks import RunInbox
from holdwater.run.conductor.scheduler import ABORT_SECONDS, AttemptScheduler, RunParts
from holdwater.run.conductor.timeline import TimelineWriter
from holdwater.run.fleet.inline import InlineFleet
from holdwater.run.orders.catalogue import InstanceCatalogue
from holdwater.run.orders.order_book import OrderBook
from holdwater.run.orders.order_service import OrderService
from holdwater.run.orders.server_status import ServerStatus
from holdwater.run.resources.disk_space import DiskSpace

COUNT = 4


class StartingFeed(EmptyFeed):
    """Gives all samples at once, and says when it did."""

    def __init__(self, rows: list[int]) -> None:
        self._opened = [SampleOpened(instance=row, sample=0) for row in rows]
        self.given = asyncio.Event()

    async def take(self, count: int) -> list[SampleOpened]:
        opened, self._opened = self._opened, []
        self.given.set()
        return opened


class Stage:
    """A scheduler with all that surrounds it."""

    config: RunConfig
    space: DiskSpace
    scheduler: AttemptScheduler
    usage: RunUsage
    leases: AttemptLeases
    book: OrderBook | None
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
    place: Path, act: Callable[..., Any] = never_end, serving: ServingConfig | None = None
) -> AsyncIterator[tuple[Stage, InlineFleet]]:
    directory = RunDirectory.create(place)
    Ledger.create(directory)
    config = RunConfig(
        id=f"{os.getpid()}-{place.name}",  # its control groups are no other process's
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
        planned = [
            PlannedInstance(name=f"i{n}", digest=b"", payload=payload, place="here") for n in range(COUNT)
        ]
        stage.feed = StartingFeed(await stage.ledger.plan(planned))
        observers = VerdictObservers((), lambda kind, message: None)
        earlier = make_earlier_lookup(config, stage.ledger)
        stage.space = space = DiskSpace(config, directory, places)
        stage.usage = RunUsage(ResourceMeter(places, None, None))
        stage.leases = AttemptLeases(config, stage.usage, space.bound)
        welcome = WorkerSetup(config=config, directory=str(place), worker=0, token=stage.ledger.token)
        welcome = msgspec.structs.replace(welcome, path=os.defpath)
        inbox = RunInbox(print)
        async with InlineFleet(welcome, inbox.put, suite(), agent(act)) as fleet:
            stage.book = OrderBook(config, stage.ledger, fleet, {}) if serving else None
            admission = AttemptAdmission(stage.ledger, stage.leases, earlier, orders=stage.book)
            parts = RunParts(stage.feed, admission, fleet, inbox, space, observers, stage.book)
            stage.scheduler = AttemptScheduler(config, stage.ledger, 1, parts)
            yield stage, fleet
        space.close()


async def test_an_order_that_returns_as_it_is_given_up_has_one_ticket(tmp_path: Path) -> None:
    async with staged(tmp_path / f"run-{os.getpid()}", act=pass_at_once, serving=ServingConfig()) as (
        stage,
        fleet,
    ):
        # given an order that an earlier conductor left open
        ledger, scheduler = stage.ledger, stage.scheduler
        order = Order(key="k", instance="i0", model=ModelChoice(source=ModelSource.TRAINER))
        row = OrderRow(0, "k", msgspec.msgpack.encode(order), 0.0, 1, ())
        await ledger.place_order(row, size=1)
        book = stage.book
        assert book is not None
        timeline = TimelineWriter(ledger, stage.usage, stage.space)
        status = ServerStatus(ledger, fleet, book, scheduler, stage.leases, stage.usage, timeline)
        catalogue = InstanceCatalogue(suite(), agent(pass_at_once), stage.config, ledger)
        desk = OrderService(stage.config, ledger, catalogue, book, scheduler, fleet, status)
        running = asyncio.create_task(scheduler.run())
        async with asyncio.timeout(stretch(30)), desk.accept_orders():
            assert list(book.parked) == ["k"]

            desk._abandon_parked()
            ticket = await desk.place(order)

            async with desk.follow(ticket):
                while not ticket.finished:
                    await ticket.wait_for_change(ticket.version)
                assert (book.open_rollouts, len(book.by_key), book.by_key["k"]) == (1, 1, ticket)
                result = await desk.read_result(ticket)
        scheduler.finish()
        await running

    assert [rollout.outcome for rollout in result.rollouts] == ["passed"]
    assert book.open_rollouts == 0


@pytest.mark.parametrize("turns", range(0, 40, 2))
async def test_an_abort_in_any_loop_turn_settles_all_and_returns_all(tmp_path: Path, turns: int) -> None:
    place = tmp_path / f"run-{os.getpid()}-{turns}"
    async with staged(place) as (stage, _fleet):
        running = asyncio.create_task(stage.scheduler.run())
        await stage.feed.given.wait()
        for _ in range(turns):
            await asyncio.sleep(0)

        began = time.monotonic()
        stage.scheduler.stop(RunStopped("the run's time is used up"))
        with pytest.raises(RunStopped):
            await running

        assert time.monotonic() - began < ABORT_SECONDS / 2, "it waited for attempts that had ended"
        assert stage.leases.leased == 0
        assert list(stage.scheduler.list_unsettled()) == []
        assert stage.scheduler.plan.running == 0
        assert await stage.ledger.list_unsettled() == []
    with LedgerReader(place) as reader:
        kinds = {row.kind for row in reader.attempts()}
    assert kinds <= {"interrupted"}
