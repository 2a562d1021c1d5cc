"""What a fleet is: the workers that host attempts, here or elsewhere.

`inline.py` hosts them in the conductor, `local.py` in processes of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from ..core.records import Record, Usage
from ..rollout.wire import Broken, Done, Job, Living, Noted, Said, Unfit

News = Done | Noted | Said | Broken | Unfit
Emit = Callable[[News], None]


class Census(Record, frozen=True):
    """The workers at one moment."""

    workers: int
    draining: int = 0
    pids: tuple[int, ...] = ()
    lag: float = 0.0
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    usage: Usage = Usage()  # of the attempts that are not settled
    memory: dict[int, int] = msgspec.field(
        default_factory=dict
    )  # attempt -> bytes, its share of a worker too
    sandboxes: int = 0  # bytes that all of them use

    @staticmethod
    def used(living: Iterable[Living]) -> Usage:
        total = Usage()
        for one in living:
            total = total.plus(one.usage)
        return total


class Fleet(Protocol):
    """Hosts attempts and reports their verdicts; opened and closed with `async with`."""

    async def start(self, job: Job) -> None:
        """Hand the attempt to a worker; waits until one can take it."""

    def interrupt(self, attempt: int, reason: str) -> None:
        """End the attempt with the verdict `interrupted`."""

    def give_up(self, attempt: int) -> str:
        """Stop waiting for an attempt that overran its limits; where it hangs. Its worker takes no more."""

    def census(self) -> Census: ...

    def allow(self, attempt: int, memory: int) -> None:
        """The attempt may use more memory from now on."""

    # What is done when memory runs short; each says what it did, nothing where there is nothing to do.

    def trim(self) -> str:
        """Have workers without attempts give memory back."""

    def recycle(self) -> str:
        """Drain the worker that has grown most; another takes its place when it is gone."""

    def youngest(self) -> int | None:
        """The attempt that began last."""
