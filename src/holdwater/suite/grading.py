"""Grades by a command: what suites use whose instances carry one."""

from __future__ import annotations

from ..core.authoring import Sandbox
from ..core.errors import GradeFailed
from ..core.records import CommandResult, Grade, Instance

LONGEST_DETAIL = 4000  # characters of output that a grade keeps
CANNOT_RUN = (126, 127)  # what a shell says of a command that is missing or no program


async def command_grade(instance: Instance, sandbox: Sandbox, answer: object = None) -> Grade:
    """Run the instance's `grade` command in the sandbox: status 0 is a pass."""
    if not instance.grade:
        raise GradeFailed(f"instance `{instance.id}` has no grade command", again=False)
    return as_grade(await sandbox.run(instance.grade))


def as_grade(result: CommandResult) -> Grade:
    """The grade that a command's end stands for; GradeFailed if it never got to judge."""
    if result.timed_out:
        raise GradeFailed(f"the grade command timed out after {result.seconds:.0f} s", kind="timeout")
    if result.exit_code in CANNOT_RUN:
        reason = tail(result.output, 300) or f"status {result.exit_code}"
        raise GradeFailed(
            f"the grade command cannot be run: {reason}", hint="is it in the sandbox and executable?"
        )
    return Grade(passed=result.ok, score=float(result.ok), detail=tail(result.output))


def tail(text: str, characters: int = LONGEST_DETAIL) -> str:
    """The end of `text`: where programs say what went wrong."""
    text = text.strip()
    return text if len(text) <= characters else "..." + text[-characters:]
