"""Requests that the gateway refuses: each kind is told when it happens first, and counted to the end."""

from __future__ import annotations

from collections.abc import Callable

MOST_KINDS = 32  # of an attempt that are told
LONGEST_TOLD = 500  # characters
STEPS = frozenset(10**power for power in range(1, 10))  # counts that are told while it goes on


class RefusedCalls:
    """The refused requests of one session, or of all that belong to none."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._counts: dict[str, int] = {}  # bound: MOST_KINDS
        self._others = 0

    def add(self, call: str, status: int, message: str) -> None:
        """A call, such as `POST v1/messages`, was answered with this status."""
        what = f"{status} `{call}`: {message}"[:LONGEST_TOLD]
        if what in self._counts:
            self._counts[what] += 1
            if self._counts[what] in STEPS:  # the last word may be lost with its worker
                self._tell(f"{self._counts[what]} times: {what}")
        elif len(self._counts) < MOST_KINDS:
            self._counts[what] = 1
            self._tell(what)
        else:
            self._others += 1

    def close(self) -> None:
        """Say how often it happened, where that was more than once."""
        for what, count in self._counts.items():
            if count > 1:
                self._tell(f"{count} times: {what}")
        if self._others:
            self._tell(f"{self._others} more requests were refused")
        self._counts, self._others = {}, 0
