"""Minimal HTTP for the gateway benchmark: an upstream that answers, and a client that calls.

Both are bare protocols, so that the measured difference is the proxy. A request has a `Content-Length`. As
`python raw_http.py` it is the upstream: it prints its address and ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from typing import cast

import uvloop

CHUNKS = 200  # events of a stream
PACE = 0.001  # seconds between two of them
SMALL = 64 * 1024  # bytes; smaller requests are searched for `"stream":true`
END = b"0\r\n\r\n"
_STREAMS = (b'"stream":true', b'"stream": true')
_LAST_EVENTS = (b"[DONE]", b"message_stop")
_ENVELOPE = {"id": "chatcmpl-1", "created": 1, "model": "benchmark"}
_USAGE = {"prompt_tokens": 500, "completion_tokens": 200, "total_tokens": 700}


class Upstream(asyncio.Protocol):
    """A connection of the upstream: reads a request, discards it, and answers."""

    def __init__(self) -> None:
        self._head = b""
        self._left = -1  # bytes of the body still to come; -1 while reading headers
        self._seen: bytes | None = b""  # the body, as long as it is small

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._head = b""
            self._left = length_in(head)
            self._seen = b"" if self._left <= SMALL else None
        self._left -= len(data)
        if self._seen is not None:
            self._seen += data
        if self._left <= 0:
            self._left = -1
            self._answer(self._seen or b"")

    def _answer(self, request: bytes) -> None:
        if any(mark in request for mark in _STREAMS):
            self._transport.write(STREAM_HEAD)
            self._say(deque(EVENTS), asyncio.get_running_loop().time())
        else:
            self._transport.write(REPLY)

    def _say(self, events: deque[bytes], at: float) -> None:
        """Send one event at a time, as a model does; a late event does not delay the others."""
        self._transport.write(events.popleft())
        if events and not self._transport.is_closing():
            asyncio.get_running_loop().call_at(at + PACE, self._say, events, at + PACE)


class Connection(asyncio.Protocol):
    """A client's connection; one call at a time."""

    def __init__(self) -> None:
        self._head = b""
        self._left = -1  # bytes of the answer still to come, or -1
        self._tail: bytes | None = None  # the last bytes of a chunked answer
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def call(self, head: bytes, body: bytes) -> None:
        """Send a request and wait for the last byte of its answer; the status must be a success."""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(head)
        self._transport.write(body)
        await self._answered

    @property
    def closed(self) -> bool:
        """Return whether the server closed the connection: some do after seconds of idleness."""
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._left < 0 and self._tail is None:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._head = b""
            if b" 200 " not in head[:16]:
                self._fail(f"{head.decode()} {data[:500].decode(errors='replace')}")
                return
            chunked = b"transfer-encoding: chunked" in head.lower()
            self._tail, self._left = (b"", -1) if chunked else (None, length_in(head))
        if self._tail is not None:
            self._tail = (self._tail + data)[-64:]
            if self._tail.endswith(END):
                self._end(whole=any(mark in self._tail for mark in _LAST_EVENTS))
            return
        self._left -= len(data)
        if self._left == 0:
            self._end(whole=True)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was lost: {error}")

    def _end(self, *, whole: bool) -> None:
        self._left, self._tail = -1, None
        if not whole:
            self._fail("a stream ended early")
        elif self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, message: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(message))


def request_head(path: str, key: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nAccept: */*\r\nUser-Agent: benchmark\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def length_in(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _reply() -> bytes:
    message = {"role": "assistant", "content": "word " * 100}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = json.dumps(
        {**_ENVELOPE, "object": "chat.completion", "choices": [choice], "usage": _USAGE}
    ).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


def _events() -> list[bytes]:
    said = [{"index": 0, "delta": {"content": f"word{n} "}, "finish_reason": None} for n in range(CHUNKS - 3)]
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    envelope = {**_ENVELOPE, "object": "chat.completion.chunk"}
    documents = [{**envelope, "choices": [choice]} for choice in (*said, last)]
    datas = [json.dumps(document) for document in (*documents, {**envelope, "choices": [], "usage": _USAGE})]
    events = [f"data: {data}\n\n".encode() for data in (*datas, "[DONE]")]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    return [*chunks[:-1], chunks[-1] + END]


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REPLY = _reply()
EVENTS = _events()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Upstream, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve())
