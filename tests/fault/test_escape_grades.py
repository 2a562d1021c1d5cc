"""An agent that does no work and tries to be graded as if it had: nothing of its tricks passes.

Each run is played in process sandboxes, as root and as an ordinary user.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.harbor_tasks import task
from tests.user_commands import find_python, name_user, run_as, staged, users
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.records import Limits, Network
from holdwater.ledger.reader import LedgerReader
from holdwater.sandbox import salvage_archive
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

SHOP = "def price(): return 1\n"
TEST = """
import unittest
from shop import price
class TestPrice(unittest.TestCase):
    def test_price(self):
        self.assertEqual(price(), 2)
"""
IN_PLACE = {  # graded in the agent's own directory, as many suites do
    "id": "in-place",
    "files": {"shop.py": SHOP, "test_shop.py": TEST},
    "grade": "python3 -m unittest test_shop",
}
SHOW = "import sys; sys.path.append('.'); from shop import price; print(price())"
OUTSIDE = {  # the recommended way: what the work prints is compared outside the sandbox
    "id": "outside",
    "files": {"shop.py": SHOP},
    "expected": "2\n",
    "grade": f'python3 -I -c "{SHOW}"',
    "solution": "echo 'def price(): return 2' > shop.py",
}
WRITTEN = {  # the recommended way for files: a link is none
    "id": "written",
    "instruction": "Write 2 to out.txt",
    "tests": {"expected": "2\n"},
    "grade": "test -f out.txt && ! test -L out.txt && cmp $HOLDWATER_TESTS/expected out.txt",
}
READABLE = {  # the work can read the value that it is compared with
    "id": "readable",
    "files": {"shop.py": SHOP},
    "tests": {"expected": "2\n"},
    "grade": f'python3 -I -c "{SHOW}" | cmp - $HOLDWATER_TESTS/expected',
}
LINKED = {**WRITTEN, "id": "linked", "grade": "cmp $HOLDWATER_TESTS/expected out.txt"}
TO_TESTS = {**WRITTEN, "id": "to-tests", "grade": "cmp out.txt $HOLDWATER_TESTS/expected"}
# Tricks that need a suite which trusts files of the agent's directory: replaced tests, modules beside them.
ONLY_IN_PLACE = {"stdlib-shadow", "replaced-tests", "early-exit"}


@pytest.fixture(params=users(), ids=name_user)
def user(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def holdwater(user: int, *words: str) -> Any:
    """What a command of this user prints as JSON, and its status."""
    done = run_as(user, [find_python(user), "-m", "holdwater", *words, "--json"], stretch(240))
    assert done.returncode in (0, 1), done
    return json.loads(done.stdout), done.returncode


def write_rows(place: Path, *rows: dict[str, Any]) -> str:
    file = place / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def outcomes(out: Path, user: int) -> dict[str, tuple[str, float]]:
    words = [find_python(user), "-m", "holdwater", "export", str(out), "--format", "jsonl"]
    done = run_as(user, words, stretch(60))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["instance"]: (row["kind"], row["score"]) for row in rows}


def test_no_trick_passes_a_suite_that_is_graded_as_recommended(user: int) -> None:
    with staged(user) as place:
        rows = write_rows(place, OUTSIDE, WRITTEN)
        found, status = holdwater(user, "check", "--attack", rows, "--workers", "0")

    tried = {trick["name"]: trick["passed"] for trick in found["tricks"]}
    assert (status, found["instances"], found["nop_passed"]) == (0, 2, [])
    assert len(tried) >= 19 and not any(tried.values()), tried


def test_a_value_that_the_work_can_read_or_link_to_is_detected(user: int) -> None:
    with staged(user) as place:
        rows = write_rows(place, READABLE, LINKED, TO_TESTS)
        found, status = holdwater(user, "check", "--attack", rows, "--workers", "0")

    passed = {(trick["name"], row) for trick in found["tricks"] for row in trick["passed"]}
    assert (status, found["instances"]) == (1, 3)
    assert passed == {("tests-read", "readable"), ("open-file-link", "linked")}


def test_tests_in_the_agents_directory_fall_to_its_files_alone(user: int) -> None:
    with staged(user) as place:
        found, status = holdwater(user, "check", "--attack", write_rows(place, IN_PLACE), "--workers", "0")

    assert (status, found["instances"]) == (1, 1)
    assert {trick["name"] for trick in found["tricks"] if trick["passed"]} == ONLY_IN_PLACE


def test_a_regrade_says_what_the_first_grading_said(user: int) -> None:
    with staged(user) as place:
        out, suite = place / "run", write_rows(place, IN_PLACE)
        trick = ("--agent", "attack:usercustomize", "--workers", "0")
        holdwater(user, "run", suite, "--out", str(out), *trick)
        first = outcomes(out, user)

        holdwater(user, "regrade", str(out))

        assert first == outcomes(out, user) == {"in-place": ("failed", 0.0)}


def test_a_verifier_in_a_process_sandbox_runs_no_file_from_the_home(user: int) -> None:
    verify = """
    echo 0 > /logs/verifier/reward.txt
    python3 -c 'pass'
    """
    with staged(user) as place:
        task(place / "tree" / "one", tests__test_sh=verify)
        agent = ("--agent", "attack:usercustomize", "--workers", "0")
        words = ("run", str(place / "tree"), "--out", str(place / "run"), "--retries", "0", *agent)

        holdwater(user, *words)

        assert outcomes(place / "run", user) == {"one": ("failed", 0.0)}


def test_a_verifier_that_follows_a_link_to_its_tests_is_found_out(user: int) -> None:
    verify = "cmp answer.txt /tests/expected && reward 1 || reward 0"
    with staged(user) as place:
        task(place / "tree" / "one", tests__test_sh=verify, tests__expected="yes\n")
        words = ("check", "--attack", str(place / "tree"), "--workers", "0", "--retries", "0")

        found, status = holdwater(user, *words)

    passed = {trick["name"] for trick in found["tricks"] if trick["passed"]}
    assert (status, passed) == (1, {"tests-link"})


async def test_an_agent_cannot_turn_its_zero_into_an_error(tmp_path: Path) -> None:
    row = {"id": "one", "grade": "sh work.sh"}

    async def act(instance: hw.Instance, sandbox: Any, model: Any) -> None:
        await sandbox.write("work.sh", "echo sh: no such program >&2; exit 127\n")

    summary = await hw.arun(write_rows(tmp_path, row), act, out=tmp_path / "run", workers=0, retries=0)

    assert summary.outcomes == {"failed": 1}


async def test_a_pipe_in_a_suites_directory_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    os.mkfifo(tmp_path / "given" / "pipe")
    rows = write_rows(tmp_path, {"id": "one", "grade": "true", "directory": "given"})

    async with asyncio.timeout(stretch(60)):
        summary = await hw.arun(rows, "nop", out=tmp_path / "run", workers=0, retries=0)

    assert summary.outcomes == {"sandbox": 1}
    with LedgerReader(tmp_path / "run") as reader:
        (row,) = reader.outcomes()
    assert f"`{tmp_path / 'given' / 'pipe'}`" in row.failure, row


async def test_everything_but_the_work_is_as_set_up_left_it(tmp_path: Path) -> None:
    lines = (
        "echo set-up > $HOME/kept; echo set-up > /tmp/kept; mkdir $HOME/deep; echo set-up > $HOME/deep/kept"
    )
    seen: list[str] = []

    async def act(instance: hw.Instance, sandbox: Any, model: Any) -> None:
        await sandbox.run(
            "echo agent > work; echo agent > $HOME/new; echo agent > /tmp/new; rm -r $HOME/deep"
        )
        await sandbox.run("echo agent > $HOME/kept; ln -sf /nowhere /tmp/kept; echo agent > /var/tmp/other")
        await sandbox.write(f"{sandbox.private}/new", "agent")

    async def grade(instance: hw.Instance, sandbox: Any, answer: Any) -> bool:
        look = f"cat $HOME/kept /tmp/kept $HOME/deep/kept work; ls -A $HOME /tmp /var/tmp {sandbox.private}"
        seen.append((await sandbox.run(f"{look}; echo $PYTHONNOUSERSITE")).output)
        return True

    suite = hw.Suite(name="s", instances=lambda: [hw.Instance(id="one", setup=lines)], grade=grade)

    summary = await hw.arun(suite, act, out=tmp_path / "run", workers=0)

    assert summary.outcomes == {"passed": 1}
    assert seen[0].split()[:4] == ["set-up", "set-up", "set-up", "agent"], seen
    assert "new" not in seen[0] and "other" not in seen[0] and seen[0].split()[-1] == "1", seen


@pytest.mark.parametrize("confined", [True, False], ids=["bubblewrap", "without"])
async def test_no_process_of_the_agent_is_left_for_the_grading(tmp_path: Path, confined: bool) -> None:
    machine = probe() if confined else MachineFeatures(why_not="left out on purpose", cgroup=probe().cgroup)
    if not confined and not machine.cgroup.usable:
        pytest.skip("without bubblewrap and control groups a process without marks is not found")
    boxes = ProcessSandboxes(tmp_path / "scratch", f"grades {os.getpid()}", Network.OPEN, machine=machine)
    async with boxes.open(1, Limits(), None) as box:
        await box.run("echo 'while :; do echo x >> growing; sleep 0.02; done' > grow")
        await box.mark()
        leave = '(env -i PATH="$PATH" setsid sh grow > /dev/null 2>&1 &)'
        await box.run(f"{leave}; until [ -s growing ]; do :; done")

        assert await box.clear_outside()

        sizes = (await box.run("wc -c < growing; sleep 0.5; wc -c < growing")).stdout.split()
        assert len(sizes) == 2 and len(set(sizes)) == 1, sizes


@pytest.mark.parametrize(("size", "ended"), [(10, "passed"), (5000, "grade")], ids=["kept", "not kept"])
async def test_work_that_cannot_be_cleared_in_place_is_regraded_or_not_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, ended: str
) -> None:
    # Set-up's own files are larger, so they are not kept.
    monkeypatch.setattr(salvage_archive, "LARGEST", 1000)
    setup = "head -c 5000 /dev/zero > $HOME/large"

    async def act(instance: hw.Instance, sandbox: Any, model: Any) -> None:
        await sandbox.run(f"head -c {size} /dev/zero > work; echo agent > $HOME/new; rm $HOME/large")

    async def grade(instance: hw.Instance, sandbox: Any, answer: Any) -> bool:
        return (await sandbox.run("test -e work && test -e $HOME/large && test ! -e $HOME/new")).ok

    suite = hw.Suite(name="s", instances=lambda: [hw.Instance(id="one", setup=setup)], grade=grade)

    summary = await hw.arun(suite, act, out=tmp_path / "run", workers=0, retries=0)

    assert summary.outcomes == {ended: 1}
