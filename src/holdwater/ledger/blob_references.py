"""Resolves references in recorded exchanges to blobs: media and constants such as tools, stored once per run.

`"holdwater-blob:<hash>:<mime>"` stands for a base64 data URL, `"holdwater-base64:<hash>"` for bare base64,
`"holdwater-json:<hash>"` for any JSON value. The gateway inserts references and ensures that no text looks
like one. This module resolves them in raw, undecoded JSON. The bytes themselves are in `blobs.py`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

from .blobs import BlobStore

# An unescaped quote before the word always opens a string: no letter can follow a closing quote.
_REFERENCE = re.compile(rb'(?<!\\)"holdwater-(blob|base64|json):([0-9a-f]{64})(?::([^"\\]{0,255}))?"')


def resolve_references(message: bytes, blobs: BlobStore) -> bytes:
    """Return the message with its references replaced by the media and constants."""
    if b'"holdwater-' not in message:
        return message
    return _REFERENCE.sub(lambda match: _resolve_match(match, blobs), message)


def rename_references(message: bytes, word: bytes) -> bytes:
    """Replace `holdwater-` by `word` in references, so that after decoding no other text looks like one."""
    if b'"holdwater-' not in message:
        return message
    return _REFERENCE.sub(lambda match: b'"%s%s' % (word, match[0].removeprefix(b'"holdwater-')), message)


def find_references(content: bytes) -> Iterator[str]:
    """Yield the hashes of the blobs that raw JSON refers to."""
    if b'"holdwater-' in content:
        for match in _REFERENCE.finditer(content):
            yield match[2].decode()


def _resolve_match(match: re.Match[bytes], blobs: BlobStore) -> bytes:
    content = blobs.get(match[2].decode())
    if match[1] == b"json":
        return content
    data = base64.b64encode(content)
    return b'"%s"' % data if match[1] == b"base64" else b'"data:%s;base64,%s"' % (match[3] or b"", data)
