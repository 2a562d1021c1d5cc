"""Splits a JSON object into its members, each as bytes; refuses an object that repeats a key.

Parsers disagree on which of two equal keys counts: the record would show one value and the upstream use the
other. Repeats inside a member stay unchanged, in the record and on the way upstream.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_BLANKS = b" \t\r\n"
_KEY = re.compile(rb'"((?:[^"\\]|\\.){0,1024})"')  # no request has a longer key
_SLICE = 256 * 1024  # bytes scanned at once


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
        piece = content[at : at + _SLICE]
        at += len(piece) - len(piece.lstrip(_BLANKS))
    return at


def skip_blanks_before(content: bytes | bytearray, end: int) -> int:
    """Return the position after the last non-blank byte before `end`."""
    while end and content[end - 1] in _BLANKS:
        piece = content[max(0, end - _SLICE) : end]
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
