"""Grading by a command: a pass, a zero, and what is neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.directory_sandbox import Directory

from holdwater.core.errors import GradeFailed
from holdwater.core.records import CommandResult, Instance
from holdwater.suite.grading import LONGEST_DETAIL, as_grade, command_grade
from holdwater.suite.jsonl import jsonl


async def test_status_0_is_a_pass_and_another_a_zero(tmp_path: Path) -> None:
    sandbox = Directory(tmp_path)

    good = await command_grade(Instance(id="i", grade="echo fine"), sandbox, None)
    bad = await command_grade(Instance(id="i", grade="seq 10000; echo wrong >&2; exit 1"), sandbox, None)

    assert (good.passed, good.score, good.detail) == (True, 1.0, "fine")
    assert (bad.passed, bad.score) == (False, 0.0)
    assert bad.detail.endswith("wrong") and len(bad.detail) <= LONGEST_DETAIL + 3


MISSING = "no-such-program-anywhere"
TESTS = {"run.sh": f"cd . && {MISSING}\n", "data": ""}


@pytest.mark.parametrize(
    "command",
    [
        MISSING,
        f"cd . && {MISSING} -q",
        f"echo 1 | {MISSING} - expected 2>&1",
        f"timeout -k 5 60 {MISSING}",
        f"sh -c 'X=1 {MISSING} -q'",
        f"/opt/{MISSING}",
        "$HOLDWATER_TESTS/run.sh",
        'sh -e "$HOLDWATER_TESTS/run.sh"',
        None,
    ],
)
async def test_a_command_that_cannot_judge_is_no_zero(tmp_path: Path, command: str | None) -> None:
    with pytest.raises(GradeFailed):
        await command_grade(Instance(id="i", grade=command, tests=TESTS), Directory(tmp_path), None)


@pytest.mark.parametrize("status", [126, 127])
@pytest.mark.parametrize(
    "command",
    [
        "sh work.sh",
        "cd . && sh work.sh",
        "./work.sh",
        "./missing.sh",
        "./not-executable",
        "$PWD/missing.sh",
        "find . -name work.sh > /dev/null; sh work.sh",
        "run() { sh work.sh; }; run",
        "case a in b) no-such ;; a) sh work.sh ;; esac",
        "sh work.sh # no-such; no-such",
        "PATH=$PWD:$PATH; missing.sh",
    ],
)
async def test_a_status_of_the_works_own_is_a_zero(tmp_path: Path, command: str, status: int) -> None:
    (tmp_path / "work.sh").write_text(f"#!/bin/sh\necho no-such-program: not found >&2\nexit {status}\n")
    (tmp_path / "work.sh").chmod(0o755)
    (tmp_path / "not-executable").write_text("")

    grade = await command_grade(Instance(id="i", grade=command), Directory(tmp_path), None)

    assert (grade.passed, grade.score) == (False, 0.0)


@pytest.mark.parametrize(("printed", "passed"), [("2", True), ("1", False), ("2 and more", False)])
async def test_what_a_command_prints_is_compared_outside_the_sandbox(
    tmp_path: Path, printed: str, passed: bool
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"id": "i", "grade": f"echo {printed}", "expected": "2\n"}))
    (instance,) = jsonl(file).instances()

    grade = await command_grade(instance, Directory(tmp_path), None)

    assert (grade.passed, grade.score) == (passed, float(passed))


async def test_the_directory_of_tests_has_another_name_each_time(tmp_path: Path) -> None:
    instance = Instance(id="i", grade='cat "$HOLDWATER_TESTS/data"; echo "$HOLDWATER_TESTS"', tests=TESTS)

    grades = [await command_grade(instance, Directory(tmp_path), None) for _ in range(2)]

    assert all(grade.passed for grade in grades) and grades[0].detail != grades[1].detail


def test_a_timeout_is_no_zero() -> None:
    with pytest.raises(GradeFailed) as caught:
        as_grade(CommandResult(exit_code=-9, stdout="", stderr="", seconds=5.0, timed_out=True))

    assert caught.value.kind == "timeout"
