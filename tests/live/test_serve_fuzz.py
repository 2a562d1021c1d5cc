"""Whatever is sent to the door, it is refused in its words, noted once, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server_connection import EVENTS, FRAMES, JSON, MSGPACK, Reading, scene
from tests.wait_bounds import stretch

from holdwater.core.groups import GroupTerms
from holdwater.core.records import Instance, LimitOverrides, Network, SandboxSpec
from holdwater.core.serving_protocol import (
    PROTOCOL,
    CallAnswer,
    Finished,
    ModelChoice,
    ModelSource,
    Order,
    ProblemDetails,
    SteerRequest,
)
from holdwater.serve import bodies, connection_server
from holdwater.serve.wire_format import STATUS

FEW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
ORDER = Order(key="k", instance="i", sampling={"temperature": 1.0}, detached=True)
HEAD = b"POST /v1/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SECRETS = [
    "http://user:hunter2@host/v1",
    "https://hunter2@host/v1",
    "http://host/v1?key=hunter2",
    "http://host/any/path?",
    "http://host/any/path#",
]
KINDS = [JSON, MSGPACK, "text/plain", "application/msgpack; charset=x", ""]
ACCEPTED = [JSON, MSGPACK, EVENTS, FRAMES, "*/*", "", "nonsense,,;q=", "application/xml"]


def mutated(body: bytes) -> st.SearchStrategy[bytes]:
    """A good body, cut, or with some bytes in the place of others."""
    at = st.integers(0, len(body))
    return st.tuples(at, at, st.binary(max_size=12)).map(
        lambda how: body[: min(how[:2])] + how[2] + body[max(how[:2]) :]
    )


WRONG = st.one_of(
    st.binary(max_size=200),
    mutated(msgspec.json.encode(ORDER)),
    mutated(msgspec.msgpack.encode(ORDER)),
    mutated(msgspec.json.encode([CallAnswer(call="c", text="t")])),
    st.sampled_from(
        [b"[" * 100_000, b'{"key":' * 5000, b"\x91" * 100_000, b'{"key":"\\ud800"}', b"null", b""]
    ),
)
PATHS = st.sampled_from(
    ["orders", "orders/k", "orders/k/answers", "model", "health", "nothing", "blobs/" + "0" * 64]
)
REQUESTS = st.tuples(
    st.sampled_from(["POST", "PUT", "GET", "DELETE", "PATCH", "X"]),
    PATHS,
    WRONG,
    st.sampled_from(KINDS),
    st.sampled_from(ACCEPTED),
    st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=30),
)


@asynccontextmanager
async def undisturbed(s):
    """Meanwhile an order of someone else goes its way, and no more than a note of a kind is made."""
    async with s.post(Order(key="good", instance="i"), EVENTS) as response:
        ticket = s.desk.orders["good"]
        yield
        ticket.members[0].attempt = 3
        await ticket.notify_change()
        await ticket.finish()
        assert isinstance((await Reading(response).all())[-1], Finished)
    assert s.door._bodies._held == 0
    assert set(Counter(kind for kind, _ in s.notes).values()) <= {1}


@FEW
@given(st.lists(REQUESTS, min_size=1, max_size=40))
async def test_any_request_is_answered_in_the_words_of_the_protocol(requests):
    async with scene() as s, undisturbed(s):
        for method, path, body, kind, accept, value in requests:
            headers = {"Content-Type": kind, "Accept": accept, "X-Holdwater-Have": value}
            async with s.http.request(method, f"{s.url}/{path}", data=body, headers=headers) as response:
                if response.status < 400 and response.content_type in (EVENTS, FRAMES):
                    continue  # a mutation that is an order: someone waits for it now
                said = await response.read()
            assert response.status != 500, said
            if response.status >= 400 and path != "health":
                decode = msgspec.msgpack.decode if response.content_type == MSGPACK else msgspec.json.decode
                assert STATUS[decode(said, type=ProblemDetails).code] == response.status


@FEW
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=10), st.integers(0, 120))
async def test_a_request_other_than_http_is_refused_and_its_connection_closed(garbage, cut):
    body = msgspec.json.encode(ORDER)
    whole = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    async with scene() as s, undisturbed(s):
        for piece in [*garbage, whole[:cut], whole[:cut] + garbage[0]]:
            said = await raw(s, piece, end=True)
            assert said == b"" or said.startswith(b"HTTP/1.1 "), said
            assert not said.startswith(b"HTTP/1.1 500"), said


async def raw(s, content: bytes, *, end: bool = False) -> bytes:
    """What comes back for these bytes."""
    host, port = s.door.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(content)
        if end:
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (
            b'{"key":"a","instance":"i","protocol":9,"new_field":1}',
            "version",
            "version 9 (this server supports",
        ),
        (b'{"key":"a","instance":"i","protocol":0}', "version", f"this server supports {PROTOCOL}"),
        (b'{"key":"a","instance":"i","sise":2}', "invalid", "unknown field `sise`"),
        (b'{"key":"a","instance":"i","limits":{"acting":"x"}}', "invalid", "$.limits.acting"),
        (b'{"key":"a","instance":"i","group":{"x":1}}', "invalid", "$.group"),
        (b'{"key":"","instance":"i"}', "invalid", "`key` must have 1 to"),
        (b'{"key":"a","instance":"i","model":{"source":"endpoint"}}', "invalid", "`model.url` is required"),
        (b'{"key":"a\\n","instance":"i"}', "invalid", "printable"),
        (b'{"key":"a","instance":"i","a\\nb":2}', "invalid", "unknown field"),
    ],
)
async def test_a_wrong_order_is_refused_with_the_reason(body, code, message):
    async with scene() as s:
        for kind, sent in ((JSON, body), (MSGPACK, msgspec.msgpack.encode(msgspec.json.decode(body)))):
            headers = {"Content-Type": kind, "Accept": JSON}
            async with s.http.post(f"{s.url}/orders", data=sent, headers=headers) as response:
                problem = msgspec.json.decode(await response.read(), type=ProblemDetails)
            assert (response.status, problem.code) == (400, code)
            assert message in problem.message
        (note,) = s.notes
        assert note[0] == f"serve.{code}" and note[1].isprintable()
        assert s.desk.orders == {}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"limits": LimitOverrides(acting=-5.0)}, "limits.acting"),
        ({"limits": LimitOverrides(acting=float("nan"))}, "limits.acting"),
        ({"limits": LimitOverrides(requests=0)}, "limits.requests"),
        ({"group": GroupTerms(quorum=0)}, "group.quorum"),
        ({"group": GroupTerms(patience=float("inf"))}, "group.patience"),
        ({"model": ModelChoice(source=ModelSource.ENDPOINT, url="file:///etc/passwd")}, "model.url"),
        ({"model": ModelChoice(source=ModelSource.ENDPOINT, url="http://[::1")}, "model.url"),
        *(({"model": ModelChoice(source=ModelSource.ENDPOINT, url=url)}, "model.url") for url in SECRETS),
        ({"sampling": {"x": msgspec.msgpack.Ext(5, b"x")}}, "sampling"),
        ({"instance": Instance(id="i", directory="/etc")}, "instance.directory"),
        ({"instance": Instance(id="i", start=SandboxSpec(build="/etc"))}, "instance.start.build"),
        ({"instance": Instance(id="i", grader=SandboxSpec(network=Network.OPEN))}, "instance.grader.network"),
        ({"instance": Instance(id="i", start=SandboxSpec(env={"A": "${HOME}"}))}, "instance.start.env"),
        ({"instance": Instance(id="i", limits=LimitOverrides(memory=-1))}, "instance.limits.memory"),
    ],
)
async def test_what_no_client_may_ask_for_is_refused_by_its_name(more, field):
    async with scene() as s, s.post(Order(**{"key": "a", "instance": "i", **more}), packed=True) as response:
        problem = msgspec.json.decode(await response.read(), type=ProblemDetails)

        assert (response.status, problem.code) == (400, "invalid")
        assert problem.message.startswith(f"`{field}` ")
        assert s.desk.orders == {}
        assert "hunter2" not in str((s.notes, problem))


@pytest.mark.parametrize("url", ["file:///etc/passwd", *SECRETS])
async def test_a_model_whose_url_holds_a_secret_is_refused(url):
    async with scene() as s:
        async with s.http.post(f"{s.url}/model", data=msgspec.json.encode(SteerRequest(url=url))) as response:
            problem = msgspec.json.decode(await response.read(), type=ProblemDetails)

        assert (response.status, problem.code) == (400, "invalid")
        assert problem.message.startswith("`url` must ")
        assert s.desk.steered == []
        assert "hunter2" not in str((s.notes, problem))


async def test_a_key_of_an_endpoint_that_no_header_can_carry_is_refused():
    body = msgspec.json.encode(ORDER)
    async with scene() as s:
        for value in (b"caf\xc3\xa9", b"\xff\xfe"):
            head = HEAD + b"Connection: close\r\nX-Holdwater-Model-Key: %s\r\n" % value
            said = await raw(s, head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            assert said.startswith(b"HTTP/1.1 400 ") and b"printable ASCII" in said
        assert s.desk.orders == {}


async def test_a_huge_body_is_refused_by_its_length_and_during_its_reading(monkeypatch):
    monkeypatch.setattr(connection_server, "LINGER", 0.1)

    async def endless():
        for _ in range(1000):
            yield b"x" * 100_000

    async with scene(largest_order=1_000_000) as s, undisturbed(s):
        said = await raw(s, HEAD + b"Content-Length: 99999999\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 413 ") and b'"too_large"' in said
        try:
            async with s.http.post(f"{s.url}/orders", data=endless()) as response:
                assert response.status == 413
        except aiohttp.ClientError:
            pass  # it was cut while it was still sending
        assert [kind for kind, _ in s.notes] == ["serve.too_large"]


async def test_a_body_of_known_and_one_of_unknown_length_are_one_order():
    async def pieces():
        for byte in msgspec.json.encode(ORDER):
            yield bytes([byte])

    async with scene() as s:
        async with s.http.post(f"{s.url}/orders", data=pieces()) as response:
            assert response.status == 202
        async with s.http.post(
            f"{s.url}/orders", data=msgspec.json.encode(ORDER), expect100=True
        ) as response:
            assert (response.status, (await response.json())["new"]) == (202, False)


async def test_clients_that_send_too_much_together_are_refused_as_busy():
    async with scene(largest_order=1_000_000) as s, undisturbed(s):
        host, port = s.door.address.removeprefix("http://").split(":")
        head = HEAD + b"Content-Length: 999999\r\n\r\n"
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + b" " * 999_998)
            await writer.drain()
            writers.append(writer)
        while s.door._bodies._held < 2 * 999_998:
            await asyncio.sleep(0.01)
        async with s.http.post(f"{s.url}/orders", data=b" " * 900_000) as response:
            assert (response.status, (await response.json())["code"]) == (429, "busy")
        for writer in writers:
            writer.close()
        while s.door._bodies._held:
            await asyncio.sleep(0.01)


async def test_those_who_send_nothing_more_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(connection_server, "IDLE", 0.2)
    monkeypatch.setattr(connection_server, "LINGER", 0.1)
    monkeypatch.setattr(bodies, "LONGEST_SILENCE", 0.2)
    async with scene() as s, undisturbed(s), asyncio.timeout(stretch(10)), asyncio.TaskGroup() as group:
        head = HEAD + b"Content-Length: 100\r\n\r\n"
        nothing = group.create_task(raw(s, b""))
        half = group.create_task(raw(s, head[:30]))
        no_body = group.create_task(raw(s, head))
        half_body = group.create_task(raw(s, head + b'{"key":'))
        assert (await nothing, await half) == (b"", b"")
        for said in (await no_body, await half_body):
            assert said.startswith(b"HTTP/1.1 400 ") and b"timed out while reading the body" in said


RIGHT = {"X-Api-Key": "right", "Content-Type": JSON}


async def test_many_wrong_keys_are_noted_once_and_delay_no_right_one():
    async with scene(keys=("right",), http={"headers": RIGHT}) as s, undisturbed(s):

        async def wrong(n):
            async with s.http.post(
                f"{s.url}/orders", data=b"x" * 50_000, headers={"X-Api-Key": f"w{n}"}
            ) as r:
                assert r.status == 401

        async with asyncio.TaskGroup() as group:
            for n in range(200):
                group.create_task(wrong(n))
        assert [kind for kind, _ in s.notes] == ["serve.unauthorized"]
        assert set(s.desk.orders) == {"good"}


def test_the_memory_of_peers_is_bounded():
    told = []
    complaints = connection_server.PeerWarnings(lambda kind, message: told.append(kind))
    for n in range(3 * connection_server.MOST_NOTED):
        complaints.warn(f"10.0.{n >> 8}.{n & 255}", "invalid", "m")
    assert len(told) == 3 * connection_server.MOST_NOTED
    assert len(complaints._noted) == connection_server.MOST_NOTED
