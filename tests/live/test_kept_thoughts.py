"""A server gets its own thoughts back, signed as they were, from agents whose dialect cannot carry them."""

import json
from typing import Any

import pytest
from tests.dialect_requests import Request, send, speak
from tests.gateway_harness import Log, Scene, scene
from tests.in_process_run import QUICK

import holdwater as hw
from holdwater.dialect import DIALECTS
from holdwater.dialect.interface import AdaptedRequest, RequestTarget
from holdwater.gateway.upstreams.kept_thoughts import KeptThoughts
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, serve_script

THOUGHTS = [
    {"type": "thinking", "thinking": "what is 19 + 23?", "signature": "c2lnbmVk"},
    {"type": "redacted_thinking", "data": "aGlkZGVu"},
]
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 19, "b": 23}}
REPLY = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "test-model",
    "content": [*THOUGHTS, {"type": "text", "text": "let me add"}, CALL],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 5, "output_tokens": 7},
}
CHAT_REPLY = {
    "id": "c1",
    "object": "chat.completion",
    "model": "test-model",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "let me add",
                "reasoning_content": "what is 19 + 23?",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 19, "b": 23}'},
                    }
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 7},
}
REPLIES = {"messages": REPLY, "chat": CHAT_REPLY}
RESULTS: dict[str, Any] = {
    "chat": lambda name: {"role": "tool", "tool_call_id": name, "content": "42"},
    "responses": lambda name: {"type": "function_call_output", "call_id": name, "output": "42"},
    "gemini": lambda name: {
        "role": "user",
        "parts": [{"functionResponse": {"name": "add", "response": {"result": "42"}}}],
    },
}
AGENTS = pytest.mark.parametrize("agent", ["chat", "responses", "gemini"])
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class ModelServer:
    """Thinks before its first reply; keeps what it was asked."""

    def __init__(self, dialect: str, stream: bool) -> None:
        self.requests: list[Any] = []  # bound: the calls of a test
        whole = json.dumps(REPLIES[dialect]).encode()
        body = b"".join(DIALECTS[dialect].render_stream(whole)) if stream else whole
        kind = "text/event-stream" if stream else "application/json"
        self._first = ScriptedReply(body=body, headers={"Content-Type": kind})

    def __call__(self, request: Any) -> ScriptedReply:
        self.requests.append(request)
        return self._first if len(self.requests) == 1 else ScriptedReply(text="it is 42")

    @property
    def returned(self) -> Any:
        """The model's message in the last request."""
        [message] = [m for m in self.requests[-1]["messages"] if m["role"] == "assistant"]
        return message


async def ask(s: Scene, request: Request) -> bytes:
    async with send(s, request) as response:
        assert response.status == 200, await response.text()
        return await response.read()


def go_on(agent: str, first: Request, answer: bytes, stream: bool) -> Request:
    """The next request of an agent that knows its own dialect alone: its tool's result."""
    dialect = DIALECTS[agent]
    if stream:
        reader = dialect.stream(AdaptedRequest(RequestTarget("x"), {}))
        assert b"".join(reader.events(answer)) == answer
        answer = reader.reply()
    body = json.loads(first.body)
    [(said, _)] = dialect.split_choices(json.loads(answer))
    said = json.loads(json.dumps(said).replace('"thoughtSignature"', '"ignored"'))
    name = "toolu_1" if b"toolu_1" in answer else "call_1"
    body[dialect.key] += [*(said if isinstance(said, list) else [said]), RESULTS[agent](name)]
    return first._replace(body=json.dumps(body).encode())


