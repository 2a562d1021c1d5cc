"""One attempt does not hurt its neighbours: its connections and its requests are bounded."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import os
import random
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import brotli  # type: ignore[import-untyped]
import msgspec
import pytest
import zstandard
from tests.dialect_requests import message_of, send, speak
from tests.gateway_harness import Log, Scene, ask, scene
from tests.wait_bounds import stretch

from holdwater.gateway import body_reader, request_heads
from holdwater.gateway import connections as gateway_connections
from holdwater.gateway.body_reader import DECODERS
from holdwater.testing.scripted_model import ScriptedReply, serve_raw

Told = list[tuple[str, int | None]]
FILES = 1024  # that the worker may have open


@asynccontextmanager
async def neighbours(**options: Any) -> AsyncIterator[tuple[Scene, Scene, Told]]:
    """Two attempts of one gateway, and the events of requests that it refuses."""
    told: Told = []
    async with serve_raw(lambda headers, body: ScriptedReply(text="fine")) as url, scene(url, **options) as s:
        s.gateway.on_refused = lambda what, attempt: told.append((what, attempt))
        log = Log()
        async with s.gateway.open_session(2, log) as session:
            yield s, Scene(s.gateway, session, log, s.http), told


async def answered(s: Scene, body: Any = None) -> int:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body or ask("hi"))
    async with s.post(io.BytesIO(content)) as response:
        await response.read()
        status: int = response.status
        return status


async def connect(s: Scene, stack: AsyncExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(s.gateway.socket)
    stack.callback(writer.close)
    return reader, writer


def head(s: Scene, call: str, *headers: str) -> bytes:
    key = f"Authorization: Bearer {s.session.key}"
    return "\r\n".join([f"{call} HTTP/1.1", "Host: x", key, *headers, "", ""]).encode()


async def patient(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(stretch(15)):
        while not is_so():
            await asyncio.sleep(0.01)


def tiny(count: int) -> bytes:
    return b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * count) + b"]}"


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "gemini"])
async def test_a_small_body_of_millions_of_messages_is_refused(dialect: str) -> None:
    packed = gzip.compress(tiny(2_000_000).replace(b"messages", speak_key(dialect)))
    async with neighbours() as (greedy, neighbour, told):
        request = speak(dialect)._replace(body=packed)
        async with send(greedy, request, **{"Content-Encoding": "gzip"}) as response:
            assert response.status == 413
            assert message_of(await response.json()) == "the request has more than 500000 values"
        assert await answered(neighbour) == 200
        assert greedy.log.exchanges == []
    assert [(what.partition(": ")[2], attempt) for what, attempt in told] == [
        ("the request has more than 500000 values", 1)
    ]


def speak_key(dialect: str) -> bytes:
    return {"responses": b"input", "gemini": b"contents"}.get(dialect, b"messages")


async def test_a_body_of_too_many_messages_is_refused() -> None:
    async with neighbours() as (greedy, _, told):
        assert await answered(greedy, tiny(60_000)) == 413
    assert told[0][0].endswith("the request has 60000 messages, more than the limit of 50000")


def words(count: int) -> str:
    source = random.Random(7)
    return " ".join(source.choice(["alpha", "beta, gamma", "{delta}", "[1, 2]"]) for _ in range(count))


async def test_a_long_conversation_with_images_is_recorded_as_sent() -> None:
    """Thousands of messages and megabytes of images are no attack, turn after turn."""
    image = base64.b64encode(os.urandom(6_000_000)).decode()
    url = {"url": f"data:image/png;base64,{image}"}
    said = words(100)
    messages: list[Any] = [{"role": "user", "content": f"{number}: {said}"} for number in range(6000)]
    messages[3000] = {"role": "user", "content": [{"type": "image_url", "image_url": url}] * 3}
    async with neighbours() as (s, _, told):
        for more in range(2):
            messages.append({"role": "user", "content": f"and now {more}"})
            assert await answered(s, {"model": "m", "messages": messages}) == 200
        first, second = s.log.exchanges
        assert (first.keep, len(first.append), second.keep, len(second.append)) == (0, 6001, 6001, 1)
        assert s.log.requests()[1]["messages"] == messages
    assert told == []


async def test_a_slow_large_body_does_not_keep_neighbours_waiting() -> None:
    async with neighbours() as (greedy, neighbour, _), AsyncExitStack() as stack:
        for _ in range(8):
            _, writer = await connect(greedy, stack)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {greedy.session.key}"
            )
            writer.write(f"{head}\r\nContent-Length: {200 << 20}\r\n\r\n[".encode())
        await patient(lambda: greedy.gateway.serving >= 8)

        assert await asyncio.wait_for(answered(neighbour, ask("x" * 500_000)), stretch(10)) == 200


async def test_connections_without_a_key_are_closed_soon() -> None:
    async with neighbours() as (s, _, told), AsyncExitStack() as stack:
        s.gateway.connections.patience = 0.2
        s.gateway.attempt_of = lambda process: 1
        silent, _ = await connect(s, stack)
        reader, writer = await connect(s, stack)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")  # and no end of it

        for one in (silent, reader):
            assert await asyncio.wait_for(one.read(), stretch(10)) == b""

        assert told[0] == ("408 `connection`: no request with a valid key within 0.2 s", 1)


async def test_a_connection_with_a_key_stays_open() -> None:
    async with neighbours() as (s, _, _), AsyncExitStack() as stack:
        s.gateway.connections.patience = 0.2
        reader, writer = await connect(s, stack)
        request = (
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {s.session.key}\r\n\r\n".encode()
        )
        writer.write(request)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        silent, _ = await connect(s, stack)
        assert await asyncio.wait_for(silent.read(), stretch(10)) == b""  # by then the first one is older

        writer.write(request)

        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")


async def test_a_flood_of_connections_takes_none_from_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a worker that may open few files, and one process that opens more connections than that."""
    monkeypatch.setattr("holdwater.gateway.server._most_files", lambda: FILES)
    async with neighbours() as (greedy, neighbour, told), AsyncExitStack() as stack:
        readers = []
        for number in range(1500):
            reader, writer = await connect(greedy, stack)
            readers.append(reader)
            if number % 2:  # a valid key makes no difference
                writer.write(head(greedy, "GET /v1/models"))
            if number % 100 == 0:
                assert await answered(neighbour) == 200
        connections = greedy.gateway.connections
        assert connections.most_each == FILES // gateway_connections.SHARE_EACH
        assert connections.count <= connections.most
        await patient(lambda: sum(not reader.at_eof() for reader in readers[::2]) <= connections.most_each)
        assert await answered(neighbour) == 200
    assert any("connection closed: more than 128 are open" in what for what, _ in told)


