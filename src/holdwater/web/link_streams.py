"""Streams of bytes over one link, in both directions at once, each with a window of its own.

An unread stream stops its writer and no other stream. Records in a stream are msgpack with their
length before them. `message_link.py` carries the frames.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import IntEnum
from typing import Any, Self, TypeVar

import msgspec

from ..core.records import MiB
from .message_link import LinkBroken, MessageLink

T = TypeVar("T")

WINDOW = 1 * MiB  # bytes of a stream that are sent before they are read
PIECE = 64 * 1024  # bytes of one frame
MOST_STREAMS = 8192  # open at once
FRAME = struct.Struct(">BI")  # kind, stream
NUMBER = struct.Struct(">I")


class FrameKind(IntEnum):
    """What a frame does to its stream."""

    OPEN = 1  # the content is its purpose
    DATA = 2
    END = 3  # no more data follow
    CREDIT = 4  # so many more bytes may be sent
    RESET = 5  # neither side needs the stream any more


class LinkStream:
    """One stream. Leaving `async with` resets it, unless both sides have ended."""

    def __init__(self, streams: LinkStreams, number: int, purpose: bytes) -> None:
        self.purpose = purpose
        self.on_reset: Callable[[], None] = lambda: None
        self._streams = streams
        self._number = number
        self._pieces: deque[bytes] = deque()  # bound: WINDOW
        self._held = b""  # the rest of a piece that was read in part
        self._unread = 0
        self._consumed = 0  # bytes since the last credit
        self._credit = WINDOW
        self._ended = False  # by the peer
        self._finished = False  # by this side
        self._broken = ""  # why nothing more can be sent
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset the stream, unless it is over."""
        if not (self._finished and self._ended) and not self._broken:
            self._send(FrameKind.RESET)
        self._broken = self._broken or "closed"
        self._changed.set()
        self._streams.forget(self._number)

    async def write(self, content: bytes) -> None:
        """Send bytes; wait while the peer does not read."""
        view = memoryview(content)
        while view:
            while not self._credit and not self._broken:
                await self._wait()
            if self._broken:
                raise LinkBroken(self._broken)
            size = min(len(view), self._credit, PIECE)
            self._credit -= size
            self._send(FrameKind.DATA, view[:size])
            view = view[size:]

    def end(self) -> None:
        """Send no more data."""
        if not self._finished and not self._broken:
            self._finished = True
            self._send(FrameKind.END)

    async def read(self) -> bytes:
        """Return the next piece; empty: the peer has ended the stream."""
        if self._held:
            piece, self._held = self._held, b""
            return piece
        while not self._pieces:
            if self._ended:
                return b""
            if self._broken:
                raise LinkBroken(self._broken)
            await self._wait()
        piece = self._pieces.popleft()
        self._unread -= len(piece)
        self._consumed += len(piece)
        if self._consumed >= WINDOW // 2 and not self._ended:
            self._send(FrameKind.CREDIT, NUMBER.pack(self._consumed))
            self._consumed = 0
        return piece

    async def read_exactly(self, size: int) -> bytes:
        """Return so many bytes; raise `LinkBroken` if there are fewer."""
        found = bytearray()
        while len(found) < size:
            piece = await self.read()
            if not piece:
                raise LinkBroken("the other side ended a stream early")
            found += piece
        self._held = bytes(found[size:])
        return bytes(found[:size])

    async def write_record(self, record: msgspec.Struct) -> None:
        packed = msgspec.msgpack.encode(record)
        await self.write(NUMBER.pack(len(packed)) + packed)

    async def read_record(self, kind: type[T] | Any, largest: int) -> T:
        """Return the next record; raise `LinkBroken` if it is too large or of another kind."""
        (size,) = NUMBER.unpack(await self.read_exactly(NUMBER.size))
        if size > largest:
            raise LinkBroken(f"a record of {size} bytes, at most {largest} are allowed")
        try:
            record: T = msgspec.msgpack.decode(await self.read_exactly(size), type=kind)
        except msgspec.MsgspecError as error:
            raise LinkBroken(f"a record that cannot be read: {error}") from error
        return record

    async def pieces(self) -> AsyncIterator[bytes]:
        while piece := await self.read():
            yield piece

    def on_frame(self, kind: FrameKind, content: bytes) -> None:
        """Take a frame of the peer."""
        match kind:
            case FrameKind.DATA:
                self._unread += len(content)
                if self._unread > WINDOW:
                    self.on_broken("the other side sent more than the window of a stream")
                else:
                    self._pieces.append(content)
            case FrameKind.END:
                self._ended = True
            case FrameKind.CREDIT:
                self._credit += NUMBER.unpack(content)[0]
            case FrameKind.RESET:
                self.on_broken("the other side closed a stream early")
                self._streams.forget(self._number)
        self._changed.set()

    def on_broken(self, reason: str) -> None:
        """End the stream: nothing can be sent any more, and nothing follows what has been received."""
        self._broken = self._broken or reason
        self._changed.set()
        self.on_reset()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _send(self, kind: FrameKind, content: bytes | memoryview = b"") -> None:
        self._streams.send(kind, self._number, content)


