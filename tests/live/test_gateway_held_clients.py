"""The real client libraries, answered by a trainer in Chat Completions: text and tool calls, in every way."""

import json

import pytest
from tests.held_call_harness import HELD, Trainer, worker
from tests.live.test_gateway_clients import PARAMETERS, WAYS, client_library

from holdwater.dialect import find_dialect
from holdwater.dialect.message import ReplyTokens

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

ARGUMENTS = {"a": 19, "b": 23}
CALLING = {
    "id": "chatcmpl-9",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "let me add",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)},
                    }
                ],
            },
            "finish_reason": "tool_calls",
            "token_ids": [3, 4],
            "logprobs": {"content": [{"token": "x", "logprob": -0.25, "top_logprobs": []}]},
        }
    ],
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
}
IN_CHAT = [
    {"role": "system", "content": "be exact"},
    {"role": "user", "content": "19 + 23?"},
    ("let me add", {"name": "add", "arguments": ARGUMENTS}),
    ("tool", "42"),
]


class Scene:
    """A session whose calls a trainer answers: first with a tool call, then with a text."""

    def __init__(self, tmp_path, name):
        self._tmp_path, self._name = tmp_path, name

    async def __aenter__(self):
        self._worker = worker(self._tmp_path)
        self.w = await self._worker.__aenter__()
        self._session = self.w.session(1, HELD)
        self.key = (await self._session.__aenter__()).key
        answers = iter([{"reply": CALLING, "version": "1"}, {"text": "it is 42", "version": "2"}])
        self.trainer = Trainer(self.w, lambda dialect, request: next(answers))
        return self

    async def __aexit__(self, *error):
        await self._session.__aexit__(*error)
        await self._worker.__aexit__(*error)
        if error[0] is None:
            self._check()

    def _check(self):
        first, second = self.w.exchanges(1)
        assert [e.error for e in (first, second)] == ["", ""]
        assert [e.version for e in (first, second)] == ["1", "2"]
        reply = find_dialect(self._name).parse_reply(json.loads(bytes(first.reply)))
        assert reply.tokens == ReplyTokens((1, 2), (3, 4), (-0.25,))
        assert (first.usage.input_tokens, first.usage.output_tokens) == (7, 2)
        asked = find_dialect(self._name).request_to_chat(self.trainer.requests[-1])
        said = [_plain(message) for message in asked["messages"]]
        assert said == IN_CHAT
        assert [tool["function"]["name"] for tool in asked["tools"]] == ["add"]


def _plain(message):
    if message["role"] == "assistant":
        function = message["tool_calls"][0]["function"]
        called = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        return message["content"], called
    if message["role"] == "tool":
        return "tool", str(message["content"]).replace('{"result":42}', "42")
    return message


@WAYS
async def test_openai_chat(tmp_path, stream):
    openai = client_library("openai")
    tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    async with (
        Scene(tmp_path, "chat") as s,
        openai.AsyncOpenAI(base_url=s.w.gateway.url, api_key=s.key) as client,
    ):
        messages = [{"role": "system", "content": "be exact"}, {"role": "user", "content": "19 + 23?"}]

        async def turn():
            asked = {"model": "m", "messages": messages, "tools": [tool]}
            if not stream:
                return (await client.chat.completions.create(**asked)).choices[0]
            async with client.chat.completions.stream(**asked) as events:
                return (await events.get_final_completion()).choices[0]

        first = await turn()
        assert (first.finish_reason, first.message.content) == ("tool_calls", "let me add")
        [call] = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", ARGUMENTS)
        calls = [call.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}})]
        messages += [{"role": "assistant", "content": "let me add", "tool_calls": calls}]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "42"}]
        assert (await turn()).message.content == "it is 42"


@WAYS
async def test_openai_responses(tmp_path, stream):
    openai = client_library("openai")
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    async with (
        Scene(tmp_path, "responses") as s,
        openai.AsyncOpenAI(base_url=s.w.gateway.url, api_key=s.key) as client,
    ):
        items = [{"role": "user", "content": "19 + 23?"}]

        async def turn():
            asked = {"model": "m", "input": items, "tools": [tool], "instructions": "be exact"}
            if not stream:
                return await client.responses.create(**asked)
            async with client.responses.stream(**asked) as events:
                return await events.get_final_response()

        first = await turn()
        assert (first.status, first.output_text) == ("completed", "let me add")
        [call] = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", ARGUMENTS)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        assert (await turn()).output_text == "it is 42"


@WAYS
async def test_anthropic_messages(tmp_path, stream):
    anthropic = client_library("anthropic")
    async with (
        Scene(tmp_path, "messages") as s,
        anthropic.AsyncAnthropic(base_url=s.w.root, api_key=s.key) as client,
    ):
        messages = [{"role": "user", "content": "19 + 23?"}]

        async def turn():
            tools = [{"name": "add", "input_schema": PARAMETERS}]
            asked = {"model": "m", "max_tokens": 99, "tools": tools, "system": "be exact"}
            if not stream:
                return await client.messages.create(messages=messages, **asked)
            async with client.messages.stream(messages=messages, **asked) as events:
                return await events.get_final_message()

        first = await turn()
        assert first.stop_reason == "tool_use"
        [call] = [block for block in first.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("add", ARGUMENTS)
        said = [b.model_dump(exclude_none=True, exclude={"parsed_output"}) for b in first.content]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        assert (await turn()).content[0].text == "it is 42"


@WAYS
async def test_google_genai(tmp_path, stream):
    genai = client_library("google.genai")
    types = genai.types
    async with Scene(tmp_path, "gemini") as s:
        declared = types.FunctionDeclaration(name="add", parameters_json_schema=PARAMETERS)
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[declared])], system_instruction="be exact"
        )
        contents = [types.Content(role="user", parts=[types.Part(text="19 + 23?")])]
        options = types.HttpOptions(base_url=s.w.root)
        async with genai.Client(api_key=s.key, http_options=options).aio as client:

            async def turn():
                asked = {"model": "m", "contents": contents, "config": config}
                if not stream:
                    return (await client.models.generate_content(**asked)).candidates[0].content.parts
                parts = []
                async for chunk in await client.models.generate_content_stream(**asked):
                    parts += chunk.candidates[0].content.parts or ()
                return parts

            parts = await turn()
            assert [part.text for part in parts if part.text and not part.thought] == ["let me add"]
            [call] = [part.function_call for part in parts if part.function_call]
            assert (call.name, call.args) == ("add", ARGUMENTS)
            result = types.Part.from_function_response(name="add", response={"result": 42})
            contents += [types.Content(role="model", parts=parts), types.Content(role="user", parts=[result])]
            assert [part.text for part in await turn()] == ["it is 42"]