async def test_calls_in_flight_are_not_closed_for_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdwater.gateway.server._most_files", lambda: 128)
    go = asyncio.Event()

    async def slowly(headers: Any, body: bytes) -> ScriptedReply:
        await go.wait()
        return ScriptedReply(text="fine")

    async with serve_raw(slowly) as url, scene(url) as s, AsyncExitStack() as stack:
        most = s.gateway.connections.most_each
        calls = [asyncio.create_task(answered(s)) for _ in range(most)]
        await patient(lambda: s.gateway.serving == most)
        for _ in range(100):
            await connect(s, stack)
        go.set()

        assert await asyncio.gather(*calls) == [200] * most


async def test_a_head_without_an_end_is_refused() -> None:
    async with neighbours() as (s, _, told), AsyncExitStack() as stack:
        reader, writer = await connect(s, stack)
        content = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + long_headers(3)
        writer.write(content[: request_heads.LONGEST_HEAD + 1])  # the last of these bytes is too much
        async with asyncio.timeout(stretch(10)):
            answer = await reader.read()

        assert b" 431 " in answer.partition(b"\r\n")[0]
        why = "the head is larger than the 131072 bytes that are allowed"
        assert told[0][0] == f"431 `GET /v1/models HTTP/1.1`: {why}"


def long_headers(count: int, size: int = 60_000) -> bytes:
    return b"".join(b"X-%d: %s\r\n" % (number, b"a" * size) for number in range(count))


async def test_a_large_head_in_small_pieces_is_read() -> None:
    """A header is repeated in it, so that it is read again."""
    async with neighbours() as (s, _, told), AsyncExitStack() as stack:
        reader, writer = await connect(s, stack)
        content = head(s, "GET /v1/models", "User-Agent: a", "X-Long: " + "a" * 60_000, "User-Agent: a")
        for at in range(0, len(content), 1000):
            writer.write(content[at : at + 1000])
            await writer.drain()
            await asyncio.sleep(0)

        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), stretch(10))
    assert told == []


