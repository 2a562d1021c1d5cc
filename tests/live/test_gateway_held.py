"""Held calls: each is answered with its own answer, or ended with its attempt, its client or its budget."""

import asyncio
import base64
import gc
import json
import os
import tracemalloc
import weakref
from contextlib import AsyncExitStack

import aiohttp
import pytest
from tests.dialect_requests import DIALECTS, message_of, send, speak, text_of
from tests.held_call_harness import CallHeld, CallReleased, Trainer, worker
from tests.wait_bounds import stretch

from holdwater.core.records import Limits, MiB
from holdwater.dialect import DIALECTS as SPOKEN
from holdwater.dialect.interface import RequestTarget
from holdwater.gateway.in_process_calls import ChatClient
from holdwater.rollout.worker_protocol import HeldCallContent


class Client:
    """A session as `speech.send` wants it."""

    def __init__(self, w, session):
        self.gateway, self.http, self.session = w.gateway, w.http, session


async def said(client, dialect, stream, *texts):
    async with send(client, speak(dialect, *texts, stream=stream)) as response:
        body = await response.read()
    if response.status != 200:
        return response.status, message_of(json.loads(body))
    if stream:
        reader = SPOKEN[dialect].stream(
            SPOKEN[dialect].adapt_request({}, RequestTarget("v1beta/models/m:x"), None)
        )
        assert list(reader.events(body))
        body = reader.reply()
    return 200, text_of(dialect, json.loads(body))


def last_text(dialect, request):
    if dialect == "gemini":
        return request["contents"][-1]["parts"][0]["text"]
    return request[SPOKEN[dialect].key][-1]["content"]


WAYS = [(dialect, stream) for dialect in DIALECTS for stream in (False, True)]


async def test_a_hundred_at_once_each_get_their_own_answer(tmp_path):
    attempts, each = range(1, 6), [(way, n) for way in WAYS for n in range(3)]
    async with worker(tmp_path) as w, asyncio.TaskGroup() as group, AsyncExitStack() as sessions:
        asking = {}
        for attempt in attempts:
            client = Client(w, await sessions.enter_async_context(w.session(attempt)))
            for way, n in each:
                text = f"{attempt} {way} {n}"
                asking[text] = group.create_task(said(client, *way, text))
        await w.until(lambda _: len(w.of(CallHeld)) == len(asking))
        calls = [await w.asked(held.attempt, held.call) for held in w.of(CallHeld)]
        for call in reversed(calls):
            text = last_text(call.dialect, {SPOKEN[call.dialect].key: [json.loads(call.append[-1])]})
            w.answer(call.attempt, call.call, text=f"to {text}", version=f"{call.attempt}.{call.call}")
        assert len(asking) == 120
        assert {text: await task for text, task in asking.items()} == {t: (200, f"to {t}") for t in asking}
        assert not w.of(CallReleased)
        for attempt in attempts:
            versions = {exchange.version for exchange in w.exchanges(attempt)}
            assert versions == {f"{attempt}.{n}" for n in range(1, 1 + len(each))}


@pytest.mark.parametrize(("dialect", "stream"), WAYS)
async def test_a_conversation_is_handed_out_by_its_new_messages(tmp_path, dialect, stream):
    async with worker(tmp_path) as w, w.session(3) as session:
        trainer = Trainer(w, lambda name, request: {"text": f"{last_text(name, request)}!"})
        client = Client(w, session)
        texts = []
        for turn in range(3):
            texts.append(f"turn {turn}")
            status, text = await said(client, dialect, stream, *texts)
            assert (status, text) == (200, f"turn {turn}!")
            texts.append(text)
    first, second, third = w.of(HeldCallContent)
    assert (first.parent, len(first.append), first.streamed) == (None, 1, stream)
    assert [(a.parent, a.keep, len(a.append), a.head) for a in (second, third)] == [
        (1, 1, 2, None),
        (2, 3, 2, None),
    ]
    sent = json.loads(speak(dialect, *texts[:-1], stream=stream).body)
    assert {key: trainer.requests[-1].get(key) for key in sent} == sent


