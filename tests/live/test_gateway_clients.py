"""The real client libraries, through the gateway: a conversation with a tool call, and its record.

They are installed by `scripts/setup dev`. Where one is missing its tests are skipped, but never in CI.
"""

import importlib
import json
import os
import warnings

import pytest
from tests.dialect_requests import root
from tests.gateway_harness import MODEL, scene

from holdwater.testing.scripted_model import ScriptedReply, serve_raw

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

CALL = {"name": "add", "arguments": {"a": 19, "b": 23}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
SERVERS = pytest.mark.parametrize("server", ["same", "chat", "messages"])  # the dialect of the model's server


def client_library(name):
    try:
        with warnings.catch_warnings(action="ignore"):  # theirs, not ours
            return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"`{name}` is not installed: `scripts/setup dev`")


class Upstream:
    """Calls a tool first, then says what came of it; keeps what it was asked."""

    def __init__(self):
        self.seen = []

    def __call__(self, headers, body):
        self.seen.append(json.loads(body))
        if len(self.seen) == 1:
            return ScriptedReply(text="let me add", tool_calls=[CALL], cached=4)
        return ScriptedReply(text="it is 42")


def check(s, upstream, dialect, stream, server="same"):
    """Two turns are in the record, as the upstream saw them, and only what is new of the second."""
    first, second = s.log.exchanges
    if server in ("same", dialect):
        requests = s.log.requests()
        if dialect == "gemini":
            assert [request.pop("model") for request in requests] == [MODEL, MODEL]
        assert requests == upstream.seen
        assert first.original is None
    elif server == "chat":
        check_chat_requests(upstream.seen, stream)
        assert json.loads(bytes(first.original))["choices"][0]["message"]["content"] == "let me add"
    else:
        check_messages_requests(upstream.seen, stream)
        assert json.loads(bytes(first.original))["content"][0]["text"] == "let me add"
    assert (first.dialect, first.streamed, first.error, second.error) == (dialect, stream, "", "")
    assert (second.parent, second.keep, second.head) == (1, len(first.append), None)
    assert first.usage.cached_tokens == 4
    assert s.session.usage.output_tokens > 0
    assert s.session.failure is None


def check_chat_requests(requests, stream):
    """A server of Chat Completions got the conversation in its own dialect."""
    first, second = requests
    function = {"name": "add", "parameters": PARAMETERS}
    for request in requests:
        assert request["model"] == MODEL
        assert request.get("stream", False) == stream
        [tool] = request["tools"]
        assert {key: tool["function"][key] for key in function} == function
        assert [message["role"] for message in request["messages"][:2]] == ["system", "user"]
        assert "be exact" in json.dumps(request["messages"][0])
    assert second["messages"][:2] == first["messages"] == first["messages"][:2]
    said, result = second["messages"][2:]
    [called] = said["tool_calls"]
    assert (said["role"], said["content"], called["function"]["name"]) == ("assistant", "let me add", "add")
    assert json.loads(called["function"]["arguments"]) == CALL["arguments"]
    assert (result["role"], result["tool_call_id"]) == ("tool", called["id"])
    assert "42" in json.dumps(result["content"])


def check_messages_requests(requests, stream):
    """A server of Messages got the conversation in its own dialect."""
    first, second = requests
    for request in requests:
        assert request["model"] == MODEL
        assert request["max_tokens"] > 0
        assert request.get("stream", False) == stream
        assert "be exact" in request["system"]
        [tool] = request["tools"]
        assert (tool["name"], tool["input_schema"]) == ("add", PARAMETERS)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    [text, called] = second["messages"][1]["content"]
    assert (text["text"], called["type"], called["name"]) == ("let me add", "tool_use", "add")
    assert called["input"] == CALL["arguments"]
    [result] = second["messages"][2]["content"]
    assert (result["type"], result["tool_use_id"]) == ("tool_result", called["id"])
    assert "42" in json.dumps(result["content"])


