"""Calls that go wrong, on either side: the client is told, the record says what happened, nobody hangs."""

import asyncio
import gzip
import json
import socket
import tracemalloc
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import aiohttp
import pytest
from tests.gateway_harness import Log, ask, scene
from tests.wait_bounds import stretch

from holdwater.core.errors import ModelFailed
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, apply_plan, serve_script

NOW = {"retry-after": "0"}  # in lower case, as many servers write it


def fine(request):
    return ScriptedReply(text="a fine reply, long enough to be cut")


async def outcome(s, request):
    """The status and the body that a client gets; None for a body that broke off."""
    try:
        async with s.post(request) as response:
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "faults",
    [
        [ScriptedReply(status=429, headers=NOW)],
        [
            ScriptedReply(status=500, headers=NOW),
            ScriptedReply(status=502, headers=NOW),
            ScriptedReply(status=529, headers=NOW),
        ],
        [ReplyFault.RESET],
    ],
    ids=["429", "5xx", "reset"],
)
async def test_what_passes_is_tried_again_before_the_first_byte(faults, stream):
    async with serve_script(apply_plan(faults, fine)) as upstream, scene(upstream) as s:
        status, _ = await outcome(s, ask("hi", stream=stream))
        assert status == 200
        assert s.log.reply["choices"][0]["message"]["content"] == fine({}).text
        assert (len(s.log.exchanges), s.log.last.error, s.session.failure) == (1, "", None)


async def test_waiting_for_a_rate_limit_is_counted_and_both_forms_are_honoured():
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    plan = [
        ScriptedReply(status=429, headers={"Retry-After": "0.3"}),
        ScriptedReply(status=503, headers={"Retry-After": date}),
    ]
    async with serve_script(apply_plan(plan, fine)) as upstream, scene(upstream) as s:
        status, _ = await outcome(s, ask("hi"))
        assert status == 200
        assert 1.0 < s.session.waited < stretch(4.0)
        assert s.session.waited <= s.log.last.seconds


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "where", "kind"),
    [
        (
            ScriptedReply(status=429, headers={"Retry-After": "0", "X-Own": "1"}, text="slow down"),
            429,
            "model",
            "429",
        ),
        (ScriptedReply(status=503, headers=NOW), 503, "model", "5xx"),
        (ScriptedReply(status=429, headers={"Retry-After": "9999"}), 429, "model", "429"),
        (ScriptedReply(status=500, headers={"x-should-retry": "false"}), 500, "model", "5xx"),
        (ScriptedReply(status=400, text="bad temperature"), 400, "model", "invalid"),
        (ScriptedReply(status=401, text="wrong key"), 401, "run", "key"),
        (ScriptedReply(status=404, text="no such model"), 404, "run", "model"),
        (ReplyFault.STALL, 504, "model", "stall"),
        (ReplyFault.GARBAGE, 200, "model", "garbage"),
        (ReplyFault.ERROR, 200, "model", "error"),
        (ReplyFault.CUT, 0, "model", "cut"),
        (ReplyFault.HANG, 0, "model", "stall"),
    ],
    ids=lambda value: str(getattr(value, "value", getattr(value, "status", value))),
)
async def test_a_failed_call_is_reported_and_recorded_once(fault, status, where, kind, stream):
    if stream and kind == "garbage":
        kind = "error"
    if not stream and status == 0:
        status = 504 if kind == "stall" else 502  # nothing has left yet: it can be said
    plan = [fault] * 3
    async with serve_script(apply_plan(plan, fine)) as upstream, scene(upstream, retries=1, stall=0.3) as s:
        got, text = await outcome(s, ask("hi", stream=stream))
        assert got == status or (status == 0 and text is None)
        failure = s.session.failure
        assert (failure.where, failure.kind) == (where, kind)
        assert len(s.log.exchanges) == 1
        assert s.log.last.error == failure.message
        assert s.log.requests()[0]["messages"] == ask("hi")["messages"]
        if isinstance(fault, ScriptedReply) and fault.text:
            assert fault.text in text
            assert fault.text in failure.message
    assert s.log.last.usage.requests == 1


async def test_a_retry_after_that_is_too_long_is_left_to_the_run():
    plan = [ScriptedReply(status=429, headers={"Retry-After": "9999"})]
    async with serve_script(apply_plan(plan, fine)) as upstream, scene(upstream) as s:
        assert (await outcome(s, ask("hi")))[0] == 429
        assert s.session.failure.after == 9999
        assert (await outcome(s, ask("hi")))[0] == 200
        assert s.session.failure is None, "a success clears it"


async def test_an_upstream_that_is_not_there():
    async with scene("http://127.0.0.1:9/v1", retries=0) as s:
        with pytest.raises(ModelFailed, match="cannot be reached"):
            await s.client.chat([{"role": "user", "content": "hi"}])
        assert (s.session.failure.kind, s.log.last.status) == ("unreachable", 502)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_the_call_upstream(stream):
    reached, cancelled = asyncio.Event(), asyncio.Event()

    async def held(request):
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    recorded = asyncio.Event()
    log = Log(before=lambda exchange: recorded.set())
    async with serve_script(held) as upstream, scene(upstream, log=log) as s:
        async with asyncio.TaskGroup() as group:
            client = group.create_task(outcome(s, ask("hi", stream=stream)))
            await reached.wait()
            client.cancel()
        await cancelled.wait()
        await recorded.wait()
        assert (log.last.error, log.last.status, log.last.reply) == ("client went away", 499, None)