@pytest.mark.parametrize("end", [b"", b"\r\n"], ids=["unfinished", "answered"])
async def test_heads_of_all_connections_together_are_bounded(end: bytes) -> None:
    """Given strangers whose heads are allowed, but too many; the gateway keeps those of answered requests."""
    async with neighbours() as (s, neighbour, told), AsyncExitStack() as stack:
        s.gateway.connections.patience = stretch(600)
        readers = []
        for _ in range(200):
            reader, writer = await connect(s, stack)
            readers.append(reader)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + long_headers(2) + end)
            await writer.drain()

        async with asyncio.timeout(stretch(30)):
            await readers[0].read()  # it is closed
        await patient(lambda: any("request heads of all connections exceed" in what for what, _ in told))
        assert await answered(neighbour) == 200
        assert not readers[-1].at_eof()


async def test_trailers_without_an_end_are_not_kept() -> None:
    async with neighbours() as (s, neighbour, _), AsyncExitStack() as stack:
        _, writer = await connect(s, stack)
        await patient(lambda: s.gateway.connections.count == 1)
        [connection] = s.gateway.connections._strangers
        writer.write(head(s, "POST /v1/chat/completions", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n")
        for _ in range(40):
            writer.write(long_headers(1))
            await writer.drain()
        assert await answered(neighbour) == 200

        parser = getattr(connection, request_heads.PARSER_ATTRIBUTE)
        await patient(lambda: parser._ignores)
        assert parser._unfinished <= request_heads.LONGEST_HEAD + request_heads.STEP


async def test_a_body_that_trickles_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many bytes at first do not make up for it."""
    monkeypatch.setattr(body_reader, "PATIENCE", 0.5)
    async with neighbours() as (greedy, _, told), AsyncExitStack() as stack:
        reader, writer = await connect(greedy, stack)
        writer.write(
            head(greedy, "POST /v1/chat/completions", f"Content-Length: {100 << 20}") + b" " * (3 << 20)
        )
        async with asyncio.timeout(stretch(20)):
            answer = asyncio.create_task(reader.readline())
            while not answer.done():
                writer.write(b" ")
                await asyncio.sleep(0.02)

        assert await answer == b"HTTP/1.1 408 Request Timeout\r\n"
    assert told[0][0].endswith("timed out waiting for the request body")


async def test_a_small_body_does_not_wait_behind_large_ones() -> None:
    async with neighbours() as (greedy, neighbour, _), AsyncExitStack() as stack:
        _, writer = await connect(greedy, stack)
        writer.write(head(greedy, "POST /v1/chat/completions", f"Content-Length: {100 << 20}") + b" ")
        await patient(lambda: greedy.gateway.serving == 1)
        large = asyncio.create_task(answered(neighbour, ask("x" * (5 << 20))))
        await patient(lambda: bool(greedy.gateway.relay.admission._waiting))

        assert await asyncio.wait_for(answered(neighbour), stretch(10)) == 200
        assert not large.done()
        writer.close()
        assert await asyncio.wait_for(large, stretch(30)) == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_bytes_after_the_end_of_a_compressed_body_are_refused(encoding: str) -> None:
    packed = PACK[encoding](msgspec.json.encode(ask("hi")))
    async with neighbours() as (s, _, _):
        for tail in (b"\0", b"\0" * 300_000, packed):
            async with s.post(packed + tail, headers={"Content-Encoding": encoding}) as response:
                assert response.status == 400
                assert f"invalid {encoding} body" in message_of(await response.json())


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
}
EMPTY_FRAME = bytes.fromhex("28b52ffd0058")  # of zstd: a header; a block of no bytes is three zeros


async def test_a_body_that_decodes_to_nothing_is_not_endless() -> None:
    async with neighbours(body_cap=1 << 20) as (s, _, _):
        packed = EMPTY_FRAME + b"\0\0\0" * (1 << 20)
        async with s.post(io.BytesIO(packed), headers={"Content-Encoding": "zstd"}) as response:
            assert response.status == 413


def test_zstd_is_decoded_as_it_comes() -> None:
    """So each step has no more to do than its piece asks for."""
    said = words(100_000).encode()
    packed = zstandard.compress(said)
    decoder = DECODERS["zstd"]()
    decoded = [b"".join(decoder.feed(packed[at : at + 1000])) for at in range(0, len(packed), 1000)]

    assert b"".join(decoded) == said
    assert max(map(len, decoded)) < len(said) / 2
    assert list(decoder.end()) == []
