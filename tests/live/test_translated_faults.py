"""A server of another dialect fails: the client learns it in its own dialect, and it is recorded once."""

import json

import aiohttp
import pytest
from tests.dialect_requests import message_of, send, speak, text_of
from tests.gateway_harness import scene

from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, apply_plan, serve_script

NOW = {"retry-after": "0"}
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PAIRS = pytest.mark.parametrize(
    ("agent", "server"),
    [
        ("messages", "chat"),
        ("responses", "chat"),
        ("gemini", "chat"),
        ("chat", "messages"),
        ("responses", "messages"),
        ("gemini", "messages"),
    ],
)


def fine(request):
    return ScriptedReply(text="a fine reply, long enough to be cut")


async def ask(s, agent, stream):
    """The status and the body that the agent gets; None for a body that broke off."""
    try:
        async with send(s, speak(agent, "hi", stream=stream)) as response:
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, None


@PAIRS
@WAYS
async def test_what_passes_is_tried_again(agent, server, stream):
    plan = [ScriptedReply(status=429, headers=NOW), ScriptedReply(status=503, headers=NOW), ReplyFault.RESET]
    async with serve_script(apply_plan(plan, fine)) as url, scene(url, server=server) as s:
        status, _ = await ask(s, agent, stream)
        assert status == 200
        assert text_of(agent, s.log.reply) == fine({}).text
        assert (len(s.log.exchanges), s.log.last.error, s.session.failure) == (1, "", None)
        assert s.log.last.original is not None
        assert s.log.last.usage.output_tokens > 0


@PAIRS
@WAYS
async def test_an_error_has_the_form_of_the_agent(agent, server, stream):
    refusal = ScriptedReply(status=400, body=json.dumps({"error": {"message": "no such option"}}).encode())
    async with serve_script(lambda request: refusal) as url, scene(url, server=server) as s:
        status, body = await ask(s, agent, stream)
        assert (status, message_of(json.loads(body))) == (400, "no such option")
        assert (s.log.last.status, len(s.log.exchanges)) == (400, 1)
        assert s.session.failure.kind == "invalid"


@PAIRS
@pytest.mark.parametrize("fault", [ReplyFault.CUT, ReplyFault.SHORT, ReplyFault.GARBAGE, ReplyFault.ERROR])
@WAYS
async def test_a_broken_reply_is_a_model_failure(agent, server, fault, stream):
    broken = ScriptedReply(text="a reply that is never whole " * 20, fault=fault)
    async with serve_script(lambda request: broken) as url, scene(url, server=server, retries=0) as s:
        status, body = await ask(s, agent, stream)
        whole = status == 200 and body is not None and not stream
        assert not whole
        assert len(s.log.exchanges) == 1
        assert s.log.last.error
        assert s.session.failure is not None
