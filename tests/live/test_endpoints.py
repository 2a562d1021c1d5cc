"""Several servers behind one gateway: who gets which call, and where conversations go when a server fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.gateway_harness import Log, Scene, ask, scene
from tests.wait_bounds import stretch

from holdwater.core.endpoints import EndpointState
from holdwater.dialect import DIALECTS
from holdwater.gateway.call_terms import CallTerms
from holdwater.gateway.upstreams.http import HttpUpstream
from holdwater.gateway.upstreams.http_endpoint import EndpointTerms, ProviderAddress
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, serve_raw

RETRIES = 2


class ModelServer:
    """A server that can die and come back on its port, and that writes down its requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key: str | None = None
        self.requests: list[tuple[str, dict[str, Any]]] = []  # key and body
        self.faults: list[ScriptedReply | ReplyFault] = []  # of the next requests
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.url = ""
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        port = int(self.url.removesuffix("/v1").rpartition(":")[2]) if self.url else 0
        self.url = await self._stack.enter_async_context(serve_raw(self._answer, port))

    async def die(self) -> None:
        await self._stack.aclose()

    async def _answer(self, headers: Any, body: bytes) -> ScriptedReply:
        key = headers.get("Authorization", "").removeprefix("Bearer ")
        self.requests.append((key, msgspec.json.decode(body)))
        self.asked.set()
        await self.gate.wait()
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, ReplyFault):
            return ScriptedReply(text="a reply that is long enough to be cut", fault=fault)
        return fault or ScriptedReply(text=f"{self.name} says {len(self.requests)}")


class Place(Scene):
    """A gateway before several servers."""

    servers: Sequence[ModelServer]
    notes: list[tuple[str, str]]
    upstream: HttpUpstream

    async def say(self, *texts: str, **options: Any) -> tuple[int, str]:
        """Return the status of a request and the text of its reply; 0 if the reply broke off."""
        try:
            async with self.post(ask(*texts, **options)) as response:
                body = await response.read()
        except aiohttp.ClientError:
            return 0, ""
        if response.status != 200 or options.get("stream"):
            return response.status, body.decode()
        return 200, msgspec.json.decode(body)["choices"][0]["message"]["content"]

    async def talk(self, turns: int, *texts: str) -> list[str]:
        """Go on with a conversation; return all of it."""
        said = list(texts)
        for _ in range(turns):
            status, text = await self.say(*said)
            assert status == 200, text
            said += [text, "go on"]
        return said

    def count(self) -> list[int]:
        return [len(server.requests) for server in self.servers]


@asynccontextmanager
async def place(*terms: dict[str, Any], stall: float = 30.0, **options: Any) -> AsyncIterator[Any]:
    servers = [ModelServer(f"server{n}") for n in range(len(terms))]
    notes: list[tuple[str, str]] = []
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.die)
        given = [
            EndpointTerms(dict.fromkeys(DIALECTS, ProviderAddress(server.url, one.pop("key", None))), **one)
            for server, one in zip(servers, map(dict, terms), strict=True)
        ]
        upstream = HttpUpstream(
            given, retries=RETRIES, stall=stall, note=lambda kind, text: notes.append((kind, text))
        )
        opened = await stack.enter_async_context(scene(upstream, **options))
        opened.__class__ = Place
        opened.servers, opened.notes, opened.upstream = servers, notes, upstream
        yield opened


def kinds(found: Any) -> list[str]:
    return [kind for kind, _ in found.notes]


async def test_new_conversations_go_where_the_fewest_calls_are_by_weight():
    async with place({"weight": 2.0}, {}) as s, asyncio.TaskGroup() as group:
        for server in s.servers:
            server.gate.clear()
        calls = [group.create_task(s.say(f"conversation {n}")) for n in range(30)]
        async with asyncio.timeout(stretch(10)):
            while sum(s.count()) < 30:
                await asyncio.sleep(0.01)
        assert s.count() == [20, 10]
        for server in s.servers:
            server.gate.set()
    assert {call.result()[0] for call in calls} == {200}


