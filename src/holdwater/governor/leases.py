"""Grants leases to attempts: estimates the need, waits at the gate, divides, hands over, and learns from use.

`gate.py` queues; `memory_control.py` extends leases and reclaims memory. `PeakHistory` predicts the memory or
disk of an attempt from the peaks of earlier attempts of this run.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ..core.authoring import Agent
from ..core.config import RunConfig
from ..core.failures import make_interrupt_failure
from ..core.records import Attempt, AttemptFailure, FailureOrigin, LimitOverrides, MiB, Verdict
from .gate import Gate, Lease
from .resource_reading import AttemptUse, ResourceBound
from .run_usage import RunUsage

FLOOR = 32 * MiB  # the lowest limit of a sandbox: a shell and its children start in it
QUARTER = 4  # part of the free disk (1/4) that leases without a declared need take at most
UNTYPICAL = (FailureOrigin.INTERRUPTED, FailureOrigin.CANCELLED, FailureOrigin.BUDGET, FailureOrigin.WORKER)
KEPT_PEAKS = 512  # the latest peaks that are used
TRUSTED_PEAKS = 8  # number of peaks after which the prior has no weight
MARGIN = 1.1


class AttemptGrant(msgspec.Struct):
    """The grant of an attempt, and its highest observed use."""

    declared: int | None  # the memory limit of its sandbox, where that does not grow with the lease
    allowed: int = 0  # the current limit of its sandbox
    peak: AttemptUse = AttemptUse()
    before: int = 0  # bytes that it used at the last look
    short: int = 0  # looks through which it grew and had no room to


class AttemptLeases:
    """The leases of one run. With `--ungoverned` they are empty, and granted at once.

    `elsewhere`: sandboxes are on another machine, and a lease is for the worker's part alone.
    """

    def __init__(
        self,
        config: RunConfig,
        usage: RunUsage,
        disk: Callable[[], ResourceBound],
        agent: Agent | None = None,  # whose needs are the first estimates
        *,
        elsewhere: bool = False,
    ) -> None:
        self._config = config
        self._elsewhere = elsewhere
        self._usage = usage
        self._disk = disk
        self._loans = 0  # the number of the last loan: below the numbers of attempts
        self.gate = Gate()
        self.grants: dict[int, AttemptGrant] = {}  # attempt -> its grant; bound: the run's concurrency
        self.gate.memory.set_usage(usage.reading.holding, {})
        self._sandboxes = sandbox_memory(self.gate.memory.largest_lease, agent.memory if agent else 0)
        self._workers = worker_memory(agent.worker_memory if agent else 0)
        self._disks = sandbox_disk()

    def change(self, config: RunConfig) -> None:
        """Grant leases by this configuration from now on."""
        self._config = config

    async def lease(self, attempt: Attempt, asks: LimitOverrides, images: int = 0) -> Lease | AttemptFailure:
        """Wait for the lease of an attempt; return it, or why it cannot be had.

        `images`: bytes of disk for images, needed before the sandbox exists, until `end_image_lease`.
        """
        return await self.lease_all((attempt,), asks, images)

    async def lease_all(
        self, attempts: Sequence[Attempt], asks: LimitOverrides, images: int = 0
    ) -> Lease | AttemptFailure:
        """Do the same for attempts that run together or not at all; return the lease of each."""
        first, count = attempts[0], len(attempts)
        if self._config.ungoverned:
            return await self.gate.take(first.id, Lease(0)) or Lease(0)
        if self._usage.refresh():
            self.measure_memory()
        if images:
            self.measure_disk()
            if failure := self.gate.find_disk_refusal(images):
                return failure
        memory = self._find_declared(first, asks)
        disk = (asks.disk or self._config.limits.disk or 0) * first.scale or None
        each = disk or min(self._disks.need, max(0, self.gate.disk.leasable_total) // QUARTER // count)
        if self._elsewhere:
            disk, each = None, 0
        need = Lease(
            memory=self._estimate_memory(memory, first.scale, count),
            disk=images + each * count,
            firm=memory is not None or disk is not None,
        )
        for attempt in attempts:
            self.grants[attempt.id] = AttemptGrant(memory)
        failure = await self.gate.take(first.id, need)
        if failure is not None:
            for attempt in attempts:
                self.grants.pop(attempt.id, None)
            return failure
        if count == 1:
            return need
        self.gate.divide(first.id, [attempt.id for attempt in attempts])
        return Lease(need.memory // count, need.disk // count, need.firm)

    def hand_over(self, attempt: int, to: Attempt, asks: LimitOverrides) -> Lease:
        """Hand an ended attempt's lease to another, and extend it on request if there is room."""
        if self._config.ungoverned:
            return Lease(0)
        memory = self._find_declared(to, asks)
        self.gate.hand_over(attempt, to.id)
        self.grants[to.id] = AttemptGrant(memory)
        self.gate.extend(to.id, self._estimate_memory(memory, to.scale))
        return Lease(self.gate.memory.leases[to.id], self.gate.disk.leases[to.id], memory is not None)

    def derive_limits(self, attempt: int, lease: Lease) -> tuple[int, int]:
        """Return the sandbox's limits: bytes of memory, and of disk if that has a budget and no limit."""
        if attempt not in self.grants or self._elsewhere:
            return 0, 0
        grant = self.grants[attempt]
        grant.allowed = grant.declared or max(FLOOR, lease.memory + self.bonus)
        return grant.allowed, self._config.disk or 0

    def end_image_lease(self, attempt: int, disk: int) -> None:
        """End the lease of images now on the disk: they are measured there and outlive the attempt."""
        if disk:
            self.measure_disk()
            self.gate.shrink(attempt, disk)

    def drop(self, attempt: int, reason: str) -> bool:
        """Drop a waiting attempt; return whether it did wait."""
        return self.gate.drop(attempt, make_interrupt_failure(reason))

    def on_settled(self, verdict: Verdict) -> None:
        """Take the lease back, and learn from the attempt's use."""
        self._learn(verdict, self.return_lease(verdict.attempt))

    def retain_lease(self, verdict: Verdict) -> None:
        """Learn from an ended attempt's use, and keep its lease for `hand_over` or `return_lease`."""
        self._learn(verdict, self.grants.pop(verdict.attempt, None))

    def return_lease(self, attempt: int) -> AttemptGrant | None:
        """Take the lease back; return the grant."""
        self.gate.give_back(attempt)
        return self.grants.pop(attempt, None)

    def lend(self, disk: int) -> int | None:
        """Lend disk that no attempt waits for, at once or not at all; return the number for `repay`."""
        self.measure_disk()
        self._loans -= 1
        return self._loans if self.gate.lend(self._loans, disk) else None

    def repay(self, loan: int) -> None:
        self.measure_disk()
        self.gate.give_back(loan)

    def hold(self, why: str) -> None:
        """Admit no attempt until `release`."""
        self.gate.hold(why)

    def release(self, why: str) -> None:
        self.gate.release(why)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that have a slot and no lease yet."""
        return self.gate.waiting

    @property
    def binds(self) -> str:
        """The resource that keeps attempts waiting, if one does."""
        return self.gate.binds

    @property
    def lacking(self) -> int:
        """Bytes of disk that the first waiting attempt lacks."""
        return self.gate.missing_disk

    @property
    def leased(self) -> int:
        return sum(self.gate.memory.leases.values())

    @property
    def room(self) -> int:
        """Bytes of memory that can still be leased."""
        return self.gate.memory.room

    @property
    def bonus(self) -> int:
        """The part of free memory that each attempt may use beyond its lease, until it is leased."""
        return max(0, self.room) // (len(self.gate.memory.leases) + 1)

    def measure_memory(self) -> None:
        """Tell the gate the latest reading of memory."""
        self.gate.memory.set_usage(self._usage.reading.holding, self._usage.memory_uses)

    def measure_disk(self) -> None:
        """Read the disk, which fills faster than the periodic look, and tell the gate."""
        if not self._config.ungoverned:
            self.gate.disk.set_usage((self._disk(),), self._usage.disk_uses)

    def _find_declared(self, attempt: Attempt, asks: LimitOverrides) -> int | None:
        """Return the memory that the attempt declares, more of it in a retry for lack of memory."""
        if self._elsewhere:
            return None
        return (asks.memory or self._config.limits.memory or 0) * attempt.scale or None

    def _estimate_memory(self, declared: int | None, scale: int, count: int = 1) -> int:
        """Return the memory that attempts need: declared or learned, and more after a shortage."""
        if declared is not None:
            return (declared + self._workers.need) * count
        if self._elsewhere:
            return self._workers.need * count
        sandbox = self._sandboxes.need if scale == 1 else self._sandboxes.retry_need
        # A guess never exceeds the memory beside the run's own processes: the sandbox's limit decides then.
        most = max(FLOOR, self.gate.memory.largest_lease - self._usage.base)
        return min((sandbox + self._workers.need) * scale * count, most)

    def _learn(self, verdict: Verdict, grant: AttemptGrant | None) -> None:
        if grant is None or (verdict.failure is not None and verdict.failure.where in UNTYPICAL):
            return
        self._sandboxes.add(max(grant.peak.sandbox, verdict.peak_memory))
        self._workers.add(grant.peak.worker)
        self._disks.add(grant.peak.disk)


class PeakHistory:
    """The latest peaks of one resource.

    `quantile` is the share of peaks that must fit: 1.0 if no limit stops an attempt that needs more, less
    if its lease is a limit that can grow.
    """

    def __init__(self, prior: int, least: int, quantile: float) -> None:
        self._prior = prior
        self._least = least
        self._quantile = quantile
        self._latest: deque[int] = deque()  # bound: `KEPT_PEAKS`, as the next
        self._sorted: list[int] = []

    def add(self, peak: int) -> None:
        self._latest.append(peak)
        bisect.insort(self._sorted, peak)
        if len(self._latest) > KEPT_PEAKS:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    @property
    def need(self) -> int:
        """Bytes for one more attempt: the quantile with a margin, and with few peaks a share of the prior."""
        count = len(self._sorted)
        if not count:
            return self._prior
        high = self._sorted[min(count - 1, int(count * self._quantile))]
        return max(
            self._least, int(high * MARGIN), self._prior * max(0, TRUSTED_PEAKS - count) // TRUSTED_PEAKS
        )

    @property
    def retry_need(self) -> int:
        """Initial bytes for an attempt whose lease was too small: never less than the prior."""
        return max(self._prior, self.need)


def sandbox_memory(limit: int, needed: int = 0) -> PeakHistory:
    """Return the history of sandbox memory. `needed`: bytes that the agent declares; 0: none.

    A lease is a limit for its sandbox and grows with it while there is room; `limit` is the total memory.
    """
    prior = needed or min(max(limit // 16, 64 * MiB), 512 * MiB)
    return PeakHistory(prior=prior, least=2 * MiB, quantile=0.65)


def worker_memory(needed: int = 0) -> PeakHistory:
    """Return the history of worker memory per attempt. `needed`: bytes that the agent declares; 0: none.

    Attempts share the limit of their worker, so one that exceeds it hits the others: nearly all peaks must
    fit.
    """
    return PeakHistory(prior=needed or 8 * MiB, least=1 * MiB, quantile=0.95)


def sandbox_disk() -> PeakHistory:
    return PeakHistory(prior=64 * MiB, least=1 * MiB, quantile=0.95)
