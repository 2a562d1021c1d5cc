"""The link of a run with a sandbox server: streams of bytes that a cut of the connection does not change."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import ClientError, ClientSession, web
from tests.wait_bounds import stretch

from holdwater.web.link_streams import WINDOW, LinkStream, LinkStreams, join_socket
from holdwater.web.message_link import LinkBroken, MessageLink


class LinkPair:
    """Two ends of a link over real WebSockets; `sockets` can be closed, and then follows the next one."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[LinkStream] = asyncio.Queue()
        self.here = LinkStreams(self.accepted.put_nowait, first=1)
        self.there = LinkStreams(self.accepted.put_nowait, first=2)
        self.connections = 0
        self._socket: web.WebSocketResponse | None = None

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self._socket = socket
        self.connections += 1
        await self.there.link.serve(socket, int(request.headers["received"]))
        return socket

    async def keep(self, url: str) -> None:
        async with ClientSession() as http:
            while True:
                headers = {"received": str(self.here.link.received)}
                with suppress(ClientError, TypeError):  # cut before the first message
                    async with http.ws_connect(url, headers=headers) as socket:
                        await self.here.link.join(socket, lambda: None)

    def cut(self) -> None:
        """End the connection as a lost network does: without a word."""
        assert self._socket is not None and self._socket._req is not None
        transport = self._socket._req.transport
        if transport is not None:
            transport.abort()

    async def accept(self) -> LinkStream:
        async with asyncio.timeout(stretch(10)):
            return await self.accepted.get()


@asynccontextmanager
async def linked() -> AsyncIterator[LinkPair]:
    pair = LinkPair()
    app = web.Application()
    app.router.add_get("/", pair.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    keeping = asyncio.ensure_future(pair.keep(f"http://127.0.0.1:{runner.addresses[0][1]}/"))
    try:
        yield pair
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
        await runner.cleanup()


async def read_all(stream: LinkStream) -> bytes:
    return b"".join([piece async for piece in stream.pieces()])


async def test_streams_in_both_directions_survive_cuts_of_the_connection() -> None:
    content = [os.urandom(3_000_000 + n) for n in range(4)]

    async with linked() as pair:

        async def send(stream: LinkStream, what: bytes) -> None:
            for at in range(0, len(what), 70_000):
                await stream.write(what[at : at + 70_000])
                if at % 700_000 == 0:
                    pair.cut()
            stream.end()

        streams = [pair.here.open(b"one"), pair.here.open(b"two")]
        accepted = [await pair.accept() for _ in streams]
        ends = [*streams, *accepted]
        async with asyncio.timeout(stretch(60)):
            sending = [asyncio.ensure_future(send(*each)) for each in zip(ends, content, strict=True)]
            received = await asyncio.gather(*map(read_all, [*accepted, *streams]))
            await asyncio.gather(*sending)

    digests = [hashlib.sha256(one).hexdigest() for one in received]
    assert digests == [hashlib.sha256(one).hexdigest() for one in content]
    assert pair.connections > 2
    assert not pair.here.link._kept or len(pair.here.link._kept) < 100


async def test_a_stream_that_is_not_read_stops_its_writer_alone() -> None:
    async with linked() as pair:
        unread, read = pair.here.open(b"unread"), pair.here.open(b"read")
        await pair.accept()
        reader = await pair.accept()
        stuck = asyncio.ensure_future(unread.write(b"x" * (WINDOW + 1)))
        writing = asyncio.ensure_future(read.write(b"y" * 3 * WINDOW))

        async with asyncio.timeout(stretch(20)):
            got = await reader.read_exactly(3 * WINDOW)
            await writing

        assert len(got) == 3 * WINDOW
        assert not stuck.done()
        unread.close()
        with pytest.raises(LinkBroken, match="closed"):
            await stuck


async def test_a_reset_reaches_the_other_side_after_the_data_before_it() -> None:
    async with linked() as pair:
        stream = pair.here.open(b"reset")
        other = await pair.accept()
        await stream.write(b"before")
        stream.close()

        async with asyncio.timeout(stretch(10)):
            assert await other.read() == b"before"
            with pytest.raises(LinkBroken, match="closed a stream early"):
                await other.read()
            with pytest.raises(LinkBroken):
                await other.write(b"late")


async def test_a_socket_joined_to_a_stream_passes_both_directions() -> None:
    closed = asyncio.Event()

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with linked() as pair:
        server = await asyncio.start_server(shout, "127.0.0.1", 0)
        stream = pair.here.open(b"join")
        other = await pair.accept()
        near = await asyncio.open_connection(*server.sockets[0].getsockname())
        joined = asyncio.ensure_future(join_socket(other, *near))
        async with asyncio.timeout(stretch(10)):
            await stream.write(b"quiet " * 100_000)
            stream.end()
            answer = await read_all(stream)
            await joined
            await near[1].wait_closed()
            await closed.wait()
        server.close()
        await server.wait_closed()

    assert answer == b"QUIET " * 100_000


async def test_a_window_that_is_ignored_breaks_the_stream() -> None:
    async with linked() as pair:
        stream = pair.here.open(b"flood")
        other = await pair.accept()
        stream._credit = 100 * WINDOW
        with pytest.raises(LinkBroken):
            async with asyncio.timeout(stretch(20)):
                await stream.write(b"x" * 3 * WINDOW)
                while True:
                    await other.read()
                    await asyncio.sleep(0)

        assert other._unread <= 2 * WINDOW


def test_a_peer_that_lost_messages_cannot_continue() -> None:
    link = MessageLink(lambda message: None)
    for number in range(5):
        link.send(bytes([number]))
    link._forget(2)

    assert [received for received in range(8) if link.can_continue(received)] == [2, 3, 4, 5]
