"""Accepts orders: the conductor's side of a server. `serve/` is the HTTP interface in front of it.

An order is in the ledger before it is accepted; its rollouts are samples like any other. In memory it is an
`ActiveOrder`, from its acceptance until its result is delivered or no client wants it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from ...conversation.nodes import read_nodes
from ...conversation.order_results import build_result
from ...core.config import RunConfig, ServingConfig
from ...core.errors import HoldwaterError, RequestRefused
from ...core.events import SampleWithdrawn
from ...core.groups import CLIENT_GONE, make_cancel_failure
from ...core.records import Instance
from ...core.serving_protocol import (
    PROTOCOL,
    CallAnswer,
    Called,
    MessageNode,
    ModelSource,
    Order,
    OrderResult,
    ServerHealth,
    ServerStats,
    SteerRequest,
)
from ...ledger.ledger import Ledger
from ...ledger.orders import KeyTaken, OrderRow
from ...ledger.reader import LedgerReader
from ...rollout.worker_protocol import SteerWorker
from ..conductor.feed import make_opened_event
from ..conductor.scheduler import AttemptScheduler
from ..fleet.interface import ServingFleet
from .active_order import ActiveOrder
from .catalogue import InstanceCatalogue
from .order_book import OrderBook
from .server_status import ServerStatus

STEERED = "steered"  # the ledger's name for the steered model; its key is never written to a file


class OrderService:
    """Serves the orders of one run. Implements `ServerBackend` of `serve/`."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        catalogue: InstanceCatalogue,
        book: OrderBook,
        scheduler: AttemptScheduler,
        fleet: ServingFleet,
        status: ServerStatus,
    ) -> None:
        self._config = config
        self._serving = config.serving or ServingConfig()
        self._ledger = ledger
        self._catalogue = catalogue
        self._book = book
        self._scheduler = scheduler
        self._fleet = fleet
        self._status = status
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="holdwater-results")
        self._has_model = config.model is not None or not catalogue.agent.uses_model  # without an order's own
        self._tasks: asyncio.TaskGroup | None = None
        self._working: set[asyncio.Task[None]] = set()  # bound: `serving.queue` rollouts

    @asynccontextmanager
    async def accept_orders(self) -> AsyncIterator[OrderService]:
        """Accept orders in this block. Orders of an earlier conductor wait for their clients."""
        loop = asyncio.get_running_loop()
        error: HoldwaterError | None = None
        with LedgerReader(self._ledger.directory) as self._reader:
            async with asyncio.TaskGroup() as self._tasks:
                through = self._tasks.create_task(self._catalogue.read_suite())
                await self._restore_orders()
                patience = loop.call_later(self._serving.return_grace, self._abandon_parked)
                try:
                    yield self
                except HoldwaterError as raised:
                    error = raised  # re-raised outside the group, so that it is no exception group
                finally:
                    patience.cancel()
                    through.cancel()
                    if not self._scheduler.started.is_set():  # it never will be
                        for task in self._working:
                            task.cancel()
                    for active in self._book.by_key.values():
                        active.stop_grace()
            self._reading.shutdown(wait=True)
        if error is not None:
            raise error

    # Called by the server.

    async def place(self, order: Order, key: str | None = None, owner: str = "") -> ActiveOrder:
        """Accept an order or return the one with its key; raise `RequestRefused`. `key` is its endpoint's."""
        self._check(order, known=order.key in self._book.by_key)
        brought = order.instance
        order = msgspec.structs.replace(order, instance=self._catalogue.name_instance(brought))
        while (active := self._book.by_key.get(order.key)) is not None:
            await asyncio.shield(active.placed)
            if self._book.by_key.get(order.key) is not active:
                continue  # it was refused, or is finished and dropped
            if (active.order, active.owner) != (order, owner):
                raise RequestRefused(
                    "conflict", f"order key `{order.key}` is already used by a different request"
                )
            if active.abandoned:  # it runs again as soon as the cancelled rollouts have ended
                await active.wait_for_change(active.version)
                continue
            active.mark_known()
            return active
        active = self._book.by_key[order.key] = ActiveOrder(order, key, owner)
        try:
            await self._write(active, brought)
            if active.new:
                self._book.statistics.count_order()
        except BaseException as error:  # boundary: remove the order, then re-raise
            del self._book.by_key[order.key]
            active.placed.set_result(None)
            if isinstance(error, KeyTaken):
                raise RequestRefused("conflict", error.message) from None
            if isinstance(error, RequestRefused):
                self._book.statistics.count_refusal(error.code)
            raise
        active.placed.set_result(None)
        return active

    async def find(self, key: str, owner: str = "") -> ActiveOrder | None:
        """Return the order with this key, from memory or the ledger; None also if another client owns it."""
        if (active := self._book.by_key.get(key)) is not None:
            await asyncio.shield(active.placed)
            return active if active.owner == owner else None
        row = await self._ledger.find_order(key)
        return None if row is None or row.owner != owner else await self._load_order(row)

    async def steer(self, to: SteerRequest, key: str | None = None) -> None:
        """Change the run's model from now on; `key` is its API key."""
        await self._ledger.remember(STEERED, msgspec.msgpack.encode(to))
        self._book.tokens.note_version(to.version)
        self._has_model = True
        self._fleet.announce(SteerWorker(to=to, key=key))
        await self._ledger.note("model.steered", f"version `{to.version}`: {to.url}")

    def drain(self) -> None:
        """Accept no more orders; the server ends when the open ones are finished."""
        self._book.drain()
        self._end_if_over()

    def health(self) -> ServerHealth:
        return self._status.health()

    def stats(self) -> ServerStats:
        return self._status.stats()

    # Called by the server, for one order.

    @asynccontextmanager
    async def follow(self, order: ActiveOrder) -> AsyncIterator[None]:
        """Follow the order. Once the last follower is gone for the grace period, the order is cancelled."""
        order.add_follower()
        try:
            yield
        finally:
            order.remove_follower()
            if not order.followers and order.finished:
                self._forget(order)
            elif not order.followers and not order.order.detached:
                end = partial(self._cancel, order, CLIENT_GONE, "its client is gone")
                order.start_grace(self._serving.grace, end)

    def answer(self, order: ActiveOrder, answer: CallAnswer) -> None:
        """Answer a held call; raise `RequestRefused` (`gone`) if it is not held any more."""
        member = order.find_caller(answer.call)
        if member is None:
            raise RequestRefused(
                "gone", f"this call does not wait for an answer any more: `{answer.call[:80]}`"
            )
        del member.calls[answer.call]
        self._book.tokens.note_version(answer.version)
        self._book.calls.deliver_answer(answer)

    def cancel(self, order: ActiveOrder, message: str, *, left: bool = False) -> None:
        """End all open members with the verdict `cancelled`; if it was `left`, its key may run it again."""
        self._cancel(order, CLIENT_GONE if left else "asked", message)

    async def wait_for_change(self, order: ActiveOrder, seen: int) -> int:
        return await order.wait_for_change(seen)

    async def read_nodes(self, order: ActiveOrder, member: int, since: int) -> tuple[MessageNode, ...]:
        """Return the messages of a member's conversation, from number `since` on."""
        attempt, directory = order.members[member].attempt, self._ledger.directory

        def load_nodes() -> tuple[MessageNode, ...]:
            return tuple(node for node in read_nodes(directory, attempt) if node.id >= since)

        return await asyncio.get_running_loop().run_in_executor(self._reading, load_nodes)

    async def fetch_call(self, order: ActiveOrder, call: str, *, whole: bool) -> Called | None:
        """Return the request of a held call; None when it is not held any more."""
        member = order.find_caller(call)
        if member is None:
            return None
        return await self._book.calls.fetch_call(call, whole=whole, member=member.member)

    async def read_result(self, order: ActiveOrder) -> OrderResult:
        """Read the result from the ledger, in a thread; only when the order is `finished`."""
        loop, how = asyncio.get_running_loop(), order.order.trajectory
        result = await loop.run_in_executor(self._reading, build_result, self._reader, order.row, how)
        return self._book.tokens.rate_result(order.order, result, first=order.take_first_reading())

    async def mark_delivered(self, order: ActiveOrder) -> None:
        """Record that the client has the result; the order is not new any more."""
        await self._ledger.mark_delivered(order.id, self._config.keep)
        order.mark_delivered()

    def _cancel(self, order: ActiveOrder, kind: str, message: str) -> None:
        if (parked := self._book.parked.pop(order.order.key, None)) is not None:
            self._abandon(parked, kind, message)
            return
        if kind == CLIENT_GONE:
            order.mark_abandoned()
        for member in order.members:
            if member.outcome is None:
                failure = make_cancel_failure(kind, message)
                where = {"instance": order.row.instance, "sample": member.sample}
                self._scheduler.handle(SampleWithdrawn(**where, failure=failure))

    # Accepting orders.

    def _check(self, order: Order, *, known: bool) -> None:
        """Raise `RequestRefused` if the server can never run the order. A `known` order has been accepted."""
        if order.protocol != PROTOCOL:
            raise RequestRefused(
                "version", f"unsupported protocol version {order.protocol} (this server supports {PROTOCOL})"
            )
        if known:
            return
        slots, queue = self._config.slots, self._serving.queue
        if order.size > queue:
            raise RequestRefused(
                "invalid", f"{order.size} rollouts exceed the limit of open rollouts: {queue}"
            )
        if order.group is not None and order.size > slots:
            hint = "its members run at once: order fewer, or start the server with more `--concurrency`"
            raise RequestRefused("invalid", f"a group of {order.size} does not fit {slots} slots", hint)
        if order.model.source is ModelSource.FUNCTION and self._serving.policy is None:
            raise RequestRefused("invalid", "the server has no policy", "start it with `--policy`")
        if order.model.source is ModelSource.RUN and not self._has_model:
            hint = "name an `endpoint`, answer as `trainer`, or start the server with `--model`"
            raise RequestRefused("invalid", "the server has no model", hint)

    def _reserve(self, places: int) -> AbstractContextManager[None]:
        """Reserve room for this many rollouts; it is given back only if the block raises."""
        if self._book.draining or self._scheduler.draining:
            raise RequestRefused("draining", "the server accepts no more orders")
        return self._book.reserve(places)

    async def _write(self, active: ActiveOrder, brought: str | Instance) -> None:
        order = active.order
        asked = msgspec.msgpack.encode(order)
        known = self._book.parked.get(order.key) or await self._ledger.find_order(order.key)
        if known is None:
            with self._reserve(order.size):
                at, instance = time.time(), await self._find_instance(brought)
                row = OrderRow(0, order.key, asked, at, instance, (), owner=active.owner)
                known = await self._ledger.place_order(row, order.size)
        elif (known.asked, known.owner) != (asked, active.owner):
            raise KeyTaken(f"order key `{order.key}` is already used by a different request")
        else:
            self._book.parked.pop(order.key, None)
            known = await self._readmit(known)
        self._book.tokens.note_version(order.model.version)
        await self._take_up(active, known)

    async def _readmit(self, row: OrderRow) -> OrderRow:
        """Readmit a known order: rollouts that were cancelled because its client was gone run again."""
        if not await self._ledger.is_abandoned(row.id):
            self._book.count_rollouts(len(row.samples))
            return row
        with self._reserve(len(row.samples)):
            await self._ledger.reopen_abandoned(row.id)
        return msgspec.structs.replace(row, delivered=False)

    async def _find_instance(self, instance: str | Instance) -> int:
        row = await self._catalogue.find_row(instance)
        if row is None:
            error = self._catalogue.error
            hint = f"the suite could not be read to its end: {error.message}" if error else ""
            raise RequestRefused("unknown", f"no such instance: `{instance}`"[:300], hint)
        return row

    async def _take_up(self, active: ActiveOrder, row: OrderRow) -> None:
        """Open every rollout of the order that is not closed."""
        active.load_row(row, await self._ledger.list_closed_rollouts(row.id) if row.known else ())
        if active.finished:
            return
        self._book.open(active)
        opened = [make_opened_event(standing) for standing in await self._ledger.list_open_rollouts(row)]
        group = active.membership
        await self._scheduler.started.wait()
        self._scheduler.open_samples([msgspec.structs.replace(event, group=group) for event in opened])

    async def _load_order(self, row: OrderRow) -> ActiveOrder:
        """Return an `ActiveOrder` for a query about an order that is only in the ledger."""
        active = ActiveOrder(msgspec.msgpack.decode(row.asked, type=Order), None, row.owner)
        active.placed.set_result(None)
        active.load_row(row, await self._ledger.list_closed_rollouts(row.id))
        return active

    # Orders of an earlier conductor.

    async def _restore_orders(self) -> None:
        """Restore open orders: detached ones start with the scheduler, others when their clients return."""
        if (steered := await self._ledger.recall(STEERED)) is not None:
            self._has_model = True
            self._fleet.announce(SteerWorker(to=msgspec.msgpack.decode(steered, type=SteerRequest)))
        async for row in self._ledger.open_orders():
            order = msgspec.msgpack.decode(row.asked, type=Order)
            if order.detached:
                self._start(self._resume_order(self._register(row), row))
            else:
                self._book.parked[order.key] = row

    def _register(self, row: OrderRow) -> ActiveOrder:
        """Register an order of an earlier conductor, so that a client that places it again finds it."""
        order = msgspec.msgpack.decode(row.asked, type=Order)
        active = self._book.by_key[order.key] = ActiveOrder(order, None, row.owner)
        self._book.count_rollouts(len(row.samples))
        return active

    async def _resume_order(self, active: ActiveOrder, row: OrderRow) -> None:
        """Continue the order, whether its client is connected or not."""
        await self._take_up(active, row)
        active.placed.set_result(None)

    def _abandon_parked(self) -> None:
        """Cancel the orders whose clients did not come back."""
        for row in self._book.take_parked():
            self._abandon(row, CLIENT_GONE, "its client is gone")

    def _abandon(self, row: OrderRow, kind: str, message: str) -> None:
        """Take up an order of an earlier conductor in order to cancel it."""
        active = self._register(row)  # now: its client may come back before the task runs

        async def take_up_and_cancel() -> None:
            await self._resume_order(active, row)
            self._cancel(active, kind, message)

        self._start(take_up_and_cancel())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None, "orders are not accepted yet"
        self._working.add(task := self._tasks.create_task(work))
        task.add_done_callback(self._working.discard)

    # Dropping orders.

    def _forget(self, active: ActiveOrder) -> None:
        self._book.forget(active)
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._book.over:
            self._scheduler.finish()
