"""What a fleet is: the workers that host attempts, here or elsewhere.

`inline.py` hosts them in the conductor, `local.py` in processes of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from ..core.records import Failure, Record, Usage
from ..rollout.wire import (
    Answered,
    Arrived,
    Asked,
    Broken,
    Done,
    Held,
    Job,
    Living,
    Noted,
    Progress,
    Said,
    Steered,
    Take,
    Unfit,
    Unheld,
)

ToAttempt = Take | Answered


class Gone(Record, frozen=True):
    """A worker is no more, and everything that it said has been passed on."""

    worker: int


# What an attempt says before its verdict.
Underway = Arrived | Progress | Held | Unheld | Asked
News = Done | Noted | Said | Broken | Unfit | Underway | Gone
Emit = Callable[[News], None]


class Use(Record, frozen=True):
    """What one attempt uses now, in bytes."""

    sandbox: int = 0  # memory of its processes
    worker: int = 0  # its share of what its worker has grown by since it began
    disk: int = 0
    throttled: bool = False  # it waits for a rate limit
    cpu: float = 0.0  # seconds that its sandbox has used so far

    @property
    def memory(self) -> int:
        return self.sandbox + self.worker


class Census(Record, frozen=True):
    """The workers at one moment."""

    workers: int
    draining: int = 0
    pids: tuple[int, ...] = ()
    lag: float = 0.0
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    usage: Usage = Usage()  # of the attempts that are not settled
    uses: dict[int, Use] = msgspec.field(default_factory=dict)  # by attempt

    @property
    def sandboxes(self) -> int:
        """Bytes of memory in all sandboxes."""
        return sum(use.sandbox for use in self.uses.values())

    @staticmethod
    def used(living: Iterable[Living]) -> Usage:
        total = Usage()
        for one in living:
            total = total.plus(one.usage)
        return total


class Condition(Record, frozen=True):
    """How the workers are."""

    ready: int  # and taking what comes
    starting: int
    draining: int
    wanted: int
    lost: int = 0  # workers that died or hung, since the start
    recycled: int = 0
    unfit: str = ""  # why a worker cannot start


class Fleet(Protocol):
    """Hosts attempts and reports their verdicts; opened and closed with `async with`."""

    async def start(self, job: Job) -> None:
        """Hand the attempt to a worker; waits until one can take it."""

    def interrupt(self, attempt: int, failure: Failure) -> None:
        """End the attempt with this failure."""

    def give_up(self, attempt: int) -> str:
        """Stop waiting for an attempt that overran its limits; where it hangs. Its worker takes no more."""

    def census(self) -> Census: ...


class Governed(Fleet, Protocol):
    """A fleet whose memory can be governed. What reclaims says what it did: nothing, if it did nothing."""

    @property
    def news(self) -> int:
        """Another number when the use of memory has changed."""

    def allow(self, attempt: int, memory: int) -> None:
        """The attempt's sandbox may use so much from now on."""

    def permit(self, leases: Mapping[int, int], room: int) -> None:
        """Workers may grow by what their attempts have leased, and share what is free."""

    def trim(self) -> str:
        """Have workers without attempts give memory back."""

    def recycle(self, least: int, *, at_once: bool) -> str:
        """Drain the worker that has grown most, if by `least` bytes; another takes its place, now or then."""


class Attended(Governed, Protocol):
    """A fleet whose attempts can be spoken to while they live."""

    def send(self, attempt: int, message: ToAttempt) -> bool:
        """Tell the worker that hosts the attempt; False: none does."""

    def score(self, group: int, together: bool) -> None:
        """Nobody of the group is left to wait for: see `Score`."""

    def steer(self, message: Steered) -> None:
        """The run's model is another one: all workers hear it, also those that start later."""

    def demand(self, running: int, waiting: int, room: int) -> None:
        """What is asked of it, and bytes of memory that are free: there are more workers or fewer."""

    def condition(self) -> Condition: ...
