"""An accepted order while a client waits for it: tracks its rollouts and wakes its followers.

Nothing is queued here: a follower compares the state it has sent with the current one, so that a slow client
costs nothing. `order_service.py` acts on these objects; they call nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from ...core.events import GroupMembership
from ...core.records import Outcome
from ...core.serving_protocol import Order, OrderProgress, RolloutProgress
from ...ledger.orders import ClosedRollout, OrderRow
from ...rollout.worker_protocol import OrderTerms


class ActiveOrder(OrderProgress):
    """An accepted order and its rollouts."""

    def __init__(self, order: Order, key: str | None, owner: str) -> None:
        super().__init__(order, owner)
        self.row = OrderRow(0, order.key, b"", 0.0, 0, ())  # until it is in the ledger
        self.abandoned = False  # it is being cancelled because its client is gone
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.followers = 0
        self._was_read = False  # its result
        self._endpoint_key = key  # never written to a file
        self._pending_replacements = 0  # members that are being replaced
        self._grace: asyncio.TimerHandle | None = None  # runs while no client waits for the order
        self._change_event = asyncio.Event()

    def load_row(self, row: OrderRow, closed: Sequence[ClosedRollout]) -> None:
        """Load the order's row in the ledger and the outcomes of its closed rollouts."""
        self.row, self.id = row, row.id
        self.new = not row.known
        self.members = [RolloutProgress(member, sample) for member, sample in enumerate(row.samples)]
        for rollout in closed:
            self.find_member(rollout.sample).close(rollout.kind, rollout.score)

    def mark_delivered(self) -> None:
        self.row = msgspec.structs.replace(self.row, delivered=True)

    def take_first_reading(self) -> bool:
        """Return whether the result is read for the first time; that of a delivered order was read before."""
        first = not (self._was_read or self.row.delivered)
        self._was_read = True
        return first

    def mark_abandoned(self) -> None:
        self.abandoned = True

    def expect_replacement(self) -> None:
        """Announce that a failed member is going to be replaced."""
        self._pending_replacements += 1

    def add_replacement(self, sample: int) -> None:
        """Add the replacement of a failed member."""
        self.members.append(RolloutProgress(len(self.members), sample))
        self.row = msgspec.structs.replace(self.row, samples=(*self.row.samples, sample))
        self._pending_replacements -= 1
        self.notify_change()

    def find_member(self, sample: int) -> RolloutProgress:
        return next(member for member in self.members if member.sample == sample)

    def find_caller(self, call: str) -> RolloutProgress | None:
        """Return the member that waits for the answer to this call."""
        return next((member for member in self.members if call in member.calls), None)

    @property
    def offer(self) -> OrderTerms:
        """The terms that its attempts run under."""
        order = self.order
        return OrderTerms(
            model=order.model,
            key=self._endpoint_key,
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
        """Whether every member is closed, and none is to be replaced."""
        return super().finished and not self._pending_replacements

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

    def add_follower(self) -> None:
        self.followers += 1
        self.stop_grace()

    def remove_follower(self) -> None:
        self.followers -= 1

    def start_grace(self, seconds: float, end: Callable[[], None]) -> None:
        """Call `end` after so many seconds, unless a client comes back."""
        self._grace = asyncio.get_running_loop().call_later(seconds, end)

    def stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
