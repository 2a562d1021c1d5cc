"""What is kept once in a run: large base64 inside a message, and the large constants of a request.

A reference takes their place, and no text is left that looks like one. Works on bytes in one pass; a message
is not parsed. The way back is in the ledger's own `media.py`.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Raw

SMALLEST = 4096  # characters below which a medium or a constant stays where it is
LONGEST_TYPE = 255  # characters between `data:` and `;base64,`

_OPENING = b'"data:'
_BASE64 = b";base64,"
_FIELD = b'data"'
# What stands between a colon and a quote is a whole value, whatever the key before it.
_BARE = re.compile(rb'data"[ \t\r\n]*:[ \t\r\n]*"')
_WORD = b'"holdwater-'
_ESCAPED = b'"\\u0068oldwater-'  # the same JSON string, written so that it is not taken for a reference

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
Keep = Callable[[bytes], str]


def extracted(message: bytes, keep: Keep) -> bytes:
    """`message` with a reference in place of each large medium; `keep` takes it and returns its hash."""
    if len(message) < SMALLEST and _WORD not in message:
        return message
    parts: list[bytes] = []
    done = 0
    for medium in sorted([*_data_urls(message), *_bare(message)]):
        content = _canonical(message[medium.data : medium.end])
        if content is not None:
            name = keep(content).encode()
            word = b"blob:%s:%s" % (name, medium.kind) if medium.kind is not None else b"base64:" + name
            parts += _safe(message[done : medium.start]), _WORD + word
            done = medium.end
    parts.append(_safe(message[done:]))
    return b"".join(parts)


def constants(head: bytes, keep: Keep) -> bytes:
    """The JSON object `head` with a reference in place of each large value."""
    if len(head) < SMALLEST:
        return _safe(head)
    return b"{" + b",".join(_pair(key, bytes(raw), keep) for key, raw in _OBJECT.decode(head).items()) + b"}"


def _pair(key: str, value: bytes, keep: Keep) -> bytes:
    name = _safe(msgspec.json.encode(key))
    if len(value) < SMALLEST:
        return name + b":" + _safe(value)
    return name + b":" + _WORD + b"json:" + keep(value).encode() + b'"'


def has_large(message: bytes, size: int) -> bool:
    """Might `message` hold media of `size` characters or more?"""
    return len(message) >= size and (_OPENING in message or _FIELD in message)


class _Medium(NamedTuple):
    """A string value that may be one: where its quote stands, where its data start, where they end."""

    start: int
    data: int
    end: int
    kind: bytes | None  # the type in a data URL; None for bare base64


def _data_urls(message: bytes) -> Iterator[_Medium]:
    at = 0
    while (start := message.find(_OPENING, at)) >= 0:
        at = start + len(_OPENING)
        comma = message.find(_BASE64, at, at + LONGEST_TYPE + len(_BASE64))
        # A quote after a backslash belongs to the text of a string; such data are not a whole value.
        if comma < 0 or message[start - 1 : start] == b"\\" or b'"' in message[at:comma]:
            continue
        data = comma + len(_BASE64)
        end = message.find(b'"', data)
        if end < 0:
            return
        at = end
        if end - data >= SMALLEST and b"\\" not in message[start:data]:
            kind = message[start + len(_OPENING) : comma]
            yield _Medium(start, data, end, kind)


def _bare(message: bytes) -> Iterator[_Medium]:
    if _FIELD not in message:
        return
    for match in _BARE.finditer(message):
        end = message.find(b'"', match.end())
        if end - match.end() >= SMALLEST:
            yield _Medium(match.end() - 1, match.end(), end, None)


def _canonical(data: bytes) -> bytes | None:
    """The bytes that `data` encodes, if encoding them again gives `data`."""
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error:
        return None
    # What is strict leaves nothing open but the last bits of the last group.
    last = len(content) - (len(content) - 1) % 3 - 1
    return content if binascii.b2a_base64(content[last:], newline=False) == data[-4:] else None


def _safe(text: bytes) -> bytes:
    return text.replace(_WORD, _ESCAPED) if _WORD in text else text
