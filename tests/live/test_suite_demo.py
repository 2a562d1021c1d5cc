"""The demo: its tasks are right (the oracle passes, nop fails), its model as good as promised."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.directory_sandbox import Directory, prepared
from tests.http_model import HttpModel

from holdwater.agent import bash
from holdwater.agent.baselines import nop, oracle
from holdwater.core.authoring import AgentFunction
from holdwater.core.errors import GradeFailed
from holdwater.core.records import Grade, Instance
from holdwater.suite import demo
from holdwater.suite.demo import script
from holdwater.testing.scripted_model import serve_script

INSTANCES = {instance.id: instance for instance in demo.instances()}


async def graded(act: AgentFunction, base: Path, instance: Instance, model: HttpModel | None = None) -> Grade:
    sandbox = await prepared(base, instance)
    return await demo.grade(instance, sandbox, await act(instance, sandbox, model))


async def all_graded(act: AgentFunction, base: Path, model: HttpModel | None = None) -> dict[str, bool]:
    """What passes, with eight at a time."""
    slots = asyncio.Semaphore(8)

    async def one(instance: Instance) -> bool:
        async with slots:
            return (await graded(act, base / instance.id, instance, model)).passed

    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(one(instance)) for name, instance in INSTANCES.items()}
    return {name: task.result() for name, task in tasks.items()}


async def test_the_oracle_passes_all_of_a_dozen_or_more(tmp_path: Path) -> None:
    passed = await all_graded(oracle().act, tmp_path)

    assert len(passed) >= 12 and demo.suite().size == len(passed)
    assert [name for name, ok in passed.items() if not ok] == []


async def test_doing_nothing_passes_none(tmp_path: Path) -> None:
    assert [name for name, ok in (await all_graded(nop().act, tmp_path)).items() if ok] == []


@pytest.mark.parametrize(
    ("seed", "failing"),
    [(1, ["build-order", "quoted-commas", "split-the-bill"]), (2, ["build-order"])],
)
async def test_the_scripted_model_fails_where_it_should(
    tmp_path: Path, seed: int, failing: list[str]
) -> None:
    async with serve_script(script.reply) as url, HttpModel(url) as model:
        model.seed = seed
        passed = await all_graded(bash.act, tmp_path, model)

    assert [name for name, ok in passed.items() if not ok] == failing


def test_every_task_has_its_own_plan_and_every_plan_a_task() -> None:
    assert set(script.PLANS) == set(INSTANCES)


def test_the_model_is_quick_enough_for_a_demo() -> None:
    def seconds(instance: Instance, seed: int) -> float:
        messages = [{"role": "user", "content": instance.instruction}]
        total = 0.0
        while True:
            reply = script.reply({"messages": messages, "seed": seed})
            total += reply.delay
            if not reply.tool_calls:
                return total
            messages.append({"role": "assistant", "content": reply.text})

    assert sum(seconds(instance, seed) for instance in INSTANCES.values() for seed in (1, 2)) / 8 < 10


def test_another_conversation_is_declined() -> None:
    assert "only know" in script.reply({"messages": [{"role": "user", "content": "What is love?"}]}).text


def test_a_message_in_parts_is_understood() -> None:
    parts = [{"type": "text", "text": "Task: "}, {"type": "text", "text": INSTANCES["pager"].instruction}]

    assert script.reply({"messages": [{"role": "user", "content": parts}]}).tool_calls


CHEATS = {
    "tests of its own": "mkdir holdwater_tests; echo 'import os; os._exit(0)' > holdwater_tests/__init__.py",
    "a unittest of its own": "echo 'def main(*a, **k): print(\"OK\")' > unittest.py",
    "leaving early": "echo 'import os; os._exit(0)' > pager.py",
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
async def test_cheating_does_not_pass(tmp_path: Path, cheat: str) -> None:
    async def act(instance: Instance, sandbox: Directory, model: object) -> None:
        assert (await sandbox.run(cheat)).ok

    assert not (await graded(act, tmp_path / "w", INSTANCES["pager"])).passed


async def test_a_sandbox_without_python_is_no_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await prepared(tmp_path / "w", INSTANCES["pager"])
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(GradeFailed, match="cannot be run"):
        await demo.grade(INSTANCES["pager"], sandbox)