@WAYS
@SERVERS
async def test_openai_chat(stream, server):
    openai = client_library("openai")
    upstream = Upstream()
    tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    async with serve_raw(upstream) as url, scene(url, server=server) as s:
        client = openai.AsyncOpenAI(base_url=s.gateway.url, api_key=s.session.key)
        messages = [{"role": "system", "content": "be exact"}, {"role": "user", "content": "19 + 23?"}]

        async def turn():
            if not stream:
                reply = await client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
                return reply.choices[0].message.model_dump(exclude_none=True)
            asked = client.chat.completions.stream(
                model=MODEL, messages=messages, tools=[tool], stream_options={"include_usage": True}
            )
            async with asked as events:
                reply = await events.get_final_completion()
            message = reply.choices[0].message.model_dump(exclude_none=True)
            message.pop("parsed", None)
            for call in message.get("tool_calls") or ():
                call.pop("index", None)
                call["function"].pop("parsed_arguments", None)
            return message

        message = await turn()
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == CALL["arguments"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
        assert (await turn())["content"] == "it is 42"
        assert [model.id async for model in client.models.list()] == []
        await client.close()
        check(s, upstream, "chat", stream, server)


@WAYS
@SERVERS
async def test_openai_responses(stream, server):
    openai = client_library("openai")
    upstream = Upstream()
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    async with serve_raw(upstream) as url, scene(url, server=server) as s:
        client = openai.AsyncOpenAI(base_url=s.gateway.url, api_key=s.session.key)
        items = [{"role": "user", "content": "19 + 23?"}]

        async def turn():
            asked = {"model": MODEL, "input": items, "tools": [tool], "instructions": "be exact"}
            if not stream:
                return await client.responses.create(**asked)
            async with client.responses.stream(**asked) as events:
                async for event in events:
                    if event.type == "response.completed":
                        break  # and hang up, as Codex does
                return event.response

        reply = await turn()
        [call] = [item for item in reply.output if item.type == "function_call"]
        assert json.loads(call.arguments) == CALL["arguments"]
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        assert (await turn()).output_text == "it is 42"
        await client.close()
        check(s, upstream, "responses", stream, server)


@WAYS
@SERVERS
@pytest.mark.parametrize("token", [False, True], ids=["key", "token"])
async def test_anthropic_messages(stream, server, token):
    anthropic = client_library("anthropic")
    upstream = Upstream()
    tool = {"name": "add", "input_schema": PARAMETERS}
    async with serve_raw(upstream) as url, scene(url, server=server) as s:
        key = {"auth_token": s.session.key} if token else {"api_key": s.session.key}
        client = anthropic.AsyncAnthropic(base_url=root(s), **key)
        messages = [{"role": "user", "content": "19 + 23?"}]

        async def turn():
            asked = {"model": MODEL, "max_tokens": 99, "tools": [tool], "system": "be exact"}
            if not stream:
                return await client.messages.create(messages=messages, **asked)
            async with client.messages.stream(messages=messages, **asked) as events:
                return await events.get_final_message()

        reply = await turn()
        [call] = [block for block in reply.content if block.type == "tool_use"]
        assert call.input == CALL["arguments"]
        said = [b.model_dump(exclude_none=True, exclude={"parsed_output"}) for b in reply.content]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        assert (await turn()).content[0].text == "it is 42"
        check(s, upstream, "messages", stream, server)
        counted = await client.messages.count_tokens(model=MODEL, messages=messages)
        assert counted.input_tokens > 1
        await client.close()
        assert s.log.last.dialect == ("messages" if server == "chat" else "messages_count")


@WAYS
@SERVERS
async def test_google_genai(stream, server):
    genai = client_library("google.genai")
    types = genai.types
    upstream = Upstream()
    async with serve_raw(upstream) as url, scene(url, server=server) as s:
        options = types.HttpOptions(base_url=root(s))
        declared = types.FunctionDeclaration(name="add", parameters_json_schema=PARAMETERS)
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[declared])], system_instruction="be exact"
        )
        contents = [types.Content(role="user", parts=[types.Part(text="19 + 23?")])]
        async with genai.Client(api_key=s.session.key, http_options=options).aio as client:

            async def turn():
                asked = {"model": MODEL, "contents": contents, "config": config}
                if not stream:
                    return (await client.models.generate_content(**asked)).candidates[0].content.parts
                parts = []
                async for chunk in await client.models.generate_content_stream(**asked):
                    parts += chunk.candidates[0].content.parts or ()
                return parts

            parts = await turn()
            [call] = [part.function_call for part in parts if part.function_call]
            assert call.args == CALL["arguments"]
            result = types.Part.from_function_response(name="add", response={"result": 42})
            contents += [types.Content(role="model", parts=parts), types.Content(role="user", parts=[result])]
            assert "".join(part.text for part in await turn() if part.text) == "it is 42"
            check(s, upstream, "gemini", stream, server)
            counted = await client.models.count_tokens(model=MODEL, contents=contents)
            assert counted.total_tokens > 1
        assert s.log.last.dialect == ("gemini_count" if server == "same" else "gemini")


@WAYS
async def test_clients_stop_at_an_error_of_the_gateway(stream):
    """One call each reaches a gateway whose attempt is over: the client raises what it means, at once."""
    openai, anthropic = client_library("openai"), client_library("anthropic")
    genai = client_library("google.genai")
    async with serve_raw(Upstream()) as url, scene(url) as s:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        async with openai.AsyncOpenAI(base_url=s.gateway.url, api_key="sk-dead") as client:
            with pytest.raises(openai.AuthenticationError, match="no attempt is running"):
                await client.chat.completions.create(stream=stream, **asked)
            with pytest.raises(openai.AuthenticationError, match="no attempt is running"):
                await client.responses.create(model=MODEL, input="hi", stream=stream)
        async with anthropic.AsyncAnthropic(base_url=root(s), api_key="sk-dead") as client:
            with pytest.raises(anthropic.AuthenticationError, match="no attempt is running"):
                await client.messages.create(max_tokens=9, stream=stream, **asked)
        options = genai.types.HttpOptions(base_url=root(s))
        async with genai.Client(api_key="sk-dead", http_options=options).aio as client:
            with pytest.raises(genai.errors.ClientError, match="no attempt is running"):
                if stream:
                    chunks = await client.models.generate_content_stream(model=MODEL, contents="hi")
                    assert [chunk async for chunk in chunks] == []
                else:
                    await client.models.generate_content(model=MODEL, contents="hi")
        assert s.log.exchanges == []
