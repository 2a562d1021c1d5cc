"""What a worker is handed of an attempt: its lease and images, what was answered before, its order.

It is written to the ledger on the way, when it has what it needs and before anyone could start it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ..core.records import Ask, Attempt, Failure, Where
from ..ledger.ledger import Ledger
from ..rollout.wire import Job, Offer
from .admission import Admission, Asks
from .governor import Governor
from .replay import Earlier


class Made(NamedTuple):
    """An attempt that can be started."""

    job: Job
    asks: Ask  # its instance's limits, and its order's


class Dispatch:
    """One run's."""

    def __init__(self, ledger: Ledger, admission: Admission, governor: Governor, earlier: Earlier) -> None:
        self._ledger = ledger
        self._admission = admission
        self._governor = governor
        self._earlier = earlier
        self.offer: Callable[[Attempt], Offer | None] = lambda attempt: None

    async def made(self, attempt: Attempt) -> Made | Failure:
        """Waits for what it needs. One that was let go while it waited, `interrupted`, is written nowhere."""
        payload = await self._ledger.payload(attempt.instance)
        asks, offer = msgspec.msgpack.decode(payload, type=Asks).limits, self.offer(attempt)
        if offer is not None:
            asks = asks.under(offer.limits)
        granted = await self._admission.granted(attempt, payload, asks)
        if isinstance(granted, Failure) and granted.where is Where.INTERRUPTED:
            return granted
        await self._ledger.begin(attempt)
        if isinstance(granted, Failure):
            return granted
        earlier = await self._earlier(attempt, payload)
        if isinstance(earlier, Failure):
            return earlier
        lease, images = granted
        memory, quota = self._governor.limits(attempt.id, lease)
        job = Job(
            attempt=attempt,
            payload=payload,
            work=None if attempt.regrades is None else await self._ledger.verdict(attempt.regrades),
            lease=memory,
            quota=quota,
            earlier=earlier,
            images=images,
            offer=offer,
        )
        return Made(job, asks)
