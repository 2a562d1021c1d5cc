"""A grade function with a parameter `attempt`: it reads the agent's record, and asks a judge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.in_process_run import QUICK, attempts

import holdwater as hw
from holdwater.core.errors import AttemptOver
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import read_exchanges

REPLIES = {"work": "done", "judge": "0.75", "retry": "0.5"}
Options = dict[str, Any]


def answer(request: dict[str, Any]) -> str:
    return REPLIES[request["messages"][-1]["content"]]


async def solve(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    await model.chat([{"role": "user", "content": "work"}])
    return "x"


def run(out: Path, grade: Any, act: Any = solve, **options: Any) -> Any:
    suite = hw.Suite(name="judged", instances=lambda: [hw.Instance(id="i")], grade=grade)
    settings: Options = {**QUICK, "concurrency": 1, **options}
    return hw.run(suite, act, out=out, policy=answer, **settings)


def read_record(out: Path, attempt: int = 1) -> list[tuple[str, int]]:
    return [(exchange.by, exchange.status) for exchange in read_exchanges(RunDirectory(out), attempt)]


async def judge(instance: hw.Instance, sandbox: Any, result: Any, *, attempt: Any) -> hw.Grade:
    nodes = await attempt.nodes()
    assert [(node.role, node.message["content"]) for node in nodes] == [
        ("user", "work"),
        ("assistant", "done"),
    ]
    assert (attempt.failure, attempt.usage.requests, result) == (None, 1, "x")
    reply = await attempt.model.chat([{"role": "user", "content": "judge"}])
    return hw.Grade(passed=True, score=float(reply["choices"][0]["message"]["content"]))


def judge_in_thread(instance: hw.Instance, sandbox: Any, result: Any, attempt: Any) -> float:
    assert [node.sampled for node in attempt.nodes()] == [False, True]
    reply = attempt.model.chat([{"role": "user", "content": "judge"}])
    return float(reply["choices"][0]["message"]["content"])


@pytest.mark.parametrize("grade", [judge, judge_in_thread])
def test_a_judge_reads_the_record_and_its_calls_are_the_graders(tmp_path: Path, grade: Any) -> None:
    summary = run(tmp_path / "run", grade)

    assert summary.score == 0.75
    assert read_record(tmp_path / "run") == [("", 200), ("grader", 200)]


def test_the_limits_of_an_agent_do_not_bind_its_judge(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", judge, max_requests=1)

    assert summary.score == 0.75


async def ask_twice(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    for _ in range(2):
        await model.chat([{"role": "user", "content": "work"}])
    return "x"


def test_the_limits_of_an_agent_still_bind_it(tmp_path: Path) -> None:
    run(tmp_path / "run", judge_in_thread, ask_twice, max_requests=1)

    (row,) = attempts(tmp_path / "run")
    assert row.verdict is not None and row.verdict.failure is not None
    assert row.verdict.failure.kind == "requests"


def test_a_judge_is_no_part_of_the_agents_record(tmp_path: Path) -> None:
    tries: list[int] = []

    async def grade(instance: hw.Instance, sandbox: Any, result: Any, attempt: Any) -> float:
        reply = await attempt.model.chat([{"role": "user", "content": "judge"}])
        tries.append(len(await attempt.nodes()))
        if len(tries) == 1:
            raise OSError("the judge's notes are lost")
        return float(reply["choices"][0]["message"]["content"])

    summary = run(tmp_path / "run", grade, retries=1)

    assert summary.score == 0.75
    assert tries == [2, 2]


def test_a_view_that_outlives_its_grading_is_dead(tmp_path: Path) -> None:
    kept: list[Any] = []

    async def grade(instance: hw.Instance, sandbox: Any, result: Any, attempt: Any) -> bool:
        kept.append(attempt)
        return True

    run(tmp_path / "run", grade)

    with pytest.raises(AttemptOver):
        asyncio.run(kept[0].nodes())
    with pytest.raises(AttemptOver):
        asyncio.run(kept[0].model.chat([]))


def test_a_group_hook_reads_the_conversations_of_its_members(tmp_path: Path) -> None:
    async def group(instance: hw.Instance, members: Any) -> list[float]:
        return [float(len(await member.nodes())) for member in members]

    suite = hw.Suite(
        name="judged", instances=lambda: [hw.Instance(id="i")], grade=lambda *work: 0.5, group=group
    )
    settings: Options = {**QUICK, "concurrency": 2, "samples": 2}

    summary = hw.run(suite, solve, out=tmp_path / "run", policy=answer, **settings)

    assert summary.score == 2.0
