"""Parses the body of a request into its messages and its other keys, with a digest for each message.

It parses only the new part of a body that starts with the bytes of a recorded one; `recorder.py` finds that
start. This module does no I/O.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3
from msgspec import Raw
from xxhash import xxh3_128

from ..core.masking import mask_bytes
from ..dialect.interface import Dialect
from ..dialect.message import DECODE_ERRORS
from .body import BodyPart
from .json_checks import (
    LARGE,
    MANY,
    check_messages,
    check_values,
    decode_members,
    skip_blanks,
    skip_blanks_before,
)

Buffer = bytes | bytearray

DIGEST_SIZE = 16  # bytes of blake3: collisions cannot be crafted
_SEED = secrets.randbits(64)  # hashes seeded with it never leave the process, so collisions cannot be crafted
_TAIL_SIZE = 32  # bytes before a mark that are compared before hashing

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_ARRAY = msgspec.json.Decoder(list[Raw])


class MalformedRequest(ValueError):
    """The body is not a valid request."""


class BodyMark(NamedTuple):
    """Where in a body the messages begin and the last stable one ends, and a digest of all bytes before."""

    opening: int  # the first byte after `"messages":[`
    end: int
    known: int  # messages before `end`
    digest: bytes
    last: bytes


class KnownStart(NamedTuple):
    """A body starts with the same bytes as a recorded one, up to the mark."""

    digests: bytes  # of the messages of the recorded one
    mark: BodyMark
    before: xxh3_128  # hash of the bytes before the mark

    def count_new(self, body: Buffer) -> int:
        """Return the number of bytes of `body` to parse."""
        return len(body) - self.mark.end + self.mark.opening


class MessageSlices(Protocol):
    """Messages that can be sliced, each as its own JSON."""

    def __getitem__(self, part: slice, /) -> Sequence[Raw | bytes]: ...


class ParsedRequest(NamedTuple):
    """A parsed request. `head` and `fresh` are views: they keep the body in memory.

    An empty array of messages stays in the head.
    """

    head: dict[str, Raw]
    fresh: MessageSlices  # the messages after the first `known` ones
    known: int
    digests: bytes
    span: BodyPart | None  # the array of messages, or the text that replaces it
    mark: BodyMark | None

    @property
    def is_large(self) -> bool:
        """Whether recording the request would block the event loop."""
        if not isinstance(self.fresh, list):  # a call from this process
            return False
        parts = (*self.head.values(), *self.fresh[:MANY])
        return len(self.fresh) > MANY or sum([len(memoryview(part)) for part in parts]) > LARGE


def parse_whole(body: Buffer, dialect: Dialect, large: bool) -> ParsedRequest:
    """Parse all of `body`; a request with many messages raises `LargeRequest` unless `large` is set."""
    if large:
        check_values(body)
    head = decode_members(body)
    fresh = _decode_messages(head, dialect, large)
    if not fresh:
        return ParsedRequest(head, [], 0, b"", None, None)
    messages = head.pop(dialect.key)
    digests, steady = _digest_messages(fresh, dialect)
    reading = ParsedRequest(head, fresh, 0, digests, memoryview(messages), None)
    if _is_text(messages):
        return reading
    return reading._replace(mark=_find_mark(body, reading, messages, steady, dialect.key))


def parse_rest(body: Buffer, known: KnownStart, dialect: Dialect, large: bool) -> ParsedRequest | None:
    """Parse the part after the mark, as if the messages before it were absent.

    Return None if `body` must be parsed as a whole.
    """
    mark = known.mark
    before = known.before.copy()  # the start may be read again
    view = memoryview(body)
    start = skip_blanks(body, mark.end)
    if body.startswith(b",", start):
        start = skip_blanks(body, start + 1)
        if body.startswith(b"]", start):  # a trailing comma
            return None
    elif not body.startswith(b"]", start):
        return None
    short = b"".join((view[: mark.opening], view[start:]))
    if large:
        check_values(short)
    head = decode_members(short)
    fresh = _decode_messages(head, dialect, large)
    messages = bytes(head.pop(dialect.key))
    if not short.startswith(messages, mark.opening - 1):
        return None  # a second `messages` key
    close = start + len(messages) - 1
    digests, steady = _digest_messages(fresh, dialect)
    end = _find_end_before(body, close, fresh[steady:]) if steady else mark.end
    before.update(view[mark.end : end])
    return ParsedRequest(
        head,
        fresh,
        mark.known,
        known.digests[: mark.known * DIGEST_SIZE] + digests,
        view[mark.opening - 1 : close],
        _make_mark(body, mark.opening, end, mark.known + steady, before),
    )


def _decode_messages(head: dict[str, Raw], dialect: Dialect, large: bool) -> list[Raw]:
    messages = head.get(dialect.key)
    if messages is None:
        if dialect.optional:
            return []
        raise MalformedRequest(f"`{dialect.key}` is missing")
    if dialect.optional and _is_text(messages):
        return [Raw(b'{"role":"user","content":%s}' % bytes(messages))]
    fresh = _ARRAY.decode(messages)
    check_messages(len(fresh), large=large)
    return fresh


def _is_text(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b'"'


def _digest_messages(messages: list[Raw], dialect: Dialect) -> tuple[bytes, int]:
    """Return the digests of messages, and how many precede the first whose bytes may change next time."""
    if not dialect.has_transient:
        return b"".join([digest(raw) for raw in messages]), len(messages)
    digests: list[bytes] = []
    steady = len(messages)
    for place, raw in enumerate(messages):
        content = bytes(raw)
        lasting = dialect.strip_transient(content)
        digests.append(digest(lasting))
        if len(lasting) != len(content):
            steady = min(steady, place)
    return b"".join(digests), steady


def _find_mark(body: Buffer, reading: ParsedRequest, messages: Raw, steady: int, key: str) -> BodyMark | None:
    """Locate the messages in the body; None if that is uncertain: then the next body is parsed as a whole."""
    view = memoryview(messages)
    start = body.find(bytes(view[:256]))
    close = start + len(view)
    # Python compares views item by item, which is too slow.
    if not steady or start < 0 or not body.startswith(bytes(view), start):
        return None
    without = bytes(memoryview(body)[: start + 1]) + bytes(memoryview(body)[close - 1 :])
    try:
        rest = _OBJECT.decode(without)
    except DECODE_ERRORS:
        return None
    if bytes(rest.pop(key, b"")) != b"[]" or rest.keys() != reading.head.keys():
        return None
    end = _find_end_before(body, close, reading.fresh[steady:])
    return _make_mark(body, start + 1, end, steady, hash_start(body, end))


def _make_mark(body: Buffer, opening: int, end: int, count: int, before: xxh3_128) -> BodyMark:
    return BodyMark(opening, end, count, before.digest(), bytes(body[max(0, end - _TAIL_SIZE) : end]))


def _find_end_before(body: Buffer, close: int, later: Sequence[Raw | bytes]) -> int:
    """Return the end of the message before `later`, the last ones before the bracket ending at `close`."""
    end = _find_last_end(body, close)
    for raw in reversed(later):
        end = _find_last_end(body, end - len(memoryview(raw)) + 1)  # now after the comma
        end = _find_last_end(body, end)
    return end


def _find_last_end(body: Buffer, close: int) -> int:
    """Return the end of the last non-blank bytes before the single byte that ends at `close`."""
    return skip_blanks_before(body, close - 1)


def digest(part: Raw | bytes) -> bytes:
    """Return the digest of a message or of a request's other keys; the attempt's key does not change it."""
    return blake3(mask_bytes(bytes(part))).digest(DIGEST_SIZE)


def hash_start(body: Buffer, end: int) -> xxh3_128:
    """Return the hash of the bytes of `body` before `end`."""
    return xxh3_128(memoryview(body)[:end], _SEED)
