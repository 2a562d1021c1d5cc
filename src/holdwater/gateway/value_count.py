"""Counts the values of a JSON text before it is parsed, so that no request blocks its worker.

A compressed body of a few hundred kilobytes can hold millions of messages. The text is scanned in slices, so
that the counting thread lets other threads run.
"""

from __future__ import annotations

MOST_VALUES = 500_000  # per request, at any depth
MOST_MESSAGES = 50_000
MOST_OUTSIDE = 32 * 1024 * 1024  # bytes outside of strings: a parser that skips blanks blocks other threads
SLICE = 256 * 1024  # bytes: about a millisecond


LARGE = 1024 * 1024  # bytes from which parsing a request would block the event loop
MANY = 4096  # messages from which it would, too


class LargeRequest(Exception):
    """A request that seemed small has many messages: parse it as a large one."""


class OverfullRequest(Exception):
    """A request has more values or messages than the gateway parses."""


class ValueCount:
    """Counts the values of a growing text by the separators outside of strings."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most = most
        self._found = 0  # up to `_seen`
        self._seen = 0  # bytes
        self._outside = 0  # scanned bytes outside of strings
        self._in_string = False
        self._ahead = 0  # upper bound for the values after `_seen`

    def expect(self, piece: bytes) -> bool:
        """Whether the new `piece` may exceed the limit: `scan` finds out for certain."""
        self._ahead += _count(piece)
        return self._found + self._ahead > self._most

    def scan(self, text: bytes | bytearray) -> None:
        """Scan the new part of `text`; raise `OverfullRequest` if it exceeds a limit. Blocks."""
        while self._seen < len(text):
            end = self._seen + SLICE
            piece = bytes(text[self._seen : end])
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # keep the escaped character with its backslash
                if end >= len(text):
                    break
                piece = bytes(text[self._seen : end + 1])
            self._seen += len(piece)
            self._add(piece)
            if self._found > self._most:
                raise OverfullRequest(f"the request has more than {self._most} values")
            if self._outside > MOST_OUTSIDE:
                raise OverfullRequest(f"the request has more than {MOST_OUTSIDE} bytes outside of strings")
        self._ahead = 0

    def _add(self, piece: bytes) -> None:
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[1 if self._in_string else 0 :: 2])
        self._outside += len(outside)
        self._found += _count(outside)
        self._in_string ^= len(parts) % 2 == 0


def check_values(text: bytes | bytearray) -> None:
    """Raise `OverfullRequest` if `text` has too many values or blanks. Blocks."""
    if len(text) <= MOST_VALUES:
        return
    count = ValueCount()
    for start in range(0, len(text), SLICE):
        if len(text) > MOST_OUTSIDE or count.expect(bytes(text[start : start + SLICE])):
            count.scan(text)
            return


def check_messages(count: int, *, large: bool) -> None:
    """Raise `OverfullRequest` above `MOST_MESSAGES`, `LargeRequest` above `MANY` unless `large` is set."""
    if count > MANY and not large:
        raise LargeRequest
    if count > MOST_MESSAGES:
        raise OverfullRequest(f"the request has {count} messages, more than the limit of {MOST_MESSAGES}")


def _count(piece: bytes) -> int:
    return piece.count(b",") + piece.count(b"[") + piece.count(b"{")
