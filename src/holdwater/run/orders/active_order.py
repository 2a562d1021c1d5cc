"""An accepted order while a client waits for it: tracks its rollouts and notifies its followers.

Nothing is queued here: a follower compares the state it has sent with the current one, so that a slow client
costs nothing. `order_service.py` creates and drops these objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from ...core.errors import RequestRefused
from ...core.events import GroupMembership
from ...core.records import NO_USAGE, ModelUsage, Outcome
from ...core.serving_protocol import CallAnswer, Called, MessageNode, Order, OrderResult
from ...ledger.orders import ClosedRollout, OrderRow
from ...rollout.worker_protocol import OrderTerms


class RolloutProgress:
    """The progress of one rollout of an order."""

    def __init__(self, member: int, sample: int) -> None:
        self.member = member
        self.sample = sample
        self.attempt = 0  # 0: not begun yet
        self.turns = 0
        self.usage = NO_USAGE
        self.calls: dict[str, None] = {}  # held calls, oldest first; bound: the calls its agent has in flight
        self.outcome: str | None = None
        self.reward: float | None = None

    def begin(self, attempt: int) -> None:
        """Begin another attempt: the progress of the one before is void."""
        self.attempt = attempt
        self.turns = 0
        self.usage = NO_USAGE
        self.calls.clear()

    def advance(self, turns: int, usage: ModelUsage) -> None:
        self.turns, self.usage = turns, usage

    def close(self, outcome: str, reward: float | None) -> None:
        self.outcome, self.reward = outcome, reward
        self.calls.clear()


class OrderBackend(Protocol):
    """The operations of `OrderService` that an `ActiveOrder` uses."""

    async def read_nodes(self, attempt: int, since: int) -> tuple[MessageNode, ...]: ...

    async def fetch_call(self, call: str, *, whole: bool, member: int) -> Called | None: ...

    def deliver_answer(self, answer: CallAnswer) -> None: ...

    async def read_result(self, ticket: ActiveOrder) -> OrderResult: ...

    async def mark_delivered(self, ticket: ActiveOrder) -> None: ...

    def on_client_gone(self, ticket: ActiveOrder) -> None: ...

    def cancel(self, ticket: ActiveOrder, kind: str, message: str) -> None: ...


class ActiveOrder:
    """An accepted order and its rollouts."""

    def __init__(self, order: Order, key: str | None, desk: OrderBackend, owner: str) -> None:
        self.order = order
        self.owner = owner  # the client that may access it
        self.endpoint_key = key  # of its endpoint; never written to a file
        self.row = OrderRow(0, order.key, b"", 0.0, 0, ())  # until it is in the ledger
        self.new = True  # False: it was known when it was placed
        self.abandoned = False  # it is being cancelled because its client is gone
        self.members: list[RolloutProgress] = []  # bound: the order's size, and its replacements
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending_replacements = 0  # members that are being replaced
        self.version = 0  # grows with every change
        self.followers = 0
        self.timer: asyncio.TimerHandle | None = None  # runs while no client waits for the order
        self._backend = desk
        self._change_event = asyncio.Event()

    def load_row(self, row: OrderRow, closed: Sequence[ClosedRollout]) -> None:
        """Load the order's row in the ledger and the outcomes of its closed rollouts."""
        self.row = row
        self.new = not row.known
        self.members = [RolloutProgress(member, sample) for member, sample in enumerate(row.samples)]
        for rollout in closed:
            self.find_member(rollout.sample).close(rollout.kind, rollout.score)

    def expect_replacement(self) -> None:
        """Announce that a failed member is going to be replaced."""
        self.pending_replacements += 1

    def add_replacement(self, sample: int) -> None:
        """Add the replacement of a failed member."""
        self.members.append(RolloutProgress(len(self.members), sample))
        self.row = msgspec.structs.replace(self.row, samples=(*self.row.samples, sample))
        self.pending_replacements -= 1
        self.notify_change()

    def find_member(self, sample: int) -> RolloutProgress:
        return next(one for one in self.members if one.sample == sample)

    @property
    def id(self) -> int:
        return self.row.id

    @property
    def offer(self) -> OrderTerms:
        """The terms that its attempts run under."""
        order = self.order
        return OrderTerms(
            model=order.model,
            key=self.endpoint_key,
            sampling=order.sampling,
            limits=order.limits,
            followed=order.turns,
        )

    @property
    def membership(self) -> GroupMembership | None:
        """The group that its open members belong to."""
        if (terms := self.order.group) is None:
            return None
        open_ = sum(1 for member in self.members if member.outcome is None)
        replaced = len(self.members) - self.order.size  # also by an earlier conductor
        terms = msgspec.structs.replace(terms, replace=max(0, terms.replace - replaced))
        scored = any(member.reward is not None for member in self.members)
        return GroupMembership(group=self.id, size=open_, terms=terms, scored=scored)

    @property
    def rollout_count(self) -> int:
        """The number of open rollouts that it counts for."""
        return len(self.members) or self.order.size

    @property
    def finished(self) -> bool:
        """Whether every member is closed."""
        settled = all(member.outcome is not None for member in self.members)
        return bool(self.members) and settled and not self.pending_replacements

    def close(self, outcome: Outcome) -> None:
        self.find_member(outcome.sample).close(outcome.kind, outcome.score)
        self.notify_change()

    def notify_change(self) -> None:
        """Record a change and wake all followers."""
        self.version += 1
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def wait_for_change(self, seen: int) -> int:
        """Wait until `version` differs from `seen`; return the new version."""
        while self.version == seen:
            await self._change_event.wait()
        return self.version

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Follow the order. Once the last follower is gone for the grace period, the order is cancelled."""
        self.followers += 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        try:
            yield
        finally:
            self.followers -= 1
            if not self.followers:
                self._backend.on_client_gone(self)

    async def read_nodes(self, member: int, since: int) -> tuple[MessageNode, ...]:
        """Return the messages of a member's conversation, from number `since` on."""
        return await self._backend.read_nodes(self.members[member].attempt, since)

    async def fetch_call(self, call: str, *, whole: bool) -> Called | None:
        """Return the request of a held call; None when it is not held any more."""
        member = next((one for one in self.members if call in one.calls), None)
        return (
            None
            if member is None
            else await self._backend.fetch_call(call, whole=whole, member=member.member)
        )

    def answer(self, answer: CallAnswer) -> None:
        """Answer a held call; raise `RequestRefused` (`gone`) if it is not held any more."""
        member = next((one for one in self.members if answer.call in one.calls), None)
        if member is None:
            raise RequestRefused(
                "gone", f"this call does not wait for an answer any more: `{answer.call[:80]}`"
            )
        del member.calls[answer.call]
        self._backend.deliver_answer(answer)

    async def read_result(self) -> OrderResult:
        """Read the result from the ledger; only when the order is `finished`."""
        return await self._backend.read_result(self)

    async def mark_delivered(self) -> None:
        """Record that the client has the result; the order is not new any more and leaves memory."""
        await self._backend.mark_delivered(self)

    def cancel(self, message: str) -> None:
        """End all open members with the verdict `cancelled`."""
        self._backend.cancel(self, "asked", message)
