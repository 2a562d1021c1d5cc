"""The demo suite: small, real bug-fix tasks of different kinds, graded by tests that the agent does not see.

The tasks are the directories in `tasks/`. `script.py` scripts a model that solves most of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ...core.authoring import Sandbox, Suite, SuiteDefaults
from ...core.errors import BadInput, GradeFailed
from ...core.records import Grade, Instance, Record
from ..grading import as_grade, check_started, put_tests

TASKS = Path(__file__).parent / "tasks"
# Python runs isolated, with the tests outside the working directory and the standard library before it, so no
# file of the agent can replace a module of the tests. The secret word proves that the tests ran to their end:
# the agent's code cannot print it and exit early.
RUN_TESTS = """
import sys, unittest
tests, word, *modules = sys.argv[1:]
sys.path[:0], sys.argv = [tests], sys.argv[:1]
sys.path.append(".")
ended = unittest.main(None, argv=["unittest", *modules], exit=False).result
if ended.wasSuccessful() and ended.testsRun:
    print(word)
sys.exit(not ended.wasSuccessful())
"""


class DemoTask(Record, frozen=True):
    """One task directory of the demo."""

    name: str
    instruction: str
    files: dict[str, str]
    tests: dict[str, str]
    solution: str
    wrong: str | None  # a plausible fix that fails the tests


@cache
def task_names() -> tuple[str, ...]:
    """Return the names of all tasks, sorted."""
    return tuple(sorted(path.name for path in TASKS.iterdir() if (path / "instruction.md").is_file()))


@cache  # bounded by the number of tasks, a few KiB each
def load_task(name: str) -> DemoTask:
    if name not in task_names():
        raise BadInput(f"unknown demo task: `{name}`")
    base = TASKS / name
    wrong = base / "wrong.sh"
    return DemoTask(
        name=name,
        instruction=(base / "instruction.md").read_text(encoding="utf-8").strip(),
        files=_read_tree(base / "files"),
        tests=_read_tree(base / "tests"),
        solution=(base / "solution.sh").read_text(encoding="utf-8"),
        wrong=wrong.read_text(encoding="utf-8") if wrong.exists() else None,
    )


def _read_tree(base: Path) -> dict[str, str]:
    found = sorted(path for path in base.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(base).as_posix(): path.read_text(encoding="utf-8") for path in found}


def suite() -> Suite:
    return Suite(
        name="demo",
        instances=instances,
        grade=grade,
        size=len(task_names()),
        defaults=SuiteDefaults(agent="bash", model="scripted", attempts=2),
        description="small, real bug-fix tasks; runs on a scripted model, or on yours with `--model`",
    )


def instances() -> Iterator[Instance]:
    for name in task_names():
        found = load_task(name)
        yield Instance(
            id=name,
            instruction=found.instruction,
            files=found.files,
            solution=found.solution,
        )


async def grade(instance: Instance, sandbox: Sandbox, answer: object = None) -> Grade:
    """Write the hidden tests into the sandbox, outside the agent's work, and run them."""
    tests = load_task(instance.id).tests
    if not tests:
        raise GradeFailed(f"the demo task `{instance.id}` has no tests", again=False)
    directory = await put_tests(tests, sandbox)
    modules = [name.removesuffix(".py") for name in tests]
    word = secrets.token_hex(8)
    result = await sandbox.run(["python3", "-I", "-S", "-B", "-c", RUN_TESTS, directory, word, *modules])
    await check_started(result, ["python3"], sandbox)
    given = as_grade(result)
    passed = given.passed and result.stdout.rstrip().endswith(word)
    return Grade(passed=passed, score=float(passed), detail=given.detail)
