"""Model calls that overlap: the main thread of the conversation says whether the model failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.in_process_run import QUICK, attempts, numbered, outcomes, solve, suite

import holdwater as hw
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, serve_script

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
GARBAGE = ScriptedReply(text="cut", fault=ReplyFault.GARBAGE)


class Talk:
    """An agent's calls, each by its name. A call is answered when the agent lets it be answered."""

    def __init__(self) -> None:
        self.replies: dict[str, ScriptedReply] = {}
        self.arrived: dict[str, asyncio.Event] = {}
        self.let: dict[str, asyncio.Event] = {}
        self.url = self.key = ""

    async def script(self, request: dict[str, Any]) -> ScriptedReply:
        name = request["messages"][-1]["content"]
        self.arrived[name].set()
        await self.let[name].wait()
        return self.replies[name]

    @asynccontextmanager
    async def http(self) -> AsyncIterator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"}) as http:
            yield http

    async def begin(
        self, name: str, reply: ScriptedReply, before: tuple[str, ...] = (), **options: Any
    ) -> asyncio.Task[int]:
        """Start a call whose last message is its name, behind `before`; it has reached the model."""
        self.replies[name] = reply
        self.arrived[name], self.let[name] = asyncio.Event(), asyncio.Event()
        roles = ("user", "assistant")
        said = [*before, name]
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]

        async def post() -> int:
            async with self.http() as http:
                body = {"model": "m", "messages": messages, **options}
                async with http.post(f"{self.url}/chat/completions", json=body) as response:
                    await response.read()
                    return response.status

        call = asyncio.create_task(post())
        await self.arrived[name].wait()
        return call

    async def end(self, name: str, call: asyncio.Task[int]) -> int:
        """Let a call be answered; the status that its client sees."""
        self.let[name].set()
        return await call

    async def call(
        self, name: str, reply: ScriptedReply, before: tuple[str, ...] = (), **options: Any
    ) -> int:
        return await self.end(name, await self.begin(name, reply, before, **options))


OK = ScriptedReply(text="said")


async def main_fails_then_title_succeeds(talk: Talk) -> None:
    title = await talk.begin("title", OK)
    await talk.call("go", OK)
    await talk.call("on", GARBAGE, ("go", "said"))
    await talk.end("title", title)


async def first_main_call_fails_then_title_succeeds(talk: Talk) -> None:
    title = await talk.begin("title", OK)
    await talk.call("go", GARBAGE, tools=TOOLS)
    await talk.end("title", title)


async def main_fails_then_a_new_side_call_succeeds(talk: Talk) -> None:
    await talk.call("go", OK)
    await talk.call("on", GARBAGE, ("go", "said"))
    await talk.call("summary", OK)


async def main_fails_after_a_longer_child(talk: Talk) -> None:
    await talk.call("go", OK)
    await talk.call("child", OK)
    await talk.call("more", OK, ("child", "said"))
    await talk.call("most", OK, ("child", "said", "more", "said"))
    await talk.call("on", GARBAGE, ("go", "said"))


async def second_conversation_fails(talk: Talk) -> None:
    await talk.call("go", OK)
    await talk.call("on", OK, ("go", "said"))
    await talk.call("other", OK)
    await talk.call("end", GARBAGE, ("other", "said"))


async def title_fails_last(talk: Talk) -> None:
    title = await talk.begin("title", GARBAGE)
    await talk.call("go", OK)
    await talk.call("on", OK, ("go", "said"))
    await talk.end("title", title)


async def summary_fails_at_the_end(talk: Talk) -> None:
    await talk.call("go", OK, tools=TOOLS)
    await talk.call("summary", GARBAGE)


async def child_fails_beside_main(talk: Talk) -> None:
    await talk.call("go", OK)
    await talk.call("child", OK)
    more = await talk.begin("more", GARBAGE, ("child", "said"))
    await talk.call("on", OK, ("go", "said"))
    await talk.end("more", more)


async def main_recovers(talk: Talk) -> None:
    await talk.call("go", GARBAGE)
    await talk.call("go", OK)


Story = Callable[[Talk], Awaitable[None]]


def play(out: Path, story: Story, error: Exception | None) -> list[tuple[str, str]]:
    """Where and how each attempt failed; an empty place for one that did not."""

    async def conduct() -> None:
        talk = Talk()

        async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
            talk.url, talk.key = model.url, model.key
            await story(talk)
            await solve(instance, sandbox, model)
            if error is not None:
                raise error

        async with serve_script(talk.script) as url:
            asked = {**QUICK, "model": "m", "base_url": url, "retries": 0, "timeout": 60.0}
            await hw.arun(suite(instances=numbered(1)), agent, out=out, **asked)

    asyncio.run(conduct())
    verdicts = [row.verdict for row in attempts(out)]
    return [(str(v.failure.where), v.failure.kind) if v and v.failure else ("", "") for v in verdicts]


@pytest.mark.parametrize("error", [None, RuntimeError("no model")], ids=["goes-on", "gives-up"])
@pytest.mark.parametrize(
    "story",
    [
        main_fails_then_title_succeeds,
        first_main_call_fails_then_title_succeeds,
        main_fails_then_a_new_side_call_succeeds,
        main_fails_after_a_longer_child,
        second_conversation_fails,
    ],
)
def test_a_failed_main_call_is_the_models_failure(
    tmp_path: Path, story: Story, error: Exception | None
) -> None:
    assert play(tmp_path / "run", story, error) == [("model", "garbage")]
    assert outcomes(tmp_path / "run")["i0"].score is None


@pytest.mark.parametrize(
    "story", [title_fails_last, summary_fails_at_the_end, child_fails_beside_main, main_recovers]
)
def test_a_failed_side_call_hides_no_finished_work(tmp_path: Path, story: Story) -> None:
    assert play(tmp_path / "run", story, None) == [("", "")]
    assert outcomes(tmp_path / "run")["i0"].kind == "passed"


def test_an_agent_that_fails_with_its_child_blames_the_model(tmp_path: Path) -> None:
    async def child_fails_while_main_waits(talk: Talk) -> None:
        await talk.call("go", OK)
        await talk.call("on", OK, ("go", "said"))
        await talk.call("child", GARBAGE)

    found = play(tmp_path / "run", child_fails_while_main_waits, RuntimeError("no child"))

    assert found == [("model", "garbage")]


def test_an_agent_that_fails_after_it_recovered_is_scored(tmp_path: Path) -> None:
    async def title_fails_first(talk: Talk) -> None:
        await talk.call("title", GARBAGE)
        await talk.call("go", OK)
        await talk.call("on", OK, ("go", "said"))

    found = play(tmp_path / "run", title_fails_first, RuntimeError("of its own"))

    assert found == [("agent", "exception")]
