"""The scripted model: an HTTP server that speaks four dialects, plain and streaming, and fails on request.

It does not think: a `Script` says what to reply, `wires.py` how that looks in a dialect. As a program
(`python -m holdwater.testing.scripted`) it serves a fixed conversation for benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import string
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, cast

import msgspec
import uvloop
from aiohttp import web

from .wires import CHARS_PER_TOKEN, FAILED, WIRES, Asked, Wire

LONGEST_HEADER = 64 * 1024


class Fault(StrEnum):
    """A way to fail that is more than a status."""

    RESET = "reset"  # the connection is lost before the first byte
    CUT = "cut"  # the connection is lost in the middle of the reply
    STALL = "stall"  # not a byte, until the client goes away
    SHORT = "short"  # the reply ends in its middle as if that were its end
    HANG = "hang"  # silence from the middle of the reply on, until the client goes away
    GARBAGE = "garbage"  # a 200 whose body is no JSON
    ERROR = "error"  # an error inside a 200


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the scripted model answers. A `tool_calls` item is `{"name": ..., "arguments": {...}}`."""

    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""
    finish: str | None = None  # `tool_calls`, `stop` or `length`; by what the reply holds, where not given
    cached: int = 0  # tokens of the request that count as cached
    delay: float = 0.0  # seconds before the first byte
    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes | None = None  # sent as it is in place of all that is above
    fault: Fault | None = None


Script = Callable[[dict[str, Any]], Reply | Awaitable[Reply]]
"""Takes the decoded request, in whatever dialect it came; plain or async."""

RawScript = Callable[[Mapping[str, str], bytes], Reply | Awaitable[Reply]]
"""Takes the headers and the body as they came: for byte-exact tests, and for benchmarks that do not parse."""


def serve(script: Script, port: int = 0) -> AbstractAsyncContextManager[str]:
    """Serve `script` on 127.0.0.1: `async with serve(script) as url`, where `url` ends in `/v1`."""
    return serve_raw(lambda headers, body: script(msgspec.json.decode(body)), port)


