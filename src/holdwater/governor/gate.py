"""Grants leases of memory and disk, in the order in which they are asked for: what runs together always fits.

The only place in a run that waits for resources. A lease is the most that an attempt may use: sandboxes are
held to it. What is measured comes from `meter.py`, what an attempt will need from `peaks.py`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ..core.records import Failure, MiB, Record, Where
from .reading import Bound

RESERVE = 0.06  # of a limit: for what grows between two readings, and for the kernel's own
LEAST_RESERVE = 24 * MiB
NEVER = 40  # readings without any lease after which one that still does not fit never will


class Lease(Record, frozen=True):
    """Bytes of memory and of disk for one attempt."""

    memory: int
    disk: int = 0
    firm: bool = True  # declared: less will not do. What is only a guess takes what there is


class Pool:
    """One resource: the bounds on it, what is leased of it and what of the leases is used."""

    def __init__(self, reserve: float, least_reserve: int) -> None:
        self._reserve = reserve
        self._least_reserve = least_reserve
        self._bounds: tuple[Bound, ...] = ()
        self._used: dict[int, int] = {}
        self._inside = 0  # the sum of it
        self._leased = 0  # the sum of leases, where one that is exceeded counts as what is used
        self._leases: dict[int, int] = {}  # attempt -> bytes; bound: the run's concurrency, as the other

    @property
    def leases(self) -> Mapping[int, int]:
        return self._leases

    def measured(self, bounds: tuple[Bound, ...], used: Mapping[int, int]) -> None:
        """What all together use of each limit, and what of that is each attempt's."""
        self._bounds = bounds
        self._used = {attempt: used.get(attempt, 0) for attempt in self._leases}
        self._inside = sum(self._used.values())
        self._leased = sum(max(lease, self._used[a]) for a, lease in self._leases.items())

    def lease(self, attempt: int, bytes_: int) -> None:
        used = self._used.setdefault(attempt, 0)
        self._leased += max(bytes_, used) - max(self._leases.get(attempt, 0), used)
        self._leases[attempt] = bytes_

    def give(self, attempt: int) -> None:
        used = self._used.pop(attempt, 0)
        self._inside -= used
        self._leased -= max(self._leases.pop(attempt, 0), used)

    @property
    def room(self) -> int:
        """Bytes that can still be leased. An attempt that uses more than its lease has leased that."""
        return self.all_of_it - self._leased

    @property
    def all_of_it(self) -> int:
        """Bytes that could be leased now if nothing was."""
        # What is used and not an attempt's: the conductor, idle workers, neighbours.
        free = (self._usable(bound) - max(0, bound.used - self._inside) for bound in self._bounds)
        return min(free, default=1 << 62)

    @property
    def most(self) -> int:
        """Bytes that can ever be leased, were there nobody else at all."""
        return min((self._usable(bound) for bound in self._bounds), default=1 << 62)

    def _usable(self, bound: Bound) -> int:
        return bound.limit - max(self._least_reserve, int(bound.limit * self._reserve))


