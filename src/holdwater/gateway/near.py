"""A call from this process: it goes the way of every call, without a connection, and its body is never whole.

Of a conversation that goes on, only what is new is copied and hashed; no message is kept as bytes.
`client.py` makes such calls, for agents in Python; their way is in `relay.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Raw
from multidict import CIMultiDict

from .body import Body, Retention, joined
from .recorder import Reading, digest

PIECE = 64 * 1024  # bytes that are made before they are sent
LARGE = 16 * 1024  # characters of a text from which encoding it each time is worth avoiding

_encode = msgspec.json.Encoder().encode
_PLACE = secrets.token_hex(16)  # stands for a text, and never for itself: nobody knows it


class Near:
    """What the relay needs of a request."""

    transport = None
    headers = CIMultiDict({"Accept": "*/*", "Content-Type": "application/json", "User-Agent": "holdwater"})

    def __init__(self, head: dict[str, Raw], messages: Messages) -> None:
        self._head = head
        self._messages = messages

    def body(self, key: str, retention: Retention) -> Body:
        return Body(joined(key, _encode(self._head), self._span), None, retention)

    def reading(self, key: str) -> Reading:
        """It taken apart, as a recorder takes other requests apart."""
        messages, span = self._messages, self._span
        head = dict(self._head) if span is not None else {**self._head, key: Raw(b"[]")}
        return Reading(head, messages, 0, messages.digests, span, None)

    @property
    def _span(self) -> Messages | None:
        return self._messages if len(self._messages.entries) else None


Request = web.BaseRequest | Near


class Entry(NamedTuple):
    """A message: a copy of its own, which shares the texts, and what is known of its bytes."""

    message: Any
    size: int
    digest: bytes
    lasts: bool  # an equal message has the same bytes
    parts: tuple[bytes | str, ...] = ()  # its bytes, with large texts that are as they are; none: encode it

    def content(self) -> list[bytes]:
        if not self.parts:
            return [_encode(self.message)]
        return [part.encode() if isinstance(part, str) else part for part in self.parts]


class Messages:
    """The messages of a request, as JSON that is made when it is sent. Nobody can change them any more."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.digests = b"".join([entry.digest for entry in entries])
        self._size = sum([entry.size for entry in entries]) + max(1, len(entries)) + 1

    def __len__(self) -> int:
        """In bytes."""
        return self._size

    def __getitem__(self, part: slice) -> list[bytes]:
        """Some of the messages, each by itself."""
        return [b"".join(entry.content()) for entry in self.entries[part]]

    def pieces(self) -> Iterator[bytes]:
        """All of it, a little at a time."""
        held, size = [b"["], 0
        for number, entry in enumerate(self.entries):
            if number:
                held.append(b",")
            held += entry.content()
            size += entry.size
            if size >= PIECE:
                yield b"".join(held)
                held, size = [], 0
        held.append(b"]")
        yield b"".join(held)


class Conversation:
    """What an agent said last. It may change its messages as it likes: what is sent is a copy."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []  # bound: the messages of one request

    def said(self, messages: Sequence[Mapping[str, Any]]) -> Messages:
        known = 0
        for entry, message in zip(self._entries, messages, strict=False):
            # Texts that are the same object are not compared: a long history costs next to nothing.
            if not entry.lasts or entry.message != message:
                break
            known += 1
        self._entries = [*self._entries[:known], *map(_entry, messages[known:])]
        return Messages(self._entries)


def _entry(message: Mapping[str, Any]) -> Entry:
    try:
        copy, lasts = _copied(message), True
    except _Other:
        copy, lasts = msgspec.json.decode(_encode(message)), False
    content = _encode(copy)
    parts = _parts(copy) if lasts and len(content) >= LARGE else ()
    return Entry(copy, len(content), digest(content), lasts, parts)


def _parts(message: Any) -> tuple[bytes | str, ...]:
    """What is around the large texts of a message that JSON has as they are, and these, in turn."""
    texts: list[str] = []
    around = _encode(_without(message, texts)).split(_PLACE.encode())
    return (around[0], *(part for pair in zip(texts, around[1:], strict=True) for part in pair))


def _without(value: Any, texts: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, texts) for item in value]
    if value is None or len(value) < LARGE or not value.isascii() or len(_encode(value)) != len(value) + 2:
        return value
    texts.append(value)
    return _PLACE


class _Other(Exception):
    """Something whose equals may have other bytes: `1`, `True` and `1.0` are equal."""


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is dict:
        return {_text(key): _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    raise _Other


def _text(key: Any) -> str:
    if type(key) is not str:
        raise _Other
    return key
