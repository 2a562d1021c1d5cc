"""An accepted order, as long as somebody waits for it: how far its rollouts have come, and who is told.

Nothing is queued here: a follower compares what it has told with what there is, so that a slow one costs
nothing. Tickets are made and dropped by `desk.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from ..core.errors import Refused
from ..core.events import Membership
from ..core.records import NO_USAGE, Outcome
from ..core.serving import Answer, Called, Node, Order, Result
from ..ledger.orders import Closed, OrderRow
from ..rollout.wire import Offer


class MemberState:
    """One rollout of a ticket, as far as it has come."""

    def __init__(self, member: int, sample: int) -> None:
        self.member = member
        self.sample = sample
        self.attempt = 0  # 0: not begun yet
        self.turns = 0
        self.usage = NO_USAGE
        self.calls: dict[str, None] = {}  # held ones, oldest first; bound: what its agent has in flight
        self.outcome: str | None = None
        self.reward: float | None = None

    def begin(self, attempt: int) -> None:
        """Another attempt: what was told of the one before is void."""
        self.attempt = attempt
        self.turns = 0
        self.usage = NO_USAGE
        self.calls.clear()


class Counter(Protocol):
    """What a ticket asks of its desk."""

    async def nodes(self, attempt: int, since: int) -> tuple[Node, ...]: ...

    async def fetch(self, call: str, *, whole: bool, member: int) -> Called | None: ...

    def pass_on(self, answer: Answer) -> None: ...

    async def read(self, ticket: Ticket) -> Result: ...

    async def delivered(self, ticket: Ticket) -> None: ...

    def left(self, ticket: Ticket) -> None: ...

    def cancel(self, ticket: Ticket, kind: str, message: str) -> None: ...


class Ticket:
    """An accepted order."""

    def __init__(self, order: Order, key: str | None, desk: Counter, owner: str) -> None:
        self.order = order
        self.owner = owner  # the client that may have it
        self.key = key  # of its endpoint: in no file
        self.row = OrderRow(0, order.key, b"", 0.0, 0, ())  # until it is in the ledger
        self.new = True  # False: it was known when it was placed
        self.abandoned = False  # it is being cancelled because its client is gone
        self.members: list[MemberState] = []  # bound: the order's size, and what is replaced
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.coming = 0  # members that are being replaced
        self.version = 0  # grows with every change
        self.followers = 0
        self.timer: asyncio.TimerHandle | None = None  # runs while nobody waits for it
        self._desk = desk
        self._wakened = asyncio.Event()

    def written(self, row: OrderRow, closed: Sequence[Closed]) -> None:
        """It is in the ledger, and so far it has come."""
        self.row = row
        self.new = not row.known
        self.members = [MemberState(member, sample) for member, sample in enumerate(row.samples)]
        for one in closed:
            member = self.member(one.sample)
            member.outcome, member.reward = one.kind, one.score

    def replaced(self, sample: int) -> None:
        """Another member is there, in the place of one that failed."""
        self.members.append(MemberState(len(self.members), sample))
        self.row = msgspec.structs.replace(self.row, samples=(*self.row.samples, sample))
        self.coming -= 1
        self.change()

    def member(self, sample: int) -> MemberState:
        return next(one for one in self.members if one.sample == sample)

    @property
    def id(self) -> int:
        return self.row.id

    @property
    def offer(self) -> Offer:
        """What it brings for its attempts."""
        order = self.order
        return Offer(
            model=order.model,
            key=self.key,
            sampling=order.sampling,
            limits=order.limits,
            followed=order.turns,
        )

    @property
    def membership(self) -> Membership | None:
        """The group that its open members belong to."""
        if (terms := self.order.group) is None:
            return None
        open_ = sum(1 for member in self.members if member.outcome is None)
        replaced = len(self.members) - self.order.size  # also by an earlier conductor
        terms = msgspec.structs.replace(terms, replace=max(0, terms.replace - replaced))
        scored = any(member.reward is not None for member in self.members)
        return Membership(group=self.id, size=open_, terms=terms, scored=scored)

    @property
    def places(self) -> int:
        """How much of what may be open at once it takes up."""
        return len(self.members) or self.order.size

    @property
    def finished(self) -> bool:
        """Every member is closed."""
        settled = all(member.outcome is not None for member in self.members)
        return bool(self.members) and settled and not self.coming

    def close(self, outcome: Outcome) -> None:
        member = self.member(outcome.sample)
        member.outcome, member.reward = outcome.kind, outcome.score
        member.calls.clear()
        self.change()

    def change(self) -> None:
        """Something is different: whoever follows looks again."""
        self.version += 1
        self._wakened.set()
        self._wakened = asyncio.Event()

    async def changed(self, seen: int) -> int:
        """Wait until `version` is another than `seen`; the version then."""
        while self.version == seen:
            await self._wakened.wait()
        return self.version

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """A client waits for it. When the last one has been gone for the grace period, it is cancelled."""
        self.followers += 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        try:
            yield
        finally:
            self.followers -= 1
            if not self.followers:
                self._desk.left(self)

    async def nodes(self, member: int, since: int) -> tuple[Node, ...]:
        """The messages of a member's conversation from the one with this number on."""
        return await self._desk.nodes(self.members[member].attempt, since)

    async def called(self, call: str, *, whole: bool) -> Called | None:
        """What is asked in a held call; None when it is not held any more."""
        member = next((one for one in self.members if call in one.calls), None)
        return None if member is None else await self._desk.fetch(call, whole=whole, member=member.member)

    def answer(self, answer: Answer) -> None:
        """Answer a held call; `Refused` (`gone`) if nobody waits for that."""
        member = next((one for one in self.members if answer.call in one.calls), None)
        if member is None:
            raise Refused("gone", f"nobody waits for an answer to this call: `{answer.call[:80]}`")
        del member.calls[answer.call]
        self._desk.pass_on(answer)

    async def result(self) -> Result:
        """What became of it, read from the ledger; only when it is `finished`."""
        return await self._desk.read(self)

    async def delivered(self) -> None:
        """Its client has the result: it is not new any more, and nothing of it stays in memory."""
        await self._desk.delivered(self)

    def cancel(self, message: str) -> None:
        """End what is not over: verdict `cancelled`."""
        self._desk.cancel(self, "asked", message)
