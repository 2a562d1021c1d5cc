"""The scripted model: an HTTP server with four dialects, plain and streaming, that fails on request.

A `Script` defines the replies, and `reply_formats.py` renders them in a dialect. As a program (`python -m
holdwater.testing.scripted_model`) it serves a fixed conversation for benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import string
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, cast

import msgspec
import uvloop
from aiohttp import web

from ..dialect import DIALECTS, list_conversations
from ..dialect.interface import Dialect, PathMatch, ReplyFormat, RequestTarget
from .reply_formats import CHARS_PER_TOKEN, FAILED, WIRES, ConvertedWire, DialectWire, ScriptedRequest

LONGEST_HEADER = 64 * 1024


class ReplyFault(StrEnum):
    """A failure beyond an HTTP error status."""

    RESET = "reset"  # the connection is lost before the first byte
    CUT = "cut"  # the connection is lost in the middle of the reply
    STALL = "stall"  # no bytes until the client disconnects
    SHORT = "short"  # the reply is truncated but ends normally
    HANG = "hang"  # no more bytes from the middle of the reply on, until the client disconnects
    GARBAGE = "garbage"  # a 200 whose body is not JSON
    ERROR = "error"  # an error inside a 200


class ScriptedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply of the scripted model. A `tool_calls` item is `{"name": ..., "arguments": {...}}`."""

    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""
    finish: str | None = None  # `tool_calls`, `stop` or `length`; None: derived from the content
    cached: int = 0  # tokens of the request that count as cached
    delay: float = 0.0  # seconds before the first byte
    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes | None = None  # sent unchanged in place of all fields above
    fault: ReplyFault | None = None


Script = Callable[[dict[str, Any]], ScriptedReply | Awaitable[ScriptedReply]]
"""Takes the decoded request, in any dialect; plain or async."""

RawScript = Callable[[Mapping[str, str], bytes], ScriptedReply | Awaitable[ScriptedReply]]
"""Takes the raw headers and body: for byte-exact tests, and for benchmarks that do not parse."""


def serve_script(
    script: Script, port: int = 0, *, dialects: Iterable[str] | None = None
) -> AbstractAsyncContextManager[str]:
    """Serve `script` on 127.0.0.1: `async with serve_script(script) as url`, where `url` ends in `/v1`.

    With `dialects`, paths of any others get the status 404.
    """
    return serve_raw(lambda headers, body: script(msgspec.json.decode(body)), port, dialects=dialects)


@asynccontextmanager
async def serve_raw(
    script: RawScript, port: int = 0, *, dialects: Iterable[str] | None = None
) -> AsyncIterator[str]:
    """Serve a script that takes the raw request."""
    served = [DIALECTS[name] for name in (list_conversations() if dialects is None else dialects)]

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await _handle(script, request, served)

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


def apply_plan(plan: Sequence[ScriptedReply | ReplyFault | None], script: Script) -> Script:
    """Wrap `script` so that request number n (from 0) gets `plan[n]`, unless that is None."""
    rest = iter(plan)

    def reply(request: dict[str, Any]) -> ScriptedReply | Awaitable[ScriptedReply]:
        step = next(rest, None)
        if isinstance(step, ReplyFault):
            return ScriptedReply(text="a reply that fails on its way", fault=step)
        return script(request) if step is None else step

    return reply


