"""Calls of agents in Python: without a connection, what happens to them is what happens to any call."""

import asyncio
import json

import pytest
from tests.gateway_scene import MODEL, Log, scene

from holdwater.core.errors import ModelFailed
from holdwater.gateway.client import ChatClient
from holdwater.testing.scripted import Reply, serve, serve_raw


def user(text):
    return {"role": "user", "content": text}


async def test_a_call_that_is_tried_again_says_what_it_said_first_whatever_the_agent_did_meanwhile():
    bodies, messages = [], [user("x" * 300_000), user("hi")]

    def refused_once(headers, body):
        bodies.append(body)
        messages[0]["content"] = "changed while it was sent"
        return Reply(status=429, headers={"retry-after": "0"}) if len(bodies) == 1 else Reply(text="hello")

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

    async with serve(held) as upstream, scene(upstream) as s:
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


async def test_a_bug_of_the_gateway_is_not_taken_for_one_of_the_agent():
    async with (
        serve(lambda request: Reply(text="hello")) as upstream,
        scene(upstream) as s,
        s.gateway.session(2, Log(), recording=Broken()) as session,
    ):
        with pytest.raises(ModelFailed, match="internal error: RuntimeError: a bug"):
            await ChatClient(s.gateway.ask, "", "", session.key, MODEL).chat([user("hi")])


@pytest.mark.parametrize(
    ("reply", "options", "message"),
    [
        (Reply(text="hello"), {"body_cap": 1000}, "larger than the 1000 bytes"),
        (Reply(headers={"Content-Type": "text/event-stream"}, body=b"data: [DONE]\n\n"), {}, "no JSON"),
    ],
    ids=["too large", "an unasked stream"],
)
async def test_what_cannot_be_passed_on_is_told(reply, options, message):
    async with serve(lambda request: reply) as upstream, scene(upstream, **options) as s:
        with pytest.raises(ModelFailed, match=message):
            await s.client.chat([user("x" * 1000)])


async def test_after_its_attempt_a_key_works_no_more():
    async with serve(lambda request: Reply(text="hello")) as upstream, scene(upstream) as s:
        async with s.gateway.session(2, Log()) as session:
            client = ChatClient(s.gateway.ask, "", "", session.key, MODEL)
        with pytest.raises(ModelFailed, match="no attempt is running with this key"):
            await client.chat([user("hi")])
