"""Builds the job that a worker receives for an attempt: its lease, images, earlier replies and order terms.

The attempt is written to the ledger once it has its lease and images, before any worker can start it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ...core.records import Attempt, AttemptFailure, FailureOrigin, LimitOverrides
from ...ledger.ledger import Ledger
from ...rollout.worker_protocol import AttemptJob, OrderTerms
from ..resources.governor import Governor
from .admission import AttemptAdmission, InstanceLimits
from .replay import EarlierLookup


class ReadyJob(NamedTuple):
    """An attempt that can be started."""

    job: AttemptJob
    asks: LimitOverrides  # the limits of its instance and its order


class JobBuilder:
    """Builds the jobs of one run."""

    def __init__(
        self, ledger: Ledger, admission: AttemptAdmission, governor: Governor, earlier: EarlierLookup
    ) -> None:
        self._ledger = ledger
        self._admission = admission
        self._governor = governor
        self._earlier = earlier
        self.offer: Callable[[Attempt], OrderTerms | None] = lambda attempt: None

    async def build(self, attempt: Attempt) -> ReadyJob | AttemptFailure:
        """Wait for lease and images; return the job or the failure. An `interrupted` wait is not recorded."""
        payload = await self._ledger.payload(attempt.instance)
        asks, offer = msgspec.msgpack.decode(payload, type=InstanceLimits).limits, self.offer(attempt)
        if offer is not None:
            asks = asks.merge(offer.limits)
        granted = await self._admission.grant(attempt, payload, asks)
        if isinstance(granted, AttemptFailure) and granted.where is FailureOrigin.INTERRUPTED:
            return granted
        await self._ledger.begin_attempt(attempt)
        if isinstance(granted, AttemptFailure):
            return granted
        earlier = await self._earlier(attempt, payload)
        if isinstance(earlier, AttemptFailure):
            return earlier
        lease, images = granted
        memory, quota = self._governor.derive_limits(attempt.id, lease)
        job = AttemptJob(
            attempt=attempt,
            payload=payload,
            work=None if attempt.regrades is None else await self._ledger.verdict(attempt.regrades),
            lease=memory,
            quota=quota,
            earlier=earlier,
            images=images,
            offer=offer,
        )
        return ReadyJob(job, asks)
