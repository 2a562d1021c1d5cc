"""What the door needs of a desk: `run/desk.py` in a server, `testing/desk.py` in tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..core.records import Usage
from ..core.serving import Answer, Called, Health, Node, Order, Result, Stats, Steer


class Member(Protocol):
    """One rollout of a ticket, as far as it has come."""

    @property
    def member(self) -> int: ...

    @property
    def attempt(self) -> int:
        """0: not begun yet."""

    @property
    def turns(self) -> int: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def calls(self) -> Collection[str]:
        """Those that are held, oldest first."""

    @property
    def outcome(self) -> str | None: ...

    @property
    def reward(self) -> float | None: ...


class Ticket(Protocol):
    """An accepted order."""

    @property
    def id(self) -> int: ...

    @property
    def order(self) -> Order: ...

    @property
    def new(self) -> bool: ...

    @property
    def members(self) -> Sequence[Member]: ...

    @property
    def version(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    def attended(self) -> AbstractAsyncContextManager[None]: ...

    async def changed(self, seen: int) -> int: ...

    async def nodes(self, member: int, since: int) -> tuple[Node, ...]: ...

    async def called(self, call: str, *, whole: bool) -> Called | None: ...

    def answer(self, answer: Answer) -> None: ...

    async def result(self) -> Result: ...

    async def delivered(self) -> None: ...

    def cancel(self, message: str) -> None: ...


class Desk(Protocol):
    """One server's."""

    async def place(self, order: Order, key: str | None = None, owner: str = "") -> Ticket: ...

    async def find(self, key: str, owner: str = "") -> Ticket | None: ...

    async def steer(self, to: Steer, key: str | None = None) -> None: ...

    def health(self) -> Health: ...

    def stats(self) -> Stats: ...

    def drain(self) -> None: ...
