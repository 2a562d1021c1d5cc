"""Every dialect, plain and streaming: passed on faithfully, recorded once, each key on its own side."""

import asyncio
import gzip
import json
import zlib
from datetime import UTC, datetime
from email.utils import format_datetime

import aiohttp
import brotli
import pytest
import zstandard
from tests.dialect_requests import DIALECTS, message_of, root, send, speak, text_of
from tests.gateway_harness import MODEL, UPSTREAM_KEY, Log, scene

from holdwater.gateway.upstreams.http_endpoint import ProviderAddress
from holdwater.testing.reply_formats import WIRES, ScriptedRequest
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, apply_plan, serve_raw, serve_script

CALL = {"name": "bash", "arguments": {"command": "ls -l", "n": 1.5}, "id": "call_x"}
ANSWER = ScriptedReply(
    text="here you are, in many words", reasoning="let me see", tool_calls=[CALL], cached=20
)
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
SPOKEN = pytest.mark.parametrize("dialect", DIALECTS)


class Seen:
    """A raw script that notes what reached the upstream."""

    def __init__(self, reply=ANSWER):
        self.bodies, self.headers, self._reply = [], [], reply

    def __call__(self, headers, body):
        self.headers.append(headers)
        self.bodies.append(body)
        return self._reply


def fine(request):
    return ScriptedReply(text="a fine reply, long enough to be cut")


def timeless(reply):
    return {k: v for k, v in reply.items() if k not in ("created", "created_at")}


@SPOKEN
@WAYS
async def test_a_call_is_answered_and_recorded_whole(dialect, stream):
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        async with send(s, speak(dialect, "hi", stream=stream)) as response:
            assert response.status == 200
            answer = await response.read()
        exchange = s.log.last
        assert (exchange.dialect, exchange.streamed, exchange.status, exchange.error) == (
            dialect,
            stream,
            200,
            "",
        )
        # the record has the reply as the upstream would have given it in one piece
        asked = ScriptedRequest(model=MODEL, size=len(seen.bodies[0]))
        assert timeless(s.log.reply) == timeless(
            json.loads(json.dumps(WIRES[dialect].render_reply(ANSWER, asked)))
        )
        if not stream:
            assert bytes(exchange.reply) == answer
        tokens, said = asked.tokens(ANSWER)
        usage = s.session.usage
        assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (tokens, 20, said)
        [recorded] = s.log.requests()
        sent = json.loads(seen.bodies[0])
        assert recorded == ({"model": MODEL, **sent} if dialect == "gemini" else sent)


OWN_HEADERS = {
    "messages": {"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"},
    "gemini": {"x-goog-api-client": "google-genai-sdk/1"},
}


@SPOKEN
@WAYS
async def test_bytes_and_headers_pass_as_they_are_both_ways(dialect, stream):
    body = speak(dialect, "hi", stream=stream).body[:-1] + b', "x-new" : [1e3, "\\u00fc"] }'
    asked = ScriptedRequest(model=MODEL, stream=stream, size=9)
    wire = WIRES[dialect]
    reply = (
        b"".join(wire.render_events(ANSWER, asked))
        if stream
        else b" " + json.dumps(wire.render_reply(ANSWER, asked)).encode()
    )
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    seen = Seen(ScriptedReply(body=reply, headers={"Content-Type": kind, "X-Rate": "9", "request-id": "r1"}))
    request = speak(dialect, stream=stream)._replace(body=body)
    told = {"x-stainless-lang": "python", **OWN_HEADERS.get(dialect, {"OpenAI-Beta": "b=1"})}
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        async with send(s, request, **told) as response:
            assert await response.read() == reply
            assert (response.headers["X-Rate"], response.headers["request-id"]) == ("9", "r1")
            assert response.headers["Content-Type"] == kind
        assert seen.bodies == [body]
        assert told.items() <= dict(seen.headers[0]).items()