async def test_an_unknown_conversation_is_handed_out_whole(tmp_path):
    picture = base64.b64encode(os.urandom(9000)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    shown = {"role": "user", "content": [part]}
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 9000, "parameters": {}}}]

    def request(*more):
        return {"model": "m", "messages": [shown, *more], "tools": tools}

    async def ask(w, session, *more):
        url, headers = f"{w.gateway.url}/chat/completions", {"Authorization": f"Bearer {session.key}"}
        async with w.http.post(url, json=request(*more), headers=headers) as response:
            return (await response.json())["choices"][0]["message"]

    async with worker(tmp_path) as w, asyncio.TaskGroup() as group:
        async with w.session(1) as session:
            first = group.create_task(ask(w, session))
            await w.until(lambda _: w.of(CallHeld))
            asked = await w.asked(1, 1)
            assert [json.loads(m) for m in asked.append] == [shown]
            assert json.loads(asked.head)["tools"] == tools
            w.answer(1, 1, text="I see", version="7")
            reply = await first
        async with w.session(2, earlier=(1,)) as session:
            assert await ask(w, session) == reply  # from the record, and nobody was asked
            assert [m.attempt for m in w.of(CallHeld)] == [1]
            more = [reply, {"role": "user", "content": "and?"}]
            second = group.create_task(ask(w, session, *more))
            await w.until(lambda _: w.of(CallHeld, 2))
            for whole in (False, True):
                asked = await w.asked(2, 1, whole=whole)
                assert (asked.parent, asked.keep) == (None, 0)
                assert [json.loads(m) for m in asked.append] == [shown, *more]
                assert json.loads(asked.head)["tools"] == tools
            w.answer(2, 1, text="yes")
            third = group.create_task(
                ask(w, session, *more, await second, {"role": "user", "content": "so?"})
            )
            await w.until(lambda _: len(w.of(CallHeld, 2)) == 2)
            assert (await w.asked(2, 2)).parent == 1
            asked = await w.asked(2, 2, whole=True)
            assert (asked.parent, len(asked.append)) == (None, 5)
            w.answer(2, 2, text="so")
            await third
        assert [e.version for e in w.exchanges(2)] == ["7", "", ""]


@pytest.mark.parametrize("taken", [False, True])
async def test_the_attempt_ends_and_everyone_has_an_answer_at_once(tmp_path, taken):
    async with worker(tmp_path) as w, asyncio.TaskGroup() as group:
        async with w.session(1) as session:
            client = Client(w, session)
            asking = [group.create_task(said(client, *way, "x")) for way in WAYS]
            await w.until(lambda _: len(w.of(CallHeld)) == len(WAYS))
            if taken:
                for held in w.of(CallHeld):
                    await w.asked(1, held.call)
        async with asyncio.timeout(stretch(2)):
            assert [await task for task in asking] == [(400, "the attempt is over")] * len(WAYS)
        assert {m.call for m in w.of(CallReleased)} == {m.call for m in w.of(CallHeld)}
        assert {(e.status, e.error) for e in w.exchanges(1)} == {(499, "the attempt ended")}
        w.answer(1, 1, text="too late")
        assert (await w.asked(1, 1)).dialect == ""


async def test_a_client_that_leaves_is_reported_and_its_retry_is_new(tmp_path):
    async with worker(tmp_path) as w, w.session(1) as session, asyncio.TaskGroup() as group:
        client = Client(w, session)
        leaving = group.create_task(said(client, "chat", False, "x"))
        await w.until(lambda _: w.of(CallHeld))
        await w.asked(1, 1)
        leaving.cancel()
        assert (await w.until(lambda _: w.of(CallReleased)))[0].call == 1
        w.answer(1, 1, text="for the first")
        again = group.create_task(said(client, "chat", False, "x"))
        await w.until(lambda _: len(w.of(CallHeld)) == 2)
        asked = await w.asked(1, 2)
        assert (asked.parent, asked.keep, asked.append) == (1, 1, ())
        w.answer(1, 2, text="for the second")
        assert await again == (200, "for the second")


async def test_an_error_and_an_invalid_reply_fail_the_call(tmp_path):
    answers = iter([{"error": "no GPU"}, {"reply": {"choices": [1]}}, {"text": "fine"}])
    async with worker(tmp_path) as w, w.session(1) as session:
        Trainer(w, lambda dialect, request: next(answers))
        client = Client(w, session)
        status, message = await said(client, "messages", True, "x")
        assert (status, "no GPU" in message) == (502, True)
        assert (session.failure.where, session.failure.kind) == ("model", "policy")
        assert (await said(client, "messages", False, "x"))[0] == 502
        assert session.failure.kind == "policy"
        assert await said(client, "messages", False, "x") == (200, "fine")
        assert session.failure is None


