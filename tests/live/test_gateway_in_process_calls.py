"""Calls of agents in Python: without a connection, what happens to them is what happens to any call."""

import asyncio
import json

import pytest
from tests.gateway_harness import MODEL, Log, scene

from holdwater.core.errors import ModelFailed
from holdwater.gateway.in_process_calls import ChatClient
from holdwater.testing.scripted_model import ScriptedReply, serve_raw, serve_script


def user(text):
    return {"role": "user", "content": text}


async def test_a_retried_call_sends_its_first_body_despite_changes_by_the_agent():
    bodies, messages = [], [user("x" * 300_000), user("hi")]

    def refused_once(headers, body):
        bodies.append(body)
        messages[0]["content"] = "changed while it was sent"
        return (
            ScriptedReply(status=429, headers={"retry-after": "0"})
            if len(bodies) == 1
            else ScriptedReply(text="hello")
        )

    async with serve_raw(refused_once) as upstream, scene(upstream) as s:
        await s.client.chat(messages)

        assert bodies[0] == bodies[1]
        assert json.loads(bodies[1])["messages"] == [user("x" * 300_000), user("hi")]
        assert s.log.requests() == [json.loads(bodies[1])]

        await s.client.chat(messages)
        assert json.loads(bodies[2])["messages"] == messages


async def test_a_cancelled_call_ends_upstream_too_and_is_in_the_record():
    reached, cancelled = asyncio.Event(), asyncio.Event()

    async def held(request):
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serve_script(held) as upstream, scene(upstream) as s:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(s.client.chat([user("hi")]))
            await reached.wait()
            call.cancel()

        await cancelled.wait()
        assert (s.log.last.error, s.log.last.status) == ("client went away", 499)
        assert s.gateway.serving == 0


class Broken:
    """A recording with a bug."""

    def take(self, identity):
        raise RuntimeError("a bug")


async def test_a_bug_of_the_gateway_is_not_blamed_on_the_agent():
    async with (
        serve_script(lambda request: ScriptedReply(text="hello")) as upstream,
        scene(upstream) as s,
        s.gateway.open_session(2, Log(), recording=Broken()) as session,
    ):
        with pytest.raises(ModelFailed, match="internal error: RuntimeError: a bug"):
            await ChatClient(s.gateway.ask, "", "", session.key, MODEL).chat([user("hi")])


@pytest.mark.parametrize(
    ("reply", "options", "message"),
    [
        (ScriptedReply(text="hello"), {"body_cap": 1000}, "larger than the 1000 bytes"),
        (
            ScriptedReply(headers={"Content-Type": "text/event-stream"}, body=b"data: [DONE]\n\n"),
            {},
            "not valid JSON",
        ),
    ],
    ids=["too large", "an unasked stream"],
)
async def test_a_call_that_cannot_be_passed_on_fails_with_the_reason(reply, options, message):
    async with serve_script(lambda request: reply) as upstream, scene(upstream, **options) as s:
        with pytest.raises(ModelFailed, match=message):
            await s.client.chat([user("x" * 1000)])


async def test_after_its_attempt_a_key_works_no_more():
    async with serve_script(lambda request: ScriptedReply(text="hello")) as upstream, scene(upstream) as s:
        async with s.gateway.open_session(2, Log()) as session:
            client = ChatClient(s.gateway.ask, "", "", session.key, MODEL)
        with pytest.raises(ModelFailed, match="no attempt is running with this key"):
            await client.chat([user("hi")])