class Gate:
    """The leases of one run. `measured` must have been called once before anything is asked for."""

    def __init__(self) -> None:
        self.memory = Pool(RESERVE, LEAST_RESERVE)
        self.disk = Pool(RESERVE, 0)
        self.most: int | None = None  # attempts at once that the CPU bears; None: it is not asked
        self.holds: set[str] = set()  # why nobody is admitted for the moment; a handful of reasons
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # bound: the run's concurrency
        self._alone = 0  # readings that the first has waited through without any lease beside it

    async def take(self, attempt: int, need: Lease) -> Failure | None:
        """Wait for a lease; the failure if there can never be one, or why it was let go."""
        if need.firm and (failure := self._never(need, self.memory.most, self.disk.most)):
            return failure
        if not self._waiting and self._fits(need):
            self._grant(attempt, need)
            return None
        granted: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = need, granted
        try:
            return await granted
        finally:
            self._waiting.pop(attempt, None)

    def beyond(self, disk: int) -> Failure | None:
        """Why so much disk can never be had, if that is so."""
        return self._never(Lease(0, disk), self.memory.most, self.disk.most)

    def drop(self, attempt: int, failure: Failure) -> bool:
        """Let an attempt that waits go with this failure; whether it did wait."""
        _, granted = self._waiting.pop(attempt, (None, None))
        if granted is None or granted.done():
            return False
        granted.set_result(failure)
        self._admit()
        return True

    def hold(self, why: str) -> None:
        """Nobody is admitted until this reason, and every other, is gone."""
        self.holds.add(why)

    def release(self, why: str) -> None:
        self.holds.discard(why)
        self._admit()

    def extend(self, attempt: int, memory: int) -> bool:
        """Whether its memory could be made more. Who has a lease goes before those who wait for one."""
        lease = self.memory.leases.get(attempt)
        if lease is None or memory - lease > self.memory.room:
            return False
        self.memory.lease(attempt, max(lease, memory))
        return True

    def divide(self, attempt: int, among: Sequence[int]) -> None:
        """What the attempt has leased is shared by all of these, in equal parts."""
        memory, disk = self.memory.leases.get(attempt, 0), self.disk.leases.get(attempt, 0)
        for each in among:
            self.memory.lease(each, memory // len(among))
            self.disk.lease(each, disk // len(among))

    def hand_over(self, attempt: int, to: int) -> None:
        """What one has leased is another's."""
        for pool in (self.memory, self.disk):
            bytes_ = pool.leases.get(attempt, 0)
            pool.give(attempt)
            pool.lease(to, bytes_)

    def shrink(self, attempt: int, disk: int) -> None:
        """So many bytes of its disk are not leased any more."""
        if (lease := self.disk.leases.get(attempt)) is not None:
            self.disk.lease(attempt, max(0, lease - disk))
            self._admit()

    def lend(self, loan: int, disk: int) -> bool:
        """Disk for something that nobody waits for: at once or not at all. It goes back by `give`."""
        if self._waiting or self.holds or disk > self.disk.room:
            return False
        self.disk.lease(loan, disk)
        return True

    def give(self, attempt: int) -> None:
        """The attempt is over: its bytes are free."""
        self.memory.give(attempt)
        self.disk.give(attempt)
        self._admit()

    def measured(self) -> None:
        """The pools have been measured: whoever fits now is admitted."""
        self._admit()
        self._alone = self._alone + 1 if self._waiting and not self.memory.leases and not self.holds else 0
        if self._alone < NEVER:
            return
        attempt, (need, granted) = next(iter(self._waiting.items()))
        if need.firm and (failure := self._never(need, self.memory.room, self.disk.room)):
            self.drop(attempt, failure)
        elif not need.firm and not granted.done():
            del self._waiting[attempt]
            self._grant(attempt, need)
            granted.set_result(None)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that wait, in their order."""
        return tuple(self._waiting)

    @property
    def lacking(self) -> int:
        """Bytes of disk that the first in the queue waits for."""
        need, _ = next(iter(self._waiting.values()), (Lease(0), None))
        return max(0, need.disk - self.disk.room) if need.disk else 0

    @property
    def binds(self) -> str:
        """What the first in the queue waits for; nothing when nobody waits."""
        if not self._waiting:
            return ""
        if self.holds:
            return "disk" if "disk" in self.holds else "memory"
        need, _ = next(iter(self._waiting.values()))
        if self._crowded:
            return "cpu"
        return "memory" if need.memory > self.memory.room else "disk"

    @property
    def _crowded(self) -> bool:
        return self.most is not None and len(self.memory.leases) >= self.most

    def _fits(self, need: Lease) -> bool:
        memory = not need.memory or need.memory <= self.memory.room  # who needs none waits for none
        disk = not need.disk or need.disk <= self.disk.room
        return not (self.holds or self._crowded) and memory and disk

    def _grant(self, attempt: int, need: Lease) -> None:
        self.memory.lease(attempt, need.memory)
        self.disk.lease(attempt, need.disk)

    def _admit(self) -> None:
        """In order: a large one at the head waits for its room, and nobody passes it."""
        while self._waiting:
            attempt, (need, granted) = next(iter(self._waiting.items()))
            if not self._fits(need):
                return
            del self._waiting[attempt]
            if not granted.done():  # else it was cancelled
                self._grant(attempt, need)
                granted.set_result(None)

    def _never(self, need: Lease, memory: int, disk: int) -> Failure | None:
        if need.memory > memory:
            return _budget("memory", need.memory, memory)
        return _budget("disk", need.disk, disk) if need.disk > disk else None


_Waiting = tuple[Lease, asyncio.Future[Failure | None]]


def _budget(kind: str, need: int, most: int) -> Failure:
    return Failure(
        where=Where.BUDGET,
        kind=kind,
        message=f"needs {need // MiB} MiB of {kind}, and there are {max(0, most) // MiB} MiB for an attempt",
        hint=f"give the run more with `--{kind}`, or let the instance ask for less in its `limits`",
        again=False,
    )
