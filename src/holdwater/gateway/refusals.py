"""Reports requests that the gateway refuses: each kind at its first occurrence, and its count at the end."""

from __future__ import annotations

from collections.abc import Callable

MOST_KINDS = 32  # reported per attempt
LONGEST_REPORT = 500  # characters
REPORTED_COUNTS = frozenset(10**power for power in range(1, 10))  # counts reported while the attempt runs


class RefusedCalls:
    """The refused requests of one session, or of all requests without a session."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._counts: dict[str, int] = {}  # bound: MOST_KINDS
        self._others = 0

    def add(self, call: str, status: int, message: str) -> None:
        """Count a call, such as `POST v1/messages`, that was refused with this status."""
        what = f"{status} `{call}`: {message}"[:LONGEST_REPORT]
        if what in self._counts:
            self._counts[what] += 1
            if self._counts[what] in REPORTED_COUNTS:  # the final report may be lost with its worker
                self._tell(f"{self._counts[what]} times: {what}")
        elif len(self._counts) < MOST_KINDS:
            self._counts[what] = 1
            self._tell(what)
        else:
            self._others += 1

    def close(self) -> None:
        """Report the count of each kind that occurred more than once."""
        for what, count in self._counts.items():
            if count > 1:
                self._tell(f"{count} times: {what}")
        if self._others:
            self._tell(f"{self._others} more requests were refused")
        self._counts, self._others = {}, 0
