"""Whatever a client or an upstream sends, the gateway answers, records what happened, and goes on."""

import asyncio
import json
import random

import aiohttp
import pytest
from tests.dialect_requests import DIALECTS, root, send, speak, text_of
from tests.gateway_harness import scene

from holdwater.testing.reply_formats import WIRES, ScriptedRequest
from holdwater.testing.scripted_model import ScriptedReply, serve_raw, serve_script

SPOKEN = pytest.mark.parametrize("dialect", DIALECTS)
PIECES = [
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"1e999", b"-", b"\xff", b"\\ud800", b"\x00", b"\n"),
    *(b'"messages":[', b'"input":', b'"contents":[', b'"model":', b'"stream":true', b'"tools":[{}]', b"{}"),
    *(
        b'{"role":"user","content":"hi"}',
        b'"cache_control":{"type":"ephemeral"}',
        b'"stream_options":7',
        b"[" * 3000,
    ),
]


def fine(request):
    return ScriptedReply(text="fine")


def garbled(rng, body):
    """A body with a few pieces put in, left out or doubled."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(body) + 1), rng.choice([0, 0, 1, 5])
        body = body[:at] + rng.choice(PIECES) + body[at + length :]
    return body


@SPOKEN
async def test_any_body_is_answered_and_the_next_call_works(dialect):
    rng = random.Random(5)
    statuses = set()
    async with serve_script(fine) as upstream, scene(upstream) as s:
        for n in range(120):
            request = speak(dialect, "hi", "yes", stream=n % 2 == 0)
            async with send(s, request._replace(body=garbled(rng, request.body))) as response:
                statuses.add(response.status)
                await response.read()
        recorded = len(s.log.exchanges)
        async with send(s, speak(dialect, "still here")) as response:
            assert response.status == 200
        assert text_of(dialect, s.log.reply) == "fine"
        assert len(s.log.exchanges) == recorded + 1
        s.log.requests()  # all of them can be read back
    # 500 is what the scripted upstream makes of requests that it cannot read
    assert {200, 400} <= statuses <= {200, 400, 500}


@SPOKEN
async def test_any_upstream_answer_is_recorded_once_and_the_next_call_works(dialect):
    rng = random.Random(6)
    asked = ScriptedRequest(model="m", stream=True, size=40)
    reply = ScriptedReply(
        text="some words", reasoning="hm", tool_calls=[{"name": "f", "arguments": {"a": 1}}]
    )
    events = b"".join(WIRES[dialect].render_events(reply, asked))
    whole = json.dumps(WIRES[dialect].render_reply(reply, asked)).encode()
    kinds = ["text/event-stream", "application/json", "Text/Event-Stream; x", "text/html"]

    def script(headers, body):
        kind = rng.choice(kinds)
        body = garbled(rng, events if rng.random() < 0.7 else whole)
        return ScriptedReply(
            body=body, headers={"Content-Type": kind}, status=rng.choice([200, 200, 200, 400, 201])
        )

    async with serve_raw(script) as upstream, scene(upstream, retries=0) as s:
        for n in range(120):
            try:
                async with send(s, speak(dialect, f"hi {n}", stream=True)) as response:
                    assert response.status != 500
                    await response.read()
            except aiohttp.ClientError:
                pass  # cut
            assert len(s.log.exchanges) == n + 1
        assert s.log.last.usage.requests == 1


async def test_odd_requests_get_a_status_and_never_a_traceback():
    """Paths, methods and header values that no client library sends."""
    async with serve_script(fine) as upstream, scene(upstream) as s:
        body = speak("chat", "hi").body
        key = s.session.key.encode()

        async def raw(head):
            reader, writer = await asyncio.open_unix_connection(s.gateway.socket)
            writer.write(
                head + b"\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            answer = await reader.read()
            writer.close()
            return int(answer.split(b" ", 2)[1])

        odd = b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer %s\r\nX-Odd: caf\xe9 \xff" % key
        assert await raw(odd) == 200
        assert await raw(b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer \xff\xfe") == 401
        assert await raw(b"POST /k/%s/v1/chat/completions?key=%%ff&x=%%00 HTTP/1.1" % key) == 200
        assert await raw(b"POST /k/%s/v1beta/models/a%%20b%%0d%%0aX:generateContent HTTP/1.1" % key) in (
            200,
            400,
        )
        assert await raw(b"POST /k/%s/v1beta/models/:generateContent HTTP/1.1" % key) == 404
        assert await raw(b"PUT /k/%s/v1/messages HTTP/1.1" % key) == 404
        assert await raw(b"POST /k/%s HTTP/1.1" % key) == 404
        assert await raw(b"POST /k//v1/messages HTTP/1.1") == 401
        assert await raw(b"GET /%s HTTP/1.1" % (b"x" * 50_000)) == 401
        async with s.http.request("OPTIONS", root(s) + "/v1/responses") as response:
            assert response.status == 401
