"""Grading by a command: a pass, a zero, and what is neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.directory import Directory

from holdwater.core.errors import GradeFailed
from holdwater.core.records import CommandResult, Instance
from holdwater.suite.grading import LONGEST_DETAIL, as_grade, command_grade


async def test_status_0_is_a_pass_and_another_a_zero(tmp_path: Path) -> None:
    sandbox = Directory(tmp_path)

    good = await command_grade(Instance(id="i", grade="echo fine"), sandbox, None)
    bad = await command_grade(Instance(id="i", grade="seq 10000; echo wrong >&2; exit 1"), sandbox, None)

    assert (good.passed, good.score, good.detail) == (True, 1.0, "fine")
    assert (bad.passed, bad.score) == (False, 0.0)
    assert bad.detail.endswith("wrong") and len(bad.detail) <= LONGEST_DETAIL + 3


@pytest.mark.parametrize("command", ["no-such-program-anywhere", "./not-executable", None])
async def test_a_command_that_cannot_judge_is_no_zero(tmp_path: Path, command: str | None) -> None:
    (tmp_path / "not-executable").write_text("")

    with pytest.raises(GradeFailed):
        await command_grade(Instance(id="i", grade=command), Directory(tmp_path), None)


def test_a_timeout_is_no_zero() -> None:
    with pytest.raises(GradeFailed) as caught:
        as_grade(CommandResult(exit_code=-9, stdout="", stderr="", seconds=5.0, timed_out=True))

    assert caught.value.kind == "timeout"
