"""Calls that go well: passed on faithfully, recorded before they end, each key on its own side."""

import asyncio
import base64
import gzip
import io
import json
import random
import stat

import aiohttp
import pytest
from tests.gateway_harness import MODEL, UPSTREAM_KEY, Log, ask, scene

from holdwater.core.errors import BadInput, ModelFailed
from holdwater.gateway.server import Gateway
from holdwater.testing.scripted_model import ScriptedReply, serve_raw, serve_script

CALL = {"name": "bash", "arguments": {"command": "ls"}}


def hello(request):
    return ScriptedReply(text="hello", tool_calls=[CALL])


class Seen:
    """A raw script that notes what reached the upstream."""

    def __init__(self, reply=ScriptedReply(text="hello")):  # noqa: B008 (a frozen record)
        self.bodies, self.headers, self._reply = [], [], reply

    def __call__(self, headers, body):
        self.headers.append(headers)
        self.bodies.append(body)
        return self._reply


async def test_a_plain_call_is_answered_and_recorded():
    async with serve_script(hello) as upstream, scene(upstream) as s:
        reply = await s.client.chat([{"role": "user", "content": "hi"}], temperature=0.5)
        message = reply["choices"][0]["message"]
        assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("hello", "bash")
        assert s.log.requests() == [ask("hi", temperature=0.5)]
        assert s.log.reply == reply
        assert (s.log.last.status, s.log.last.error, s.log.last.streamed) == (200, "", False)
        assert s.session.usage == s.log.last.usage
        assert s.session.usage.output_tokens == reply["usage"]["completion_tokens"] > 0
        assert (s.session.exchanges, s.session.failure) == (1, None)


async def test_unknown_fields_pass_both_ways_byte_for_byte():
    request = b'{ "x-new" : [1e3, "\\u00fc"],"messages":[ {"role":"user" ,"content":"hi"}], "n":1.50 }'
    reply = b'{"choices": [], "x-other": 1.250, "usage": {"prompt_tokens": 3, "details": null}}\n'
    seen = Seen(ScriptedReply(body=reply, headers={"Content-Type": "application/json", "X-Ratelimit": "9"}))
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        async with s.post(request, headers={"X-Request-Id": "kept", "OpenAI-Beta": "b=1"}) as response:
            assert await response.read() == reply
            assert response.headers["X-Ratelimit"] == "9"
        assert seen.bodies == [request]
        assert (seen.headers[0]["X-Request-Id"], seen.headers[0]["OpenAI-Beta"]) == ("kept", "b=1")
        assert bytes(s.log.last.reply) == reply
        assert s.session.usage.input_tokens == 3


async def test_each_key_stays_on_its_side():
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        headers = {"x-api-key": s.session.key, "Cookie": "a=b", "X-Copy": f"it is {s.session.key}"}
        async with s.post(ask("hi"), headers=headers) as response:
            answer = str(response.headers) + await response.text()
        assert seen.headers[0]["Authorization"] == f"Bearer {UPSTREAM_KEY}"
        assert s.session.key not in str(seen.headers)
        assert "Cookie" not in seen.headers[0]
        assert UPSTREAM_KEY not in answer
        assert UPSTREAM_KEY not in str(s.log.exchanges)


async def test_an_upstream_that_tells_its_key_is_not_quoted():
    leak = ScriptedReply(
        status=400, text=f"bad header: Bearer {UPSTREAM_KEY}", headers={"X-Echo": UPSTREAM_KEY}
    )
    async with serve_script(lambda request: leak) as upstream, scene(upstream) as s:
        async with s.post(ask("hi")) as response:
            answer = str(response.headers) + await response.text()
        assert response.status == 400
        assert UPSTREAM_KEY not in answer + str(s.log.exchanges) + s.session.failure.message
        assert "bad header" in answer


async def test_a_key_works_for_its_attempt_while_it_lives():
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        other = Log()
        async with s.gateway.open_session(2, other) as session:
            dead = session.key
            async with s.post(ask("hi"), key=dead) as response:
                assert response.status == 200
        assert (len(other.exchanges), len(s.log.exchanges)) == (1, 0)
        for key in (dead, "wrong", "Bearer"):
            async with s.post(ask("hi"), key=key) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with s.http.post(f"{s.gateway.url}/chat/completions", json=ask("hi")) as response:
            assert response.status == 401
        assert (len(seen.bodies), len(s.log.exchanges)) == (1, 0)


async def test_side_calls_are_answered_here_and_not_recorded():
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream, model=MODEL) as s:
        root = s.gateway.url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {s.session.key}"}
        async with s.http.head(root + "/") as response:
            assert response.status == 200
        async with s.http.get(s.gateway.url + "/models", headers=headers) as response:
            assert [m["id"] for m in (await response.json())["data"]] == [MODEL]
        async with s.http.get(s.gateway.url + "/files", headers=headers) as response:
            assert (response.status, "error" in await response.json()) == (404, True)
        assert (seen.bodies, s.log.exchanges) == ([], [])


