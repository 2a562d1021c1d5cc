"""Judges with a model of their own: which server gets their calls, with which key, price and sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.in_process_run import QUICK, attempts, events
from tests.secret_search import found

import holdwater as hw
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import read_exchanges
from holdwater.testing.scripted_model import ScriptedReply, serve_raw

AGENTS_KEY, JUDGES_KEY = "key-of-the-agents-server", "key-of-the-judges-server"
PRICES = """
["policy"]
input = 1.0
output = 1.0
["critic"]
input = 2.0
output = 2.0
"""


class ModelServer:
    """A server that writes down its requests; `status` is that of its replies."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []  # key and body; bound: the calls of a test
        self.status = 200
        self.url = ""

    def answer(self, headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        key = headers.get("Authorization", "").removeprefix("Bearer ")
        self.requests.append((key, msgspec.json.decode(body)))
        return ScriptedReply(text="0.75", status=self.status)

    def list_calls(self) -> list[tuple[str, str, Any]]:
        """Return key, model and temperature of each request."""
        return [(key, body["model"], body.get("temperature")) for key, body in self.requests]


async def solve(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    await model.chat([{"role": "user", "content": "work"}])
    return "x"


async def judge(instance: hw.Instance, sandbox: Any, result: Any, *, attempt: Any) -> float:
    question = [{"role": "user", "content": "judge"}]
    reply = await attempt.model.chat(question, model="own-choice", temperature=0)
    return float(reply["choices"][0]["message"]["content"])


SUITE = hw.Suite(name="judged", instances=lambda: [hw.Instance(id="i")], grade=judge)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENAI_API_KEY", AGENTS_KEY)
    monkeypatch.setenv("JUDGE_API_KEY", JUDGES_KEY)
    (tmp_path / "prices.toml").write_text(PRICES)
    return tmp_path


class Played:
    """The two servers, after a run with some options."""

    def __init__(self, place: Path) -> None:
        self.out = place / "run"
        self.agents, self.judges = ModelServer(), ModelServer()
        self.summary: Any = None

    async def play(self, *actions: Any) -> Played:
        agents, judges = serve_raw(self.agents.answer), serve_raw(self.judges.answer)
        async with agents as self.agents.url, judges as self.judges.url:
            for action in actions:
                self.summary = await asyncio.to_thread(action, self)
        return self

    def run(self, **options: Any) -> Any:
        settings = {**QUICK, "concurrency": 1, "sampling": {"temperature": 0.5}, "retries": 0, **options}
        return hw.run(SUITE, solve, out=self.out, model="policy", base_url=self.agents.url, **settings)

    def list_models(self) -> list[tuple[str, str]]:
        exchanges = read_exchanges(RunDirectory(self.out), 1)
        return [(exchange.by, msgspec.json.decode(exchange.head or b"{}")["model"]) for exchange in exchanges]


async def test_a_judge_with_its_own_server_has_its_key_and_choice(place: Path) -> None:
    played = await Played(place).play(lambda it: it.run(judge_base_url=it.judges.url))

    assert played.agents.list_calls() == [(AGENTS_KEY, "policy", 0.5)]
    assert played.judges.list_calls() == [(JUDGES_KEY, "own-choice", 0)]
    assert played.summary.score == 0.75
    assert played.list_models() == [("", "policy"), ("grader", "own-choice")]
    assert found(JUDGES_KEY, place) == []


async def test_a_named_model_replaces_the_judges_choice(place: Path) -> None:
    played = await Played(place).play(
        lambda it: it.run(judge_base_url=it.judges.url, judge_model="critic", prices=place / "prices.toml")
    )

    assert played.judges.list_calls() == [(JUDGES_KEY, "critic", 0)]
    acting, grading = read_exchanges(RunDirectory(played.out), 1)
    assert (acting.by, grading.by) == ("", "grader")
    assert grading.usage.cost == 2 * acting.usage.cost > 0


async def test_a_named_model_alone_is_asked_on_the_runs_server(place: Path) -> None:
    played = await Played(place).play(lambda it: it.run(judge_model="critic"))

    assert played.agents.list_calls() == [(AGENTS_KEY, "policy", 0.5), (AGENTS_KEY, "critic", 0)]
    assert not played.judges.requests


async def test_a_resume_asks_another_judge_and_pays_no_turn_twice(place: Path) -> None:
    def fail(played: Played) -> Any:
        played.judges.status = 401
        return played.run(judge_base_url=played.judges.url)

    def resume(played: Played) -> Any:
        played.judges.status = 200
        url = f"{played.judges.url}/"
        return hw.resume(played.out, suite=SUITE, agent=solve, judge_base_url=url, retry="infrastructure")

    played = await Played(place).play(fail, resume)

    assert played.summary.score == 0.75
    assert len(played.agents.requests) == 1
    assert attempts(played.out)[0].kind == "model"


async def test_a_replay_answers_the_judge_from_the_record(place: Path) -> None:
    def replay(played: Played) -> Any:
        return hw.replay(played.out, out=place / "again", suite=SUITE, agent=solve)

    played = await Played(place).play(lambda it: it.run(judge_base_url=it.judges.url), replay)

    assert played.summary.score == 0.75
    assert (len(played.agents.requests), len(played.judges.requests)) == (1, 1)
    assert events(place / "again", "replay.drifted") == []
