"""Checks on untrusted JSON: the number of its values before it is parsed, and keys that repeat.

A compressed body of a few hundred kilobytes can hold millions of messages, which would block the worker.
Parsers disagree on which of two equal keys counts: the record would show one value and the upstream use the
other.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

MOST_VALUES = 500_000  # per request, at any depth
MOST_MESSAGES = 50_000
MOST_OUTSIDE = 32 * 1024 * 1024  # bytes outside of strings: a parser that skips blanks blocks other threads
SLICE = 256 * 1024  # bytes: about a millisecond
LARGE = 1024 * 1024  # bytes from which parsing a request would block the event loop
MANY = 4096  # messages from which it would, too
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_BLANKS = b" \t\r\n"
_KEY = re.compile(rb'"((?:[^"\\]|\\.){0,1024})"')  # no request has a longer key


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


def decode_members(content: bytes | bytearray) -> dict[str, Raw]:
    """Return the members of the JSON object `content`; raise `msgspec.MsgspecError` and the like."""
    members = _OBJECT.decode(content)
    # An object without blanks and repeats has exactly this length; any other object is longer.
    shortest = sum([len(name) + len(memoryview(value)) + 4 for name, value in members.items()]) + 1
    if shortest == len(content):
        return members
    at = skip_blanks(content, 0) + 1
    for name, value in members.items():
        key, start = _read_key(content, at)
        end = start + len(memoryview(value))
        at = skip_blanks(content, end)
        # A repeated key has the position of its first and the value of its last member. The first value may
        # start with the last one, as `12` starts with `1`: then no comma follows.
        is_same = _is_name(key, name) and content.startswith(memoryview(value), start)
        if not is_same or content[at : at + 1] not in (b",", b"}"):
            raise _make_repeat_error(key)
        at += 1
    if members and content[at - 1 : at] == b",":
        raise _make_repeat_error(_read_key(content, at)[0])
    return members


def skip_blanks(content: bytes | bytearray, at: int) -> int:
    """Return the position of the first non-blank byte at or after `at`."""
    while at < len(content) and content[at] in _BLANKS:
        piece = content[at : at + SLICE]
        at += len(piece) - len(piece.lstrip(_BLANKS))
    return at


def skip_blanks_before(content: bytes | bytearray, end: int) -> int:
    """Return the position after the last non-blank byte before `end`."""
    while end and content[end - 1] in _BLANKS:
        piece = content[max(0, end - SLICE) : end]
        end -= len(piece) - len(piece.rstrip(_BLANKS))
    return end


def _read_key(content: bytes | bytearray, at: int) -> tuple[bytes, int]:
    """Return the key, as written, of the member that begins at `at`, and the position of its value."""
    match = _KEY.match(content, skip_blanks(content, at))
    if match is None:
        raise msgspec.ValidationError("a key of the object is too long")
    colon = skip_blanks(content, match.end())
    return match[1], skip_blanks(content, colon + 1)


def _is_name(written: bytes, name: str) -> bool:
    return written == name.encode() or (b"\\" in written and msgspec.json.decode(b'"%s"' % written) == name)


def _make_repeat_error(key: bytes) -> msgspec.ValidationError:
    return msgspec.ValidationError(f"duplicate key: `{key[:100].decode(errors='replace')}`")