@AGENTS
@WAYS
@pytest.mark.parametrize("kept", [True, False], ids=["in memory", "in the record"])
async def test_signed_thoughts_come_back(agent: str, stream: bool, kept: bool) -> None:
    server, log = ModelServer("messages", stream), Log()
    first = speak(agent, "19 + 23?", stream=stream)
    async with serve_script(server) as url:
        async with scene(url, server="messages", log=log) as s:
            second = go_on(agent, first, await ask(s, first), stream)
            if kept:
                await ask(s, second)
        if not kept:
            async with scene(url, server="messages", log=log) as s:
                await ask(s, second)
    assert b"redacted" not in second.body
    assert b"c2lnbmVk" not in second.body
    text, call = server.returned["content"][2:]
    assert server.returned["content"][:2] == THOUGHTS
    assert (text["text"], call) == ("let me add", {**CALL, "id": call["id"]})


@WAYS
async def test_plain_thoughts_come_back_to_a_chat_server(stream: bool) -> None:
    server = ModelServer("chat", stream)
    first = speak("gemini", "19 + 23?", stream=stream)
    async with serve_script(server) as url, scene(url, server="chat") as s:
        second = go_on("gemini", first, await ask(s, first), stream)
        body = json.loads(second.body)
        for content in body["contents"]:  # as Gemini CLI does
            content["parts"] = [part for part in content["parts"] if not part.get("thought")]
        await ask(s, second._replace(body=json.dumps(body).encode()))
    assert server.returned["reasoning_content"] == "what is 19 + 23?"


async def test_thoughts_of_a_reply_that_was_paid_for_come_back(tmp_path: Any) -> None:
    asked: list[Any] = []

    def answer(request: Any) -> ScriptedReply:
        asked.append(request)
        if len(request["messages"]) == 1:
            return ScriptedReply(
                body=json.dumps(REPLY).encode(), headers={"Content-Type": "application/json"}
            )
        return ScriptedReply(text="it is 42", fault=ReplyFault.CUT if len(asked) == 2 else None)

    async def solve(instance: Any, sandbox: Any, model: Any) -> str:
        messages: list[Any] = [{"role": "user", "content": "19 + 23?"}]
        reply = await model.chat(messages)
        said = reply["choices"][0]["message"]
        assert "thinking_blocks" not in said
        messages += [said, {"role": "tool", "tool_call_id": "toolu_1", "content": "42"}]
        return str((await model.chat(messages))["choices"][0]["message"]["content"])

    suite = hw.Suite(
        name="adding",
        instances=lambda: [hw.Instance(id="a")],
        grade=lambda instance, sandbox, said: said == "it is 42",
    )
    async with serve_script(answer, dialects=["messages"]) as url:
        out = tmp_path / "run"
        summary = await hw.arun(suite, solve, out=out, model="m", base_url=url, **QUICK)
    assert summary.outcomes == {"passed": 1}
    assert (summary.attempts, summary.saved.requests, len(asked)) == (2, 1, 3)
    assert [request["messages"][1]["content"][:2] for request in asked[1:]] == [THOUGHTS, THOUGHTS]


def make_completion(text: str) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": text,
        "thinking_blocks": [{"type": "thinking", "thinking": text}],
    }
    return {"choices": [{"message": message}]}


async def test_memory_is_bounded_and_the_record_is_read_once() -> None:
    read: list[int] = []

    def read_replies(attempt: int) -> list[bytes]:
        read.append(attempt)
        blocks = [{"type": "thinking", "thinking": "recorded"}, {"type": "text", "text": f"said {attempt}"}]
        return [json.dumps({"type": "message", "content": blocks}).encode(), b"not JSON"]

    kept = KeptThoughts(DIALECTS["messages"], read_replies, bound=4096)
    for attempt in range(100):
        kept.take(attempt, make_completion(f"said {attempt}"))
        assert kept.size <= 4096
    for attempt in (0, 0, 99):  # the first is forgotten
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": f"said {attempt}"},
        ]
        await kept.restore(attempt, messages)
        thought = "recorded" if attempt == 0 else "said 99"
        assert messages[1]["thinking_blocks"] == [{"type": "thinking", "thinking": thought}]
    for _ in range(2):
        stranger = [{"role": "assistant", "content": "an example"}]
        await kept.restore(99, stranger)
        assert "thinking_blocks" not in stranger[0]
    assert read == [0, 99]
