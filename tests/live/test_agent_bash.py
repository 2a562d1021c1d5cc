"""The bash agent against a scripted model over HTTP, and the two agents that need none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.directory_sandbox import Directory
from tests.http_model import HttpModel

from holdwater.agent import bash
from holdwater.agent.baselines import nop, oracle
from holdwater.core.errors import AgentFailed, LimitReached, ModelFailed
from holdwater.core.records import Instance
from holdwater.testing.scripted_model import ScriptedReply, serve_script

INSTANCE = Instance(id="i", instruction="write x")


def calls(*commands: str) -> ScriptedReply:
    return ScriptedReply(tool_calls=[{"name": "bash", "arguments": {"command": c}} for c in commands])


@asynccontextmanager
async def scripted(
    replies: Sequence[ScriptedReply] | Callable[[], ScriptedReply],
) -> AsyncIterator[tuple[HttpModel, list[dict[str, Any]]]]:
    """A model that gives these replies, and the requests that it got."""
    asked: list[dict[str, Any]] = []
    rest = iter(replies) if not callable(replies) else iter(replies, None)

    def reply(request: dict[str, Any]) -> ScriptedReply:
        asked.append(request)
        return next(rest)

    async with serve_script(reply) as url, HttpModel(url) as model:
        yield model, asked


async def test_it_runs_the_models_commands_and_returns_its_last_message(tmp_path: Path) -> None:
    async with scripted([calls("echo one > x", "cat x; exit 3"), ScriptedReply(text="done")]) as (
        model,
        asked,
    ):
        answer = await bash.act(INSTANCE, Directory(tmp_path), model)

    assert answer == "done"
    assert (tmp_path / "x").read_text() == "one\n"
    assert [m["role"] for m in asked[1]["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert asked[1]["messages"][1]["content"] == "write x"
    assert asked[1]["messages"][4]["content"] == "exit status: 3\none\n"
    given, told = asked[1]["messages"][2]["tool_calls"], asked[1]["messages"][3:]
    assert [c["id"] for c in given] == [m["tool_call_id"] for m in told]


async def test_the_round_is_the_seed(tmp_path: Path) -> None:
    async with scripted([ScriptedReply(text="done"), ScriptedReply(text="done")]) as (model, asked):
        await bash.act(INSTANCE, Directory(tmp_path), model)
        model.seed = 2
        await bash.act(INSTANCE, Directory(tmp_path), model)

    assert ["seed" in asked[0], asked[1]["seed"]] == [False, 2]


async def test_a_malformed_call_is_the_models_to_correct(tmp_path: Path) -> None:
    def raw(name: str, arguments: str) -> ScriptedReply:
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        body = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
        return ScriptedReply(body=json.dumps(body).encode())

    bad = [
        raw("bash", '{"command": '),
        raw("bash", '{"cmd": "ls"}'),
        raw("python", "{}"),
        raw("bash", "[" * 5000),
    ]
    too_long = raw("bash", json.dumps({"command": "x" * 200_000}))
    async with scripted([*bad, too_long, ScriptedReply(text="done")]) as (model, asked):
        assert await bash.act(INSTANCE, Directory(tmp_path), model) == "done"

    told = [m["content"] for m in asked[-1]["messages"] if m["role"] == "tool"]
    assert len(told) == 5 and all(t.startswith("error: ") for t in told)


async def test_long_output_is_cut_in_the_middle(tmp_path: Path) -> None:
    async with scripted([calls("echo begin; seq 100000; echo end"), ScriptedReply(text="done")]) as (
        model,
        asked,
    ):
        await bash.act(INSTANCE, Directory(tmp_path), model)

    told = asked[1]["messages"][-1]["content"]
    assert len(told) < bash.LONGEST_OUTPUT + 100
    assert told.startswith("exit status: 0\nbegin\n1\n") and told.endswith("100000\nend\n")


async def test_a_command_that_hangs_is_stopped_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bash, "COMMAND_SECONDS", 0.2)
    async with scripted([calls("sleep 1000"), ScriptedReply(text="done")]) as (model, asked):
        await bash.act(INSTANCE, Directory(tmp_path), model)

    assert asked[1]["messages"][-1]["content"].startswith("stopped after 0 seconds")


async def test_a_model_that_never_ends_reaches_the_limit(tmp_path: Path) -> None:
    async with scripted(lambda: calls("true")) as (model, asked):
        with pytest.raises(LimitReached) as caught:
            await bash.act(INSTANCE, Directory(tmp_path), model)

    assert (caught.value.kind, len(asked)) == ("turns", bash.MOST_TURNS)


async def test_a_reply_without_a_message_is_the_models_failure(tmp_path: Path) -> None:
    async with scripted([ScriptedReply(body=b'{"choices": []}')]) as (model, _):
        with pytest.raises(ModelFailed, match="contains no message"):
            await bash.act(INSTANCE, Directory(tmp_path), model)


async def test_the_oracle_runs_the_solution(tmp_path: Path) -> None:
    await oracle().act(Instance(id="i", solution="echo one > x"), Directory(tmp_path), None)

    assert (tmp_path / "x").read_text() == "one\n"


@pytest.mark.parametrize(("solution", "kind"), [(None, "no-solution"), ("echo oops >&2; exit 2", "exit")])
async def test_an_oracle_without_a_working_solution_fails(
    tmp_path: Path, solution: str | None, kind: str
) -> None:
    with pytest.raises(AgentFailed) as caught:
        await oracle().act(Instance(id="i", solution=solution), Directory(tmp_path), None)

    assert caught.value.kind == kind


async def test_nop_touches_nothing(tmp_path: Path) -> None:
    assert await nop().act(INSTANCE, Directory(tmp_path), None) is None
    assert list(tmp_path.iterdir()) == []
