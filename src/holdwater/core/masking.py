"""The keys of attempts, hidden in everything that is stored: logs, records, answers, artifacts.

A key is replaced by a text of the same length, so that lengths and offsets around it stay true. Pure.
"""

from __future__ import annotations

import re
from typing import Protocol

KEY_PREFIX = "sk-hw-"
KEY_LENGTH = 43  # characters after the prefix
TEXT_SAMPLE = 8192  # bytes of a file that say whether it is text

_PREFIX = KEY_PREFIX.encode()
_KEY = re.compile(rb"%s[A-Za-z0-9_-]{%d}" % (_PREFIX, KEY_LENGTH))
_MASK = _PREFIX + b"x" * KEY_LENGTH
_BEGUN = re.compile(rb"(?:s|sk|sk-|sk-h|sk-hw|sk-hw-[A-Za-z0-9_-]{0,%d})\Z" % (KEY_LENGTH - 1))


def mask_bytes(content: bytes) -> bytes:
    """`content` with a mask of the same length in the place of each key."""
    return _KEY.sub(_MASK, content) if _PREFIX in content else content


def mask_text(text: str) -> str:
    """The same for text."""
    if KEY_PREFIX not in text:
        return text
    return mask_bytes(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def unmask_bytes(content: bytes, key: str) -> bytes:
    """`content` with `key` in the place of each mask."""
    return content.replace(_MASK, key.encode())


class KeyMask:
    """Hides keys in a stream of bytes, also one that comes in pieces."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be passed on; the beginning of a key is held until its end is there."""
        content = mask_bytes(self._held + piece)
        begun = _BEGUN.search(content, max(0, len(content) - len(_PREFIX) - KEY_LENGTH))
        cut = begun.start() if begun is not None else len(content)
        self._held = content[cut:]
        return content[:cut]

    def rest(self) -> bytes:
        """What is held at the end."""
        held, self._held = self._held, b""
        return held


class Readable(Protocol):
    """A file that is read from its beginning to its end."""

    def read(self, size: int = -1, /) -> bytes: ...


class MaskedFile:
    """A file of `size` bytes without keys, if it is text; as many bytes come as are asked for."""

    def __init__(self, file: Readable, size: int) -> None:
        self._file = file
        self._left = size
        self._held = b""
        self._is_text: bool | None = None  # None: nothing was read yet

    def read(self, size: int = -1) -> bytes:
        ahead = (self._left if size < 0 else size) + len(_PREFIX) + KEY_LENGTH
        while self._left and len(self._held) < ahead:
            piece = self._file.read(min(self._left, max(ahead - len(self._held), TEXT_SAMPLE)))
            if not piece:
                break
            self._left -= len(piece)
            if self._is_text is None:
                self._is_text = b"\0" not in piece[:TEXT_SAMPLE]
            self._held += piece
        if self._is_text:
            self._held = mask_bytes(self._held)
        end = len(self._held) if size < 0 else size
        given, self._held = self._held[:end], self._held[end:]
        return given
