"""Decides whether an order is accepted: its protocol, its model, and the room for its rollouts.

`serve/wire_format.py` has checked its fields before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.config import RunConfig, ServingConfig
from ...core.errors import RequestRefused
from ...core.serving_protocol import PROTOCOL, ModelSource, Order
from ..conductor.scheduler import AttemptScheduler
from .server_status import ServerStatus

BUSY_SECONDS = 1.0  # before a retry is worthwhile


class OrderAdmission:
    """Admits the orders of one server."""

    def __init__(
        self, config: RunConfig, scheduler: AttemptScheduler, status: ServerStatus, *, has_model: bool
    ) -> None:
        self._slots = config.slots
        self._serving = config.serving or ServingConfig()
        self._scheduler = scheduler
        self._status = status
        self.has_model = has_model  # for orders that bring none
        self.open_rollouts = 0  # rollouts of all active orders

    def check(self, order: Order, *, known: bool) -> None:
        """Raise `RequestRefused` if the server can never run the order. A `known` order has been accepted."""
        if order.protocol != PROTOCOL:
            raise RequestRefused(
                "version", f"unsupported protocol version {order.protocol} (this server supports {PROTOCOL})"
            )
        if known:
            return
        slots, queue = self._slots, self._serving.queue
        if order.size > queue:
            raise RequestRefused(
                "invalid", f"{order.size} rollouts exceed the limit of open rollouts: {queue}"
            )
        if order.group is not None and order.size > slots:
            hint = "its members run at once: order fewer, or start the server with more `--concurrency`"
            raise RequestRefused("invalid", f"a group of {order.size} does not fit {slots} slots", hint)
        if order.model.source is ModelSource.FUNCTION and self._serving.policy is None:
            raise RequestRefused("invalid", "the server has no policy", "start it with `--policy`")
        if order.model.source is ModelSource.RUN and not self.has_model:
            hint = "name an `endpoint`, answer as `trainer`, or start the server with `--model`"
            raise RequestRefused("invalid", "the server has no model", hint)

    @contextmanager
    def reserve(self, places: int) -> Iterator[None]:
        """Reserve room for this many rollouts; it is given back only if the block raises."""
        if self._status.draining or self._scheduler.draining:
            raise RequestRefused("draining", "the server accepts no more orders")
        queue = self._serving.queue
        if self.open_rollouts + places > queue:
            raise RequestRefused(
                "busy", f"{self.open_rollouts} rollouts are open, the limit is {queue}", after=BUSY_SECONDS
            )
        self.open_rollouts += places
        try:
            yield
        except BaseException:  # boundary: give the room back, then re-raise
            self.open_rollouts -= places
            raise
