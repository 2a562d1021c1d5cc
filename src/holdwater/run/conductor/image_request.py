"""The images that an attempt requests for its sandboxes, and the interface that supplies them.

`run/builds/docker_supply.py` implements the interface.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ...core.records import AttemptFailure, SandboxSpec


class ImageRequest(msgspec.Struct, frozen=True):
    """The part of an instance that says which images it needs."""

    id: str
    start: SandboxSpec = SandboxSpec()
    grader: SandboxSpec | None = None
    data: dict[str, Any] = {}  # names of images may be derived from it
    refused: str = ""  # why it cannot be tried; it then needs no images

    @property
    def starts(self) -> tuple[SandboxSpec, ...]:
        """The sandbox specs that name an image, one for each key."""
        named = {one.key: one for one in (self.grader, self.start) if one is not None and one.key}
        return tuple(named.values())


class ImageSupply(Protocol):
    """Makes images available where sandboxes start."""

    async def estimate_need(self, wanted: ImageRequest) -> int:
        """Return the bytes that these images would add on the daemon's disk."""

    async def hold(self, attempt: int, wanted: ImageRequest) -> dict[str, str]:
        """Return `SandboxSpec.key` -> the daemon's image, held until `release`. Raises an `AttemptError`."""

    def release(self, attempt: int, failure: AttemptFailure | None = None) -> None:
        """End the attempt's hold, if it has one; `failure` is the attempt's."""

    def expect(self, wanted: ImageRequest) -> None:
        """Announce that an attempt will request these images soon."""

    def stop(self) -> None:
        """Expect no more requests."""
