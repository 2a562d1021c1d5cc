"""Where orders are taken: the conductor's side of a server. `serve/` is the door in front of it.

An order is in the ledger before it is accepted; its rollouts are samples like any other. What is kept of one
in memory is a `Ticket`, from its acceptance until its result has been delivered, or nobody wants it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec

from ..core.config import RunConfig, Serving
from ..core.errors import HoldwaterError, Refused
from ..core.events import Opened
from ..core.groups import CLIENT_GONE, cancelled
from ..core.records import Attempt, Instance, Outcome, Verdict
from ..core.serving import PROTOCOL, Answer, Called, Health, Node, Order, Result, Source, Stats, Steer
from ..ledger.nodes import nodes
from ..ledger.orders import KeyTaken, OrderRow
from ..ledger.reader import Reader
from ..ledger.results import result_of
from ..rollout.wire import Offer, Progress, Steered
from .catalogue import Catalogue
from .feed import reopened
from .fleet import Attended, Underway
from .held import Calls
from .scheduler import Scheduler
from .service import Service
from .ticket import MemberState, Ticket

BUSY_SECONDS = 1.0  # before it is worth to ask again
STEERED = "steered"  # what the ledger remembers the model by; its key is in no file
Key = tuple[int, int]  # instance, sample


class Desk:
    """One server's. Implements `scheduler.Customers`."""

    def __init__(
        self, config: RunConfig, catalogue: Catalogue, scheduler: Scheduler, fleet: Attended, service: Service
    ) -> None:
        self._config = config
        self._serving = config.serving or Serving()
        self._catalogue = catalogue
        self._scheduler = scheduler
        self._ledger = scheduler.ledger
        self._fleet = fleet
        self._service = service
        self._calls = Calls(fleet)
        self._tickets: dict[str, Ticket] = {}  # by key; bound: `serving.queue` rollouts
        self._wanted: dict[Key, Ticket] = {}  # by sample; bound: the same
        self._groups: dict[int, Ticket] = {}  # by order; bound: the same
        self._parked: dict[str, OrderRow] = {}  # left by an earlier conductor; bound: the same
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="holdwater-results")
        self.open = 0  # rollouts of all tickets
        self._has_model = config.model is not None or not catalogue.agent.uses_model
        self._tasks: asyncio.TaskGroup | None = None
        self._working: set[asyncio.Task[None]] = set()  # bound: `serving.queue` rollouts

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Desk]:
        """Orders are taken in this block. What an earlier conductor left waits for its clients."""
        loop = asyncio.get_running_loop()
        error: HoldwaterError | None = None
        with Reader(self._ledger.directory) as self._reader:
            async with asyncio.TaskGroup() as self._tasks:
                await self._service.begin()
                through = self._tasks.create_task(self._catalogue.go_through())
                await self._recall()
                patience = loop.call_later(self._serving.return_grace, self._give_up)
                try:
                    yield self
                except HoldwaterError as raised:
                    error = raised  # outside it is no group of errors
                finally:
                    patience.cancel()
                    through.cancel()
                    if not self._scheduler.started.is_set():  # it never will be
                        for task in self._working:
                            task.cancel()
                    for ticket in self._tickets.values():
                        if ticket.timer is not None:
                            ticket.timer.cancel()
            self._reading.shutdown(wait=True)
        if error is not None:
            raise error

    # What the door asks for.

    async def place(self, order: Order, key: str | None = None, owner: str = "") -> Ticket:
        """Take an order, or find the one that has its key; `key` is its endpoint's. Raises `Refused`."""
        self._check(order)
        brought = order.instance
        order = msgspec.structs.replace(order, instance=self._catalogue.name(brought))
        while (ticket := self._tickets.get(order.key)) is not None:
            await asyncio.shield(ticket.placed)
            if self._tickets.get(order.key) is not ticket:
                continue  # it was refused, or is over and gone
            if (ticket.order, ticket.owner) != (order, owner):
                raise Refused("conflict", f"the key belongs to an order that asks otherwise: `{order.key}`")
            if ticket.abandoned:  # it runs anew as soon as what was cancelled has ended
                await ticket.changed(ticket.version)
                continue
            ticket.new = False
            return ticket
        ticket = self._tickets[order.key] = Ticket(order, key, self, owner)
        try:
            await self._write(ticket, brought)
            if ticket.new:
                self._service.counts.ordered()
        except BaseException as error:  # boundary: given back, then raised again
            del self._tickets[order.key]
            ticket.placed.set_result(None)
            if isinstance(error, KeyTaken):
                raise Refused("conflict", error.message) from None
            if isinstance(error, Refused):
                self._service.counts.refused(error.code)
            raise
        ticket.placed.set_result(None)
        return ticket

    async def find(self, key: str, owner: str = "") -> Ticket | None:
        """The order with this key, in memory or in the ledger; None also if it is another client's."""
        if (ticket := self._tickets.get(key)) is not None:
            await asyncio.shield(ticket.placed)
            return ticket if ticket.owner == owner else None
        row = await self._ledger.order(key)
        return None if row is None or row.owner != owner else await self._found(row)

    async def steer(self, to: Steer, key: str | None = None) -> None:
        """From now on the run's model is another one, with that key."""
        await self._ledger.remember(STEERED, msgspec.msgpack.encode(to))
        self._has_model = True
        self._fleet.steer(Steered(to=to, key=key))
        await self._ledger.note("model.steered", f"version `{to.version}`: {to.url}")

    def drain(self) -> None:
        """Take no more orders; when those that are open are over, the server ends."""
        self._service.draining = True
        self._end_if_idle()

    def health(self) -> Health:
        return self._service.health()

    def stats(self) -> Stats:
        return self._service.stats(self._calls.held, len(self._tickets))

    # What a ticket asks for (`ticket.Counter`).

    async def read(self, ticket: Ticket) -> Result:
        """The result, from disk, in a thread."""
        loop = asyncio.get_running_loop()
        how = ticket.order.trajectory
        return await loop.run_in_executor(self._reading, result_of, self._reader, ticket.row, how)

    async def nodes(self, attempt: int, since: int) -> tuple[Node, ...]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reading, self._nodes, attempt, since)

    def _nodes(self, attempt: int, since: int) -> tuple[Node, ...]:
        return tuple(node for node in nodes(self._ledger.directory, attempt) if node.id >= since)

    async def delivered(self, ticket: Ticket) -> None:
        await self._ledger.deliver(ticket.id, self._config.keep)
        ticket.row = msgspec.structs.replace(ticket.row, delivered=True)

    async def fetch(self, call: str, *, whole: bool, member: int) -> Called | None:
        return await self._calls.fetch(call, whole=whole, member=member)

    def pass_on(self, answer: Answer) -> None:
        self._calls.deliver(answer)

    def left(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: it is cancelled, unless someone comes back."""
        if ticket.finished:
            self._forget(ticket)
        elif not ticket.order.detached:
            loop = asyncio.get_running_loop()
            ticket.timer = loop.call_later(
                self._serving.grace, self.cancel, ticket, CLIENT_GONE, "its client is gone"
            )

    def cancel(self, ticket: Ticket, kind: str, message: str) -> None:
        if (parked := self._parked.pop(ticket.order.key, None)) is not None:
            self._abandon(parked, kind, message)
            return
        ticket.abandoned = ticket.abandoned or kind == CLIENT_GONE
        for member in ticket.members:
            if member.outcome is None:
                self._scheduler.withdraw(ticket.row.instance, member.sample, cancelled(kind, message))

    # What the scheduler says (`scheduler.Customers`).

    def offer(self, attempt: Attempt) -> Offer | None:
        ticket = self._wanted.get((attempt.instance, attempt.sample))
        return None if ticket is None else ticket.offer

    def started(self, attempt: Attempt) -> None:
        if (found := self._member(attempt)) is not None:
            ticket, member = found
            if not member.attempt:
                self._service.counts.started(time.time() - ticket.row.at)
            member.begin(attempt.id)
            self._calls.belong(attempt.id, ticket, member)
            ticket.change()

    def underway(self, news: Underway) -> None:
        match news:
            case Progress(attempt=attempt, turns=turns, usage=usage):
                if (found := self._calls.owner(attempt)) is not None:
                    found[1].turns, found[1].usage = turns, usage
                    found[0].change()
            case _:
                self._calls.hear(news)

    def settled(self, verdict: Verdict) -> None:
        self._calls.over(verdict.attempt)

    def closed(self, outcome: Outcome) -> None:
        ticket = self._wanted.pop((outcome.instance, outcome.sample), None)
        if ticket is None:
            return
        ticket.close(outcome)
        now = time.time()
        self._service.counts.finished(now, now - ticket.row.at, outcome.kind)
        if ticket.finished and not ticket.followers:
            self._forget(ticket)

    def rally(self, group: int, together: bool) -> None:
        self._fleet.score(group, together)

    def lack(self, group: int) -> None:
        """A member failed for good, and is going to be replaced."""
        self._groups[group].coming += 1

    async def replace(self, group: int, instance: int) -> None:
        """Another one is opened in its place."""
        ticket = self._groups[group]
        sample = await self._ledger.add_member(group, instance, len(ticket.members))
        ticket.replaced(sample)
        self.open += 1
        self._wanted[instance, sample] = ticket
        self._scheduler.open([Opened(instance=instance, sample=sample, group=ticket.membership)])

    # Taking orders.

    def _check(self, order: Order) -> None:
        if order.protocol != PROTOCOL:
            raise Refused("version", f"protocol {order.protocol} is not spoken here: {PROTOCOL} is")
        if order.key in self._tickets:
            return
        slots, queue = self._config.slots, self._serving.queue
        if order.size > queue:
            raise Refused("invalid", f"{order.size} rollouts are more than may ever be open: {queue}")
        if order.group is not None and order.size > slots:
            hint = "its members run at once: ask for fewer, or start the server with more `--concurrency`"
            raise Refused("invalid", f"a group of {order.size} does not fit {slots} slots", hint)
        if order.model.source is Source.FUNCTION and self._serving.policy is None:
            raise Refused("invalid", "the server has no policy of its own", "start it with `--policy`")
        if order.model.source is Source.RUN and not self._has_model:
            hint = "name an `endpoint`, answer as `trainer`, or start the server with `--model`"
            raise Refused("invalid", "the server has no model", hint)

    @contextmanager
    def _reserved(self, places: int) -> Iterator[None]:
        """Room for so many rollouts, which stays taken unless the block raises."""
        if self._service.draining or self._scheduler.draining:
            raise Refused("draining", "the server takes no more orders")
        queue = self._serving.queue
        if self.open + places > queue:
            raise Refused("busy", f"{self.open} rollouts are open, {queue} may be", after=BUSY_SECONDS)
        self.open += places
        try:
            yield
        except BaseException:  # boundary: given back, then raised again
            self.open -= places
            raise

    async def _write(self, ticket: Ticket, brought: str | Instance) -> None:
        order = ticket.order
        asked = msgspec.msgpack.encode(order)
        known = self._parked.get(order.key) or await self._ledger.order(order.key)
        if known is None:
            with self._reserved(order.size):
                at, instance = time.time(), await self._row(brought)
                row = OrderRow(0, order.key, asked, at, instance, (), owner=ticket.owner)
                known = await self._ledger.place(row, order.size)
        elif (known.asked, known.owner) != (asked, ticket.owner):
            raise KeyTaken(f"the key belongs to an order that asks otherwise: `{order.key}`")
        else:
            self._parked.pop(order.key, None)
            known = await self._readmit(known)
        await self._take_up(ticket, known)

    async def _readmit(self, row: OrderRow) -> OrderRow:
        """A known order: rollouts that were cancelled because its client was gone run anew."""
        if not await self._ledger.is_abandoned(row.id):
            self.open += len(row.samples)
            return row
        with self._reserved(len(row.samples)):
            await self._ledger.renew(row.id)
        return msgspec.structs.replace(row, delivered=False)

    async def _row(self, instance: str | Instance) -> int:
        row = await self._catalogue.row(instance)
        if row is None:
            error = self._catalogue.error
            hint = f"the suite could not be read to its end: {error.message}" if error else ""
            raise Refused("unknown", f"no such instance: `{instance}`"[:300], hint)
        return row

    async def _take_up(self, ticket: Ticket, row: OrderRow) -> None:
        """Whatever of it is not over is opened."""
        ticket.written(row, await self._ledger.closed(row.id) if row.known else ())
        if ticket.finished:
            return
        self._groups[row.id] = ticket
        for member in ticket.members:
            if member.outcome is None:
                self._wanted[row.instance, member.sample] = ticket
        opened = [reopened(standing) for standing in await self._ledger.standings(row)]
        group = ticket.membership
        await self._scheduler.started.wait()
        self._scheduler.open([msgspec.structs.replace(event, group=group) for event in opened])

    async def _found(self, row: OrderRow) -> Ticket:
        """A ticket for someone who asks after an order that is in the ledger alone."""
        ticket = Ticket(msgspec.msgpack.decode(row.asked, type=Order), None, self, row.owner)
        ticket.placed.set_result(None)
        ticket.written(row, await self._ledger.closed(row.id))
        return ticket

    # What an earlier conductor left.

    async def _recall(self) -> None:
        """Detached orders go on when the scheduler has started, the others when their clients come back."""
        if (steered := await self._ledger.recalled(STEERED)) is not None:
            self._has_model = True
            self._fleet.steer(Steered(to=msgspec.msgpack.decode(steered, type=Steer)))
        async for row in self._ledger.open_orders():
            order = msgspec.msgpack.decode(row.asked, type=Order)
            if order.detached:
                self._start(self._revive(self._register(row), row))
            else:
                self._parked[order.key] = row

    def _register(self, row: OrderRow) -> Ticket:
        """A ticket for an order of an earlier conductor: whoever places it from now on finds this one."""
        order = msgspec.msgpack.decode(row.asked, type=Order)
        ticket = self._tickets[order.key] = Ticket(order, None, self, row.owner)
        self.open += len(row.samples)
        return ticket

    async def _revive(self, ticket: Ticket, row: OrderRow) -> None:
        """The order goes on, whether its client is there or not."""
        await self._take_up(ticket, row)
        ticket.placed.set_result(None)

    def _give_up(self) -> None:
        """Their clients did not come back."""
        parked, self._parked = self._parked, {}
        for row in parked.values():
            self._abandon(row, CLIENT_GONE, "its client is gone")

    def _abandon(self, row: OrderRow, kind: str, message: str) -> None:
        """An order of an earlier conductor is taken up, so that it can be cancelled."""
        ticket = self._register(row)  # now: its client may come back before anything else is done

        async def take_up_and_cancel() -> None:
            await self._revive(ticket, row)
            self.cancel(ticket, kind, message)

        self._start(take_up_and_cancel())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None, "the desk is not open"
        self._working.add(task := self._tasks.create_task(work))
        task.add_done_callback(self._working.discard)

    # What goes.

    def _forget(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.order.key) is ticket:
            del self._tickets[ticket.order.key]
            self.open -= ticket.places
        self._groups.pop(ticket.id, None)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._service.draining and not self._tickets and not self._parked:
            self._scheduler.finish()

    def _member(self, attempt: Attempt) -> tuple[Ticket, MemberState] | None:
        ticket = self._wanted.get((attempt.instance, attempt.sample))
        if ticket is None:
            return None
        return ticket, ticket.member(attempt.sample)
