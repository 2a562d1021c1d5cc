"""A link of two processes: ordered messages over a WebSocket, which survive a cut of the connection.

Each side keeps its messages until the other has acknowledged them, and sends them again over the next
connection. The users of a link bound these messages: see the windows of `link_streams.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from aiohttp import ClientWebSocketResponse, WSMsgType, web

from ..core.errors import HoldwaterError

LinkSocket = ClientWebSocketResponse | web.WebSocketResponse

JOIN_SECONDS = 10.0  # for the first message of the other side
HEARTBEAT = 10.0  # seconds; a peer that does not answer within half of it is gone
LARGEST_MESSAGE = 1024 * 1024  # bytes
SESSION_OVER = 4000  # the code of a WebSocket that its client closes for good
MOST_KEPT = 65536  # messages that the peer has not acknowledged: then it does not follow the rules
ACKNOWLEDGED_EACH = 32  # messages after which a side without messages of its own acknowledges
COUNT_BYTES = 8  # before each message: the number of messages received


class LinkBroken(HoldwaterError):
    """The link or a stream of it has ended before its time."""


class MessageLink:
    """One end of a link. `deliver` is called with each message, in order and exactly once."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        self.received = 0
        self._deliver = deliver
        self._kept: deque[bytes] = deque()  # not acknowledged yet; bound: MOST_KEPT
        self._first = 1  # the number of the first of them
        self._acknowledged = 0  # the last count that was sent to the peer
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # one connection at a time

    def send(self, message: bytes) -> None:
        """Send a message now, or over the next connection."""
        if len(self._kept) >= MOST_KEPT:
            raise LinkBroken("the other side acknowledges no messages")
        self._kept.append(message)
        self._wake.set()

    def can_continue(self, received: int) -> bool:
        """Whether a peer that has received so many messages can get all of the following ones."""
        return self._first - 1 <= received < self._first + len(self._kept)

    async def serve(self, socket: web.WebSocketResponse, received: int) -> None:
        """Exchange messages over a connection of the peer until it ends; the peer has received so many.

        The connection before it must end first: its last messages count.
        """
        async with self._turn:
            await socket.send_str(str(self.received))
            await self._exchange(socket, received)

    async def join(self, socket: ClientWebSocketResponse, begun: Callable[[], None]) -> None:
        """Exchange messages over a connection to the peer, until it ends; `begun` is called at its start."""
        received = int(await socket.receive_str(timeout=JOIN_SECONDS))
        begun()
        await self._exchange(socket, received)

    async def _exchange(self, socket: LinkSocket, received: int) -> None:
        if not self.can_continue(received):
            raise LinkBroken("the other side has lost messages")
        self._forget(received)
        self._acknowledged = self.received
        writing = asyncio.ensure_future(self._write(socket))
        try:
            await self._read(socket)
        finally:
            writing.cancel()
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.exception()  # a connection that breaks while it is written to

    async def _read(self, socket: LinkSocket) -> None:
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                continue
            content: bytes = message.data
            self._forget(int.from_bytes(content[:COUNT_BYTES], "big"))
            if len(content) > COUNT_BYTES:
                self.received += 1
                self._deliver(content[COUNT_BYTES:])
            if self.received - self._acknowledged >= ACKNOWLEDGED_EACH:
                self._wake.set()

    async def _write(self, socket: LinkSocket) -> None:
        following = self._first
        while True:
            self._wake.clear()
            batch = list(self._list_kept(following))
            if not batch and self.received - self._acknowledged >= ACKNOWLEDGED_EACH:
                batch = [b""]
                following -= 1
            for message in batch:
                following += 1
                self._acknowledged = self.received
                await socket.send_bytes(self.received.to_bytes(COUNT_BYTES, "big") + message)
            if not batch:
                await self._wake.wait()

    def _list_kept(self, number: int) -> Iterator[bytes]:
        """Yield the kept messages from this number on."""
        return islice(self._kept, max(0, number - self._first), None)

    def _forget(self, received: int) -> None:
        """Drop the messages that the peer has received."""
        while self._kept and self._first <= received:
            self._kept.popleft()
            self._first += 1
