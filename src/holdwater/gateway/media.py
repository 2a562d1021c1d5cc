"""Media inside a message: what is large and base64 goes to the run's blobs, and a reference takes its place.

Works on the message's bytes in one pass, unparsed, and leaves no text in them that looks like a reference.
The way back is in the ledger's own `media.py`.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterator

SMALLEST = 4096  # base64 characters below which a medium stays where it is
LONGEST_TYPE = 255  # characters between `data:` and `;base64,`

_OPENING = b'"data:'
_BASE64 = b";base64,"
_REFERENCE = b'"holdwater-blob:'
_ESCAPED = b'"\\u0068oldwater-blob:'  # the same JSON string, written so that it is not taken for a reference


def extracted(message: bytes, keep: Callable[[bytes], str]) -> bytes:
    """`message` with a reference in place of each large medium; `keep` takes it and returns its hash."""
    if len(message) < SMALLEST and _REFERENCE not in message:
        return message
    parts: list[bytes] = []
    done = 0
    for start, comma, end in _media(message):
        content = _canonical(message[comma:end])
        if content is not None:
            kind = message[start + len(_OPENING) : comma - len(_BASE64)]
            parts += _safe(message[done:start]), _REFERENCE + keep(content).encode() + b":" + kind
            done = end
    parts.append(_safe(message[done:]))
    return b"".join(parts)


def has_large(message: bytes, size: int) -> bool:
    """Might `message` hold media of `size` characters or more?"""
    return len(message) >= size and _OPENING in message


def _media(message: bytes) -> Iterator[tuple[int, int, int]]:
    """Of each string value that may be one: where its quote stands, where its data start, where they end."""
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
            yield start, data, end


def _canonical(data: bytes) -> bytes | None:
    """The bytes that `data` encodes, if encoding them again gives `data`."""
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error:
        return None
    return content if binascii.b2a_base64(content, newline=False) == data else None


def _safe(text: bytes) -> bytes:
    return text.replace(_REFERENCE, _ESCAPED) if _REFERENCE in text else text
