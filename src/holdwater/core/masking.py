"""Masks the keys of attempts in everything that is stored: logs, records, answers, artifacts. Pure.

A mask has the same length as its key, so that lengths and offsets around it stay valid. `clean_text` prepares
each text of a message, a verdict or a row.
"""

from __future__ import annotations

import re
from typing import Protocol

KEY_PREFIX = "sk-hw-"
KEY_LENGTH = 43  # characters after the prefix
LONGEST_TEXT = 1024 * 1024  # characters
TEXT_SAMPLE = 8192  # leading bytes that decide whether a file is text

_PREFIX = KEY_PREFIX.encode()
_KEY = re.compile(rb"%s[A-Za-z0-9_-]{%d}" % (_PREFIX, KEY_LENGTH))
_MASK = _PREFIX + b"x" * KEY_LENGTH
_BEGUN = re.compile(rb"(?:s|sk|sk-|sk-h|sk-hw|sk-hw-[A-Za-z0-9_-]{0,%d})\Z" % (KEY_LENGTH - 1))


def mask_bytes(content: bytes) -> bytes:
    """Return `content` with each key replaced by a mask of the same length."""
    return _KEY.sub(_MASK, content) if _PREFIX in content else content


def mask_text(text: str) -> str:
    """Return `text` with each key replaced by a mask of the same length."""
    if KEY_PREFIX not in text:
        return text
    return mask_bytes(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def unmask_bytes(content: bytes, key: str) -> bytes:
    """Return `content` with each mask replaced by `key`."""
    return content.replace(_MASK, key.encode())


class KeyMask:
    """Masks keys in a stream of bytes, also keys that are split over several pieces."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes that can be passed on; a possible beginning of a key is held back."""
        content = mask_bytes(self._held + piece)
        begun = _BEGUN.search(content, max(0, len(content) - len(_PREFIX) - KEY_LENGTH))
        cut = begun.start() if begun is not None else len(content)
        self._held = content[cut:]
        return content[:cut]

    def flush(self) -> bytes:
        """Return the bytes that are still held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held


class ReadableFile(Protocol):
    """A file that is read from beginning to end."""

    def read(self, size: int = -1, /) -> bytes: ...


class MaskedFile:
    """A file of `size` bytes, with keys masked if it is text; `read` returns as many bytes as requested."""

    def __init__(self, file: ReadableFile, size: int) -> None:
        self._file = file
        self._left = size
        self._held = b""
        self._is_text: bool | None = None  # None: not known before the first read

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


def clean_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return `text` with keys masked and text that UTF-8 cannot encode escaped.

    A text of more than `longest` characters loses its middle.
    """
    text = mask_text(text)
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}\n[cut: {len(text) - 2 * half} characters]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
