"""Replaces values that a run stores once by references: large base64 in messages, large request constants.

It escapes texts that look like a reference. It scans bytes in one pass and does not parse messages. The
ledger's own `media.py` puts the values back.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Raw

SMALLEST = 4096  # characters below which a medium or a constant stays in place
LONGEST_TYPE = 255  # characters between `data:` and `;base64,`

_OPENING = b'"data:'
_BASE64 = b";base64,"
_FIELD = b'data"'
# A colon and a quote start a complete string value, under any key that ends with `data`.
_BARE = re.compile(rb'data"[ \t\r\n]*:[ \t\r\n]*"')
_REFERENCE = b'"holdwater-'
_ESCAPED = b'"\\u0068oldwater-'  # the same JSON string, escaped so that it does not look like a reference

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
KeepBlob = Callable[[bytes], str]


def extract_media(message: bytes, keep: KeepBlob) -> bytes:
    """Return `message` with a reference for each large medium; `keep` stores one and returns its hash."""
    if len(message) < SMALLEST and _REFERENCE not in message:
        return message
    parts: list[bytes] = []
    done = 0
    for medium in sorted([*_find_data_urls(message), *_find_bare(message)]):
        content = _decode_canonical(message[medium.data : medium.end])
        if content is not None:
            name = keep(content).encode()
            word = b"blob:%s:%s" % (name, medium.kind) if medium.kind is not None else b"base64:" + name
            parts += _escape_references(message[done : medium.start]), _REFERENCE + word
            done = medium.end
    parts.append(_escape_references(message[done:]))
    return b"".join(parts)


def extract_constants(head: bytes, keep: KeepBlob) -> bytes:
    """Return the JSON object `head` with a reference in place of each large value."""
    if len(head) < SMALLEST:
        return _escape_references(head)
    return (
        b"{"
        + b",".join(_encode_pair(key, bytes(raw), keep) for key, raw in _OBJECT.decode(head).items())
        + b"}"
    )


def _encode_pair(key: str, value: bytes, keep: KeepBlob) -> bytes:
    name = _escape_references(msgspec.json.encode(key))
    if len(value) < SMALLEST:
        return name + b":" + _escape_references(value)
    return name + b":" + _REFERENCE + b"json:" + keep(value).encode() + b'"'


def has_large(message: bytes, size: int) -> bool:
    """Whether `message` may hold media of `size` characters or more."""
    return len(message) >= size and (_OPENING in message or _FIELD in message)


class _MediumSpan(NamedTuple):
    """A string value that may be a medium: the positions of its quote, of its data and of their end."""

    start: int
    data: int
    end: int
    kind: bytes | None  # the type in a data URL; None for bare base64


def _find_data_urls(message: bytes) -> Iterator[_MediumSpan]:
    at = 0
    while (start := message.find(_OPENING, at)) >= 0:
        at = start + len(_OPENING)
        comma = message.find(_BASE64, at, at + LONGEST_TYPE + len(_BASE64))
        # A quote after a backslash is inside a string, so the data are not a complete value.
        if comma < 0 or message[start - 1 : start] == b"\\" or b'"' in message[at:comma]:
            continue
        data = comma + len(_BASE64)
        end = message.find(b'"', data)
        if end < 0:
            return
        at = end
        if end - data >= SMALLEST and b"\\" not in message[start:data]:
            kind = message[start + len(_OPENING) : comma]
            yield _MediumSpan(start, data, end, kind)


def _find_bare(message: bytes) -> Iterator[_MediumSpan]:
    if _FIELD not in message:
        return
    for match in _BARE.finditer(message):
        end = message.find(b'"', match.end())
        if end - match.end() >= SMALLEST:
            yield _MediumSpan(match.end() - 1, match.end(), end, None)


def _decode_canonical(data: bytes) -> bytes | None:
    """Return the bytes that `data` encodes, if encoding them again gives `data`."""
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error:
        return None
    # Strict mode leaves only the last bits of the last group undetermined.
    last = len(content) - (len(content) - 1) % 3 - 1
    return content if binascii.b2a_base64(content[last:], newline=False) == data[-4:] else None


def _escape_references(text: bytes) -> bytes:
    return text.replace(_REFERENCE, _ESCAPED) if _REFERENCE in text else text
