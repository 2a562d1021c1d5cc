"""Whoever ordered samples, as the scheduler sees it: `desk.py` in a server, nobody in an ordinary run."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..core.failures import DISK
from ..core.records import Attempt, Outcome, Verdict, Where
from ..rollout.wire import Offer
from .fleet import Underway


class Customers(Protocol):
    """Whoever ordered samples: what their attempts bring, and who is told of them."""

    def offer(self, attempt: Attempt) -> Offer | None: ...

    def started(self, attempt: Attempt) -> None: ...

    def underway(self, news: Underway) -> None: ...

    def settled(self, verdict: Verdict) -> None: ...

    def closed(self, outcome: Outcome) -> None: ...

    def rally(self, group: int, together: bool) -> None:
        """Have those of the group that are there scored."""

    def lack(self, group: int) -> None:
        """A member of the group failed for good: `replace` follows."""

    async def replace(self, group: int, instance: int) -> None:
        """Open another sample for the group."""


def own_fault(verdict: Verdict) -> Verdict:
    """What one order's model does wrong must not stop the others: a failure of the run is theirs alone.

    But for the disk: that is everybody's.
    """
    failure = verdict.failure
    if failure is None or failure.where is not Where.RUN or failure.kind in (DISK, "record"):
        return verdict
    return msgspec.structs.replace(verdict, failure=msgspec.structs.replace(failure, where=Where.MODEL))
