"""How a recorded exchange refers to what is kept once in the run: media, and constants such as tools.

`"holdwater-blob:<hash>:<mime>"` stands for a base64 data URL, `"holdwater-base64:<hash>"` for bare base64,
`"holdwater-json:<hash>"` for any JSON value. The gateway puts references in and sees to it that no text looks
like one. This is the way back and works on raw JSON, undecoded. The bytes themselves are in `blobs.py`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

from .blobs import Blobs

# A quote before the word that is not escaped always opens a string: after one that closes comes no letter.
_REFERENCE = re.compile(rb'(?<!\\)"holdwater-(blob|base64|json):([0-9a-f]{64})(?::([^"\\]{0,255}))?"')


def resolve(message: bytes, blobs: Blobs) -> bytes:
    """The message with its media and constants in their places again."""
    if b'"holdwater-' not in message:
        return message
    return _REFERENCE.sub(lambda match: _resolved(match, blobs), message)


def renamed(message: bytes, word: bytes) -> bytes:
    """The message with `word` in place of `holdwater-` in its references: decoded, no text looks like one."""
    if b'"holdwater-' not in message:
        return message
    return _REFERENCE.sub(lambda match: b'"%s%s' % (word, match[0].removeprefix(b'"holdwater-')), message)


def references(content: bytes) -> Iterator[str]:
    """The hashes of the blobs that raw JSON refers to."""
    if b'"holdwater-' in content:
        for match in _REFERENCE.finditer(content):
            yield match[2].decode()


def _resolved(match: re.Match[bytes], blobs: Blobs) -> bytes:
    content = blobs.get(match[2].decode())
    if match[1] == b"json":
        return content
    data = base64.b64encode(content)
    return b'"%s"' % data if match[1] == b"base64" else b'"data:%s;base64,%s"' % (match[3] or b"", data)
