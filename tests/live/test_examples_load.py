"""The examples load, their solutions pass, and doing nothing does not."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.directory_sandbox import Directory, prepared
from tests.http_model import HttpModel

from holdwater.agent.loader import load as load_agent
from holdwater.core.records import Grade, Instance
from holdwater.suite.loader import load as load_suite
from holdwater.testing.scripted_model import ScriptedReply, serve_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SUITES = (f"{EXAMPLES}/adding.py:suite", f"{EXAMPLES}/tasks.jsonl")


async def passed(spec: str, agent: str, base: Path, model: Any = None) -> list[bool]:
    suite = load_suite(spec)
    act = load_agent(agent).act
    if suite.check:
        suite.check()
    found = []
    for number, instance in enumerate(suite.instances()):
        sandbox = await prepared(base / str(number), instance)
        if inspect.iscoroutinefunction(act):
            answer = await act(instance, sandbox, model)
        else:
            answer = act(instance, Blocking(sandbox), model)
        grade = await suite.grade(instance, sandbox, answer)
        found.append(grade.passed if isinstance(grade, Grade) else bool(grade))
    return found


class Blocking:
    """What a plain function sees: the same without `await`, here for files alone."""

    def __init__(self, sandbox: Directory) -> None:
        self.base = sandbox.base

    def read(self, path: str) -> bytes:
        return (self.base / path).read_bytes()

    def write(self, path: str, content: str) -> None:
        (self.base / path).write_text(content)


@pytest.mark.parametrize("spec", SUITES)
async def test_solutions_pass_and_nothing_else_does(spec: str, tmp_path: Path) -> None:
    assert all(await passed(spec, "oracle", tmp_path / "a"))
    assert not any(await passed(spec, "nop", tmp_path / "b"))


@pytest.mark.parametrize("name", ["solve", "solve_in_a_thread"])
async def test_the_agents_in_python_solve_it(name: str, tmp_path: Path) -> None:
    assert all(await passed(SUITES[0], f"{EXAMPLES}/adding.py:{name}", tmp_path))


async def test_the_program_solves_it_with_a_model_that_knows_how(tmp_path: Path) -> None:
    solutions = {
        i.instruction: i.solution for i in load_suite(SUITES[1]).instances() if isinstance(i, Instance)
    }

    def reply(request: dict[str, Any]) -> ScriptedReply:
        asked = request["messages"][0]["content"]
        return ScriptedReply(
            text=next(f"`{solution}`" for text, solution in solutions.items() if text in asked)
        )

    template = f"{sys.executable} {EXAMPLES}/command_agent.py {{instruction_file}} {{model}}"
    async with serve_script(reply) as url, HttpModel(url) as model:
        assert all(await passed(SUITES[1], f"command:{template}", tmp_path, model))


def test_every_example_file_is_in_a_command_of_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".jsonl")}

    assert {name for name in names if f"examples/{name}" in readme} == names
