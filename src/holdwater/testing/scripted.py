"""The scripted model: an HTTP server that speaks Chat Completions, plain and streaming, and fails on request.

It does not think: a `Script` says what to reply. As a program (`python -m holdwater.testing.scripted`) it
serves a fixed conversation for benchmarks. The gateway that agents reach it through is in `gateway/`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import string
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, cast

import msgspec
import uvloop
from aiohttp import web

CHARS_PER_TOKEN = 4
PIECES = 8  # how many chunks a streamed text has at most
LONGEST_HEADER = 64 * 1024


class Fault(StrEnum):
    """A way to fail that is more than a status."""

    RESET = "reset"  # the connection is lost before the first byte
    CUT = "cut"  # the connection is lost in the middle of the reply
    STALL = "stall"  # not a byte, until the client goes away
    HANG = "hang"  # silence from the middle of the reply on, until the client goes away
    GARBAGE = "garbage"  # a 200 whose body is no JSON
    ERROR = "error"  # an error inside a 200


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the scripted model answers. A `tool_calls` item is `{"name": ..., "arguments": {...}}`."""

    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""
    finish: str | None = None  # `tool_calls` or `stop`, by what the reply holds, where it is not given
    delay: float = 0.0  # seconds before the first byte
    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes | None = None  # sent as it is in place of all that is above
    fault: Fault | None = None


Script = Callable[[dict[str, Any]], Reply | Awaitable[Reply]]
"""Takes the decoded request; plain or async."""

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
    if request.method == "GET" and request.path.endswith("/models"):
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
    if not request.path.endswith("/chat/completions"):
        return _error(404, f"no such path: `{request.path}`", {})
    body = b"".join([part async for part in request.content.iter_any()])
    answer = script(cast(Mapping[str, str], request.headers), body)
    reply = await answer if isinstance(answer, Awaitable) else answer
    if reply.delay:
        await asyncio.sleep(reply.delay)
    if reply.fault in (Fault.STALL, Fault.RESET):
        return await _say_nothing(reply.fault, request)
    if reply.body is not None:
        return web.Response(status=reply.status, headers=reply.headers, body=reply.body)
    if reply.status != 200:
        return _error(reply.status, reply.text or f"scripted status {reply.status}", reply.headers)
    asked = _Asked.of(body)
    return await (_stream if asked.stream else _whole)(request, reply, asked)


def _error(status: int, message: str, headers: Mapping[str, str]) -> web.Response:
    error = {"error": {"message": message, "type": "scripted", "param": None, "code": None}}
    return web.Response(
        status=status, headers=headers, body=msgspec.json.encode(error), content_type="application/json"
    )


async def _say_nothing(fault: Fault, request: web.BaseRequest) -> web.Response:
    if fault is Fault.STALL:
        await asyncio.Event().wait()
    _abort(request)
    return web.Response()


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Asked(msgspec.Struct):
    """The little of a request that shapes the reply; msgspec skips the rest, messages included."""

    model: str = "scripted"
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    size: int = 0

    @classmethod
    def of(cls, body: bytes) -> _Asked:
        asked = msgspec.json.decode(body, type=cls)
        asked.size = len(body)
        return asked

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def usage(self, reply: Reply) -> dict[str, int]:
        said = len(reply.text) + len(reply.reasoning) + sum(len(str(c)) for c in reply.tool_calls)
        prompt, completion = self.size // CHARS_PER_TOKEN, -(-said // CHARS_PER_TOKEN)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


async def _whole(request: web.BaseRequest, reply: Reply, asked: _Asked) -> web.StreamResponse:
    body = _completion(reply, asked)
    headers = {"Content-Type": "application/json", **reply.headers}
    if reply.fault is None:
        return web.Response(headers=headers, body=body)
    if reply.fault is Fault.GARBAGE:
        return web.Response(headers=headers, body=b"<html>not JSON</html>")
    if reply.fault is Fault.ERROR:
        return web.Response(headers=headers, body=msgspec.json.encode(_FAILED))
    response = web.StreamResponse(headers={**headers, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    return await _fail_midway(request, response, reply)


_FAILED = {"error": {"message": "the model failed inside its reply", "type": "scripted", "code": None}}


async def _fail_midway(
    request: web.BaseRequest, response: web.StreamResponse, reply: Reply
) -> web.StreamResponse:
    if reply.fault is Fault.HANG:
        await asyncio.Event().wait()
    _abort(request)
    return response


async def _stream(request: web.BaseRequest, reply: Reply, asked: _Asked) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **reply.headers})
    await response.prepare(request)
    events = [_event(chunk) for chunk in _chunks(reply, asked)]
    if reply.fault is None:
        await response.write(b"".join((*events, b"data: [DONE]\n\n")))
        return response
    if reply.fault is Fault.GARBAGE:
        await response.write(b"data: {not JSON\n\n")
        return response
    await response.write(b"".join(events[: len(events) // 2]))
    if reply.fault is Fault.ERROR:
        await response.write(_event(_FAILED))
        return response
    return await _fail_midway(request, response, reply)


def _event(chunk: Any) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _tool_calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.get("id", f"call_{index}"),
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": msgspec.json.encode(call.get("arguments", {})).decode(),
            },
        }
        for index, call in enumerate(reply.tool_calls)
    ]


def _finish(reply: Reply) -> str:
    return reply.finish or ("tool_calls" if reply.tool_calls else "stop")


def _completion(reply: Reply, asked: _Asked) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = _tool_calls(reply)
    return msgspec.json.encode(
        {
            **_envelope("chat.completion", asked),
            "choices": [{"index": 0, "message": message, "finish_reason": _finish(reply)}],
            "usage": asked.usage(reply),
        }
    )


def _envelope(kind: str, asked: _Asked) -> dict[str, Any]:
    return {"id": f"chatcmpl-{asked.size}", "object": kind, "created": int(time.time()), "model": asked.model}


def _chunks(reply: Reply, asked: _Asked) -> Iterator[dict[str, Any]]:
    envelope = _envelope("chat.completion.chunk", asked)
    tail = {"usage": None} if asked.wants_usage else {}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **tail}

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(reply.reasoning):
        yield chunk({"reasoning_content": piece})
    for piece in _pieces(reply.text):
        yield chunk({"content": piece})
    for index, call in enumerate(_tool_calls(reply)):
        function = call["function"]
        opening = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield chunk({"tool_calls": [opening]})
        for piece in _pieces(function["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, _finish(reply))
    if asked.wants_usage:
        yield {**envelope, "choices": [], "usage": asked.usage(reply)}


def _pieces(text: str) -> Iterator[str]:
    size = -(-len(text) // PIECES) or 1
    return (text[i : i + size] for i in range(0, len(text), size))


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
