"""Grades an instance by its grade command, for suites whose instances carry one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from ..core.authoring import Sandbox
from ..core.errors import GradeFailed
from ..core.records import CommandResult, Grade, Instance
from .programs import TESTS, find_missing, find_programs

EXPECTED = "holdwater.expected"  # key in an instance's data: the output that the grade command must print
LONGEST_DETAIL = 4000  # characters of output that a grade keeps
CANNOT_RUN = (126, 127)  # exit statuses of a shell for a command that is not executable or not found


async def command_grade(instance: Instance, sandbox: Sandbox, answer: object = None) -> Grade:
    """Run the instance's `grade` command: it passes with status 0 and the expected output, if any."""
    if not instance.grade:
        raise GradeFailed(f"instance `{instance.id}` has no grade command", again=False)
    directory = await put_tests(instance.tests, sandbox) if instance.tests else ""
    result = await sandbox.run(instance.grade, env={TESTS: directory} if directory else {})
    programs = find_programs(instance.grade, instance.tests, directory, sandbox.workdir)
    await check_started(result, programs, sandbox)
    grade = as_grade(result)
    expected = instance.data.get(EXPECTED)
    if not grade.passed or expected is None or result.stdout.strip() == expected.strip():
        return grade
    return Grade(passed=False, score=0.0, detail=f"unexpected output: {tail(result.output, 1000)}")


async def put_tests(tests: Mapping[str, str | bytes], sandbox: Sandbox) -> str:
    """Write test files to a directory outside the working directory; return the directory's path.

    The name is random, so a link that the agent leaves cannot point there.
    """
    directory = f"{sandbox.private}/tests-{secrets.token_hex(8)}"
    for path, content in tests.items():
        await sandbox.write(f"{directory}/{path}", content)
    return directory


async def check_started(result: CommandResult, programs: Sequence[str], sandbox: Sandbox) -> None:
    """Raise GradeFailed if the shell could not start the command and one of `programs` is missing.

    If no program is missing, the exit status comes from the agent's work and counts as a grade.
    """
    if result.timed_out or result.exit_code not in CANNOT_RUN:
        return
    if missing := await find_missing(programs, sandbox):
        reason = tail(result.output, 300) or f"status {result.exit_code}"
        raise GradeFailed(
            f"the grade command cannot be run: {reason}",
            hint=f"is `{missing[0]}` in the sandbox and executable?",
        )


def as_grade(result: CommandResult) -> Grade:
    """Return the grade for a finished command; raise GradeFailed if it timed out."""
    if result.timed_out:
        raise GradeFailed(f"the grade command timed out after {result.seconds:.0f} s", kind="timeout")
    return Grade(passed=result.ok, score=float(result.ok), detail=tail(result.output))


def tail(text: str, characters: int = LONGEST_DETAIL) -> str:
    """Return the end of `text`, where programs print their errors."""
    text = text.strip()
    return text if len(text) <= characters else "..." + text[-characters:]
