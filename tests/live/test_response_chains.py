"""Responses clients that name what they go on with and do not send it: every reader sees the conversation."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.in_process_run import QUICK, grade, numbered, solve

import holdwater as hw
from holdwater.dialect import DIALECTS
from holdwater.export.formats import export_run
from holdwater.testing.scripted_model import ScriptedReply, serve_script

LONG = "look around " * 600
TOOL = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}


class Provider:
    """Answers as the provider does that keeps its replies: it knows what was said before by its name."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}
        self._ids = itertools.count(1)
        self.seen: list[list[Any]] = []

    def __call__(self, request: dict[str, Any]) -> ScriptedReply:
        given = request["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        conversation = request.get("conversation")
        name = request.get("previous_response_id") or conversation or ""
        said = [*self._kept.get(name, []), *items]
        self.seen.append(said)
        id = f"resp_{next(self._ids)}"
        output = self._output(id, sum("call_id" in item for item in items))
        self._kept[conversation or id] = [*said, *output]
        reply = json.dumps(_response(id, output)).encode()
        if not request.get("stream"):
            return ScriptedReply(body=reply, headers={"Content-Type": "application/json"})
        events = b"".join(DIALECTS["responses"].render_stream(reply))
        return ScriptedReply(body=events, headers={"Content-Type": "text/event-stream"})

    def _output(self, id: str, answered: int) -> list[dict[str, Any]]:
        if answered or id != "resp_1":
            content = [{"type": "output_text", "text": f"done in {id}", "annotations": []}]
            return [{"type": "message", "id": f"msg_{id}", "role": "assistant", "content": content}]
        call = {"name": "bash", "arguments": '{"command":"ls"}', "call_id": "call_1"}
        return [
            {"type": "reasoning", "id": f"rs_{id}", "summary": []},
            {"type": "function_call", "id": f"fc_{id}", **call},
        ]


def _response(id: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": id,
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "m",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
    }


async def create(client: openai.AsyncOpenAI, streams: bool, **asked: Any) -> str:
    """One call of the provider's own client; the id of its reply."""
    asked = {"model": "m", "instructions": "be brief", "tools": [TOOL], **asked}
    if not streams:
        return (await client.responses.create(**asked)).id
    async with client.responses.stream(**asked) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_response()).id


RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}


async def by_reply(client: openai.AsyncOpenAI, streams: bool) -> None:
    first = await create(client, streams, input=LONG)
    second = await create(client, streams, input=[RESULT], previous_response_id=first)
    await create(client, streams, input="go on", previous_response_id=second)


async def by_conversation(client: openai.AsyncOpenAI, streams: bool) -> None:
    for given in (LONG, [RESULT], "go on"):
        await create(client, streams, input=given, conversation="conv_1")


def play(out: Path, talk: Callable[..., Any], streams: bool, provider: Any, **options: Any) -> None:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        async with openai.AsyncOpenAI(base_url=model.url, api_key=model.key, max_retries=0) as client:
            await talk(client, streams)
        await solve(instance, sandbox, model)

    async def conduct() -> None:
        async with serve_script(provider) as url:
            asked = {**QUICK, "model": "m", "base_url": url, "timeout": 60.0, **options}
            suite = hw.Suite(name="chained", instances=numbered(1), grade=grade)
            summary = await hw.arun(suite, agent, out=out, **asked)
            assert summary.outcomes == {"passed": 1}

    asyncio.run(conduct())


CHAINS = pytest.mark.parametrize("talk", [by_reply, by_conversation])
ROLES = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]


@CHAINS
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_named_conversation_is_one_trajectory(
    tmp_path: Path, talk: Callable[..., Any], streams: bool
) -> None:
    play(tmp_path / "run", talk, streams, Provider())

    [rollout] = hw.read(tmp_path / "run")
    turns = list(rollout.turns())
    assert [(turn.number, turn.thread, turn.parent) for turn in turns] == [(1, 0, None), (2, 0, 1), (3, 0, 2)]
    assert [[message.role for message in turn.new] for turn in turns] == [
        ["system", "user"],
        ["tool"],
        ["user"],
    ]
    messages = list(rollout.messages())
    assert [message["role"] for message in messages] == ROLES
    assert messages[1]["content"] == LONG
    [call] = messages[2]["tool_calls"]
    assert (call["id"], messages[3]["tool_call_id"]) == ("call_1", "call_1")
    assert [messages[n]["content"] for n in (4, 5, 6)] == ["done in resp_2", "go on", "done in resp_3"]


@CHAINS
def test_nodes_and_exports_follow_the_names(tmp_path: Path, talk: Callable[..., Any]) -> None:
    play(tmp_path / "run", talk, False, Provider())

    [rollout] = hw.read(tmp_path / "run")
    nodes = list(rollout.nodes())
    assert [node.parent for node in nodes] == [None, *range(len(nodes) - 1)]
    assert [node.role for node in nodes if node.sampled] == ["assistant"] * 3
    assert len(nodes) == len(ROLES)
    out = io.BytesIO()
    export_run(tmp_path / "run", "trajectories", "openai-jsonl", out)
    [line] = out.getvalue().splitlines()
    assert [message["role"] for message in json.loads(line)["messages"]] == ROLES


def test_a_reply_can_be_gone_on_with_twice(tmp_path: Path) -> None:
    async def twice(client: openai.AsyncOpenAI, streams: bool) -> None:
        first = await create(client, streams, input="hello")
        await create(client, streams, input="hello", previous_response_id=first)
        await create(client, streams, input="hello", previous_response_id=first)

    play(tmp_path / "run", twice, False, Provider())

    [rollout] = hw.read(tmp_path / "run")
    assert sorted((turn.number, turn.parent) for turn in rollout.turns()) == [(1, None), (2, 1), (3, 1)]


@CHAINS
def test_a_policy_is_given_the_whole_conversation(tmp_path: Path, talk: Callable[..., Any]) -> None:
    asked: list[list[dict[str, Any]]] = []

    def policy(request: dict[str, Any]) -> str | dict[str, Any]:
        asked.append(request["messages"])
        if len(asked) > 1:
            return f"done {len(asked)}"
        return {"tool_calls": [{"id": "call_1", "function": {"name": "bash", "arguments": "{}"}}]}

    play(tmp_path / "run", talk, False, Provider(), policy=policy, base_url=None, model=None)

    assert [message["role"] for message in asked[-1]] == ROLES[:-1]
    assert asked[-1][1]["content"] == LONG
