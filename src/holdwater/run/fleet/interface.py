"""The interface of a fleet: the workers that host attempts.

`inline.py` hosts them in the conductor, `local.py` in processes of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from ...core.records import AttemptFailure, MiB, ModelUsage, Record
from ...rollout.worker_protocol import (
    AnswerHeldCall,
    AttemptDone,
    AttemptJob,
    AttemptProgress,
    AttemptStatus,
    CallHeld,
    CallReleased,
    EventNoted,
    FetchHeldCall,
    HeldCallContent,
    LineLogged,
    MemberWaiting,
    SteerWorker,
    WorkerBroken,
    WorkerUnfit,
)

NEW_WORKER = 96 * MiB  # room for a new worker beside the one that it replaces
ToAttempt = FetchHeldCall | AnswerHeldCall


class WorkerGone(Record, frozen=True):
    """A worker is gone, and all of its messages have been passed on."""

    worker: int


# Messages of an attempt before its verdict.
AttemptUpdate = MemberWaiting | AttemptProgress | CallHeld | CallReleased | HeldCallContent
FleetUpdate = AttemptDone | EventNoted | LineLogged | WorkerBroken | WorkerUnfit | AttemptUpdate | WorkerGone
Emit = Callable[[FleetUpdate], None]


class AttemptUse(Record, frozen=True):
    """The current use of one attempt, in bytes."""

    sandbox: int = 0  # memory of its processes
    worker: int = 0  # its share of the worker's growth since it began
    disk: int = 0
    throttled: bool = False  # it waits for a rate limit
    cpu: float = 0.0  # seconds that its sandbox has used so far

    @property
    def memory(self) -> int:
        return self.sandbox + self.worker


class FleetCensus(Record, frozen=True):
    """The workers at one moment."""

    workers: int
    draining: int = 0
    pids: tuple[int, ...] = ()
    lag: float = 0.0
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    usage: ModelUsage = ModelUsage()  # of the attempts that are not settled
    uses: dict[int, AttemptUse] = msgspec.field(default_factory=dict)  # by attempt

    @property
    def sandboxes(self) -> int:
        """Bytes of memory in all sandboxes."""
        return sum(use.sandbox for use in self.uses.values())

    @staticmethod
    def sum_usage(living: Iterable[AttemptStatus]) -> ModelUsage:
        total = ModelUsage()
        for one in living:
            total = total.plus(one.usage)
        return total


class FleetCondition(Record, frozen=True):
    """The number of workers in each state."""

    ready: int  # and taking attempts
    starting: int
    draining: int
    wanted: int
    lost: int = 0  # workers that died or hung, since the start
    recycled: int = 0
    unfit: str = ""  # why a worker cannot start


class Fleet(Protocol):
    """Hosts attempts and reports their verdicts; opened and closed with `async with`."""

    async def start(self, job: AttemptJob) -> None:
        """Hand the attempt to a worker; waits until one can take it."""

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        """End the attempt with this failure."""

    def give_up(self, attempt: int) -> str:
        """Give up an attempt that overran its limits; return where it hangs. Its worker takes no more."""

    def take_census(self) -> FleetCensus: ...


class GovernedFleet(Fleet, Protocol):
    """A fleet whose memory can be governed. `trim` and `recycle` return what they did, empty for nothing."""

    @property
    def memory_version(self) -> int:
        """A number that changes with the use of memory."""

    def allow_memory(self, attempt: int, memory: int) -> None:
        """Set the memory limit of the attempt's sandbox."""

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        """Let workers grow by their attempts' leases, and by a share of the free memory."""

    def trim(self) -> str:
        """Make workers without attempts return memory."""

    def recycle(self, least: int, *, at_once: bool) -> str:
        """Drain the worker that grew most, if by `least` bytes; replace it before (`at_once`) or after."""


class ServingFleet(GovernedFleet, Protocol):
    """A fleet whose living attempts can receive messages."""

    def send(self, attempt: int, message: ToAttempt) -> bool:
        """Send a message to the worker that hosts the attempt; return False if none does."""

    def score_group(self, group: int, together: bool) -> None:
        """Score the group, because no further member will arrive: see `ScoreMembers`."""

    def steer(self, message: SteerWorker) -> None:
        """Change the run's model on all workers, also on workers that start later."""

    def adjust_workers(self, running: int, waiting: int, room: int) -> None:
        """Start or drain workers by demand and by the free memory in bytes (`room`)."""

    def condition(self) -> FleetCondition: ...
