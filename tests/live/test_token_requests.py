"""`--token-ids` against local servers that answer as vLLM, SGLang, NeMo and a strict provider do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.dialect_requests import speak, text_of
from tests.live.test_gateway_replay import Place, answered, place

from holdwater.conversation.nodes import read_nodes
from holdwater.core.token_sequences import TokenSequence, TokenServer, build_sequences
from holdwater.dialect import CHAT
from holdwater.gateway.upstreams.http import HttpUpstream
from holdwater.gateway.upstreams.token_requests import TokenUpstream
from holdwater.gateway.upstreams.translation import TranslatedUpstream, TranslationTerms

PROMPT, TOKENS, LOGPROBS = [7, 8, 9], [3, 1, 4, 1, 5], [-0.5, -0.25, -1.0, -2.0, -0.125]
TEXT = "31415"


class EngineServer:
    """A server of models: which fields it understands, what it answers, what it was asked."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        fields = body.keys() - {"model", "messages", "stream", "stream_options", "max_tokens"}
        refused = (
            body.get("stream") and body.get("return_prompt_token_ids") if self.family == "sglang" else None
        )
        if self.family == "provider" and fields:
            refused = True
        if refused:
            return web.json_response({"error": {"message": f"unknown: {sorted(fields)}"}}, status=400)
        if not body.get("stream"):
            return web.json_response(self.render(body, range(len(TOKENS))))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(len(TOKENS)):
            chunk = self.render(body, range(at, at + 1))
            [choice] = chunk["choices"]
            choice["delta"] = choice.pop("message")
            if at < len(TOKENS) - 1:
                choice["finish_reason"] = None
            if at:
                chunk.pop("prompt_token_ids", None)
                choice["delta"].pop("prompt_token_ids", None)
            await response.write(b"data: %s\n\n" % json.dumps(chunk).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def render(self, body: dict[str, Any], places: range) -> dict[str, Any]:
        """The reply, or the part of it with these tokens, in the form of the family."""
        tokens, logprobs = [TOKENS[at] for at in places], [LOGPROBS[at] for at in places]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(map(str, tokens))}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]}
        if not body.get("logprobs"):
            return reply
        names = [f"token_id:{token}" if self.family == "named" else str(token) for token in tokens]
        pairs = zip(names, logprobs, strict=True)
        choice["logprobs"] = {"content": [{"token": name, "logprob": value} for name, value in pairs]}
        if self.family == "vllm" and body.get("return_token_ids"):
            return {**reply, "prompt_token_ids": PROMPT, "choices": [{**choice, "token_ids": tokens}]}
        if self.family == "named" and body.get("return_tokens_as_token_ids"):
            return {**reply, "prompt_token_ids": PROMPT}
        if self.family == "nemo":
            message |= {"prompt_token_ids": PROMPT, "generation_token_ids": tokens}
            message["generation_log_probs"] = logprobs
        if self.family == "sglang" and body.get("return_meta_info"):
            known = zip(logprobs, tokens, names, strict=True)
            choice["meta_info"] = {"output_token_logprobs": [list(token) for token in known]}
            choice["prompt_token_ids"] = PROMPT
        return reply


@asynccontextmanager
async def engine(family: str) -> AsyncIterator[EngineServer]:
    served = EngineServer(family)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield served
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(path: Path, served: EngineServer, server: TokenServer) -> AsyncIterator[Place]:
    """A gateway that asks the server for tokens, and translates the dialects that it does not have."""
    async with place(path, served.url) as p, HttpUpstream(served.url, retries=0) as http:
        terms = TranslationTerms(lambda attempt, delta: [], lambda attempt: [], lambda kind, message: None)
        upstream = TranslatedUpstream(_only_chat(TokenUpstream(http, server)), CHAT, terms)
        p.gateway.steer(p.gateway.relay.default_route._replace(upstream=upstream))
        yield p


def _only_chat(upstream: TokenUpstream) -> TokenUpstream:
    upstream.dialects = frozenset({"chat"})
    return upstream


def read_one(p: Place, attempt: int = 1) -> TokenSequence:
    [sequence] = build_sequences(read_nodes(p.directory, attempt))
    return sequence


def said(p: Place, dialect: str, attempt: int = 1) -> str:
    return text_of(dialect, msgspec.json.decode(bytes(p.exchanges(attempt)[-1].reply)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("family", "server"),
    [(family, family) for family in ("vllm", "sglang", "nemo")]
    + [(family, "auto") for family in ("vllm", "sglang", "nemo")]
    + [("named", "nemo")],
)
async def test_ids_of_every_server_are_read_in_every_form(
    tmp_path: Path, family: str, server: str, stream: bool
) -> None:
    async with engine(family) as served, asking(tmp_path, served, TokenServer(server)) as p:
        for number, dialect in enumerate(("chat", "messages"), 1):
            async with p.attempt(number) as scene:
                await answered(scene, speak(dialect, "count", stream=stream))

            sequence = read_one(p, number)
            assert said(p, dialect, number) == TEXT
            assert sequence.ids.tolist() == [*PROMPT, *TOKENS]
            assert "".join(map(str, sequence.mask)) == "00011111"
            assert sequence.logprobs.tolist() == [0.0, 0.0, 0.0, *LOGPROBS]


async def test_a_server_that_refuses_the_fields_is_asked_without(tmp_path: Path) -> None:
    async with (
        engine("provider") as served,
        asking(tmp_path, served, TokenServer.AUTO) as p,
        p.attempt(1) as scene,
    ):
        for text in ("one", "two"):
            await answered(scene, speak("chat", text))
            assert said(p, "chat") == TEXT

    assert [bool(body.get("logprobs")) for body in served.asked] == [True, False, False]


async def test_a_stream_without_ids_is_asked_whole_from_then_on(tmp_path: Path) -> None:
    async with (
        engine("sglang") as served,
        asking(tmp_path, served, TokenServer.AUTO) as p,
        p.attempt(1) as scene,
    ):
        for text in ("one", "two"):
            await answered(scene, speak("chat", text, stream=True))
            assert said(p, "chat") == TEXT

    assert [bool(body["stream"]) for body in served.asked] == [True, False, False]
    assert all(body["return_meta_info"] for body in served.asked)


async def test_the_record_has_the_request_of_the_agent(tmp_path: Path) -> None:
    request = speak("chat", "count")
    async with (
        engine("vllm") as served,
        asking(tmp_path, served, TokenServer.VLLM) as p,
        p.attempt(1) as scene,
    ):
        await answered(scene, request)

    [exchange] = p.exchanges(1)
    assert exchange.head is not None and b"token_ids" not in bytes(exchange.head)
    assert served.asked[0]["return_token_ids"] is True
    assert {key: served.asked[0][key] for key in msgspec.json.decode(request.body)} == json.loads(
        request.body
    )


async def test_an_agent_that_wants_no_logprobs_does_not_turn_them_off(tmp_path: Path) -> None:
    request = speak("chat", "count")
    body = {**json.loads(request.body), "logprobs": False}
    async with (
        engine("vllm") as served,
        asking(tmp_path, served, TokenServer.VLLM) as p,
        p.attempt(1) as scene,
    ):
        await answered(scene, request._replace(body=json.dumps(body).encode()))

    assert served.asked[0]["logprobs"] is True
    assert read_one(p).complete
