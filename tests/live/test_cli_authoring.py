"""`holdwater init` and `holdwater check`, as an author of a suite meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.forked_command import run_forked
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api.checking import InstanceFault
from holdwater.cli import main

SOURCE = Path(__file__).parents[2] / "src"


def instances() -> list[hw.Instance]:
    return [
        hw.Instance(id="good", solution="echo done > out.txt"),
        hw.Instance(id="hard", solution="echo almost > out.txt"),
        hw.Instance(id="easy", solution="true", files={"out.txt": "done\n"}),
        hw.Instance(id="unsolved"),
        hw.Instance(id="broken", setup="exit 3", solution="echo done > out.txt"),
    ]


async def grade(instance: hw.Instance, sandbox: hw.Sandbox, answer: Any) -> hw.Grade:
    done = (await sandbox.run("grep -qx done out.txt")).ok
    return hw.Grade(passed=done, score=float(done), detail="" if done else "`out.txt` does not say `done`")


suite = hw.Suite(name="mixed", instances=instances, grade=grade)


def test_a_check_names_each_fault_and_its_reason(tmp_path: Path) -> None:
    found = hw.check(suite, out=tmp_path, retries=0)

    assert (found.suite, found.instances, found.good, found.ok) == ("mixed", 5, 1, False)
    assert found.oracle_failed == (
        InstanceFault("hard", "`out.txt` does not say `done`"),
        InstanceFault("unsolved", "the instance has no solution"),
    )
    assert found.nop_passed == (InstanceFault("easy", "score 1"),)
    assert [fault.id for fault in found.infrastructure] == ["broken", "broken"]
    assert found.infrastructure[0].why.startswith("oracle: sandbox: set-up command exited with 3")
    assert found.infrastructure[1].why.startswith("nop: sandbox: ")
    assert found.runs == (str(tmp_path / "oracle"), str(tmp_path / "nop"))


def test_the_command_prints_one_document_and_fails_when_something_is_wrong(tmp_path: Path) -> None:
    words = ("check", f"{__file__}:suite", "--out", str(tmp_path / "run"), "--retries", "0", "--json")

    done = holdwater(*words)

    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["nop_passed"] == [{"id": "easy", "why": "score 1"}]
    assert {"suite", "instances", "good", "oracle_failed", "nop_passed", "infrastructure"} <= set(found)
    assert "check: oracle in" in done.stderr and "check: nop in" in done.stderr


def test_a_check_of_a_good_suite_succeeds(tmp_path: Path) -> None:
    words = ("check", f"{__file__}:suite", "--only", "good", "--out", str(tmp_path / "run"), "--workers", "0")

    done = holdwater(*words)

    assert (done.returncode, done.stdout) == (0, "mixed: 1 instances, 1 good\n")


def test_a_check_takes_no_agent(tmp_path: Path) -> None:
    done = holdwater("check", "demo", "--agent", "bash", cwd=tmp_path)

    assert done.returncode == 2
    assert "takes no agent" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_attack_blames_no_trick_for_what_passes_anyway(tmp_path: Path) -> None:
    found = hw.attack(suite, only=["good", "easy", "broken"], workers=0)

    assert (found.instances, found.nop_passed, found.ok) == (1, ("easy",), True)
    assert [fault.id for fault in found.untried] == ["broken"]
    assert {(trick.passed, trick.held) for trick in found.tricks} == {((), 1)}


def test_an_attack_names_the_trick_that_passed_and_fails(tmp_path: Path) -> None:
    row = {"id": "trusting", "grade": "python3 -m unittest -q test_x", "files": {"test_x.py": "syntax error"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    done = holdwater("check", "--attack", "rows.jsonl", "--workers", "0", "--quiet", cwd=tmp_path)

    assert done.returncode == 1, done
    assert "replaced-tests passes: trusting" in done.stdout
    assert "usercustomize passes" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"], "no run is kept"


def test_an_attack_on_no_suite_is_bad_input(tmp_path: Path) -> None:
    done = holdwater("check", "--attack", "missing.jsonl", cwd=tmp_path)

    assert done.returncode == 2
    assert "no such file" in done.stderr


@pytest.mark.parametrize(("kind", "module"), [("suite", "my_puzzles"), ("agent", "my_puzzles")])
def test_what_init_writes_passes_its_own_test_and_is_not_overwritten(
    tmp_path: Path, kind: str, module: str
) -> None:
    made = holdwater("init", kind, "my-puzzles", "--json", cwd=tmp_path)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{module}.py"],
        cwd=tmp_path / "my-puzzles",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=stretch(90),
        check=False,
    )
    again = holdwater("init", kind, "my-puzzles", cwd=tmp_path)

    document = json.loads(made.stdout)
    assert [Path(file).name for file in document["files"]] == [
        f"{module}.py",
        f"test_{module}.py",
        f"{module}.md",
    ]
    assert document["next"][1] == f"pytest test_{module}.py"
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_init_says_what_to_do_next(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "suite", "puzzles", "--dir", str(tmp_path / "here")]) == 0

    said = capfd.readouterr().out
    assert said.splitlines()[0] == f"wrote {tmp_path}/here/puzzles.py"
    assert "holdwater check puzzles.py:suite" in said


@pytest.mark.parametrize("name", ["../x", "1st", "a b", "", "class", "x" * 65, "a/b", "$x", "é"])
def test_an_invalid_name_is_refused(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "agent", name, "--dir", str(tmp_path)]) == 2

    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err.startswith("error: ")


def holdwater(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_forked(*words, cwd=cwd, seconds=90)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}
