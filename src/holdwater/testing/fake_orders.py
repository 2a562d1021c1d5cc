"""An order service in memory, for tests of servers: it accepts orders, and a test moves them forward.

It has the visible behaviour of `run/orders/order_service.py`, but runs and stores nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..core.errors import RequestRefused
from ..core.serving_protocol import (
    CallAnswer,
    Called,
    MessageNode,
    Order,
    OrderProgress,
    OrderResult,
    Rollout,
    RolloutProgress,
    ServerHealth,
    ServerStats,
    SteerRequest,
)


class FakeActiveOrder(OrderProgress):
    """An accepted order; a test changes its members and then calls `notify_change`."""

    def __init__(self, number: int, order: Order, owner: str = "") -> None:
        super().__init__(order, owner)
        self.id = number
        self.members = [RolloutProgress(member, member) for member in range(order.size)]
        self.followers = 0  # number of waiting clients
        self.left = asyncio.Event()  # set when the last waiting client has left
        self.cancelled = ""
        self.deliveries = 0
        self.answers: list[CallAnswer] = []
        self.held_calls: dict[str, Called] = {}  # by call: the new part of the request, or all of it
        self.full_calls: list[str] = []  # calls whose whole request was fetched
        self.member_nodes: dict[int, list[MessageNode]] = {}  # by member
        self._changed = asyncio.Condition()

    async def notify_change(self) -> None:
        """Wake all followers after a change."""
        self.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def hold(self, called: Called) -> None:
        """Add a call that waits for an answer."""
        self.held_calls[called.call] = called
        self.members[called.member].calls[called.call] = None
        await self.notify_change()

    async def finish(self, outcome: str = "passed", reward: float | None = 1.0) -> None:
        for member in self.members:
            member.outcome, member.reward = outcome, reward
            member.calls.clear()
        await self.notify_change()

    async def wait_for_change(self, seen: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != seen)
        return self.version


class FakeOrderService:
    """An order service that accepts up to `queue` orders."""

    def __init__(self, queue: int = 1000) -> None:
        self.orders: dict[str, FakeActiveOrder] = {}  # bound: queue
        self.keys: list[str | None] = []  # endpoint keys, in the order of arrival
        self.steered: list[tuple[SteerRequest, str | None]] = []
        self.draining = False
        self._queue = queue
        self._placed = asyncio.Condition()

    async def wait_for_order(self, key: str) -> FakeActiveOrder:
        """Wait for the order with this key, and return it."""
        async with self._placed:
            await self._placed.wait_for(lambda: key in self.orders)
        return self.orders[key]

    async def place(self, order: Order, key: str | None = None, owner: str = "") -> FakeActiveOrder:
        if self.draining:
            raise RequestRefused("draining", "the server takes no more orders", after=5.0)
        known = self.orders.get(order.key)
        if known is not None and (known.order, known.owner) != (order, owner):
            raise RequestRefused(
                "conflict", f"order key `{order.key}` is already used by a different request"
            )
        if known is None and len(self.orders) >= self._queue:
            raise RequestRefused("busy", f"{self._queue} rollouts are open", after=2.0)
        if known is not None:
            known.mark_known()
            return known
        self.keys.append(key)
        ticket = self.orders[order.key] = FakeActiveOrder(len(self.orders) + 1, order, owner)
        async with self._placed:
            self._placed.notify_all()
        return ticket

    async def find(self, key: str, owner: str = "") -> FakeActiveOrder | None:
        ticket = self.orders.get(key)
        return ticket if ticket is not None and ticket.owner == owner else None

    async def steer(self, to: SteerRequest, key: str | None = None) -> None:
        self.steered.append((to, key))

    def health(self) -> ServerHealth:
        if self.draining:
            return ServerHealth(ok=False, state="draining", reason="drain was requested")
        return ServerHealth(ok=True, state="serving", ready=1, wanted=1)

    def stats(self) -> ServerStats:
        return ServerStats(at=0.0, uptime=1.0, health=self.health(), orders={"open": len(self.orders)})

    def drain(self) -> None:
        self.draining = True

    @asynccontextmanager
    async def follow(self, order: FakeActiveOrder) -> AsyncIterator[None]:
        order.followers += 1
        order.left.clear()
        await order.notify_change()
        try:
            yield
        finally:
            order.followers -= 1
            if not order.followers:
                order.left.set()

    async def wait_for_change(self, order: FakeActiveOrder, seen: int) -> int:
        return await order.wait_for_change(seen)

    async def read_nodes(self, order: FakeActiveOrder, member: int, since: int) -> tuple[MessageNode, ...]:
        return tuple(order.member_nodes.get(member, ())[since:])

    async def fetch_call(self, order: FakeActiveOrder, call: str, *, whole: bool) -> Called | None:
        asked = order.held_calls.get(call)
        if asked is None or not whole:
            return asked
        order.full_calls.append(call)
        return Called(
            member=asked.member,
            call=call,
            dialect=asked.dialect,
            append=("all of it",),
            head=asked.head or "{}",
        )

    def answer(self, order: FakeActiveOrder, answer: CallAnswer) -> None:
        for member in order.members:
            if answer.call in member.calls:
                del member.calls[answer.call]
                order.answers.append(answer)
                order.version += 1
                return
        raise RequestRefused("gone", f"this call no longer waits for an answer: `{answer.call[:200]}`")

    async def read_result(self, order: FakeActiveOrder) -> OrderResult:
        rollouts = tuple(
            Rollout(
                instance=str(order.order.instance),
                sample=member.member,
                member=member.member,
                outcome=member.outcome or "",
                attempt=member.attempt,
                reward=member.reward,
            )
            for member in order.members
        )
        return OrderResult(key=order.order.key, order=order.id, rollouts=rollouts, new=not order.deliveries)

    async def mark_delivered(self, order: FakeActiveOrder) -> None:
        order.deliveries += 1
        await order.notify_change()

    def cancel(self, order: FakeActiveOrder, message: str, *, left: bool = False) -> None:
        order.cancelled = message
