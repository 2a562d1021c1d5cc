"""Reads the demo's tasks: an instruction, files, hidden tests, a solution and perhaps a plausible mistake."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ...core.errors import BadInput
from ...core.records import Record

TASKS = Path(__file__).parent / "tasks"


class Task(Record, frozen=True):
    """A task of the demo."""

    name: str
    instruction: str
    files: dict[str, str]
    tests: dict[str, str]
    solution: str
    wrong: str | None  # a plausible fix that the tests refuse


@cache
def names() -> tuple[str, ...]:
    """All tasks, in the order in which they are given."""
    return tuple(sorted(path.name for path in TASKS.iterdir() if (path / "instruction.md").is_file()))


@cache  # as many as there are names, and a few KiB each
def task(name: str) -> Task:
    if name not in names():
        raise BadInput(f"unknown demo task: `{name}`")
    base = TASKS / name
    wrong = base / "wrong.sh"
    return Task(
        name=name,
        instruction=(base / "instruction.md").read_text(encoding="utf-8").strip(),
        files=_tree(base / "files"),
        tests=_tree(base / "tests"),
        solution=(base / "solution.sh").read_text(encoding="utf-8"),
        wrong=wrong.read_text(encoding="utf-8") if wrong.exists() else None,
    )


def _tree(base: Path) -> dict[str, str]:
    found = sorted(path for path in base.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(base).as_posix(): path.read_text(encoding="utf-8") for path in found}