@SPOKEN
@pytest.mark.parametrize("place", ["bearer", "x-api-key", "x-goog-api-key", "query", "path"])
async def test_a_key_is_found_in_any_place_and_replaced_by_the_upstreams(dialect, place):
    seen, reached = Seen(), []

    async def handle(headers, body):
        return seen(headers, body)

    async with serve_raw(handle) as upstream, scene(upstream) as s:
        key, path = s.session.key, speak(dialect, "hi").path
        headers = {"bearer": {"Authorization": f"Bearer {key}"}, "x-api-key": {"x-api-key": key}}
        headers |= {"x-goog-api-key": {"x-goog-api-key": key}, "path": {"Authorization": "Bearer dummy"}}
        if place == "query":
            path += ("&" if "?" in path else "?") + f"key={key}&x=1"
        if place == "path":
            path = f"/k/{key}{path}"
        request = speak(dialect, "hi")
        call = s.http.post(root(s) + path, data=request.body, headers=headers.get(place, {}))
        async with call as response:
            assert response.status == 200, await response.text()
            reached.append(str(response.headers))
        own = {"messages": "x-api-key", "gemini": "x-goog-api-key"}.get(dialect, "Authorization")
        assert seen.headers[0][own] == (f"Bearer {UPSTREAM_KEY}" if own == "Authorization" else UPSTREAM_KEY)
        assert str(seen.headers).count(UPSTREAM_KEY) == 1
        assert key not in str(seen.headers)
        assert UPSTREAM_KEY not in reached[0] + str(s.log.exchanges)


@SPOKEN
async def test_the_query_goes_up_without_the_key(dialect):
    paths = []

    async def handle(request):
        paths.append(request.path_qs)
        return aiohttp.web.json_response({})

    server = aiohttp.web.Server(handle)
    runner = aiohttp.web.ServerRunner(server)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    request = speak(dialect, "hi")
    path, _, query = request.path.partition("?")
    try:
        for url in (f"{base}/proxy/v1", f"{base}/proxy/v1/"):
            async with scene(url) as s:
                request = request._replace(
                    path=f"{path}?{query}&api-version=1&key={s.session.key}&alt={s.session.key}"
                )
                async with send(s, request) as response:
                    await response.read()
    finally:
        await runner.cleanup()
    query = f"{query}&api-version=1" if query else "api-version=1"
    assert paths == [f"/proxy{path}?{query}"] * 2


@SPOKEN
async def test_errors_of_the_gateway_have_the_dialects_shape_and_stop_clients(dialect):
    shapes = {
        "chat": {"message", "type", "param", "code"},
        "responses": {"message", "type", "param", "code"},
        "messages": {"type", "message"},
        "gemini": {"code", "message", "status"},
    }
    async with serve_script(fine) as upstream, scene(upstream) as s:
        request = speak(dialect, "hi")
        garbage = request._replace(body=b"{no")
        for wrong, key, status in ((request, "sk-wrong", 401), (garbage, s.session.key, 400)):
            async with send(s, wrong, key=key) as response:
                error = await response.json()
            assert (response.status, response.headers["x-should-retry"]) == (status, "false")
            assert error["error"].keys() == shapes[dialect]
            assert error.get("type") == ("error" if dialect == "messages" else None)
        assert s.log.exchanges == []


@SPOKEN
@WAYS
async def test_an_upstream_of_another_dialect_is_reported_at_once(dialect, stream):
    other = {name: ProviderAddress("http://127.0.0.1:9/v1") for name in DIALECTS if name != dialect}
    async with scene(other) as s:
        async with send(s, speak(dialect, "hi", stream=stream)) as response:
            message = message_of(await response.json())
        assert (response.status, response.headers["x-should-retry"]) == (400, "false")
        assert f"does not support the agent's dialect `{dialect}`" in message
        assert (s.session.failure.where, s.session.failure.kind, s.session.failure.again) == (
            "run",
            "dialect",
            False,
        )
        assert s.log.exchanges == []


async def test_each_dialect_has_an_address_and_a_key_of_its_own():
    seen = {name: Seen() for name in DIALECTS}
    async with (
        serve_raw(seen["chat"]) as openai,
        serve_raw(seen["messages"]) as anthropic,
        serve_raw(seen["gemini"]) as google,
    ):
        addresses = {
            "chat": ProviderAddress(openai, "key-o"),
            "messages": ProviderAddress(anthropic.removesuffix("/v1"), "key-a", bearer=True),
            "gemini": ProviderAddress(google.removesuffix("/v1") + "/", "key-g"),
        }
        async with scene(addresses) as s:
            for name in addresses:
                async with send(s, speak(name, "hi")) as response:
                    assert response.status == 200
    assert seen["chat"].headers[0]["Authorization"] == "Bearer key-o"
    assert seen["messages"].headers[0]["Authorization"] == "Bearer key-a"
    assert seen["gemini"].headers[0]["x-goog-api-key"] == "key-g"


@SPOKEN
@WAYS
async def test_the_imposed_model_is_what_upstream_and_record_see(dialect, stream):
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream, model="imposed") as s:
        for texts in (["hi"], ["hi", "hello", "and now?"]):
            async with send(s, speak(dialect, *texts, stream=stream)) as response:
                assert response.status == 200
                await response.read()
        reply = s.log.reply
        assert (reply.get("model") or reply["modelVersion"]) == "imposed"
        assert [request["model"] for request in s.log.requests()] == ["imposed", "imposed"]
        assert (s.log.last.keep, len(s.log.last.append), s.log.last.head) == (1, 2, None)