async def test_conversations_stay_at_a_server_with_more_calls():
    async with place({}, {}) as s:
        talks = [await s.talk(1, f"conversation {n}") for n in range(6)]
        home, other = s.servers
        mine = [talk for talk in talks if talk[1].startswith(home.name)]
        assert len(mine) == 3, "they were spread evenly"
        home.gate.clear()
        async with asyncio.timeout(stretch(20)), asyncio.TaskGroup() as group:
            for talk in mine:
                group.create_task(s.talk(2, *talk))
            while len(home.requests) < 6:
                await asyncio.sleep(0.01)
            home.gate.set()
        assert (len(home.requests), len(other.requests)) == (9, 3)


async def test_a_conversation_moves_when_its_server_dies_and_comes_to_rest():
    async with place({}, {}) as s:
        said = await s.talk(2, "mine")
        home, other = s.servers if s.servers[0].requests else reversed(s.servers)
        await home.die()
        said = await s.talk(2, *said)
        assert len(other.requests) == 2
        await home.start()
        async with asyncio.timeout(stretch(30)):
            while not any(server is home and len(home.requests) > 2 for server in s.servers):
                await s.say(f"a new conversation {sum(s.count())}")  # one of them tries the server again
                await asyncio.sleep(0.05)
        before = len(home.requests)
        said = await s.talk(3, *said)
        assert len(home.requests) == before, "it stays where it went"
        assert kinds(s) == ["endpoint.failed", "endpoint.returned"]
        assert home.url in s.notes[0][1]
        assert s.session.failure is None
        assert len({bytes(one.reply) for one in s.log.exchanges}) == len(s.log.exchanges)
        assert [one.error for one in s.log.exchanges if one.error] == []


@pytest.mark.parametrize("fault", [ReplyFault.CUT, ReplyFault.HANG, ReplyFault.ERROR])
async def test_a_stream_that_breaks_off_is_continued_at_the_other_server(fault):
    async with place({}, {}, stall=0.3) as s:
        said = await s.talk(1, "mine")
        home, other = s.servers if s.servers[0].requests else reversed(s.servers)
        home.faults = [fault]
        await s.say(*said, stream=True)
        assert s.log.last.error
        status, text = await s.say(*said, stream=True)  # the client asks again
        assert (status, len(other.requests)) == (200, 1)
        await s.talk(2, *said)
        assert (len(home.requests), len(other.requests)) == (2, 3)
        # Each request that reached a server is one exchange, and the lost one is paid once.
        assert len(s.log.exchanges) == sum(s.count()) == 5
        assert [bool(one.error) for one in s.log.exchanges] == [False, True, False, False, False]
        assert s.session.usage.requests == 5
        assert text


async def test_a_slow_server_costs_one_call_and_the_conversation_moves():
    async with place({}, {}, stall=0.3) as s:
        said = await s.talk(1, "mine")
        home, other = s.servers if s.servers[0].requests else reversed(s.servers)
        home.faults = [ScriptedReply(text="too late", delay=stretch(10.0))]
        status, text = await s.say(*said)
        assert (status, "silent for 0.3 s" in text) == (504, True)
        await s.talk(2, *said)
        assert (len(home.requests), len(other.requests)) == (2, 2)
        assert s.session.failure is None


async def test_a_server_that_refuses_model_or_key_is_left():
    async with place({}, {}) as s:
        s.servers[0].faults = [ScriptedReply(status=401, text="wrong key")] * 9
        s.servers[1].faults = [ScriptedReply(status=404, text="no such model")]
        assert (await s.say("mine"))[0] in (401, 404)  # both: an error of every instance
        assert s.session.failure.where == "run"
        assert s.count() == [1, 1]
        await s.talk(3, "another")  # the second server has the model by now
        assert s.session.failure is None
        assert len(s.servers[1].requests) == 4


async def test_a_rate_limit_sends_the_call_to_a_server_that_has_room():
    async with place({}, {}) as s:
        s.servers[0].faults = [ScriptedReply(status=429, headers={"Retry-After": "200"})] * 5
        async with asyncio.timeout(stretch(10)):
            for n in range(4):
                assert (await s.say(f"conversation {n}"))[0] == 200
        assert s.count() == [1, 4], "it was asked once, and rests until it has room"
        assert s.session.waited < 10.0
        assert s.notes == [], "a rate limit is no failure"


