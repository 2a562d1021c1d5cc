"""The interface between the HTTP server and the service that takes orders.

`run/orders/order_service.py` implements it in a server, `testing/fake_orders.py` in tests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..core.records import ModelUsage
from ..core.serving_protocol import (
    CallAnswer,
    Called,
    MessageNode,
    Order,
    OrderResult,
    ServerHealth,
    ServerStats,
    SteerRequest,
)


class MemberProgress(Protocol):
    """The progress of one rollout of an order."""

    @property
    def member(self) -> int: ...

    @property
    def attempt(self) -> int:
        """The current attempt; 0: none has begun."""

    @property
    def turns(self) -> int: ...

    @property
    def usage(self) -> ModelUsage: ...

    @property
    def calls(self) -> Collection[str]:
        """The held calls, oldest first."""

    @property
    def outcome(self) -> str | None: ...

    @property
    def reward(self) -> float | None: ...


class OrderHandle(Protocol):
    """An accepted order."""

    @property
    def id(self) -> int: ...

    @property
    def order(self) -> Order: ...

    @property
    def new(self) -> bool: ...

    @property
    def members(self) -> Sequence[MemberProgress]: ...

    @property
    def version(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    def follow(self) -> AbstractAsyncContextManager[None]: ...

    async def wait_for_change(self, seen: int) -> int: ...

    async def read_nodes(self, member: int, since: int) -> tuple[MessageNode, ...]: ...

    async def fetch_call(self, call: str, *, whole: bool) -> Called | None: ...

    def answer(self, answer: CallAnswer) -> None: ...

    async def read_result(self) -> OrderResult: ...

    async def mark_delivered(self) -> None: ...

    def cancel(self, message: str) -> None: ...


class ServerBackend(Protocol):
    """The order service of one server."""

    async def place(self, order: Order, key: str | None = None, owner: str = "") -> OrderHandle: ...

    async def find(self, key: str, owner: str = "") -> OrderHandle | None: ...

    async def steer(self, to: SteerRequest, key: str | None = None) -> None: ...

    def health(self) -> ServerHealth: ...

    def stats(self) -> ServerStats: ...

    def drain(self) -> None: ...