@SPOKEN
async def test_constants_are_in_the_record_once_for_all_conversations(dialect):
    tools = [{"name": f"tool-{i}", "description": "what it does " * 40} for i in range(40)]
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        for i in range(5):
            async with send(s, speak(dialect, f"a new conversation {i}", tools=tools, seed=i)) as response:
                await response.read()
        sent = [json.loads(body) for body in seen.bodies]
        recorded = [{k: v for k, v in r.items() if k != "model"} for r in s.log.requests()]
        assert recorded == [{k: v for k, v in r.items() if k != "model"} for r in sent]
        assert len(s.log.blobs) == 1
        assert sum(len(bytes(e.head)) for e in s.log.exchanges) < 2000


@SPOKEN
@WAYS
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (ScriptedReply(status=429, headers={"Retry-After": "0"}, text="slow down"), "429"),
        (ScriptedReply(status=500, headers={"retry-after": "0"}, text="oh no"), "5xx"),
        (ScriptedReply(status=400, text="bad temperature"), "invalid"),
        (ReplyFault.RESET, "unreachable"),
        (ReplyFault.STALL, "stall"),
        (ReplyFault.CUT, "cut"),
        (ReplyFault.HANG, "stall"),
        (ReplyFault.SHORT, "cut"),
        (ReplyFault.ERROR, "error"),
        (ReplyFault.GARBAGE, "garbage"),
    ],
    ids=lambda value: str(getattr(value, "value", getattr(value, "status", value))),
)
async def test_a_fault_of_the_upstream_is_reported_and_recorded_once(dialect, stream, fault, kind):
    if kind == "garbage" and stream:
        kind = "error"
    if fault is ReplyFault.SHORT and not stream:
        kind = "garbage"
    async with (
        serve_script(apply_plan([fault] * 3, fine)) as upstream,
        scene(upstream, retries=1, stall=0.3) as s,
    ):
        try:
            async with send(s, speak(dialect, "hi", stream=stream)) as response:
                status, text = response.status, await response.text()
        except aiohttp.ClientError:
            status, text = 0, None
        failure = s.session.failure
        assert (failure.where, failure.kind) == ("model", kind)
        assert len(s.log.exchanges) == 1
        assert (s.log.last.error, s.log.last.dialect) == (failure.message, dialect)
        if isinstance(fault, ScriptedReply):
            assert (status, fault.text in text, fault.text in failure.message) == (fault.status, True, True)
        elif stream and kind in ("cut", "stall") and fault is not ReplyFault.STALL:
            assert text is None, "cut, not ended as if it were whole"
            assert text_of(dialect, s.log.reply).startswith("a reply")
        elif kind in ("cut", "stall", "unreachable"):
            assert (status, bool(message_of(json.loads(text)))) == (504 if kind == "stall" else 502, True)
        else:
            assert status == 200


@SPOKEN
@WAYS
async def test_what_passes_is_tried_again_before_the_first_byte(dialect, stream):
    date = format_datetime(datetime.now(UTC), usegmt=True)
    limits = [
        ScriptedReply(status=429, headers={"Retry-After": "0"}),
        ScriptedReply(status=429, headers={"retry-after": date}),
    ]
    faults = [*limits, ScriptedReply(status=529, headers={"retry-after": "0"}), ReplyFault.RESET]
    async with serve_script(apply_plan(faults, fine)) as upstream, scene(upstream) as s:
        async with send(s, speak(dialect, "hi", stream=stream)) as response:
            assert response.status == 200
            await response.read()
        assert text_of(dialect, s.log.reply) == fine({}).text
        assert (len(s.log.exchanges), s.log.last.error, s.session.failure) == (1, "", None)


@SPOKEN
@WAYS
async def test_a_client_that_hangs_up_at_once_cancels_the_call_upstream(dialect, stream):
    reached, cancelled, recorded = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def held(request):
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    log = Log(before=lambda exchange: recorded.set())
    async with serve_script(held) as upstream, scene(upstream, log=log) as s:

        async def call():
            async with send(s, speak(dialect, "hi", stream=stream)) as response:
                await response.read()

        async with asyncio.TaskGroup() as group:
            client = group.create_task(call())
            await reached.wait()
            client.cancel()
        await cancelled.wait()
        await recorded.wait()
        assert (log.last.error, log.last.status, log.last.reply) == ("client went away", 499, None)


