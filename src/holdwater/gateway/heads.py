"""Bounds the heads of requests: each of them, and those of all connections of a server together.

aiohttp bounds each header and their number, which allows megabytes. It also keeps the head of a connection's
last request until the next one comes. `connection.py` and `serve/guests.py` put it into `BoundedParser`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from ..core.records import MiB

LONGEST_HEAD = 128 * 1024
MOST_HELD = 16 * MiB  # of all connections' heads
SMALL_HEAD = 4 * 1024  # bytes up to which a connection's heads are not counted: connections are bounded too
STEP = 8 * 1024  # bytes of a head that are parsed, and counted, at once
MOST_QUEUED = 32  # requests that aiohttp reads ahead of the one that it answers
PARSER = "_request_parser" if "_request_parser" in web.RequestHandler.__slots__ else "_parser"

Parsed = tuple[Sequence[Any], bool, bytes]


class HeadTooLarge(HttpProcessingError):
    code = 431

    def __init__(self) -> None:
        super().__init__(message=f"the head is larger than the {LONGEST_HEAD} bytes that are allowed")


class HeadHolder(Protocol):
    """A connection."""

    @property
    def answering(self) -> bool:
        """Is a request of it being answered?"""


Holder = TypeVar("Holder", bound=HeadHolder)


class HeldHeads(Generic[Holder]):
    """The bytes of all heads. Beyond the bound it closes the oldest connection that answers nothing."""

    def __init__(self, close: Callable[[Holder], None], most: int = MOST_HELD) -> None:
        self.size = 0
        self.most = most
        self._close = close
        self._held: dict[Holder, int] = {}  # in the order in which they came; bound: the open connections

    def hold(self, connection: Holder, size: int) -> None:
        """So many bytes of heads are held for `connection` now."""
        if size <= SMALL_HEAD:
            self.size -= self._held.pop(connection, 0)
            return
        self.size += size - self._held.get(connection, 0)
        self._held[connection] = size
        while self.size > self.most:
            latest = next(reversed(self._held))
            over = next((other for other in self._held if not other.answering), latest)
            self.size -= self._held.pop(over)
            self._close(over)


class BoundedParser:
    """aiohttp's parser for one connection. It refuses a head, and ignores trailers, beyond `LONGEST_HEAD`."""

    def __init__(self, parser: Any, hold: Callable[[int], None]) -> None:
        self._parser = parser
        self._hold = hold
        self._payload: StreamReader | None = None  # of the latest request
        self._length = 0  # of its body, where that is known
        self._unfinished = 0  # bytes that came since the latest head, or piece of a body
        self._queued: deque[int] = deque(maxlen=MOST_QUEUED)  # the sizes of heads whose requests wait
        self._answered = 0  # the size of the head whose request is, or was, answered
        self._ignores = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def _in_head(self) -> bool:
        return self._payload is None or self._payload.is_eof()

    def message_consumed(self) -> None:
        """The next request is about to be answered."""
        if self._queued:
            self._answered = self._queued.popleft()
            self._report()
        self._parser.message_consumed()

    def feed_data(self, data: bytes) -> Parsed:
        """The messages whose heads `data` completes. Nothing is upgraded: bytes after that are ignored."""
        messages: list[Any] = []
        at = 0
        try:
            while not self._ignores:
                left = self._length - self._payload.total_bytes if self._payload is not None else 0
                size = max(STEP, left)
                found, upgraded, _ = self._feed_piece(data[at : at + size])
                self._ignores = self._ignores or upgraded
                messages += found
                at += size
                if at >= len(data):
                    break
        finally:
            self._report()
        return messages, False, b""

    def _feed_piece(self, piece: bytes) -> Parsed:
        payload, in_head = self._payload, self._in_head
        before = payload.total_bytes if payload is not None else 0
        found, upgraded, tail = self._parse(piece)
        for message, self._payload in found:
            self._queued.append(_size_of(message))
            self._length = 0 if message.chunked else int(message.headers.get("Content-Length", 0))
        grown = payload is not None and payload.total_bytes > before
        goes_on = found or grown or in_head != self._in_head
        # Beyond so many requests the parser keeps what comes.
        self._unfinished = 0 if goes_on and len(self._queued) < MOST_QUEUED else self._unfinished + len(piece)
        if self._unfinished > LONGEST_HEAD:
            self._ignores = True
            if in_head:
                raise HeadTooLarge
        return found, upgraded, tail

    def _parse(self, piece: bytes) -> Parsed:
        parsed: Parsed = self._parser.feed_data(piece)
        return parsed

    def _report(self) -> None:
        self._hold(self._unfinished + self._answered + sum(self._queued))


def _size_of(message: Any) -> int:
    return len(message.path) + sum([len(name) + len(value) for name, value in message.raw_headers])