async def test_the_socket_and_the_port_reach_the_same_session(tmp_path):
    async with serve_script(hello) as upstream, scene(upstream) as s:
        assert stat.S_IMODE(s.gateway.socket.stat().st_mode) == 0o600
        headers = {"Authorization": f"Bearer {s.session.key}"}
        async with (
            aiohttp.ClientSession() as tcp,
            tcp.post(f"{s.gateway.url}/chat/completions", json=ask("hi"), headers=headers) as response,
        ):
            assert response.status == 200
        socket = s.gateway.socket
    assert not socket.exists()
    with pytest.raises(BadInput):
        Gateway(None, tmp_path / ("x" * 108))


async def test_the_imposed_model_is_what_upstream_and_record_see():
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream, model="imposed") as s:
        for texts in (["hi"], ["hi", "hello", "and now?"]):
            async with s.post(ask(*texts)) as response:
                assert response.status == 200
        sent = [json.loads(body) for body in seen.bodies]
        assert [request["model"] for request in sent] == ["imposed", "imposed"]
        assert sent[1]["messages"] == ask("hi", "hello", "and now?")["messages"]
        assert s.log.requests() == sent
        assert (s.log.last.keep, s.log.last.head) == (1, None)


async def test_usage_of_a_stream_is_requested_upstream_and_hidden_from_the_client():
    seen = Seen(
        ScriptedReply(text="hello there", tool_calls=[CALL], headers={"content-type": "text/event-stream"})
    )
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        request = ask("hi", stream=True, stream_options={"x": 1})
        async with s.post(request) as response:
            events = await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert events.endswith("data: [DONE]\n\n")
        assert '"choices":[]' not in events
        assert json.loads(seen.bodies[0])["stream_options"] == {"x": 1, "include_usage": True}
        assert s.log.requests() == [json.loads(seen.bodies[0])]
        choice = s.log.reply["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hello there", "tool_calls")
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == CALL["arguments"]
        assert s.log.last.streamed
        assert s.session.usage.output_tokens > 0


async def test_a_stream_of_a_client_that_asked_for_usage_is_untouched():
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        request = json.dumps(ask("hi", stream=True, stream_options={"include_usage": True})).encode()
        async with s.post(request) as response:
            assert '"choices":[]' in await response.text()
        assert seen.bodies == [request]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_exchange_is_in_the_record_before_its_end_leaves(stream):
    """The log looks at what the client has when the exchange is written: not the end of the reply."""
    received = bytearray()
    at_writing = []
    log = Log(before=lambda exchange: at_writing.append(bytes(received)))
    async with (
        serve_script(lambda r: ScriptedReply(text="words " * 20000)) as upstream,
        scene(upstream, log=log) as s,
    ):
        async with s.post(ask("hi", stream=stream)) as response:
            async for piece in response.content.iter_any():
                received += piece
        assert len(at_writing) == 1
        end = b"finish_reason" if not stream else b'"finish_reason":"stop"'
        assert end in received
        assert end not in at_writing[0]
        assert b"[DONE]" not in at_writing[0]


async def test_a_reply_that_cannot_be_recorded_is_not_delivered():
    def full(exchange):
        raise OSError("no space left on device")

    async with serve_script(hello) as upstream, scene(upstream, log=Log(before=full)) as s:
        with pytest.raises(ModelFailed, match="no space left"):
            await s.client.chat([{"role": "user", "content": "hi"}])
        assert (s.session.failure.where, s.session.failure.again) == ("run", False)
        assert s.session.exchanges == 0


def canonical(requests):
    return sorted(json.dumps(request, sort_keys=True) for request in requests)


async def by_http(s, messages, **options):
    body = json.dumps({"model": MODEL, "messages": messages, **options}).encode()
    async with s.post(io.BytesIO(body)) as response:
        return await response.json()


async def in_process(s, messages, **options):
    return await s.client.chat(messages, **options)


@pytest.mark.parametrize("chat", [by_http, in_process])
async def test_the_record_is_what_the_upstream_saw_through_branches_and_media(chat):
    rng = random.Random(3)
    images = ["data:image/png;base64," + base64.b64encode(rng.randbytes(n)).decode() for n in (5000, 400_000)]
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        history = [{"role": "system", "content": "be good"}]
        for turn in range(12):
            image = {"type": "image_url", "image_url": {"url": images[turn % 2]}}
            history = [
                *history,
                {"role": "user", "content": [{"type": "text", "text": f"turn {turn}"}, image]},
            ]
            if turn == 7:
                history = [*history[:3], {"role": "user", "content": "the story so far"}]
            reply = await chat(s, history, tools=[{"n": turn // 5}])
            history = [*history, reply["choices"][0]["message"]]
            async with asyncio.TaskGroup() as side:
                for text in ("title", "summary"):
                    side.create_task(chat(s, [{"role": "user", "content": text}]))
        assert canonical(s.log.requests()) == canonical(map(json.loads, seen.bodies))
        assert len(s.log.blobs) == 2
        stored = sum(len(message) for e in s.log.exchanges for message in map(bytes, e.append))
        assert stored < 10_000


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_compressed_body_is_read(chunked):
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        body = gzip.compress(json.dumps(ask("hi" * 100_000)).encode())
        options = {"chunked": True} if chunked else {}
        async with s.post(body, headers={"Content-Encoding": "gzip"}, **options) as response:
            assert response.status == 200
        assert json.loads(seen.bodies[0]) == ask("hi" * 100_000)
        assert "Content-Encoding" not in seen.headers[0]
