"""How a recorded message refers to its media: `"holdwater-blob:<hash>:<mime>"` for a base64 data URL.

The gateway puts references in and sees to it that no text of a message looks like one. This is the way back
and works on raw JSON, undecoded. The bytes themselves are in `blobs.py`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

from .blobs import Blobs

# A quote before the word that is not escaped always opens a string: after one that closes comes no letter.
_REFERENCE = re.compile(rb'(?<!\\)"holdwater-blob:([0-9a-f]{64}):([^"\\]{0,255})"')


def resolve(message: bytes, blobs: Blobs) -> bytes:
    """The message with its media in their places again."""
    if b'"holdwater-blob:' not in message:
        return message
    return _REFERENCE.sub(lambda match: _data_url(match[1].decode(), match[2], blobs), message)


def references(content: bytes) -> Iterator[str]:
    """The hashes of the blobs that raw JSON refers to."""
    if b'"holdwater-blob:' in content:
        for match in _REFERENCE.finditer(content):
            yield match[1].decode()


def _data_url(name: str, mime: bytes, blobs: Blobs) -> bytes:
    return b'"data:%s;base64,%s"' % (mime, base64.b64encode(blobs.get(name)))
