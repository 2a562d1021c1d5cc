"""Reads the demo's tasks: instruction, files, hidden tests, solution and optionally a plausible wrong fix."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ...core.errors import BadInput
from ...core.records import Record

TASKS = Path(__file__).parent / "tasks"


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