class LinkStreams:
    """The streams of one link. `accept` is called with each stream that the peer opens."""

    def __init__(self, accept: Callable[[LinkStream], None], *, first: int) -> None:
        self.link = MessageLink(self._on_message)
        self._accept = accept
        self._next = first  # this side's streams: odd numbers of one side, even ones of the other
        self._open: dict[int, LinkStream] = {}  # bound: MOST_STREAMS
        self.broken = ""

    def open(self, purpose: bytes) -> LinkStream:
        """Open a stream; use it with `async with`."""
        if self.broken:
            raise LinkBroken(self.broken)
        if len(self._open) >= MOST_STREAMS:
            raise LinkBroken("too many streams are open")
        stream = self._open[self._next] = LinkStream(self, self._next, purpose)
        self.send(FrameKind.OPEN, self._next, purpose)
        self._next += 2
        return stream

    def send(self, kind: FrameKind, number: int, content: bytes | memoryview) -> None:
        if self.broken:
            return
        try:
            self.link.send(FRAME.pack(kind, number) + bytes(content))
        except LinkBroken as error:
            self.end(error.message)

    def forget(self, number: int) -> None:
        self._open.pop(number, None)

    def end(self, reason: str) -> None:
        """End all streams, and open no more."""
        self.broken = self.broken or reason
        for stream in tuple(self._open.values()):
            stream.on_broken(reason)
        self._open.clear()

    def _on_message(self, message: bytes) -> None:
        """Take a message of the peer; raise `LinkBroken` if the streams have ended."""
        try:
            code, number = FRAME.unpack_from(message)
            kind, content = FrameKind(code), message[FRAME.size :]
        except (struct.error, ValueError):
            self.end("the other side sent a frame that cannot be read")
        if self.broken:
            raise LinkBroken(self.broken)
        stream = self._open.get(number)
        if kind is FrameKind.OPEN and stream is None and len(self._open) < MOST_STREAMS:
            stream = self._open[number] = LinkStream(self, number, content)
            self._accept(stream)
        elif kind is FrameKind.OPEN:
            self.send(FrameKind.RESET, number, b"")
        elif stream is not None:  # else it was closed meanwhile
            stream.on_frame(kind, content)


async def join_socket(stream: LinkStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes between a stream and a socket, in both directions, until both have ended or one breaks."""

    async def read_socket() -> None:
        while content := await reader.read(PIECE):
            await stream.write(content)
        stream.end()

    async def read_stream() -> None:
        async for content in stream.pieces():
            writer.write(content)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    directions = [asyncio.ensure_future(way) for way in (read_socket(), read_stream())]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for way in directions:
            way.cancel()
        await asyncio.wait(directions)
        for way in directions:
            if not way.cancelled():
                way.exception()  # a side that broke: the other learns it by the end of its connection
        writer.close()
        stream.close()
