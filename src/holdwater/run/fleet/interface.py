"""The interface of a fleet: the workers that host attempts.

`inline.py` hosts them in the conductor, `local.py` in processes of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ...core.config import RunConfig
from ...core.records import AttemptFailure, ModelUsage, Record
from ...governor.memory_control import CountedWorkers, GovernedWorkers
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
    StandingMessage,
    WorkerBroken,
    WorkerUnfit,
)

ToAttempt = FetchHeldCall | AnswerHeldCall


class WorkerGone(Record, frozen=True):
    """A worker is gone, and all of its messages have been passed on."""

    worker: int


# Messages of an attempt before its verdict.
AttemptUpdate = MemberWaiting | AttemptProgress | CallHeld | CallReleased | HeldCallContent
FleetUpdate = AttemptDone | EventNoted | LineLogged | WorkerBroken | WorkerUnfit | AttemptUpdate | WorkerGone
Emit = Callable[[FleetUpdate], None]


class FleetCondition(Record, frozen=True):
    """The number of workers in each state."""

    ready: int  # and taking attempts
    starting: int
    draining: int
    wanted: int
    lost: int = 0  # workers that died or hung, since the start
    recycled: int = 0
    unfit: str = ""  # why a worker cannot start


class Fleet(CountedWorkers, Protocol):
    """Hosts attempts and reports their verdicts; opened and closed with `async with`."""

    async def start(self, job: AttemptJob) -> None:
        """Hand the attempt to a worker; waits until one can take it."""

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        """End the attempt with this failure."""

    def give_up(self, attempt: int) -> str:
        """Give up an attempt that overran its limits; return where it hangs. Its worker takes no more."""

    def score_group(self, group: int, together: bool) -> None:
        """Score the group, because no further member will arrive: see `ScoreMembers`."""


class GovernedFleet(Fleet, GovernedWorkers, Protocol):
    """A fleet whose memory can be governed, and whose run can be controlled."""

    def announce(self, message: StandingMessage) -> None:
        """Send a message to all workers, also to workers that start later."""

    def change(self, config: RunConfig) -> None:
        """Place attempts by this configuration from now on."""


class ServingFleet(GovernedFleet, Protocol):
    """A fleet whose living attempts can receive messages."""

    def send(self, attempt: int, message: ToAttempt) -> bool:
        """Send a message to the worker that hosts the attempt; return False if none does."""

    def adjust_workers(self, running: int, waiting: int, room: int) -> None:
        """Start or drain workers by demand and by the free memory in bytes (`room`)."""

    def condition(self) -> FleetCondition: ...


def sum_usage(living: Iterable[AttemptStatus]) -> ModelUsage:
    total = ModelUsage()
    for status in living:
        total = total.plus(status.usage)
    return total
