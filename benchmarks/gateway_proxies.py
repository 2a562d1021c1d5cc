"""The proxies between client and upstream, each in its own process that ends when its stdin closes.

    python gateway_proxies.py bare PORT | ours PORT SESSIONS DIRECTORY | translating PORT SESSIONS DIRECTORY

`bare` forwards with aiohttp and records nothing; `ours` is the gateway as a worker runs it, `translating` the
same before a server of Chat Completions alone. Each prints one JSON line: its port and its valid keys.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from yarl import URL

from holdwater.dialect import CHAT
from holdwater.gateway.server import Gateway
from holdwater.gateway.upstreams.http import HttpUpstream
from holdwater.gateway.upstreams.translation import TranslatedUpstream, TranslationTerms
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog

LARGEST = 256 * 1024 * 1024  # bytes of a body
_CONNECTION = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "date"}
)


class Listening(msgspec.Struct):
    """The line that a proxy prints when it is ready."""

    port: int
    keys: list[str]


async def bare(port: int) -> None:
    """Run a minimal aiohttp proxy: the reference of the ratios."""
    base = URL(f"http://127.0.0.1:{port}")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as client:

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = _passed(request.headers)
            async with client.post(base.join(request.rel_url), data=body, headers=headers) as answer:
                if answer.content_type != "text/event-stream":
                    content = await answer.read()
                    return web.Response(status=answer.status, headers=_passed(answer.headers), body=content)
                response = web.StreamResponse(status=answer.status, headers=_passed(answer.headers))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=LARGEST)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        await _until_stdin_ends(Listening(runner.addresses[0][1], ["sk-any"]))
        await runner.cleanup()


async def ours(port: int, count: int, place: Path, *, translating: bool) -> None:
    """Run the gateway with `count` sessions, each with its own log on disk."""
    directory = RunDirectory(place)
    terms = TranslationTerms(lambda attempt, delta: [], lambda attempt: [], lambda kind, message: None)
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(
            HttpUpstream(f"http://127.0.0.1:{port}/v1", "sk-upstream-secret")
        )
        server = TranslatedUpstream(up, CHAT, terms) if translating else up
        gateway = await stack.enter_async_context(Gateway(server, place / "socket"))
        keys = []
        for attempt in range(1, count + 1):
            log = AttemptLog(directory, attempt)
            stack.callback(log.close)
            keys.append((await stack.enter_async_context(gateway.open_session(attempt, log))).key)
        await _until_stdin_ends(Listening(URL(gateway.url).port or 0, keys))


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _CONNECTION}


async def _until_stdin_ends(listening: Listening) -> None:
    print(msgspec.json.encode(listening).decode(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    kind, port, *rest = sys.argv[1:]
    if kind == "bare":
        uvloop.run(bare(int(port)))
    else:
        uvloop.run(ours(int(port), int(rest[0]), Path(rest[1]), translating=kind == "translating"))
