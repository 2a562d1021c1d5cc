"""The real client libraries read a reply that is told as a stream: the same text, calls and usage."""

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.live.test_gateway_clients import client_library

from holdwater.dialect import DIALECTS
from holdwater.testing.reply_formats import WIRES, ScriptedRequest
from holdwater.testing.scripted_model import ScriptedReply

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

ARGUMENTS = [{"a": 19, "b": [2.5, None, "é\n"]}, {}]
CALLS = [{"name": name, "arguments": said} for name, said in zip(("add", "look"), ARGUMENTS, strict=True)]
REPLY = ScriptedReply(text="let me\nadd: äö", reasoning="19 + 23", tool_calls=CALLS, cached=4)


def whole(dialect):
    return WIRES[dialect].render_reply(REPLY, ScriptedRequest(model="m", size=40))


@asynccontextmanager
async def telling(dialect, reply):
    """A server that tells `reply` to all who ask, from a body as providers format it."""
    events = DIALECTS[dialect].render_stream(json.dumps(reply, indent=2).encode())

    async def tell(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    app = web.Application()
    app.router.add_post("/{path:.*}", tell)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_openai_reads_a_chat():
    openai = client_library("openai")
    reply = whole("chat")
    [choice] = reply["choices"]
    choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}], "refusal": None}
    reply["choices"].append(
        {"index": 1, "message": {"role": "assistant", "content": "no"}, "finish_reason": "stop"}
    )
    asked = {"model": "m", "messages": [{"role": "user", "content": "19 + 23?"}]}
    async with (
        telling("chat", reply) as url,
        openai.AsyncOpenAI(base_url=url, api_key="k") as client,
        client.chat.completions.stream(**asked) as events,
    ):
        got = await events.get_final_completion()
    first, second = got.choices
    message = first.message.model_dump(exclude_none=True)
    for call in message["tool_calls"]:
        assert call.pop("index") in (0, 1)
        call["function"].pop("parsed_arguments", None)
    message.pop("parsed", None)
    assert message == choice["message"]
    assert (first.finish_reason, first.logprobs.model_dump(exclude={"content": {0: {"bytes"}}})) == (
        "tool_calls",
        choice["logprobs"],
    )
    assert (second.message.content, second.finish_reason) == ("no", "stop")
    assert got.usage.model_dump(exclude_none=True) == reply["usage"]
    assert (got.id, got.object) == (reply["id"], "chat.completion")


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_openai_reads_a_response(status):
    openai = client_library("openai")
    reply = {**whole("responses"), "status": status}
    reply["output"].append({"type": "web_search_call", "id": "ws_1", "status": "completed"})
    said = {"output_text": "", "reasoning_summary_text": "", "function_call_arguments": ""}
    async with (
        telling("responses", reply) as url,
        openai.AsyncOpenAI(base_url=url, api_key="k") as client,
        client.responses.stream(model="m", input="19 + 23?") as events,
    ):
        async for event in events:
            if event.type.endswith(".delta"):
                said[event.type.removeprefix("response.").removesuffix(".delta")] += event.delta
    assert said == {
        "output_text": REPLY.text,
        "reasoning_summary_text": REPLY.reasoning,
        "function_call_arguments": "".join(item.get("arguments", "") for item in reply["output"]),
    }
    assert event.type == f"response.{status}"
    assert event.response.output_text == REPLY.text
    assert event.response.usage.model_dump(exclude_unset=True) == reply["usage"]
    got = [
        item.model_dump(exclude_unset=True, exclude={"parsed_arguments"}) for item in event.response.output
    ]
    for item in got:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    assert got == reply["output"]


async def test_anthropic_reads_a_message():
    anthropic = client_library("anthropic")
    reply = whole("messages")
    cited = {"type": "char_location", "cited_text": "x", "document_index": 0}
    reply["content"][1]["citations"] = [cited]
    reply["content"] += [
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "é"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
        {"type": "redacted_thinking", "data": "c2VjcmV0"},
    ]
    reply = {**reply, "stop_reason": "refusal", "stop_sequence": "END", "container": {"id": "c"}}
    reply["stop_details"] = {"type": "refusal", "category": "cyber", "explanation": "no"}
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "19 + 23?"}]}
    async with (
        telling("messages", reply) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k") as client,
        client.messages.stream(**asked) as events,
    ):
        texts = [text async for text in events.text_stream]
        got = await events.get_final_message()
    assert texts == [REPLY.text]
    content = [block.model_dump(exclude_unset=True, exclude={"parsed_output"}) for block in got.content]
    assert content == reply["content"]
    assert (got.stop_reason, got.stop_sequence, got.container.id) == ("refusal", "END", "c")
    assert got.stop_details.model_dump(exclude_unset=True) == reply["stop_details"]
    assert got.usage.model_dump(exclude_unset=True) == reply["usage"]


async def test_google_genai_reads_a_reply():
    genai = client_library("google.genai")
    reply = whole("gemini")
    async with telling("gemini", reply) as url:
        options = genai.types.HttpOptions(base_url=url)
        async with genai.Client(api_key="k", http_options=options).aio as client:
            chunks = [c async for c in await client.models.generate_content_stream(model="m", contents="19?")]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    assert [part.text for part in parts if part.text] == [REPLY.reasoning, REPLY.text]
    assert [part.thought for part in parts if part.text] == [True, None]
    assert [part.function_call.args for part in parts if part.function_call] == ARGUMENTS
    assert chunks[-1].candidates[0].finish_reason == "STOP"
    usage = chunks[-1].usage_metadata.model_dump(exclude_none=True, by_alias=True)
    assert usage == reply["usageMetadata"]