def make_turns(count: int, size: int, seed: int = 0, command: str | None = None) -> RawScript:
    """Return a conversation of `count` turns: each has `turn k of n` and `size` bytes of seeded text.

    With `command`, every turn but the last one calls the tool `bash` with it.
    """
    letters = string.ascii_letters + string.digits + "     \n"
    noise = "".join(random.Random(seed).choices(letters, k=size + 64 * count))

    def reply(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        last = body.rfind(b'"turn ')  # searched from the end, so that a long history costs nothing
        turn = min(int(body[last + 6 : last + 16].split()[0]) + 1, count) if last >= 0 else 1
        text = f"turn {turn} of {count}\n" + noise[64 * turn : 64 * turn + size]
        calls = [{"name": "bash", "arguments": {"command": command}}] if command and turn < count else []
        return ScriptedReply(text=text, tool_calls=calls)

    return reply


async def _handle(script: RawScript, request: web.BaseRequest, served: list[Dialect]) -> web.StreamResponse:
    path = request.path
    if request.method == "GET" and path.endswith("/models"):
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
    found = _find_dialect(path, served)
    if found is None:
        return _make_error(WIRES["chat"], 404, f"no such path: `{path}`", {})
    dialect, match = found
    body = b"".join([part async for part in request.content.iter_any()])
    if match.counts:
        return web.json_response({dialect.count_key: 1 + len(body) // CHARS_PER_TOKEN})
    answer = script(cast(Mapping[str, str], request.headers), body)
    reply = await answer if isinstance(answer, Awaitable) else answer
    return await _send_reply(request, reply, dialect, body)


def _find_dialect(path: str, served: list[Dialect]) -> tuple[Dialect, PathMatch] | None:
    for dialect in served:
        if (match := dialect.match_path(path)) is not None:
            return dialect, match
    return None


async def _send_reply(
    request: web.BaseRequest, reply: ScriptedReply, dialect: Dialect, body: bytes
) -> web.StreamResponse:
    wire = WIRES.get(dialect.name) or ConvertedWire(dialect)
    if reply.delay:
        await asyncio.sleep(reply.delay)
    if reply.fault is ReplyFault.STALL:
        await asyncio.Event().wait()
    if reply.fault is ReplyFault.RESET:
        _abort(request)
        return web.Response()
    if reply.body is not None:
        return web.Response(status=reply.status, headers=reply.headers, body=reply.body)
    if reply.status != 200:
        return _make_error(wire, reply.status, reply.text or f"scripted status {reply.status}", reply.headers)
    asked = ScriptedRequest.of(body)
    if dialect.model_in_path:
        path = request.path.lstrip("/")
        asked.model = dialect.read_context(body, path).model
        asked.stream = dialect.read_format({}, RequestTarget(path)) is not ReplyFormat.WHOLE
    return await (_send_stream if asked.stream else _send_whole)(request, reply, asked, wire)


def _make_error(wire: DialectWire, status: int, message: str, headers: Mapping[str, str]) -> web.Response:
    body = msgspec.json.encode(wire.render_error(status, message))
    return web.Response(status=status, headers=headers, body=body, content_type="application/json")


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _send_whole(
    request: web.BaseRequest, reply: ScriptedReply, asked: ScriptedRequest, wire: DialectWire
) -> web.StreamResponse:
    body = msgspec.json.encode(wire.render_reply(reply, asked))
    headers = {"Content-Type": "application/json", **reply.headers}
    if reply.fault is None:
        return web.Response(headers=headers, body=body)
    if reply.fault is ReplyFault.GARBAGE:
        return web.Response(headers=headers, body=b"<html>not JSON</html>")
    if reply.fault is ReplyFault.ERROR:
        return web.Response(headers=headers, body=msgspec.json.encode(wire.render_error(500, FAILED)))
    if reply.fault is ReplyFault.SHORT:
        return web.Response(headers=headers, body=body[: len(body) // 2])
    response = web.StreamResponse(headers={**headers, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    return await _fail_midway(request, response, reply)


async def _fail_midway(
    request: web.BaseRequest, response: web.StreamResponse, reply: ScriptedReply
) -> web.StreamResponse:
    if reply.fault is ReplyFault.HANG:
        await asyncio.Event().wait()
    _abort(request)
    return response


async def _send_stream(
    request: web.BaseRequest, reply: ScriptedReply, asked: ScriptedRequest, wire: DialectWire
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **reply.headers})
    await response.prepare(request)
    events = list(wire.render_events(reply, asked))
    if reply.fault is None:
        await response.write(b"".join(events))
        return response
    if reply.fault is ReplyFault.GARBAGE:
        await response.write(b"data: {not JSON\n\n")
        return response
    await response.write(b"".join(events[: len(events) // 2]))
    if reply.fault is ReplyFault.SHORT:
        return response
    if reply.fault is ReplyFault.ERROR:
        await response.write(wire.render_failure())
        return response
    return await _fail_midway(request, response, reply)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="holdwater.testing.scripted_model", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free port")
    parser.add_argument("--bytes", type=int, default=1000, help="bytes of text in each reply")
    parser.add_argument("--turns", type=int, default=45, help="turns of a conversation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", help="command for the tool `bash`, called in every turn but the last")
    options = parser.parse_args(arguments)
    script = make_turns(options.turns, options.bytes, options.seed, options.command)
    uvloop.run(_serve_until_signal(script, options.port))


async def _serve_until_signal(script: RawScript, port: int) -> None:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with serve_raw(script, port) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await told.wait()


if __name__ == "__main__":
    main()
