"""Where orders are taken: the conductor's side of a server. `serve/` is the door in front of it.

An order is in the ledger before it is accepted; its rollouts are samples like any other. What is kept of one
in memory is a `Ticket`, from its acceptance until its result has been delivered, or nobody wants it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from ..core.errors import Refused as Refused
from ..core.records import Usage
from ..core.serving import Answer, Called, Health, Order, Result, Stats, Steer


class MemberState:
    """One rollout of a ticket, as far as it has come."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.attempt = 0  # 0: not begun yet
        self.turns = 0
        self.usage = Usage()
        self.calls: dict[str, None] = {}  # held ones, oldest first; bound: what its agent has in flight
        self.outcome: str | None = None
        self.reward: float | None = None


class Ticket:
    """An accepted order."""

    id: int
    order: Order
    new: bool  # False: it was known when it was placed
    members: list[MemberState]
    version: int  # grows with every change
    finished: bool  # every member is closed

    def attended(self) -> AbstractAsyncContextManager[None]:
        """A client waits for it. When the last one has been gone for the grace period, it is cancelled."""
        raise NotImplementedError

    async def changed(self, seen: int) -> int:
        """Wait until `version` is another than `seen`; the version then."""
        raise NotImplementedError

    async def called(self, call: str, *, whole: bool) -> Called | None:
        """What is asked in a held call; None when it is not held any more."""
        raise NotImplementedError

    def answer(self, answer: Answer) -> None:
        """Answer a held call; `Refused` (`gone`) if nobody waits for that."""
        raise NotImplementedError

    async def result(self) -> Result:
        """What became of it, read from the ledger; only when it is `finished`."""
        raise NotImplementedError

    async def delivered(self) -> None:
        """Its client has the result: it is not new any more, and nothing of it stays in memory."""
        raise NotImplementedError

    def cancel(self, message: str) -> None:
        """End what is not over: verdict `cancelled`."""
        raise NotImplementedError


class Desk:
    """One server's."""

    async def place(self, order: Order, key: str | None = None) -> Ticket:
        """Take an order, or find the one that has its key; `key` is that of its endpoint. Raises `Refused`.

        The same key with another content is a `conflict`; more than the queue holds is `busy`.
        """
        raise NotImplementedError

    async def find(self, key: str) -> Ticket | None:
        """The order with this key, in memory or in the ledger."""
        raise NotImplementedError

    async def steer(self, to: Steer, key: str | None = None) -> None:
        """From now on the run's model is another one, with that key."""
        raise NotImplementedError

    def health(self) -> Health:
        raise NotImplementedError

    def stats(self) -> Stats:
        raise NotImplementedError

    def drain(self) -> None:
        """Take no more orders; when those that are open are over, the server ends."""
        raise NotImplementedError
