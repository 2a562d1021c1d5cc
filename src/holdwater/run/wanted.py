"""What an attempt's sandboxes start from, as it is asked for, and of whom. `supply.py` gives it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ..core.records import Failure, Start


class Wanted(msgspec.Struct, frozen=True):
    """The part of an instance that says which images it needs."""

    id: str
    start: Start = Start()
    grader: Start | None = None
    data: dict[str, Any] = {}  # names of images may be made from it
    refused: str = ""  # why it cannot be tried: it needs none then

    @property
    def starts(self) -> tuple[Start, ...]:
        """Those that name an image; the first of the same key counts."""
        named = {one.key: one for one in (self.grader, self.start) if one is not None and one.key}
        return tuple(named.values())


class Supplies(Protocol):
    """Sees to it that images are where they are needed."""

    async def need(self, wanted: Wanted) -> int:
        """Bytes that holding these would take on the daemon's disk beyond what is there."""

    async def hold(self, attempt: int, wanted: Wanted) -> dict[str, str]:
        """`Start.key` -> what the daemon has for it, until `release`. Raises an `AttemptError`."""

    def release(self, attempt: int, failure: Failure | None = None) -> None:
        """The attempt is over, with this failure, whether it held anything or not."""

    def expect(self, wanted: Wanted) -> None:
        """An attempt will want these soon."""

    def stop(self) -> None:
        """Nothing more is expected."""
