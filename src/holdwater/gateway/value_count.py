"""How many values a JSON text has, found before it is parsed: no request may hold up its worker.

A body of a few hundred kilobytes, unpacked, can hold millions of messages. The text is looked at in slices:
a thread that counts lets others have their turn.
"""

from __future__ import annotations

MOST_VALUES = 500_000  # of a request, at any depth
MOST_MESSAGES = 50_000
MOST_OUTSIDE = 32 * 1024 * 1024  # bytes outside of strings: a parser that skips blanks lets nobody else go on
SLICE = 256 * 1024  # bytes: a millisecond or so


LARGE = 1024 * 1024  # bytes from which taking a request apart would hold up the loop
MANY = 4096  # messages, the same


class LargeRequest(Exception):
    """A request that was taken for a small one has many messages: it is to be read as a large one."""


class OverfullRequest(Exception):
    """A request has more parts than are taken apart."""


class ValueCount:
    """The values of a text that grows: what separates them outside of strings is counted."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most = most
        self._found = 0  # up to `_seen`
        self._seen = 0  # bytes
        self._outside = 0  # bytes of that which are in no string
        self._in_string = False
        self._ahead = 0  # at most so many after `_seen`

    def expect(self, piece: bytes) -> bool:
        """Whether `piece`, which is new, could be too much: `look` says so for certain."""
        self._ahead += _count(piece)
        return self._found + self._ahead > self._most

    def look(self, text: bytes | bytearray) -> None:
        """Take in all that is new in `text`; raises `OverfullRequest`. Blocks."""
        while self._seen < len(text):
            end = self._seen + SLICE
            piece = bytes(text[self._seen : end])
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the escaped character belongs to it
                if end >= len(text):
                    break
                piece = bytes(text[self._seen : end + 1])
            self._seen += len(piece)
            self._add(piece)
            if self._found > self._most:
                raise OverfullRequest(f"the request has more than {self._most} values")
            if self._outside > MOST_OUTSIDE:
                raise OverfullRequest(f"the request has more than {MOST_OUTSIDE} bytes outside of its texts")
        self._ahead = 0

    def _add(self, piece: bytes) -> None:
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[1 if self._in_string else 0 :: 2])
        self._outside += len(outside)
        self._found += _count(outside)
        self._in_string ^= len(parts) % 2 == 0


def check_values(text: bytes | bytearray) -> None:
    """Raise `OverfullRequest` if `text` has more values, or blanks, than are taken. Blocks."""
    if len(text) <= MOST_VALUES:
        return
    count = ValueCount()
    for start in range(0, len(text), SLICE):
        if len(text) > MOST_OUTSIDE or count.expect(bytes(text[start : start + SLICE])):
            count.look(text)
            return


def check_messages(count: int, *, large: bool) -> None:
    """Raise `OverfullRequest` if there are more than `MOST_MESSAGES`, and `LargeRequest` if need be."""
    if count > MANY and not large:
        raise LargeRequest
    if count > MOST_MESSAGES:
        raise OverfullRequest(f"the request has {count} messages, and at most {MOST_MESSAGES} are taken")


def _count(piece: bytes) -> int:
    return piece.count(b",") + piece.count(b"[") + piece.count(b"{")
