"""The members of a JSON object, each as its bytes; an object that repeats a key is refused.

Parsers disagree on which of two equal keys counts: the record would show one value and the upstream obey the
other. Inside of a member repeats stay as they are, in the record as on the way up.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_BLANKS = b" \t\r\n"
_KEY = re.compile(rb'"((?:[^"\\]|\\.){0,1024})"')  # a longer one is no key of a request
_SLICE = 256 * 1024  # bytes that are looked at in one go


def decode_members(content: bytes | bytearray) -> dict[str, Raw]:
    """The members of the JSON object `content`; raises `msgspec.MsgspecError`, and the like."""
    members = _OBJECT.decode(content)
    # An object without blanks that has each key once is as long as this, and any other one is longer.
    shortest = sum([len(name) + len(memoryview(value)) + 4 for name, value in members.items()]) + 1
    if shortest == len(content):
        return members
    at = skip_blanks(content, 0) + 1
    for name, value in members.items():
        key, start = _key_at(content, at)
        end = start + len(memoryview(value))
        at = skip_blanks(content, end)
        # The first of two equal keys has its place, and the last one its value. That may begin alike, as `12`
        # begins with `1`: then no comma follows.
        is_same = _is_name(key, name) and content.startswith(memoryview(value), start)
        if not is_same or content[at : at + 1] not in (b",", b"}"):
            raise _repeated(key)
        at += 1
    if members and content[at - 1 : at] == b",":
        raise _repeated(_key_at(content, at)[0])
    return members


def skip_blanks(content: bytes | bytearray, at: int) -> int:
    """The place of the first byte from `at` on that is no blank."""
    while at < len(content) and content[at] in _BLANKS:
        piece = content[at : at + _SLICE]
        at += len(piece) - len(piece.lstrip(_BLANKS))
    return at


def skip_blanks_before(content: bytes | bytearray, end: int) -> int:
    """The place after the last byte before `end` that is no blank."""
    while end and content[end - 1] in _BLANKS:
        piece = content[max(0, end - _SLICE) : end]
        end -= len(piece) - len(piece.rstrip(_BLANKS))
    return end


def _key_at(content: bytes | bytearray, at: int) -> tuple[bytes, int]:
    """The key of the member that begins at `at`, as it is written, and the place of its value."""
    match = _KEY.match(content, skip_blanks(content, at))
    if match is None:
        raise msgspec.ValidationError("a key of the object is too long")
    colon = skip_blanks(content, match.end())
    return match[1], skip_blanks(content, colon + 1)


def _is_name(written: bytes, name: str) -> bool:
    return written == name.encode() or (b"\\" in written and msgspec.json.decode(b'"%s"' % written) == name)


def _repeated(key: bytes) -> msgspec.ValidationError:
    return msgspec.ValidationError(f"the key `{key[:100].decode(errors='replace')}` stands twice")
