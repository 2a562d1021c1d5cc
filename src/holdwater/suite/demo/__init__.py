"""The demo: small, real bug-fix tasks of different shapes, graded by tests that the agent does not see.

The tasks are the directories in `tasks/`; the model that solves most of them is in `script.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...core.authoring import Defaults, Sandbox, Suite
from ...core.errors import GradeFailed
from ...core.records import Grade, Instance
from ..grading import as_grade
from .task import names, task

TESTS = "holdwater_tests"

# Isolated, so that nothing in the working directory stands in for a module that the tests are run with.
RUN_TESTS = (
    "import sys, unittest as u; sys.path.insert(0, '.'); u.main(None, argv=['unittest', *sys.argv[1:]])"
)


def suite() -> Suite:
    return Suite(
        name="demo",
        instances=instances,
        grade=grade,
        size=len(names()),
        defaults=Defaults(agent="bash", model="scripted", attempts=2),
        description="small, real bug-fix tasks; runs on a scripted model, or on yours with `--model`",
    )


def instances() -> Iterator[Instance]:
    for name in names():
        found = task(name)
        yield Instance(
            id=name,
            instruction=found.instruction,
            files=found.files,
            solution=found.solution,
        )


async def grade(instance: Instance, sandbox: Sandbox, answer: object = None) -> Grade:
    """Write the hidden tests into the sandbox, over whatever may be there, and run them."""
    tests = task(instance.id).tests
    if not tests:
        raise GradeFailed(f"the demo task `{instance.id}` has no tests", again=False)
    await sandbox.write(f"{TESTS}/__init__.py", "")
    for name, content in tests.items():
        await sandbox.write(f"{TESTS}/{name}", content)
    modules = [f"{TESTS}.{name.removesuffix('.py')}" for name in tests]
    result = await sandbox.run(["python3", "-I", "-B", "-c", RUN_TESTS, *modules])
    given = as_grade(result)
    # A program under test can leave with status 0 before a test has run; then nothing says OK.
    passed = given.passed and result.stderr.rstrip().endswith("OK")
    return Grade(passed=passed, score=float(passed), detail=given.detail)