async def test_a_client_that_leaves_during_a_stream_leaves_a_partial_record():
    recorded = asyncio.Event()
    log = Log(before=lambda exchange: recorded.set())
    script = apply_plan([ScriptedReply(text="many words " * 9, fault=ReplyFault.HANG)], fine)
    async with serve_script(script) as upstream, scene(upstream, log=log) as s:
        async with s.post(ask("hi", stream=True)) as response:
            assert b"many" in await response.content.readany()
            response.close()
        await recorded.wait()
        assert log.last.error == "client went away"
        assert "many words" in log.reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("mid_stream", [False, True])
async def test_an_attempt_that_closes_leaves_none_of_its_calls_hanging(mid_stream):
    calls = 50
    arrived = asyncio.Semaphore(0)

    async def held(request):
        arrived.release()
        if not mid_stream:
            await asyncio.Event().wait()
        return ScriptedReply(text="many words " * 9, fault=ReplyFault.HANG)

    log = Log()
    async with serve_script(held) as upstream, scene(upstream) as s:
        started = asyncio.Semaphore(0)

        async def call(key, stream):
            try:
                async with s.post(ask("hi", stream=stream), key=key) as response:
                    started.release()
                    return response.status, await response.text()
            except aiohttp.ClientError:
                return 0, None

        async with asyncio.TaskGroup() as group:
            async with s.gateway.open_session(2, log) as session:
                tasks = [group.create_task(call(session.key, mid_stream or i % 2 == 1)) for i in range(calls)]
                for _ in range(calls):
                    await (started if mid_stream else arrived).acquire()
            assert session._calls == set()
        results = [task.result() for task in tasks]
        if mid_stream:
            assert all(text is None for _, text in results), "cut, not ended as if it were whole"
        else:
            assert {status for status, _ in results} == {400}
            assert {json.loads(text)["error"]["code"] for _, text in results} == {"attempt_over"}
        assert {exchange.error for exchange in log.exchanges} == {"the attempt ended"}
        assert len(log.exchanges) == calls
        assert (await call(session.key, False))[0] == 401


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{not json", {}, 400),
        (b"[]", {}, 400),
        (b'{"model": "m"}', {}, 400),
        (b'{"messages": [], "stream": "perhaps"}', {}, 400),
        (b'{"messages": ["\xff"]}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"messages": [' + b" " * 3000 + b"]}", {}, 413),
        (gzip.compress(b'{"messages": [' + b" " * 3000 + b"]}", mtime=0), {"Content-Encoding": "gzip"}, 413),
        (b"not gzip", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b'{"messages": []}', mtime=0)[:-9], {"Content-Encoding": "gzip"}, 400),
        (b"{}", {"Content-Encoding": "br"}, 400),
        (b"{}", {"Content-Encoding": "zstd"}, 400),
        (b"{}", {"Content-Encoding": "compress"}, 415),
        (b'{"messages": []}', {"X-Large": "x" * 60_000}, 200),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_an_unreadable_request_is_refused_in_the_dialect_and_leaves_no_trace(body, headers, status):
    cap = 200_000 if body.startswith(b"[[") else 2000
    async with serve_script(fine) as upstream, scene(upstream, body_cap=cap) as s:
        async with s.post(body, headers=headers) as response:
            assert response.status == status
            assert (await response.json()).keys() & {"error", "choices"}
        assert len(s.log.exchanges) == (status == 200)
        assert (await outcome(s, ask("still here")))[0] == 200


async def test_a_body_over_the_cap_is_refused_while_it_is_still_coming():
    async def endless():
        while True:
            yield b" " * 10_000

    async with serve_script(fine) as upstream, scene(upstream, body_cap=100_000) as s:
        try:
            async with s.post(endless()) as response:
                assert response.status == 413
        except aiohttp.ClientError:
            pass  # or the connection is closed under a client that does not listen
        assert s.log.exchanges == []


async def upload(s, body):
    """Send `body` with no copy of it on the client's side; the first line of the answer."""
    loop = asyncio.get_running_loop()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        await loop.sock_connect(client, str(s.gateway.socket))
        await loop.sock_sendall(client, f"{head}Authorization: Bearer {s.session.key}\r\n\r\n".encode())
        await loop.sock_sendall(client, body)
        return (await loop.sock_recv(client, 1000)).split(b"\r\n")[0]


async def test_bodies_beyond_the_bound_wait_outside_of_memory():
    """40 bodies of 1 MB, and an upstream that takes none of them: one is in memory, the others wait."""
    body = json.dumps(ask("x" * 1_000_000)).encode()
    taken = asyncio.Event()

    async def deaf(reader, writer):
        await taken.wait()
        writer.close()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, scene(url, admitted_bytes=2 * len(body), retries=0) as s:
        admission = s.session.admission
        tracemalloc.start()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(upload(s, body)) for _ in range(40)]
            while len(admission._waiting) < 30:
                await asyncio.sleep(0.01)
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert admission.used <= admission.bound
            assert held < 20 * len(body)
            taken.set()
        assert {call.result() for call in calls} == {b"HTTP/1.1 502 Bad Gateway"}
        assert len(s.log.exchanges) == 40


async def test_all_are_served_through_a_small_bound():
    async with serve_script(fine) as upstream, scene(upstream, admitted_bytes=1024 * 1024) as s:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(outcome(s, ask(f"{i}" + "x" * 300_000))) for i in range(40)]
        assert {call.result()[0] for call in calls} == {200}
        assert len(s.log.exchanges) == 40


async def test_a_refusal_of_a_body_too_large_to_retain_is_passed_on():
    plan = [ScriptedReply(status=429, headers=NOW)]
    async with serve_script(apply_plan(plan, fine)) as upstream, scene(upstream) as s:
        s.gateway.relay.retention.bound = 10
        assert (await outcome(s, ask("hi")))[0] == 429
        assert (await outcome(s, ask("hi")))[0] == 200
