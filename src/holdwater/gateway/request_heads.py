"""Bounds the heads of requests: each head, and the heads of all connections of a server together.

aiohttp bounds each header and their number, which allows megabytes. It also keeps the head of a connection's
last request until the next one. `connections.py` and `serve/connection_server.py` use `BoundedParser`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from ..core.records import MiB

LONGEST_HEAD = 128 * 1024
MOST_HELD = 16 * MiB  # bytes, for the heads of all connections
SMALL_HEAD = 4 * 1024  # bytes of heads not counted per connection: connections are bounded too
STEP = 8 * 1024  # bytes of a head parsed, and counted, at once
MOST_QUEUED = 32  # requests that aiohttp reads ahead of the current one
PARSER_ATTRIBUTE = "_request_parser" if "_request_parser" in web.RequestHandler.__slots__ else "_parser"

ParsedMessages = tuple[Sequence[Any], bool, bytes]


class HeadTooLarge(HttpProcessingError):
    code = 431

    def __init__(self) -> None:
        super().__init__(message=f"the head is larger than the {LONGEST_HEAD} bytes that are allowed")


class HeadHolder(Protocol):
    """A connection whose heads are counted."""

    @property
    def answering(self) -> bool:
        """Whether one of its requests is in progress."""


Holder = TypeVar("Holder", bound=HeadHolder)


class HeldHeads(Generic[Holder]):
    """Counts the bytes of all heads. Beyond the bound, it closes the oldest connection without a request."""

    def __init__(self, close: Callable[[Holder], None], most: int = MOST_HELD) -> None:
        self.size = 0
        self.most = most
        self._close = close
        self._held: dict[Holder, int] = {}  # in order of arrival; bound: the open connections

    def hold(self, connection: Holder, size: int) -> None:
        """Set the number of bytes of heads held for `connection`."""
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
    """aiohttp's parser for one connection. Beyond `LONGEST_HEAD`, it refuses heads and ignores trailers."""

    def __init__(self, parser: Any, hold: Callable[[int], None]) -> None:
        self._parser = parser
        self._hold = hold
        self._payload: StreamReader | None = None  # of the latest request
        self._length = 0  # of its body, if known
        self._unfinished = 0  # bytes since the latest head or piece of a body
        self._queued: deque[int] = deque(maxlen=MOST_QUEUED)  # the sizes of the heads of waiting requests
        self._answered = 0  # the size of the head of the current or last request
        self._ignores = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def _in_head(self) -> bool:
        return self._payload is None or self._payload.is_eof()

    def message_consumed(self) -> None:
        """Account for the next request, which is handled now."""
        if self._queued:
            self._answered = self._queued.popleft()
            self._report()
        self._parser.message_consumed()

    def feed_data(self, data: bytes) -> ParsedMessages:
        """Return the messages whose heads `data` completes. Bytes after an upgrade request are ignored."""
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

    def _feed_piece(self, piece: bytes) -> ParsedMessages:
        payload, in_head = self._payload, self._in_head
        before = payload.total_bytes if payload is not None else 0
        found, upgraded, tail = self._parse(piece)
        for message, self._payload in found:
            self._queued.append(_measure_head(message))
            self._length = 0 if message.chunked else int(message.headers.get("Content-Length", 0))
        grown = payload is not None and payload.total_bytes > before
        goes_on = found or grown or in_head != self._in_head
        # Beyond so many requests, the parser buffers all further bytes.
        self._unfinished = 0 if goes_on and len(self._queued) < MOST_QUEUED else self._unfinished + len(piece)
        if self._unfinished > LONGEST_HEAD:
            self._ignores = True
            if in_head:
                raise HeadTooLarge
        return found, upgraded, tail

    def _parse(self, piece: bytes) -> ParsedMessages:
        parsed: ParsedMessages = self._parser.feed_data(piece)
        return parsed

    def _report(self) -> None:
        self._hold(self._unfinished + self._answered + sum(self._queued))


def _measure_head(message: Any) -> int:
    return len(message.path) + sum([len(name) + len(value) for name, value in message.raw_headers])
