"""The interface between the HTTP server and the service that takes orders.

`run/orders/order_service.py` implements it in a server, `testing/fake_orders.py` in tests. Each has its own
class of orders, which the server only passes back.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from ..core.serving_protocol import (
    CallAnswer,
    Called,
    MessageNode,
    Order,
    OrderProgress,
    OrderResult,
    ServerHealth,
    ServerStats,
    SteerRequest,
)

OrderT = TypeVar("OrderT", bound=OrderProgress)
OrderT_contra = TypeVar("OrderT_contra", bound=OrderProgress, contravariant=True)


class OrderIntake(Protocol[OrderT]):
    """Accepts orders, and the requests of their clients."""

    async def place(self, order: Order, key: str | None = None, owner: str = "") -> OrderT: ...

    async def find(self, key: str, owner: str = "") -> OrderT | None: ...

    def follow(self, order: OrderT) -> AbstractAsyncContextManager[None]:
        """Follow the order. Once the last follower is gone for the grace period, the order is cancelled."""

    def answer(self, order: OrderT, answer: CallAnswer) -> None:
        """Answer a held call; raise `RequestRefused` (`gone`) if it is not held any more."""

    def cancel(self, order: OrderT, message: str, *, left: bool = False) -> None:
        """End all open members with the verdict `cancelled`; if it was `left`, its key may run it again."""


class OrderContents(Protocol[OrderT_contra]):
    """Reads the progress and the result of an order."""

    async def wait_for_change(self, order: OrderT_contra, seen: int) -> int:
        """Wait until the order's `version` differs from `seen`; return the new version."""

    async def read_nodes(self, order: OrderT_contra, member: int, since: int) -> tuple[MessageNode, ...]:
        """Return the messages of a member's conversation, from number `since` on."""

    async def fetch_call(self, order: OrderT_contra, call: str, *, whole: bool) -> Called | None:
        """Return the request of a held call; None when it is not held any more."""

    async def read_result(self, order: OrderT_contra) -> OrderResult:
        """Read the result; only when the order is `finished`."""

    async def mark_delivered(self, order: OrderT_contra) -> None:
        """Record that the client has the result; the order is not new any more and leaves memory."""


class ServerControl(Protocol):
    """Controls and describes a server."""

    async def steer(self, to: SteerRequest, key: str | None = None) -> None: ...

    def health(self) -> ServerHealth: ...

    def stats(self) -> ServerStats: ...

    def drain(self) -> None: ...


class ServerBackend(OrderIntake[OrderT], OrderContents[OrderT], ServerControl, Protocol[OrderT]):
    """The order service of one server."""
