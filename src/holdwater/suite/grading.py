"""Grades by a command: what suites use whose instances carry one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from ..core.authoring import Sandbox
from ..core.errors import GradeFailed
from ..core.records import CommandResult, Grade, Instance
from .programs import TESTS, find_missing, find_programs

EXPECTED = "holdwater.expected"  # in an instance's data: what its grade command has to print
LONGEST_DETAIL = 4000  # characters of output that a grade keeps
CANNOT_RUN = (126, 127)  # what a shell says of a command that is missing or no program


async def command_grade(instance: Instance, sandbox: Sandbox, answer: object = None) -> Grade:
    """Run the instance's `grade` command in the sandbox: status 0 is a pass, if it prints what it has to."""
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
    return Grade(passed=False, score=0.0, detail=f"not what is expected: {tail(result.output, 1000)}")


async def put_tests(tests: Mapping[str, str | bytes], sandbox: Sandbox) -> str:
    """Write files for grading to a directory outside the working directory; the directory's path.

    Its name differs each time: a link that an agent leaves cannot lead there.
    """
    directory = f"{sandbox.private}/tests-{secrets.token_hex(8)}"
    for path, content in tests.items():
        await sandbox.write(f"{directory}/{path}", content)
    return directory


async def check_started(result: CommandResult, programs: Sequence[str], sandbox: Sandbox) -> None:
    """Raise GradeFailed if a command ended as one does whose program is missing, and one of these is.

    If none is, the status comes from the work that the command ran, and is a grade.
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
    """The grade that a command's end stands for; GradeFailed if it did not end by itself."""
    if result.timed_out:
        raise GradeFailed(f"the grade command timed out after {result.seconds:.0f} s", kind="timeout")
    return Grade(passed=result.ok, score=float(result.ok), detail=tail(result.output))


def tail(text: str, characters: int = LONGEST_DETAIL) -> str:
    """The end of `text`: where programs say what went wrong."""
    text = text.strip()
    return text if len(text) <= characters else "..." + text[-characters:]
