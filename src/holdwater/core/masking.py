"""Masks secrets in everything that is stored: keys of attempts, and the values of variables of agents.

A mask has the same length as its secret, so that lengths and offsets around it stay valid. Keys are found by
their form, values after `hide_values`. `clean_text` prepares each text of a message, a verdict or a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

KEY_PREFIX = "sk-hw-"
KEY_LENGTH = 43  # characters after the prefix
LONGEST_TEXT = 1024 * 1024  # characters
TEXT_SAMPLE = 8192  # leading bytes that decide whether a file is text
# A shorter value, or a short word or number, is no secret: masked, it would change records everywhere.
SHORTEST_SECRET = 8  # characters
SHORTEST_PLAIN_SECRET = 12  # characters of a value of small letters or digits alone

_PREFIX = KEY_PREFIX.encode()
_KEY = re.compile(rb"%s[A-Za-z0-9_-]{%d}" % (_PREFIX, KEY_LENGTH))
_MASK = _PREFIX + b"x" * KEY_LENGTH
_BEGUN = re.compile(rb"(?:s|sk|sk-|sk-h|sk-hw|sk-hw-[A-Za-z0-9_-]{0,%d})\Z" % (KEY_LENGTH - 1))
_PLAIN = re.compile(r"[a-z_]+|[0-9.]+")


class HiddenValue(NamedTuple):
    """A form in which a value can be written, and its mask."""

    content: bytes
    mask: bytes


@contextmanager
def hide_values(values: Mapping[str, str]) -> Iterator[None]:
    """Mask these values of variables in this process, as keys are, until the block ends."""
    found = [hidden for n, value in enumerate(values.values(), start=1) for hidden in _list_forms(n, value)]
    # The longest first: a value can contain another one, and a longer mask begins like a shorter one.
    table = tuple(sorted(found, key=lambda hidden: (-len(hidden.content), hidden)))
    _tables.append(table)
    try:
        yield
    finally:
        _tables.remove(table)


def is_secret(value: str) -> bool:
    """Return whether a value is masked: a short one, or a word, occurs by chance."""
    return len(value) >= (SHORTEST_PLAIN_SECRET if _PLAIN.fullmatch(value) else SHORTEST_SECRET)


def mask_bytes(content: bytes) -> bytes:
    """Return `content` with each secret replaced by a mask of the same length."""
    if _PREFIX in content:
        content = _KEY.sub(_MASK, content)
    for secret, mask in _list_hidden():
        content = content.replace(secret, mask)
    return content


def mask_text(text: str) -> str:
    """Return `text` with each secret replaced by a mask of the same length in UTF-8."""
    if not _tables and KEY_PREFIX not in text:
        return text
    return mask_bytes(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def unmask_bytes(content: bytes, key: str) -> bytes:
    """Return `content` with each mask of a key replaced by `key`, and those of values by the values."""
    content = content.replace(_MASK, key.encode())
    for secret, mask in _list_hidden():
        content = content.replace(mask, secret)
    return content


def _list_forms(number: int, value: str) -> Iterator[HiddenValue]:
    """Yield the value as it is, in JSON, and in JSON within JSON, each with a mask such as `env-1-xxxx`."""
    if not is_secret(value):
        return
    texts = {value}
    for _ in range(2):
        texts |= {json.dumps(text, ensure_ascii=plain)[1:-1] for text in texts for plain in (True, False)}
    for content in {text.encode() for text in texts}:
        mask = f"env-{number}-".encode()
        yield HiddenValue(content, mask[: len(content)].ljust(len(content), b"x"))


def _list_hidden() -> list[HiddenValue]:
    return [hidden for table in _tables.copy() for hidden in table]  # a copy: threads start and end runs


def _find_begun(content: bytes) -> int:
    """Return where a secret may begin that continues after the end of `content`; its length if none does."""
    key = _BEGUN.search(content, max(0, len(content) - len(_PREFIX) - KEY_LENGTH))
    found = key.start() if key is not None else len(content)
    for secret, _ in _list_hidden():
        at = content.find(secret[:1], max(0, len(content) - len(secret) + 1))
        while 0 <= at < found:
            if secret.startswith(content[at:]):
                found = at
            at = content.find(secret[:1], at + 1)
    return found


_tables: list[tuple[HiddenValue, ...]] = []  # bound: the runs of this process


class KeyMask:
    """Masks secrets in a stream of bytes, also secrets that are split over several pieces."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes that can be passed on; a possible beginning of a secret is held back."""
        content = mask_bytes(self._held + piece)
        cut = _find_begun(content)
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
    """A file of `size` bytes, masked if it is text; `read` returns as many bytes as requested."""

    def __init__(self, file: ReadableFile, size: int) -> None:
        self._file = file
        self._left = size
        self._held = b""
        self._is_text: bool | None = None  # None: not known before the first read

    def read(self, size: int = -1) -> bytes:
        longest = max([len(_PREFIX) + KEY_LENGTH, *(len(hidden.content) for hidden in _list_hidden())])
        ahead = (self._left if size < 0 else size) + longest
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
    """Return `text` with secrets masked and text that UTF-8 cannot encode escaped.

    A text of more than `longest` characters loses its middle.
    """
    text = mask_text(text)
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}\n[cut: {len(text) - 2 * half} characters]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