@SPOKEN
async def test_a_client_that_hangs_up_during_a_stream_leaves_a_partial_record(dialect):
    recorded = asyncio.Event()
    log = Log(before=lambda exchange: recorded.set())
    script = apply_plan([ScriptedReply(text="many words " * 9, fault=ReplyFault.HANG)], fine)
    async with serve_script(script) as upstream, scene(upstream, log=log) as s:
        async with send(s, speak(dialect, "hi", stream=True)) as response:
            await response.content.readany()
            response.close()
        await recorded.wait()
        assert (log.last.error, log.last.streamed) == ("client went away", True)
        assert text_of(dialect, log.reply).startswith("many words")


@SPOKEN
async def test_a_client_that_hangs_up_right_after_the_terminal_event_has_succeeded(dialect):
    """The upstream never ends its answer; the client goes when it has what ends a reply for it."""
    asked = ScriptedRequest(model=MODEL, stream=True, size=9)
    events = list(WIRES[dialect].render_events(ANSWER, asked))
    ended = asyncio.Event()

    async def handle(request):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(events))
        if dialect == "gemini":  # has no end mark but the end
            return response
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    runner = aiohttp.web.ServerRunner(
        aiohttp.web.Server(handle, handler_cancellation=True), shutdown_timeout=0.1
    )
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as s:
            async with send(s, speak(dialect, "hi", stream=True)) as response:
                received = b""
                while events[-1] not in received:
                    received += await response.content.readany()
                response.close()
            if dialect != "gemini":
                await ended.wait()
            assert (len(s.log.exchanges), s.log.last.status, s.log.last.error) == (1, 200, "")
            assert s.session.failure is None
    finally:
        await runner.cleanup()


async def test_an_attempt_that_closes_leaves_no_call_hanging_in_any_dialect():
    calls = 50
    arrived = asyncio.Semaphore(0)

    async def held(request):
        arrived.release()
        await asyncio.Event().wait()

    log = Log()
    async with serve_script(held) as upstream, scene(upstream) as s:

        async def call(key, dialect, stream):
            async with send(s, speak(dialect, "hi", stream=stream), key=key) as response:
                return response.status, response.headers["x-should-retry"], message_of(await response.json())

        async with asyncio.TaskGroup() as group, s.gateway.open_session(2, log) as session:
            ways = [(dialect, stream) for dialect in DIALECTS for stream in (False, True)]
            tasks = [group.create_task(call(session.key, *ways[i % 8])) for i in range(calls)]
            for _ in range(calls):
                await arrived.acquire()
        assert {task.result() for task in tasks} == {(400, "false", "the attempt is over")}
        assert len(log.exchanges) == calls
        assert {exchange.error for exchange in log.exchanges} == {"the attempt ended"}


@SPOKEN
async def test_a_silent_stream_is_kept_alive_after_its_start_and_not_before(dialect):
    go, said = asyncio.Event(), []
    sign = b"event: ping\n" if dialect == "messages" else b": keep-alive\n\n"
    events = list(WIRES[dialect].render_events(fine({}), ScriptedRequest(stream=True, size=9)))

    async def handle(request):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0.15)  # longer than the pulse: nothing may be sent
        await response.write(b"".join(events[:3]))
        await go.wait()
        await response.write(b"".join(events[3:]))
        return response

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", keep_alive=0.05) as s:
            async with send(s, speak(dialect, "hi", stream=True)) as response:
                async for piece in response.content.iter_any():
                    said.append(piece)
                    if b"".join(said[1:]).count(sign) >= 2:
                        go.set()
            whole = b"".join(said)
            assert whole.startswith(events[0]), "a sign of life is no start"
            assert s.log.last.error == ""
            alive = b'event: ping\ndata: {"type": "ping"}\n\n' if dialect == "messages" else sign
            assert whole.replace(alive, b"") == b"".join(events)
    finally:
        await runner.cleanup()


