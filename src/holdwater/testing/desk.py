"""A desk in memory, for what is in front of one: orders are taken, and go as far as a test takes them.

It does what `run/desk.py` promises as far as that can be seen from outside. Nothing is run, nothing kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..core.errors import Refused
from ..core.records import Usage
from ..core.serving import Answer, Called, Health, Node, Order, Result, Rollout, Stats, Steer


class FakeMember:
    """One rollout; a test changes it and tells its ticket by `touch`."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.attempt = 0
        self.turns = 0
        self.usage = Usage()
        self.calls: dict[str, None] = {}
        self.outcome: str | None = None
        self.reward: float | None = None


class FakeTicket:
    """An accepted order."""

    def __init__(self, number: int, order: Order, owner: str = "") -> None:
        self.id = number
        self.order = order
        self.owner = owner
        self.new = True
        self.members = [FakeMember(member) for member in range(order.size)]
        self.version = 0
        self.attending = 0  # clients that wait
        self.left = asyncio.Event()  # the last one that waited went away
        self.cancelled = ""
        self.deliveries = 0
        self.answers: list[Answer] = []
        self.asked: dict[str, Called] = {}  # by call: what is new in it, or all of it
        self.whole: list[str] = []  # calls that had to be told in full
        self.said: dict[int, list[Node]] = {}  # by member
        self._changed = asyncio.Condition()

    @property
    def finished(self) -> bool:
        return all(member.outcome is not None for member in self.members)

    async def touch(self) -> None:
        """Something is another than it was."""
        self.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def hold(self, called: Called) -> None:
        """A call waits for an answer."""
        self.asked[called.call] = called
        self.members[called.member].calls[called.call] = None
        await self.touch()

    async def finish(self, outcome: str = "passed", reward: float | None = 1.0) -> None:
        for member in self.members:
            member.outcome, member.reward = outcome, reward
            member.calls.clear()
        await self.touch()

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        self.attending += 1
        self.left.clear()
        await self.touch()
        try:
            yield
        finally:
            self.attending -= 1
            if not self.attending:
                self.left.set()

    async def changed(self, seen: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != seen)
        return self.version

    async def nodes(self, member: int, since: int) -> tuple[Node, ...]:
        return tuple(self.said.get(member, ())[since:])

    async def called(self, call: str, *, whole: bool) -> Called | None:
        asked = self.asked.get(call)
        if asked is None or not whole:
            return asked
        self.whole.append(call)
        return Called(
            member=asked.member,
            call=call,
            dialect=asked.dialect,
            append=("all of it",),
            head=asked.head or "{}",
        )

    def answer(self, answer: Answer) -> None:
        for member in self.members:
            if answer.call in member.calls:
                del member.calls[answer.call]
                self.answers.append(answer)
                self.version += 1
                return
        raise Refused("gone", f"nobody waits for an answer to this call: `{answer.call[:200]}`")

    async def result(self) -> Result:
        rollouts = tuple(
            Rollout(
                instance=str(self.order.instance),
                sample=member.member,
                member=member.member,
                outcome=member.outcome or "",
                attempt=member.attempt,
                reward=member.reward,
            )
            for member in self.members
        )
        return Result(key=self.order.key, order=self.id, rollouts=rollouts, new=not self.deliveries)

    async def delivered(self) -> None:
        self.deliveries += 1
        await self.touch()

    def cancel(self, message: str) -> None:
        self.cancelled = message


class FakeDesk:
    """A desk with room for `queue` orders."""

    def __init__(self, queue: int = 1000) -> None:
        self.tickets: dict[str, FakeTicket] = {}  # bound: queue
        self.keys: list[str | None] = []  # of endpoints, as they came
        self.steered: list[tuple[Steer, str | None]] = []
        self.draining = False
        self._queue = queue
        self._placed = asyncio.Condition()

    async def ticket(self, key: str) -> FakeTicket:
        """The ticket of the order with this key, as soon as there is one."""
        async with self._placed:
            await self._placed.wait_for(lambda: key in self.tickets)
        return self.tickets[key]

    async def place(self, order: Order, key: str | None = None, owner: str = "") -> FakeTicket:
        if self.draining:
            raise Refused("draining", "the server takes no more orders", after=5.0)
        known = self.tickets.get(order.key)
        if known is not None and (known.order, known.owner) != (order, owner):
            raise Refused("conflict", f"another order has this key: `{order.key}`")
        if known is None and len(self.tickets) >= self._queue:
            raise Refused("busy", f"{self._queue} rollouts are open", after=2.0)
        if known is not None:
            known.new = False
            return known
        self.keys.append(key)
        ticket = self.tickets[order.key] = FakeTicket(len(self.tickets) + 1, order, owner)
        async with self._placed:
            self._placed.notify_all()
        return ticket

    async def find(self, key: str, owner: str = "") -> FakeTicket | None:
        ticket = self.tickets.get(key)
        return ticket if ticket is not None and ticket.owner == owner else None

    async def steer(self, to: Steer, key: str | None = None) -> None:
        self.steered.append((to, key))

    def health(self) -> Health:
        if self.draining:
            return Health(ok=False, state="draining", reason="it was asked to")
        return Health(ok=True, state="serving", ready=1, wanted=1)

    def stats(self) -> Stats:
        return Stats(at=0.0, uptime=1.0, health=self.health(), orders={"open": len(self.tickets)})

    def drain(self) -> None:
        self.draining = True
