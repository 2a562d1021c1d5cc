"""An upstream that repeats its key, split or escaped: neither the agent nor the record gets it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp.web
import pytest
from tests.gateway_harness import UPSTREAM_KEY, Scene, ask, scene

CUT = UPSTREAM_KEY[:7].encode(), UPSTREAM_KEY[7:].encode()
ESCAPED = {
    "hyphen": UPSTREAM_KEY.replace("-", "\\u002d"),
    "capital": UPSTREAM_KEY.replace("-", "\\u002D"),
    "first": "\\u0073" + UPSTREAM_KEY[1:],
    "twice": UPSTREAM_KEY.replace("-", "\\\\u002d"),
}
EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n'
END = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
WHOLE = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"%s"},"finish_reason":"stop"}]}'
FAILED = b'{"error":{"message":"bad key %s","type":"invalid_request_error"}}'


@asynccontextmanager
async def echoing(pieces: list[bytes], kind: str, status: int = 200) -> AsyncIterator[str]:
    """An upstream that answers with `pieces`, each in a packet of its own."""

    async def handle(request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
        await request.read()
        response = aiohttp.web.StreamResponse(status=status, headers={"Content-Type": kind})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.05)
        return response

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def split(template: bytes) -> list[bytes]:
    """A reply that holds the key, cut inside of it."""
    before, _, after = template.partition(b"%s")
    return [before + CUT[0], CUT[1] + after]


STREAM, JSON = "text/event-stream", "application/json"
ANSWERS: dict[str, tuple[list[bytes], str, int]] = {
    "split stream": ([*split(EVENT), END], STREAM, 200),
    "split whole": (split(WHOLE), JSON, 200),
    "split error": (split(FAILED), JSON, 400),
    "error inside": (split(b"data: " + FAILED + b"\n\n"), STREAM, 200),
}
for name, form in ESCAPED.items():
    ANSWERS[f"{name} stream"] = ([EVENT % form.encode(), END], STREAM, 200)
    ANSWERS[f"{name} whole"] = ([WHOLE % form.encode()], JSON, 200)
    ANSWERS[f"{name} error"] = ([FAILED % form.encode()], JSON, 400)


def forms_of(text: str) -> str:
    """A text with all escapes undone, so that the key is found in whatever form."""
    for _ in range(3):
        for hex_digits in ("002d", "002D"):
            text = text.replace(f"\\u{hex_digits}", "-")
        text = text.replace("\\u0073", "s").replace("\\\\", "\\")
    return text


async def heard(s: Scene, stream: bool) -> str:
    async with s.post(ask("hi", stream=stream)) as response:
        return await response.text()


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_echoed_key_reaches_neither_agent_nor_record(name: str) -> None:
    pieces, kind, status = ANSWERS[name]
    async with echoing(pieces, kind, status) as upstream, scene(upstream, retries=0) as s:
        answer = await heard(s, kind == STREAM)

        record = json.dumps(
            [str(s.log.last), bytes(s.log.last.reply or b"").decode(), str(s.session.failure)]
        )
        assert UPSTREAM_KEY not in forms_of(answer) and UPSTREAM_KEY not in forms_of(record)
        assert "[key]" in answer + record


async def test_a_stream_goes_on_while_nothing_begins_a_key() -> None:
    """Each event arrives before the next one is sent: nothing is held back."""
    first, second = EVENT % b"one", EVENT % b"ends in sk-up"
    arrived = asyncio.Event()

    async def handle(request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(headers={"Content-Type": STREAM})
        await response.prepare(request)
        for piece in (first, second):
            await response.write(piece)
            await arrived.wait()
            arrived.clear()
        await response.write(END)
        return response

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as s:
            async with s.post(ask("hi", stream=True)) as response:
                said = b""
                for event in (first, second):
                    while not said.endswith(event):
                        said += await response.content.readany()
                    arrived.set()
                said += await response.content.read()
            assert said == first + second + END
    finally:
        await runner.cleanup()


async def test_a_version_that_is_the_key_is_not_recorded() -> None:
    async def handle(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        return aiohttp.web.Response(body=WHOLE % b"hi", headers={"X-Policy-Version": UPSTREAM_KEY})

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(handle))
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as s:
            await heard(s, stream=False)
            assert s.log.last.version == "[key]"
    finally:
        await runner.cleanup()
