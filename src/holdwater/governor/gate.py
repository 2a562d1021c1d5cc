"""Grants leases of memory, in the order in which they are asked for, so that what runs together always fits.

The only place in a run that waits for resources. A lease is the most that an attempt may use: sandboxes are
held to it. What is measured comes from `meter.py`, what an attempt will need from `peaks.py`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from ..core.records import Failure, MiB, Where
from .reading import Bound

RESERVE = 0.06  # of a limit: for what grows between two readings, and for the kernel's own
LEAST_RESERVE = 24 * MiB


class Gate:
    """The leases of one run. `measured` must have been called once before anything is asked for."""

    def __init__(self) -> None:
        self._bounds: tuple[Bound, ...] = ()
        self._leases: dict[int, int] = {}  # attempt -> bytes; bound: the run's concurrency, like the next
        self._used: dict[int, int] = {}
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # bound: the same
        self.held: set[str] = set()  # why nobody is admitted for the moment; bound: the callers of `hold`

    async def take(self, attempt: int, need: int) -> Failure | None:
        """Wait for a lease of `need` bytes; the failure if there can never be one, or why it was let go."""
        if need and (most := self.most) < need:
            return _never(need, most)
        if not self._waiting and self._fits(need):
            self._leases[attempt] = need
            return None
        granted: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = need, granted
        try:
            return await granted
        finally:
            self._waiting.pop(attempt, None)

    def drop(self, attempt: int, failure: Failure) -> bool:
        """Let an attempt that waits go with this failure; whether it did wait."""
        _, granted = self._waiting.pop(attempt, (0, None))
        if granted is None or granted.done():
            return False
        granted.set_result(failure)
        self._admit()
        return True

    def hold(self, why: str) -> None:
        """Nobody is admitted until this reason, and every other, is gone."""
        self.held.add(why)

    def release(self, why: str) -> None:
        self.held.discard(why)
        self._admit()

    def extend(self, attempt: int, need: int) -> bool:
        """Whether the lease could be made larger. Who has one goes before those who wait for theirs."""
        lease = self._leases.get(attempt)
        if lease is None or need - lease > self.room:
            return False
        self._leases[attempt] = max(lease, need)
        return True

    def give(self, attempt: int) -> None:
        """The attempt is over: its bytes are free."""
        self._leases.pop(attempt, None)
        self._used.pop(attempt, None)
        self._admit()

    def measured(self, bounds: tuple[Bound, ...], used: Mapping[int, int]) -> None:
        """What all together use of each limit, and what of that is each attempt's."""
        self._bounds = bounds
        self._used = {attempt: used.get(attempt, 0) for attempt in self._leases}
        self._admit()

    @property
    def room(self) -> int:
        """Bytes that can still be leased."""
        return min((self._free(bound) for bound in self._bounds), default=0)

    @property
    def most(self) -> int:
        """Bytes that can be leased when nothing else is."""
        return self.room + sum(max(lease, self._used.get(a, 0)) for a, lease in self._leases.items())

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that wait, in their order."""
        return tuple(self._waiting)

    def lease(self, attempt: int) -> int:
        return self._leases.get(attempt, 0)

    def _free(self, bound: Bound) -> int:
        leased = sum(max(lease, self._used.get(a, 0)) for a, lease in self._leases.items())
        others = max(0, bound.used - sum(self._used.values()))  # the conductor, idle workers, neighbours
        return bound.limit - max(LEAST_RESERVE, int(bound.limit * RESERVE)) - others - leased

    def _fits(self, need: int) -> bool:
        return not self.held and (not need or need <= self.room)

    def _admit(self) -> None:
        """In order: a large one at the head waits for its room, and nobody passes it."""
        while self._waiting:
            attempt, (need, granted) = next(iter(self._waiting.items()))
            if not self._fits(need):
                return
            del self._waiting[attempt]
            if not granted.done():  # else it was cancelled
                self._leases[attempt] = need
                granted.set_result(None)


_Waiting = tuple[int, asyncio.Future[Failure | None]]


def _never(need: int, most: int) -> Failure:
    return Failure(
        where=Where.BUDGET,
        kind="memory",
        message=f"needs {need // MiB} MiB, and {max(0, most) // MiB} MiB is all that an attempt can have",
        hint="give the run more with `--memory`, or the instance less in its `limits`",
        again=False,
    )