async def test_an_invalid_request_is_sent_once():
    async with place({}, {}) as s:
        for server in s.servers:
            server.faults = [ScriptedReply(status=400, text="bad temperature")]
        assert (await s.say("mine"))[0] == 400
        assert sum(s.count()) == 1
        assert [use.failures for use in s.upstream.report_uses()] == [0, 0]


async def test_without_any_server_a_call_fails_within_its_retries():
    async with place({}, {}) as s:
        for server in s.servers:
            await server.die()
        status, text = await s.say("mine")
        assert (status, "cannot be reached" in text) == (502, True)
        failure = s.session.failure
        assert (failure.where, failure.kind, failure.again) == ("model", "unreachable", True)
        uses = s.upstream.report_uses()
        assert sum(use.requests for use in uses) == len(s.servers) + RETRIES
        assert [use.state for use in uses] == [EndpointState.DOWN] * 2
        assert len(s.log.exchanges) == 1


async def test_a_server_that_speaks_another_dialect_is_no_answer():
    content = [{"type": "text", "text": "hi"}]
    reply = {"type": "message", "role": "assistant", "content": content, "usage": {"input_tokens": 3}}
    async with place({}, {}) as s:
        said = await s.talk(1, "mine")
        home, other = s.servers if s.servers[0].requests else reversed(s.servers)
        home.faults = [ScriptedReply(body=msgspec.json.encode(reply))]
        async with s.post(ask(*said)) as response:
            await response.read()
        assert (s.session.failure.kind, "`choices`" in s.session.failure.message) == ("garbage", True)
        assert s.log.last.error == s.session.failure.message
        await s.talk(1, *said)
        assert (len(home.requests), len(other.requests)) == (2, 1)
        assert s.session.failure is None


async def test_each_server_gets_its_own_key_and_reports_its_calls():
    async with place({"key": "sk-of-the-first-server"}, {"key": "sk-of-the-second-server"}) as s:
        s.servers[0].faults = [ScriptedReply(status=500)] * 9
        for n in range(4):
            assert (await s.say(f"conversation {n}"))[0] == 200
        assert [{key for key, _ in server.requests} for server in s.servers] == [
            {"sk-of-the-first-server"},
            {"sk-of-the-second-server"},
        ]
        uses = s.upstream.report_uses()
        assert [use.requests for use in uses] == s.count()
        assert [use.failures for use in uses] == [len(s.servers[0].requests), 0]
        assert uses[0].state is not EndpointState.OK and uses[1].state is EndpointState.OK
        assert "500" in uses[0].error
        assert [use.requests for use in s.upstream.report_uses()] == [0, 0], "only the calls since"


async def test_names_are_mapped_and_models_have_their_own_server():
    terms = CallTerms(names={"small": "tiny-4b", "*haiku*": "tiny-4b"})
    async with place({"models": ("tiny-*",)}, {}, terms=terms, model="big-30b") as s:
        tiny, rest = s.servers
        for name in ("small", "claude-haiku-4-5", "tiny-4b", "claude-opus", "big-30b"):
            request = {"model": name, "messages": [{"role": "user", "content": name}]}
            async with s.post(request) as response:
                assert response.status == 200
        assert [body["model"] for _, body in tiny.requests] == ["tiny-4b"] * 3
        assert [body["model"] for _, body in rest.requests] == ["big-30b"] * 2
        assert [one["model"] for one in s.log.requests()] == ["tiny-4b"] * 3 + ["big-30b"] * 2
        await tiny.die()
        status, _ = await s.say("to the small one", model="small")
        assert status == 502, "no other server has the model"
        assert len(rest.requests) == 2


async def test_an_answer_to_a_closed_session_counts_neither_way():
    async with place({}, {}) as s:
        for server in s.servers:
            server.gate.clear()
        async with s.gateway.open_session(2, Log()) as session:
            held = asyncio.ensure_future(s.post(ask("hi"), key=session.key).__aenter__())
            await asyncio.wait(
                [asyncio.ensure_future(server.asked.wait()) for server in s.servers],
                return_when=asyncio.FIRST_COMPLETED,
            )
        (await held).release()
        assert [use.failures for use in s.upstream.report_uses()] == [0, 0]
        assert s.notes == []
