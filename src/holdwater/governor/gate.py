"""Grants leases of memory and disk in the order of the requests, so that running attempts always fit.

This is the only place in a run that waits for resources. A lease is the most that an attempt may use, and
its sandbox enforces it. `meter.py` measures the use; `leases.py` predicts the need of an attempt.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ..core.records import AttemptFailure, FailureOrigin, MiB, Record
from .resource_reading import ResourceBound

RESERVE = 0.06  # share of a limit that stays free: for growth between two readings and for the kernel
LEAST_RESERVE = 24 * MiB
PAUSE = "pause"  # a reason to hold all attempts: the run is paused
HOPELESS_READINGS = 40  # readings without any lease after which a firm request that does not fit is refused


class Lease(Record, frozen=True):
    """Bytes of memory and of disk for one attempt."""

    memory: int
    disk: int = 0
    # True: declared, so less is not enough; False: an estimate, which accepts less
    firm: bool = True


class LeasePool:
    """One resource: its bounds, its leases, and the use by their attempts."""

    def __init__(self, reserve: float, least_reserve: int) -> None:
        self._reserve = reserve
        self._least_reserve = least_reserve
        self._bounds: tuple[ResourceBound, ...] = ()
        self._used: dict[int, int] = {}
        self._inside = 0  # the sum of `_used`
        self._leased = 0  # the sum of leases; an exceeded lease counts as the bytes in use
        self._leases: dict[int, int] = {}  # attempt -> bytes; bound: the run's concurrency, as for `_used`

    @property
    def leases(self) -> Mapping[int, int]:
        return self._leases

    def set_usage(self, bounds: tuple[ResourceBound, ...], used: Mapping[int, int]) -> None:
        """Store a reading: the bounds with their total use, and the use of each attempt."""
        self._bounds = bounds
        self._used = {attempt: used.get(attempt, 0) for attempt in self._leases}
        self._inside = sum(self._used.values())
        self._leased = sum(max(lease, self._used[a]) for a, lease in self._leases.items())

    def lease(self, attempt: int, bytes_: int) -> None:
        used = self._used.setdefault(attempt, 0)
        self._leased += max(bytes_, used) - max(self._leases.get(attempt, 0), used)
        self._leases[attempt] = bytes_

    def give_back(self, attempt: int) -> None:
        used = self._used.pop(attempt, 0)
        self._inside -= used
        self._leased -= max(self._leases.pop(attempt, 0), used)

    @property
    def room(self) -> int:
        """Bytes that can still be leased. An attempt that exceeds its lease counts with its actual use."""
        return self.leasable_total - self._leased

    @property
    def leasable_total(self) -> int:
        """Bytes that could be leased now without any existing lease."""
        # Use beyond the attempts' own: the conductor, idle workers, other processes.
        free = (self._usable(bound) - max(0, bound.used - self._inside) for bound in self._bounds)
        return min(free, default=1 << 62)

    @property
    def largest_lease(self) -> int:
        """The largest possible lease, on an otherwise idle machine."""
        return min((self._usable(bound) for bound in self._bounds), default=1 << 62)

    def _usable(self, bound: ResourceBound) -> int:
        return bound.limit - max(self._least_reserve, int(bound.limit * self._reserve))


class Gate:
    """The leases of one run. `on_measured` must be called once before the first `take`."""

    def __init__(self) -> None:
        self.memory = LeasePool(RESERVE, LEAST_RESERVE)
        self.disk = LeasePool(RESERVE, 0)
        self.most_attempts: int | None = None  # limit on concurrent attempts by CPU; None: no limit
        self.holds: set[str] = set()  # reasons to admit no attempt for now; a handful at most
        self._waiting: OrderedDict[int, _WaitingLease] = OrderedDict()  # bound: the run's concurrency
        self._alone = 0  # readings for which the head of the queue has waited while no lease existed

    async def take(self, attempt: int, need: Lease) -> AttemptFailure | None:
        """Wait for a lease; return None once it is granted, or the failure if it is refused or dropped."""
        if need.firm and (
            failure := self._find_refusal(need, self.memory.largest_lease, self.disk.largest_lease)
        ):
            return failure
        if not self._waiting and self._fits(need):
            self._grant(attempt, need)
            return None
        granted: asyncio.Future[AttemptFailure | None] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = need, granted
        try:
            return await granted
        finally:
            self._waiting.pop(attempt, None)

    def find_disk_refusal(self, disk: int) -> AttemptFailure | None:
        """Return the failure if so much disk can never be leased; None: it can."""
        return self._find_refusal(Lease(0, disk), self.memory.largest_lease, self.disk.largest_lease)

    def drop(self, attempt: int, failure: AttemptFailure) -> bool:
        """Remove a waiting attempt, whose `take` returns this failure; return whether it was waiting."""
        _, granted = self._waiting.pop(attempt, (None, None))
        if granted is None or granted.done():
            return False
        granted.set_result(failure)
        self._admit()
        return True

    def limit_attempts(self, most: int | None) -> None:
        """Limit the number of concurrent attempts, from the next admission on."""
        self.most_attempts = most

    def hold(self, why: str) -> None:
        """Admit no attempt until this reason, and every other, is released."""
        self.holds.add(why)

    def release(self, why: str) -> None:
        self.holds.discard(why)
        self._admit()

    def extend(self, attempt: int, memory: int) -> bool:
        """Extend an attempt's memory lease; return whether there was room.

        Running attempts take precedence over waiting ones.
        """
        lease = self.memory.leases.get(attempt)
        if lease is None or memory - lease > self.memory.room:
            return False
        self.memory.lease(attempt, max(lease, memory))
        return True

    def divide(self, attempt: int, among: Sequence[int]) -> None:
        """Divide the lease of an attempt into equal leases for the attempts `among`."""
        memory, disk = self.memory.leases.get(attempt, 0), self.disk.leases.get(attempt, 0)
        for each in among:
            self.memory.lease(each, memory // len(among))
            self.disk.lease(each, disk // len(among))

    def hand_over(self, attempt: int, to: int) -> None:
        """Transfer the lease of one attempt to another."""
        for pool in (self.memory, self.disk):
            bytes_ = pool.leases.get(attempt, 0)
            pool.give_back(attempt)
            pool.lease(to, bytes_)

    def shrink(self, attempt: int, disk: int) -> None:
        """Reduce the disk lease of an attempt by so many bytes."""
        if (lease := self.disk.leases.get(attempt)) is not None:
            self.disk.lease(attempt, max(0, lease - disk))
            self._admit()

    def lend(self, loan: int, disk: int) -> bool:
        """Lease disk for optional work, without waiting; return whether it was granted.

        `give_back` returns it.
        """
        if self._waiting or self.holds or disk > self.disk.room:
            return False
        self.disk.lease(loan, disk)
        return True

    def give_back(self, attempt: int) -> None:
        """Free the lease of an ended attempt."""
        self.memory.give_back(attempt)
        self.disk.give_back(attempt)
        self._admit()

    def on_measured(self) -> None:
        """Admit the attempts that fit after a new measurement of the pools."""
        self._admit()
        self._alone = self._alone + 1 if self._waiting and not self.memory.leases and not self.holds else 0
        if self._alone < HOPELESS_READINGS:
            return
        attempt, (need, granted) = next(iter(self._waiting.items()))
        if need.firm and (failure := self._find_refusal(need, self.memory.room, self.disk.room)):
            self.drop(attempt, failure)
        elif not need.firm and not granted.done():
            del self._waiting[attempt]
            self._grant(attempt, need)
            granted.set_result(None)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The waiting attempts, in order."""
        return tuple(self._waiting)

    @property
    def missing_disk(self) -> int:
        """Bytes of disk that are missing for the head of the queue."""
        need, _ = next(iter(self._waiting.values()), (Lease(0), None))
        return max(0, need.disk - self.disk.room) if need.disk else 0

    @property
    def binds(self) -> str:
        """The resource that the head of the queue waits for; empty if the queue is empty."""
        if not self._waiting:
            return ""
        if self.holds:
            return next((why for why in (PAUSE, "disk") if why in self.holds), "memory")
        need, _ = next(iter(self._waiting.values()))
        if self._crowded:
            return "cpu"
        return "memory" if need.memory > self.memory.room else "disk"

    @property
    def _crowded(self) -> bool:
        return self.most_attempts is not None and len(self.memory.leases) >= self.most_attempts

    def _fits(self, need: Lease) -> bool:
        # An attempt that needs no memory does not wait for it.
        memory = not need.memory or need.memory <= self.memory.room
        disk = not need.disk or need.disk <= self.disk.room
        return not (self.holds or self._crowded) and memory and disk

    def _grant(self, attempt: int, need: Lease) -> None:
        self.memory.lease(attempt, need.memory)
        self.disk.lease(attempt, need.disk)

    def _admit(self) -> None:
        """Admit waiting attempts in order: a large request at the head waits, and no other overtakes it."""
        while self._waiting:
            attempt, (need, granted) = next(iter(self._waiting.items()))
            if not self._fits(need):
                return
            del self._waiting[attempt]
            if not granted.done():  # else it was cancelled
                self._grant(attempt, need)
                granted.set_result(None)

    def _find_refusal(self, need: Lease, memory: int, disk: int) -> AttemptFailure | None:
        if need.memory > memory:
            return _make_failure("memory", need.memory, memory)
        return _make_failure("disk", need.disk, disk) if need.disk > disk else None


_WaitingLease = tuple[Lease, asyncio.Future[AttemptFailure | None]]


def _make_failure(kind: str, need: int, most: int) -> AttemptFailure:
    return AttemptFailure(
        where=FailureOrigin.BUDGET,
        kind=kind,
        message=f"needs {need // MiB} MiB of {kind}; at most {max(0, most) // MiB} MiB are available",
        hint=f"raise `--{kind}`, or lower the `limits` of the instance",
        again=False,
    )
