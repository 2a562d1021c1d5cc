"""The scheduler's interface to the orders of a server.

`run/orders/order_service.py` implements it; an ordinary run has none.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ...core.failures import DISK
from ...core.records import Attempt, FailureOrigin, Outcome, Verdict
from ...rollout.worker_protocol import OrderTerms
from ..fleet.interface import AttemptUpdate


class OrderListener(Protocol):
    """Provides the terms of ordered attempts and receives their updates."""

    def offer(self, attempt: Attempt) -> OrderTerms | None: ...

    def on_started(self, attempt: Attempt) -> None: ...

    def on_update(self, news: AttemptUpdate) -> None: ...

    def on_settled(self, verdict: Verdict) -> None: ...

    def on_closed(self, outcome: Outcome) -> None: ...

    def score_group(self, group: int, together: bool) -> None:
        """Score the members of the group that have arrived."""

    def expect_replacement(self, group: int) -> None:
        """Announce that a member failed for good and `replace_member` follows."""

    async def replace_member(self, group: int, instance: int) -> None:
        """Open another sample for the group."""


def confine_failure(verdict: Verdict) -> Verdict:
    """Return the verdict with a run-level failure reduced to a failure of this order's model alone.

    One order's model must not stop the other orders. Failures of the disk stay run-level: they concern all
    orders.
    """
    failure = verdict.failure
    if failure is None or failure.where is not FailureOrigin.RUN or failure.kind in (DISK, "record"):
        return verdict
    return msgspec.structs.replace(
        verdict, failure=msgspec.structs.replace(failure, where=FailureOrigin.MODEL)
    )