ENCODINGS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_compressed_body_is_read(encoding, chunked):
    seen = Seen()
    request = speak("messages", "hi" * 1_000_000)
    async with serve_raw(seen) as upstream, scene(upstream) as s:
        packed = ENCODINGS[encoding](request.body)
        pieces = [packed[at : at + 100] for at in range(0, len(packed), 100)]

        async def slowly():
            for piece in pieces:
                yield piece

        body = slowly() if chunked else packed
        async with send(s, request._replace(body=body), **{"Content-Encoding": encoding}) as response:
            assert response.status == 200, await response.text()
        assert seen.bodies == [request.body]
        assert "Content-Encoding" not in seen.headers[0]


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_compressed_body_meets_the_cap_and_a_cut_one_is_refused(encoding):
    bomb = ENCODINGS[encoding](speak("chat", " " * 30_000_000).body)
    small = ENCODINGS[encoding](speak("chat", "".join(map(str, range(2000)))).body)
    async with serve_script(fine) as upstream, scene(upstream, body_cap=2_000_000) as s:
        for body, status in (
            (bomb, 413),
            (small[: len(small) // 2], 400),
            (b"no such thing", 400),
            (small, 200),
        ):
            request = speak("chat")._replace(body=body)
            async with send(s, request, **{"Content-Encoding": encoding}) as response:
                assert response.status == status, await response.text()
        assert len(s.log.exchanges) == 1


MODELS = [
    ("/v1/models", {}, lambda r: [m["id"] for m in r["data"]]),
    (
        "/v1/models",
        {"anthropic-version": "2023-06-01"},
        lambda r: [m["id"] for m in r["data"] if m["type"] == "model"],
    ),
    ("/v1beta/models", {}, lambda r: [m["name"].removeprefix("models/") for m in r["models"]]),
    (f"/v1/models/{MODEL}", {}, lambda r: [r["id"]]),
    (f"/v1beta/models/{MODEL}", {}, lambda r: [r["name"].removeprefix("models/")]),
]


async def test_side_calls_are_answered_and_never_recorded():
    seen = Seen()
    async with serve_raw(seen) as upstream, scene(upstream, model=MODEL) as s:
        async with s.http.head(root(s) + "/") as response:
            assert response.status == 200
        for path, headers, ids in MODELS:
            headers = {"Authorization": f"Bearer {s.session.key}", **headers}
            async with s.http.get(root(s) + path, headers=headers) as response:
                assert (response.status, ids(await response.json())) == (200, [MODEL])
            async with s.http.get(root(s) + path, headers=headers, params={"key": "x"}) as response:
                assert response.status == 200
        headers = {
            "Authorization": f"Bearer {s.session.key}",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
        }
        async with s.http.get(root(s) + "/v1/responses", headers=headers) as response:
            assert (response.status, "error" in await response.json()) == (426, True)
        assert (seen.bodies, s.log.exchanges) == ([], [])


COUNTS = {"messages": "/v1/messages/count_tokens", "gemini": f"/v1beta/models/{MODEL}:countTokens"}


@pytest.mark.parametrize("dialect", COUNTS)
async def test_tokens_are_estimated_where_the_upstream_speaks_the_dialect_but_cannot_count(dialect):
    async def unknown(request):
        return aiohttp.web.json_response({"error": "no such path"}, status=404)

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(unknown))
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    request = speak(dialect, "how many tokens?")._replace(path=COUNTS[dialect])
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as s:
            async with send(s, request) as response:
                assert (response.status, list((await response.json()).values())) == (
                    200,
                    [len(request.body) // 4],
                )
            assert s.session.failure is None
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("dialect", COUNTS)
async def test_tokens_are_counted_by_an_upstream_that_can_and_estimated_otherwise(dialect):
    request = speak(dialect, "how many tokens?")._replace(path=COUNTS[dialect])
    estimate = len(request.body) // 4
    field = "totalTokens" if dialect == "gemini" else "input_tokens"
    async with serve_script(fine) as upstream:
        other = {"chat": ProviderAddress(upstream)}
        gone = {dialect: ProviderAddress("http://127.0.0.1:9")}
        # An upstream that was asked is in the record, whether it could be reached or not.
        for addresses, tokens, calls in (
            (upstream, estimate + 1, 1),
            (other, estimate, 0),
            (gone, estimate, 1),
        ):
            async with scene(addresses, retries=0) as s:
                async with send(s, request) as response:
                    assert (response.status, await response.json()) == (200, {field: tokens})
                assert (len(s.log.exchanges), s.session.usage.requests, s.session.failure) == (
                    calls,
                    calls,
                    None,
                )


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions",
        "/v1/v1/messages",
        "/messages",
        "/v1/v1beta/models/m:generateContent",
        "/models/m:generateContent",
        "/responses",
    ],
)
async def test_a_base_url_with_an_extra_or_missing_version_still_works(path):
    dialect = next(
        d for d, word in zip(DIALECTS, ("chat", "resp", "mess", "gen"), strict=True) if word in path
    )
    async with serve_script(fine) as upstream, scene(upstream) as s:
        async with send(s, speak(dialect, "hi")._replace(path=path)) as response:
            assert response.status == 200
        assert s.log.last.dialect == dialect