async def test_a_used_up_budget_refuses_the_next_call(tmp_path):
    async with worker(tmp_path) as w, w.session(1, limits=Limits(requests=1)) as session:
        Trainer(w, lambda dialect, request: {"text": "one"})
        client = Client(w, session)
        assert await said(client, "gemini", True, "x") == (200, "one")
        assert (await said(client, "gemini", True, "x"))[0] == 400
        assert len(w.of(CallHeld)) == 1


async def test_counting_tokens_is_no_turn(tmp_path):
    async with worker(tmp_path) as w, w.session(1) as session:
        request = speak("messages", "x" * 400)
        async with send(Client(w, session), request._replace(path="/v1/messages/count_tokens")) as response:
            assert (await response.json())["input_tokens"] > 50
        assert w.heard == []


async def test_bodies_are_gone_while_calls_are_held(tmp_path):
    """Twenty requests of 1 MB that begin alike: what is held of each is what is new."""
    long = {"role": "user", "content": "x" * MiB}
    async with worker(tmp_path) as w, w.session(1) as session, asyncio.TaskGroup() as group:
        model = ChatClient(w.gateway.ask, w.gateway.url, w.gateway.url, session.key, "m")
        Trainer(w, lambda dialect, request: {"text": "ok"})
        await model.chat([long])
        w.on = lambda message: None
        tracemalloc.start()
        try:
            asking = [group.create_task(model.chat([long, user(n)])) for n in range(20)]
            await w.until(lambda _: len(w.of(CallHeld)) == 21)
            kept, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most > 2 * MiB  # they were there
        assert kept < 1 * MiB
        for call in range(2, 22):
            assert (await w.asked(1, call)).keep == 1
            w.answer(1, call, text="done")
        assert {(await task)["choices"][0]["message"]["content"] for task in asking} == {"done"}


def user(text):
    return {"role": "user", "content": str(text)}


async def test_nothing_of_an_attempt_waits_for_a_collection(tmp_path):
    async def answered(w, session):
        Trainer(w, lambda dialect, request: {"text": "ok"})
        assert await said(Client(w, session), "messages", True, "x") == (200, "ok")

    async def failed(w, session):
        Trainer(w, lambda dialect, request: {"error": "no"})
        assert (await said(Client(w, session), "chat", False, "x"))[0] == 502

    async def left(w, session):
        w.on = lambda message: None
        asking = asyncio.ensure_future(said(Client(w, session), "gemini", False, "x"))
        await w.until(lambda _: w.of(CallHeld, session.attempt))
        await w.asked(session.attempt, 1)
        if session.attempt % 2:
            asking.cancel()
            await w.until(lambda _: w.of(CallReleased, session.attempt))
        return asking

    gc.collect()
    gc.disable()
    try:
        async with worker(tmp_path) as w:
            for attempt, way in enumerate((answered, failed, left, left)):
                async with w.session(attempt) as session:
                    held = weakref.ref(w.models._held[attempt])
                    asking = await way(w, session)
                ended = weakref.ref(session)
                del session
                if asking is not None:
                    await asyncio.wait([asking])
                del asking  # its error knows what it was about
                w.on = lambda message: None
                await w.until(lambda _, refs=(held, ended): not any(ref() for ref in refs))
    finally:
        gc.enable()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_reader_of_events_is_kept_alive_before_the_answer(tmp_path, dialect):
    async with worker(tmp_path, keep_alive=0.01) as w, w.session(1) as session, asyncio.TaskGroup() as group:
        sign = SPOKEN[dialect].keep_alive
        async with send(Client(w, session), speak(dialect, "x", stream=True)) as response:
            for _ in range(3):
                assert await response.content.readexactly(len(sign)) == sign
            w.answer(1, 1, text="at last", version="9")
            assert b"at last" in await response.read()
        async with send(Client(w, session), speak(dialect, "x", stream=True)) as response:
            assert await response.content.readexactly(len(sign)) == sign
            w.answer(1, 2, error="too late for a status")
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        plain = group.create_task(said(Client(w, session), dialect, False, "x"))
        await w.until(lambda _: len(w.of(CallHeld)) == 3)
        w.answer(1, 3, error="no")
        assert (await plain)[0] == 502
    assert [(e.status, e.version) for e in w.exchanges(1)] == [(200, "9"), (499, ""), (502, "")]