@asynccontextmanager
async def serve_raw(script: RawScript, port: int = 0) -> AsyncIterator[str]:
    """The same for a script that wants the bytes."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await _handle(script, request)

    server = web.Server(
        handle,
        handler_cancellation=True,
        access_log=None,
        max_field_size=LONGEST_HEADER,
        max_line_size=LONGEST_HEADER,
        read_bufsize=1024 * 1024,
    )
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def planned(plan: Sequence[Reply | Fault | None], script: Script) -> Script:
    """`script`, but the request number n (from 0) gets `plan[n]` where that says anything."""
    rest = iter(plan)

    def reply(request: dict[str, Any]) -> Reply | Awaitable[Reply]:
        step = next(rest, None)
        if isinstance(step, Fault):
            return Reply(text="a reply that fails on its way", fault=step)
        return script(request) if step is None else step

    return reply


def turns(count: int, size: int, seed: int = 0, command: str | None = None) -> RawScript:
    """A conversation of `count` turns: each `turn k of n` and `size` bytes of text, the same for a seed.

    With `command`, every turn but the last one calls the tool `bash` with it.
    """
    noise = _noise(size + 64 * count, seed)

    def reply(headers: Mapping[str, str], body: bytes) -> Reply:
        last = body.rfind(b'"turn ')  # from the end, so that a long history costs nothing
        turn = min(int(body[last + 6 : last + 16].split()[0]) + 1, count) if last >= 0 else 1
        text = f"turn {turn} of {count}\n" + noise[64 * turn : 64 * turn + size]
        calls = [{"name": "bash", "arguments": {"command": command}}] if command and turn < count else []
        return Reply(text=text, tool_calls=calls)

    return reply


def _noise(size: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + string.digits + "     \n", k=size))


async def _handle(script: RawScript, request: web.BaseRequest) -> web.StreamResponse:
    path = request.path
    if request.method == "GET" and path.endswith("/models"):
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
    dialect = next((name for ends, name in _PATHS.items() if path.endswith(ends)), None)
    if dialect is None:
        return _error(WIRES["chat"], 404, f"no such path: `{path}`", {})
    body = b"".join([part async for part in request.content.iter_any()])
    if path.endswith(_COUNTS):
        tokens = 1 + len(body) // CHARS_PER_TOKEN
        return web.json_response({"totalTokens" if dialect == "gemini" else "input_tokens": tokens})
    answer = script(cast(Mapping[str, str], request.headers), body)
    reply = await answer if isinstance(answer, Awaitable) else answer
    return await _answer(request, reply, dialect, body)


_COUNTS = ("/count_tokens", ":countTokens")
_PATHS = {
    "/chat/completions": "chat",
    "/responses": "responses",
    "/messages": "messages",
    "/count_tokens": "messages",
    "enerateContent": "gemini",
    ":countTokens": "gemini",
}


async def _answer(request: web.BaseRequest, reply: Reply, dialect: str, body: bytes) -> web.StreamResponse:
    wire = WIRES[dialect]
    if reply.delay:
        await asyncio.sleep(reply.delay)
    if reply.fault in (Fault.STALL, Fault.RESET):
        return await _say_nothing(reply.fault, request)
    if reply.body is not None:
        return web.Response(status=reply.status, headers=reply.headers, body=reply.body)
    if reply.status != 200:
        return _error(wire, reply.status, reply.text or f"scripted status {reply.status}", reply.headers)
    asked = Asked.of(body)
    if dialect == "gemini":
        asked.model = request.path.rpartition("/")[2].partition(":")[0]
        asked.stream = request.path.endswith(":streamGenerateContent")
    return await (_stream if asked.stream else _whole)(request, reply, asked, wire)


def _error(wire: Wire, status: int, message: str, headers: Mapping[str, str]) -> web.Response:
    body = msgspec.json.encode(wire.error(status, message))
    return web.Response(status=status, headers=headers, body=body, content_type="application/json")


async def _say_nothing(fault: Fault, request: web.BaseRequest) -> web.Response:
    if fault is Fault.STALL:
        await asyncio.Event().wait()
    _abort(request)
    return web.Response()


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _whole(request: web.BaseRequest, reply: Reply, asked: Asked, wire: Wire) -> web.StreamResponse:
    body = msgspec.json.encode(wire.whole(reply, asked))
    headers = {"Content-Type": "application/json", **reply.headers}
    if reply.fault is None:
        return web.Response(headers=headers, body=body)
    if reply.fault is Fault.GARBAGE:
        return web.Response(headers=headers, body=b"<html>not JSON</html>")
    if reply.fault is Fault.ERROR:
        return web.Response(headers=headers, body=msgspec.json.encode(wire.error(500, FAILED)))
    if reply.fault is Fault.SHORT:
        return web.Response(headers=headers, body=body[: len(body) // 2])
    response = web.StreamResponse(headers={**headers, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    return await _fail_midway(request, response, reply)


async def _fail_midway(
    request: web.BaseRequest, response: web.StreamResponse, reply: Reply
) -> web.StreamResponse:
    if reply.fault is Fault.HANG:
        await asyncio.Event().wait()
    _abort(request)
    return response


async def _stream(request: web.BaseRequest, reply: Reply, asked: Asked, wire: Wire) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **reply.headers})
    await response.prepare(request)
    events = list(wire.events(reply, asked))
    if reply.fault is None:
        await response.write(b"".join(events))
        return response
    if reply.fault is Fault.GARBAGE:
        await response.write(b"data: {not JSON\n\n")
        return response
    await response.write(b"".join(events[: len(events) // 2]))
    if reply.fault is Fault.SHORT:
        return response
    if reply.fault is Fault.ERROR:
        await response.write(wire.failure())
        return response
    return await _fail_midway(request, response, reply)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="holdwater.testing.scripted", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--bytes", type=int, default=1000, help="bytes of text in each reply")
    parser.add_argument("--turns", type=int, default=45, help="turns of a conversation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", help="what every turn but the last calls the tool `bash` with")
    options = parser.parse_args(arguments)
    script = turns(options.turns, options.bytes, options.seed, options.command)
    uvloop.run(_serve_until_told(script, options.port))


async def _serve_until_told(script: RawScript, port: int) -> None:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with serve_raw(script, port) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await told.wait()


if __name__ == "__main__":
    main()
