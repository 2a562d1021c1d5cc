"""Clients at the front door: every route, every form, and whoever comes back, reads slowly or goes away."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.server_connection import EVENTS, FRAMES, JSON, MSGPACK, Reading, attended, scene
from tests.wait_bounds import stretch
from yarl import URL

from holdwater.core.errors import BadInput
from holdwater.core.records import ModelUsage
from holdwater.core.serving_protocol import (
    KEPT_CALLS,
    Accepted,
    CallAnswer,
    Called,
    Dropped,
    Finished,
    Order,
    OrderResult,
    ProblemDetails,
    ServerHealth,
    ServerStats,
    Settled,
    Started,
    SteerRequest,
    Turned,
)
from holdwater.ledger.blobs import BlobStore
from holdwater.serve import RolloutServer, ServerSettings, event_stream
from holdwater.testing.fake_orders import FakeOrderService

FORMS = pytest.mark.parametrize("form", [EVENTS, FRAMES])


def order(key="a", **more):
    return Order(key=key, instance="i", **more)


def call(name, parent=None, **more):
    return Called(member=0, call=name, dialect="chat", append=(f"said in {name}",), parent=parent, **more)


@pytest.mark.parametrize("kind", [JSON, MSGPACK])
async def test_the_result_is_the_answer_when_it_is_over(kind):
    async with scene() as s, asyncio.TaskGroup() as group:

        async def client():
            async with s.post(order(), kind, packed=kind == MSGPACK, X_Holdwater_Model_Key="k") as response:
                assert (response.status, response.content_type) == (200, kind)
                body = await response.read()
            decode = msgspec.json.decode if kind == JSON else msgspec.msgpack.decode
            return decode(body, type=OrderResult)

        waiting = group.create_task(client())
        ticket = await s.desk.wait_for_order("a")
        await attended(ticket)
        assert not waiting.done()
        await ticket.finish(reward=0.5)
        result = await waiting
        assert (result.key, result.rollouts[0].reward, result.new) == ("a", 0.5, True)
        assert (ticket.deliveries, ticket.followers, s.desk.keys) == (1, 0, ["k"])


@FORMS
async def test_a_stream_tells_what_changes_and_ends_with_the_result(form):
    async with scene() as s, s.post(order(size=2), form, packed=form == FRAMES) as response:
        assert (response.status, response.content_type) == (200, form)
        told = Reading(response)
        ticket = s.desk.orders["a"]
        assert await told.next() == Accepted(order=1)
        ticket.members[0].attempt = 7
        await ticket.notify_change()
        assert await told.next() == Started(member=0, attempt=7)
        ticket.members[0].turns, ticket.members[0].usage = 3, ModelUsage(requests=3)
        await ticket.notify_change()
        assert await told.next() == Turned(member=0, attempt=7, turns=3, usage=ModelUsage(requests=3))
        await ticket.hold(call("c1"))
        assert await told.next() == call("c1")
        del ticket.members[0].calls["c1"]
        await ticket.notify_change()
        assert await told.next() == Dropped(member=0, call="c1")
        ticket.members[0].attempt, ticket.members[0].turns = 9, 0  # it was lost, and is tried again
        await ticket.notify_change()
        assert await told.next() == Started(member=0, attempt=9)
        await ticket.finish()
        rest = await told.all()
        assert rest[:2] == [Settled(member=n, outcome="passed", reward=1.0) for n in (0, 1)]
        assert isinstance(rest[2], Finished) and len(rest) == 3
        assert len(rest[2].result.rollouts) == 2
        assert ticket.deliveries == 1


async def test_an_answered_call_is_not_reported_as_dropped():
    async with scene() as s, s.post(order(), FRAMES) as response:
        told = Reading(response)
        await told.next()
        ticket = s.desk.orders["a"]
        await ticket.hold(call("c1"))
        assert await told.next() == call("c1")
        answer = CallAnswer(call="c1", text="yes")
        async with s.http.post(f"{s.url}/orders/a/answers", data=msgspec.json.encode(answer)) as answered:
            assert answered.status == 204
        assert ticket.answers == [answer]
        ticket.members[0].turns = 1
        await ticket.notify_change()
        assert await told.next() == Turned(member=0, attempt=0, turns=1)


async def test_each_answer_of_many_has_its_problem_and_a_single_is_refused():
    async with scene() as s, s.post(order(), EVENTS):
        ticket = s.desk.orders["a"]
        await ticket.hold(call("c1"))
        answers = [CallAnswer(call="c1", text="yes"), CallAnswer(call="c9", error="no")]
        packed = {"Content-Type": MSGPACK}
        url = f"{s.url}/orders/a/answers"
        async with s.http.post(url, data=msgspec.msgpack.encode(answers), headers=packed) as response:
            assert response.status == 200
            problems = msgspec.msgpack.decode(await response.read(), type=list[ProblemDetails | None])
        assert problems[0] is None and problems[1] is not None and problems[1].code == "gone"
        async with s.http.post(url, data=msgspec.json.encode(answers[1])) as response:
            assert (response.status, (await response.json())["code"]) == (409, "gone")


async def test_a_call_is_sent_as_a_difference_only_to_an_informed_client():
    async with scene() as s:
        async with s.post(order(), FRAMES) as response:
            told = Reading(response)
            ticket = s.desk.orders["a"]
            await told.next()
            await ticket.hold(call("c1"))
            await told.next()
            await ticket.hold(call("c2", parent="c1"))
            assert (await told.next()).parent == "c1"
        await ticket.left.wait()
        async with s.post(order(), FRAMES, X_Holdwater_Have="c1, c7") as response:
            told = Reading(response)
            assert (await told.next()).new is False
            assert [(await told.next()).parent for _ in range(2)] == [None, "c1"]
        await ticket.left.wait()
        assert ticket.full_calls == []
        async with s.post(order(), FRAMES) as response:
            told = Reading(response)
            await told.next()
            del ticket.members[0].calls["c1"]
            assert [(await told.next()).call for _ in range(2)] == ["c1", "c2"]
            await ticket.hold(call("c3", parent="forgotten"))
            while (event := await told.next()).call != "c3":
                pass
            assert (event.append, event.parent) == (("all of it",), None)
        assert ticket.full_calls == ["c3"]


async def test_what_a_client_must_keep_is_bounded():
    async with scene() as s, s.post(order(), FRAMES) as response:
        told = Reading(response)
        ticket = s.desk.orders["a"]
        await told.next()
        for n in range(KEPT_CALLS + 1):
            await ticket.hold(call(f"c{n}"))
            assert (await told.next()).call == f"c{n}"
            answer = msgspec.json.encode(CallAnswer(call=f"c{n}", text="yes"))
            async with s.http.post(f"{s.url}/orders/a/answers", data=answer) as answered:
                assert answered.status == 204
        await ticket.hold(call("near", parent=f"c{KEPT_CALLS}"))
        assert (await told.next()).parent == f"c{KEPT_CALLS}"
        await ticket.hold(call("far", parent="c0"))
        assert (await told.next()).parent is None
        assert ticket.full_calls == ["far"]


@pytest.mark.parametrize("form", [JSON, EVENTS])
async def test_a_client_that_goes_away_leaves_its_order(form):
    async with scene() as s, asyncio.TaskGroup() as group:

        async def client():
            async with s.post(order(), form) as response:
                await response.read()

        waiting = group.create_task(client())
        ticket = await s.desk.wait_for_order("a")
        await attended(ticket)
        waiting.cancel()
        async with asyncio.timeout(stretch(5)):
            await ticket.left.wait()
        assert ticket.deliveries == 0


async def test_a_client_that_leaves_during_the_write_also_leaves_its_order():
    written = asyncio.Event()

    class Slow(FakeOrderService):
        async def place(self, order, key=None, owner=""):
            ticket = await super().place(order, key, owner)
            await written.wait()
            return ticket

    desk = Slow()
    async with (
        RolloutServer(desk, ServerSettings(listen="127.0.0.1:0")) as door,
        aiohttp.ClientSession() as http,
    ):
        async with asyncio.TaskGroup() as group:
            body = msgspec.json.encode(order())
            sent = http.post(f"{door.address}/v1/orders", data=body, headers={"Content-Type": JSON})
            waiting = group.create_task(sent)
            ticket = await desk.wait_for_order("a")
            waiting.cancel()
        while next(iter(door._connections.connections), None) is not None:
            await asyncio.sleep(0.01)  # the server hears of it: nothing can be awaited for that
        assert not ticket.left.is_set()
        written.set()
        async with asyncio.timeout(stretch(5)):
            await ticket.left.wait()


async def test_silence_is_kept_alive(monkeypatch):
    monkeypatch.setattr(event_stream, "KEEP_ALIVE", 0.02)
    async with scene() as s:
        for form in (EVENTS, FRAMES):
            async with s.post(order(form), form) as response:
                told = Reading(response)
                assert await told.next() == Accepted(order=len(s.desk.orders))
                assert [await told.next() for _ in range(3)] == [None] * 3


async def test_a_slow_reader_gets_fewer_events_and_costs_nothing():
    """It reads nothing while a thousand times as much happens as its connection can hold."""
    async with scene() as s:
        receive = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        receive.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        receive.setblocking(False)
        host, port = s.door.address.removeprefix("http://").split(":")
        await asyncio.get_running_loop().sock_connect(receive, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=receive, limit=4096)
        body = msgspec.json.encode(order())
        head = (
            f"POST /v1/orders HTTP/1.1\r\nHost: localhost\r\nAccept: {EVENTS}\r\n"
            f"Content-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        ticket = await s.desk.wait_for_order("a")
        await attended(ticket)
        fetched = 0
        for n in range(1000):  # 1 GB in all
            name = f"c{n}"
            await ticket.hold(Called(member=0, call=name, dialect="chat", append=("x" * 1_000_000,)))
            del ticket.members[0].calls[name]
            await asyncio.sleep(0)
        guest = next(iter(s.door._connections.connections))
        assert guest.transport.get_write_buffer_size() < 1_500_000  # the call that it is at, and no other
        await ticket.finish()
        seen = bytearray()
        while b"event: finished" not in seen[-2000:]:
            piece = await reader.read(1 << 20)
            assert piece
            fetched += len(piece)
            seen = (seen + piece)[-4000:]
        assert fetched < 100_000_000
        writer.close()


async def test_orders_are_asked_after_and_cancelled():
    async with scene() as s:
        async with s.post(order("a/ü ?", detached=True)) as response:
            assert (response.status, await response.json()) == (202, {"event": "accepted", "order": 1})
        ticket = s.desk.orders["a/ü ?"]
        one = f"{s.url}/orders/a%2F%C3%BC%20%3F"
        async with s.http.get(URL(one, encoded=True)) as response:
            assert response.status == 202
        async with s.http.delete(URL(one, encoded=True)) as response:
            assert response.status == 202
        assert ticket.cancelled == "its client cancelled it"
        await ticket.finish("cancelled", None)
        for new in (True, False):
            async with s.http.get(URL(one, encoded=True)) as response:
                result = msgspec.json.decode(await response.read(), type=OrderResult)
            assert (response.status, result.rollouts[0].outcome, result.new) == (200, "cancelled", new)
        async with s.http.get(f"{s.url}/orders/b") as response:
            assert (response.status, (await response.json())["code"]) == (404, "unknown")


async def test_refusals_of_the_desk_have_their_status():
    async with scene(queue=1) as s:
        async with s.post(order(detached=True)) as response:
            assert response.status == 202
        async with s.post(order(detached=True, size=2)) as response:
            assert (response.status, (await response.json())["code"]) == (409, "conflict")
        async with s.post(order("b"), FRAMES) as response:
            problem = msgspec.msgpack.decode(await response.read(), type=ProblemDetails)
            assert (response.status, problem.code, response.headers["Retry-After"]) == (429, "busy", "2")
        async with s.http.post(f"{s.url}/drain") as response:
            assert (response.status, (await response.json())["state"]) == (202, "draining")
        async with s.post(order("b")) as response:
            assert (response.status, (await response.json())["code"]) == (503, "draining")
        async with s.http.get(f"{s.url}/health") as response:
            assert (response.status, (await response.json())["ok"]) == (503, False)
        assert s.notes == []


async def test_health_stats_and_the_model():
    async with scene() as s:
        async with s.http.get(f"{s.url}/health") as response:
            assert msgspec.json.decode(await response.read(), type=ServerHealth).ok
        async with s.http.get(f"{s.url}/stats", headers={"Accept": MSGPACK}) as response:
            assert msgspec.msgpack.decode(await response.read(), type=ServerStats).uptime == 1.0
        async with s.http.get(f"{s.door.address}/metrics") as response:
            assert response.content_type == "text/plain" and b"holdwater_" in await response.read()
        steer = SteerRequest(url="http://127.0.0.1:1/v1", version="7")
        headers = {"X-Holdwater-Model-Key": "secret"}
        async with s.http.post(
            f"{s.url}/model", data=msgspec.json.encode(steer), headers=headers
        ) as response:
            assert response.status == 204
        assert s.desk.steered == [(steer, "secret")]


async def test_media_are_streamed_whole_or_cut(tmp_path):
    blobs = BlobStore(tmp_path)
    squeezed, plain, empty = (blobs.put(content) for content in (b"a" * 1_000_000, bytes(range(256)), b""))
    spoiled = blobs.put(bytes(range(255)) * 5000)
    path = next(path for path in blobs.paths() if path.stem == spoiled)
    path.write_bytes(path.read_bytes()[:-1])
    async with scene(blobs=tmp_path) as s:
        for name, content in ((squeezed, b"a" * 1_000_000), (plain, bytes(range(256))), (empty, b"")):
            async with s.http.get(f"{s.url}/blobs/{name}") as response:
                assert (response.status, await response.read()) == (200, content)
        for name in ("0" * 64, "..%2f..%2fetc%2fpasswd", "x"):
            async with s.http.get(f"{s.url}/blobs/{name}") as response:
                assert response.status == 404
        with pytest.raises(aiohttp.ClientPayloadError):
            async with s.http.get(f"{s.url}/blobs/{spoiled}") as response:
                await response.read()


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer two"}, {"X-Api-Key": "one"}])
async def test_a_key_opens_the_door_and_nothing_else_does(headers):
    async with scene(keys=("one", "two")) as s:
        for path in ("health", "stats", "orders/a", "nothing"):
            async with s.http.get(f"{s.url}/{path}") as response:
                assert (response.status, (await response.json())["code"]) == (401, "unauthorized")
        for wrong in ({"Authorization": "Bearer on"}, {"Authorization": "Basic one"}, {"X-Api-Key": "ü"}):
            async with s.http.get(f"{s.url}/health", headers=wrong) as response:
                assert response.status == 401
        async with s.http.get(f"{s.url}/health", headers=headers) as response:
            assert response.status == 200
        assert [kind for kind, _ in s.notes] == ["serve.unauthorized"]  # once, however often


async def test_an_order_belongs_to_the_key_that_it_came_with():
    alice, bob = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
    async with scene(keys=("alice", "bob")) as s:
        async with s.post(order(detached=True), **alice) as response:
            assert response.status == 202
        async with s.post(order(detached=True), **bob) as response:
            assert (response.status, (await response.json())["code"]) == (409, "conflict")
        ticket = s.desk.orders["a"]
        await ticket.hold(call("c1"))
        answer = msgspec.json.encode(CallAnswer(call="c1", text="bob's"))
        for method, path, data in (("GET", "", None), ("DELETE", "", None), ("POST", "/answers", answer)):
            url = f"{s.url}/orders/a{path}"
            async with s.http.request(method, url, data=data, headers=bob) as response:
                assert (response.status, (await response.json())["code"]) == (404, "unknown")
        assert (ticket.cancelled, ticket.answers) == ("", [])
        async with s.http.delete(f"{s.url}/orders/a", headers=alice) as response:
            assert response.status == 202
        assert ticket.cancelled


async def test_a_unix_socket_is_for_its_user_alone(tmp_path):
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as left_by_a_killed_server:
        left_by_a_killed_server.bind(str(path))
    connector = {"connector": aiohttp.UnixConnector(str(path))}
    async with scene(listen=f"unix:{path}", http=connector) as s:
        assert s.door.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with s.http.get("http://localhost/v1/health") as response:
            assert response.status == 200
        with pytest.raises(BadInput, match="another process already listens on this socket"):
            async with RolloutServer(s.desk, ServerSettings(listen=f"unix:{path}")):
                pass
    assert not path.exists()


async def test_no_request_is_answered_before_the_address_is_announced():
    order: list[str] = []

    @asynccontextmanager
    async def announce(addresses):
        async with aiohttp.ClientSession() as client:
            early = asyncio.create_task(client.get(f"{addresses[0]}/v1/health"))
            early.add_done_callback(lambda task: order.append("answered"))
            await asyncio.wait([early], timeout=0.3)
            order.append("announced")
            yield
            async with await early as response:
                assert response.status == 200

    async with scene(announce=announce):
        pass

    assert order == ["announced", "answered"]


async def test_tls(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        cert,
        "-days",
        "2",
    ]
    subprocess.run(
        [*made, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    async with scene(tls=(cert, key)) as s:
        assert s.door.address.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(cert))
        async with s.http.get(f"{s.url}/health", ssl=trusted) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            async with s.http.get(f"{s.url.replace('https', 'http')}/health") as response:
                pass
        async with s.http.get(f"{s.url}/health", ssl=trusted) as response:
            assert response.status == 200
    with pytest.raises(BadInput, match="cannot load the certificate and key"):
        RolloutServer(FakeOrderService(), ServerSettings(tls=(key, cert)))


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("0.0.0.0:0", "can be reached from other machines"),
        ("[::]:0", "can be reached from other machines"),
        ("example.org:80", "can be reached from other machines"),
        ("127.0.0.1", "must look like"),
        (":8400", "must look like"),
        ("127.0.0.1:99999", "must look like"),
        ("unix:/" + "x" * 200, "at most 107 bytes"),
        ("unix:/no/such/place", "cannot listen on"),
        ("unix:/etc/passwd", "is not a socket"),
    ],
)
async def test_where_no_door_can_be(listen, message):
    with pytest.raises(BadInput, match=message):
        async with RolloutServer(FakeOrderService(), ServerSettings(listen=listen)):
            pass


async def test_a_taken_port_is_bad_input_and_a_key_suffices_beyond_loopback():
    async with scene(listen="0.0.0.0:0", keys=("k",)) as s:
        port = s.door.address.rpartition(":")[2]
        with pytest.raises(BadInput, match="cannot listen on"):
            async with RolloutServer(FakeOrderService(), ServerSettings(listen=f"127.0.0.1:{port}")):
                pass


async def test_more_connections_than_there_is_room_for_are_refused_at_once():
    async with scene(connections=2) as s, s.post(order(), EVENTS), s.post(order("b"), EVENTS):
        async with s.http.get(f"{s.url}/health") as response:
            assert (response.status, (await response.json())["code"]) == (429, "busy")
        assert [kind for kind, _ in s.notes] == ["serve.busy"]


async def test_closing_the_door_ends_what_waits_in_it():
    async with aiohttp.ClientSession() as http:
        desk = FakeOrderService()
        async with (
            RolloutServer(desk, ServerSettings(listen="127.0.0.1:0")) as door,
            asyncio.TaskGroup() as group,
        ):

            async def client():
                headers = {"Accept": EVENTS, "Content-Type": JSON}
                body = msgspec.json.encode(order())
                async with http.post(f"{door.address}/v1/orders", data=body, headers=headers) as response:
                    await response.read()

            waiting = group.create_task(_lost(client()))
            ticket = await desk.wait_for_order("a")
            await attended(ticket)
            await door.__aexit__(None, None, None)
            assert await waiting
        assert ticket.left.is_set()


async def _lost(client):
    try:
        await client
    except aiohttp.ClientError:
        return True
    return False


def test_the_docs_name_every_route_and_every_problem():
    from holdwater.serve.rollout_server import ROUTES
    from holdwater.serve.wire_format import STATUS

    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    for pattern, methods in ROUTES.items():
        for method in methods:
            named = pattern.replace("orders/([^/]+)", "orders/KEY").replace("([^/]+)", "NAME")
            assert f"| `{method} {named}` |" in text
    for code, status in STATUS.items():
        assert f"| `{code}` | {status} |" in text
