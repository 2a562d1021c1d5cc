"""Text completions and embeddings pass the gateway: recorded, counted, paid once, beside the trajectory."""

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.dialect_requests import send, speak
from tests.live.test_gateway_clients import client_library
from tests.live.test_gateway_replay import place

from holdwater.conversation.nodes import read_nodes
from holdwater.conversation.trajectory import ExchangeTree, read_turns
from holdwater.core.prices import ModelPrice
from holdwater.core.records import ModelUsage
from holdwater.gateway.call_terms import CallTerms
from holdwater.gateway.upstreams.policy import PolicyUpstream

USED = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "one two", "finish_reason": "stop", "logprobs": None}],
}
EMBEDDED = {
    "object": "list",
    "model": "embedder",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}


class Provider:
    """A server of OpenAI's that counts what it is asked."""

    def __init__(self):
        self.asked = []

    async def answer(self, request):
        body = await request.json()
        self.asked.append((request.path, body))
        if request.path.endswith("/embeddings"):
            return web.json_response(EMBEDDED)
        if request.path.endswith("/chat/completions"):
            return web.json_response({"choices": [{"message": {"role": "assistant", "content": "hi"}}]})
        if not body.get("stream"):
            return web.json_response({**COMPLETION, "usage": USED})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        [choice] = COMPLETION["choices"]
        for text, finish in (("one ", None), ("two", "stop")):
            chunk = {**COMPLETION, "choices": [{**choice, "text": text, "finish_reason": finish}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if body.get("stream_options", {}).get("include_usage"):
            chunk = {**COMPLETION, "choices": [], "usage": USED}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(provider):
    app = web.Application()
    app.router.add_post("/{path:.*}", provider.answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


@asynccontextmanager
async def client_of(scene):
    openai = client_library("openai")
    async with openai.AsyncOpenAI(base_url=scene.gateway.url, api_key=scene.session.key) as client:
        yield client


async def complete(client, stream):
    """The text of a completion; a client that streams does not ask for the usage."""
    if not stream:
        reply = await client.completions.create(model="x", prompt="count", max_tokens=9)
        assert reply.usage.completion_tokens == 5
        return reply.choices[0].text
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            model="x", prompt="count", max_tokens=9, stream=True
        )
    ]
    assert all(chunk.choices for chunk in chunks)
    return "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_completion_is_recorded_and_paid_once(tmp_path, stream):
    provider = Provider()
    async with serving(provider) as url, place(tmp_path, url) as p:
        for number, earlier in ((1, ()), (2, (1,))):
            async with p.attempt(number, *earlier) as scene, client_of(scene) as client:
                assert await complete(client, stream) == "one two"
                used = ModelUsage(requests=1, input_tokens=7, output_tokens=5)
                assert (scene.session.usage.plus(scene.session.replayed_usage)) == used
        [turn] = read_turns(ExchangeTree(p.directory, 2))
    [(path, body)] = provider.asked
    assert (path, body["model"], body["prompt"]) == ("/v1/completions", "x", "count")
    assert (turn.thread, turn.dialect, turn.recorded) == (1, "completions", True)
    assert ([message.text for message in turn.new], turn.reply.text) == (["count"], "one two")


async def test_embeddings_keep_their_model_and_have_no_price(tmp_path):
    provider = Provider()
    terms = CallTerms(price=ModelPrice(input=1.0, output=1.0))
    async with serving(provider) as url, place(tmp_path, url, model="imposed", terms=terms) as p:
        async with p.attempt(1) as scene:
            async with client_of(scene) as client:
                reply = await client.embeddings.create(
                    model="embedder", input="text", encoding_format="float"
                )
            usage = scene.session.usage
        [turn] = read_turns(ExchangeTree(p.directory, 1))
    assert reply.data[0].embedding == [0.5, -0.25]
    assert [(path, body["model"]) for path, body in provider.asked] == [("/v1/embeddings", "embedder")]
    assert (usage.requests, usage.input_tokens, usage.cost) == (1, 3, None)
    assert (turn.thread, turn.reply.text) == (1, "[1 embedding of 2 numbers]")


async def test_they_stand_beside_the_trajectory_and_make_no_nodes(tmp_path):
    provider = Provider()
    async with (
        serving(provider) as url,
        place(tmp_path, url) as p,
        p.attempt(1) as scene,
        client_of(scene) as client,
    ):
        for _ in range(3):
            await complete(client, stream=False)
        async with send(scene, speak("chat", "hello")) as response:
            assert response.status == 200
    tree = ExchangeTree(p.directory, 1)
    assert [thread.numbers for thread in tree.threads()] == [(4,), (1,), (2,), (3,)]
    assert {node.exchange for node in read_nodes(p.directory, 1)} == {4}


async def test_an_upstream_without_embeddings_refuses_them_without_a_failure(tmp_path):
    async with serving(Provider()) as url, place(tmp_path, url) as p, p.attempt(1) as scene:
        p.gateway.steer(p.gateway.relay.default_route._replace(upstream=PolicyUpstream(lambda *_: "hi")))
        headers = {"Authorization": f"Bearer {scene.session.key}"}
        body = json.dumps({"model": "m", "input": "x"})
        async with p.http.post(f"{p.gateway.url}/embeddings", data=body, headers=headers) as response:
            assert response.status == 400
            assert "embeddings" in (await response.json())["error"]["message"]
        assert scene.session.failure is None
