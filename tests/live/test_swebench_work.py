"""The agent's diff as the patch, however it left the repository; sanity agents; tests that an agent wrote."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.swebench_rows import MENDED, Benchmark, diff, git
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api import grading
from holdwater.core.records import Instance, Verdict
from holdwater.ledger.attempt_files import patch_path
from holdwater.ledger.reader import LedgerReader

pytestmark = pytest.mark.skipif(
    find_spec("swebench") is None and os.environ.get("CI") != "true",
    reason="`swebench` is not installed: `scripts/setup dev`",
)

RESOLVED = hw.Grade(
    passed=True,
    score=1.0,
    detail="resolved: 1 of 1 FAIL_TO_PASS and 2 of 2 PASS_TO_PASS pass",
    metrics={"f2p_passed": 1.0, "f2p_total": 1.0, "p2p_passed": 2.0, "p2p_total": 2.0},
)
MEND = "sed -i 's|n // 2|n / 2|' calc.py"
COMMIT = "git -c user.name=a -c user.email=a@a commit -qam mended"
WAYS = {  # how an agent leaves what it did
    "plainly": MEND,
    "committed": f"{MEND}; {COMMIT}",
    "on-another-branch": f"git checkout -qb other; {MEND}; {COMMIT}",
    "with-the-index-locked": f"{MEND}; touch .git/index.lock",
    "with-settings-of-its-own": f"""{MEND}
        git config diff.external false; git config core.fsmonitor 'exit 1'; git config diff.noprefix true
        git config color.ui always; git config core.worktree /nowhere; git config core.bare true
        printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/post-index-change; chmod +x .git/hooks/post-index-change
        git config core.attributesFile /dev/stdin""",
    "with-a-broken-index": f"{MEND}; echo nonsense > .git/index",
    "hidden-from-git": f"git update-index --assume-unchanged calc.py; {MEND}",
    "beside-another-repository": f"{MEND}; mkdir inner; git -C inner init -q; echo new > added.txt",
    "and-raised": f"{MEND}; exit 3",
    "and-hung": f"{MEND}; sleep 60",
}


async def solve(instance: Instance, sandbox: Any, model: Any) -> None:
    result = await sandbox.run(WAYS[instance.id])
    if not result.ok:
        raise RuntimeError("gave up")


def test_work_is_graded_however_it_was_left(tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path)
    for name in WAYS:
        benchmark.add(name)

    summary = hw.run(
        benchmark.spec(),
        solve,
        out=tmp_path / "run",
        workers=0,
        concurrency=4,
        timeout=stretch(1.25),
        memory="8GiB",
    )

    verdicts = verdicts_of(tmp_path / "run")
    assert {name: v.grade.passed for name, v in verdicts.items() if v.grade} == dict.fromkeys(WAYS, True)
    assert {name: v.failure.kind for name, v in verdicts.items() if v.failure} == {
        "and-raised": "exception",
        "and-hung": "timeout",
    }
    assert summary.outcomes == {"passed": len(WAYS)}


def test_the_patch_has_new_and_binary_files_and_nothing_that_was_there(tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path)
    benchmark.add("one")
    repo = benchmark.repos / "one"
    (repo / "calc.py").write_text((repo / "calc.py").read_text() + "# not the agent's\n")
    (repo / "left.txt").write_text("not the agent's\n")
    odd = "".join(f"\\x{byte:02x}" for byte in b"n\xffme \xc3\xbc.bin")

    async def act(instance: Instance, sandbox: Any, model: Any) -> None:
        await sandbox.write("data.bin", bytes(range(256)))
        await sandbox.write("latin.txt", b"caf\xe9\n")
        await sandbox.write("ignored.log", "no")
        await sandbox.run(f"ln -s calc.py link; touch $'{odd}'; {MEND}")

    hw.run(benchmark.spec(), act, out=tmp_path / "run", workers=0)

    with LedgerReader(tmp_path / "run") as reader:
        patch = patch_path(reader.directory, 1).read_bytes()
    changed = {line for line in patch.splitlines() if line.startswith(b"diff --git")}
    assert b"not the agent's\n" not in b"".join(
        line[1:] for line in patch.splitlines(keepends=True) if line[:1] in b"+-"
    )
    assert len(changed) == 5 and b"+caf\xe9\n" in patch and b"ignored" not in patch
    (tmp_path / "p.diff").write_bytes(patch)
    git(repo, "apply", "--check", str(tmp_path / "p.diff"))
    assert verdicts_of(tmp_path / "run")["one"].grade == RESOLVED


@pytest.mark.parametrize(
    ("agent", "outcome"), [("gold", "passed"), ("oracle", "passed"), ("empty", "failed"), ("nop", "failed")]
)
def test_the_sanity_agents(tmp_path: Path, agent: str, outcome: str) -> None:
    benchmark = Benchmark(tmp_path)
    benchmark.add("one")

    summary = hw.run(benchmark.spec(), agent, out=tmp_path / "run", workers=0)

    assert summary.outcomes == {outcome: 1}


NEW = "tests/test_new.py"
SHOWS = "import calc\n\n\ndef test_odd():\n    assert calc.halve(3) == 1.5\n"


@pytest.mark.parametrize(
    ("tests", "passes", "shown", "kept", "wrong"),
    [
        (SHOWS, True, 1, 0, 0),
        (SHOWS.replace("1.5", "1"), False, 0, 0, 1),
        (SHOWS.replace("(3) == 1.5", "(4) == 2"), False, 0, 1, 0),
        (SHOWS + "\n\ndef test_wrong():\n    assert False\n", False, 1, 0, 1),
    ],
    ids=["show the fault", "ask for the fault", "do not show it", "one of them is wrong"],
)
def test_tests_must_fail_before_and_pass_after(
    tmp_path: Path, tests: str, passes: bool, shown: int, kept: int, wrong: int
) -> None:
    benchmark = Benchmark(tmp_path)
    benchmark.add("one")
    patch = diff(benchmark.repos / "one", {NEW: tests, "calc.py": MENDED.replace("a + b", "1/0")})

    async def act(instance: Instance, sandbox: Any, model: Any) -> dict[str, str]:
        return {"model_patch": patch}  # what it does to the code under test counts for nothing

    hw.run(benchmark.spec("swt"), act, out=tmp_path / "run", workers=0)

    grade = verdicts_of(tmp_path / "run")["one"].grade
    assert grade is not None
    counted = {"fail_to_pass": shown, "pass_to_pass": kept, "to_fail": wrong, "tests": shown + kept + wrong}
    assert (grade.passed, grade.metrics) == (passes, counted)


def test_the_benchmarks_own_tests_show_the_fault(tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path)
    benchmark.add("one")

    summary = hw.run(benchmark.spec("swt"), "gold", out=tmp_path / "run", workers=0)

    assert summary.outcomes == {"passed": 1}


def test_tests_that_never_end_are_an_error_in_the_report_and_zero(tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path)
    benchmark.add("one")
    patch = diff(benchmark.repos / "one", {"calc.py": "import time\ntime.sleep(60)\n"})
    predictions = benchmark.predictions({"one": patch})

    summary = hw.run(
        benchmark.spec(timeout="3"), f"predictions:{predictions}", out=tmp_path / "run", workers=0, retries=0
    )

    grade = verdicts_of(tmp_path / "run")["one"].grade
    assert summary.outcomes == {"failed": 1}
    assert grade is not None and grade.detail == "the tests did not end within 3 s"


def test_an_instance_without_a_prediction_was_not_submitted(tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path)
    benchmark.add("one")
    benchmark.add("two")
    predictions = benchmark.predictions({"one": None})

    summary = hw.run(benchmark.spec(), f"predictions:{predictions}", out=tmp_path / "run", workers=0)

    report = grading.report(tmp_path / "run")
    assert summary.outcomes == {"failed": 2}
    assert (report["total_instances"], report["empty_patch_ids"], report["incomplete_ids"]) == (
        2,
        ["one"],
        ["two"],
    )


def test_a_patch_cannot_replace_a_new_test_with_its_own_file(tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path)
    benchmark.add("made-for-its-tests")
    repo = benchmark.repos / "made-for-its-tests"
    new = diff(repo, {NEW: SHOWS})
    row = json.loads(benchmark.rows.read_text())
    script = benchmark.script(row["base_commit"], new).replace(
        "cacheprovider tests/test_calc.py", f"cacheprovider {NEW}"
    )
    changed = {
        "test_patch": new,
        "eval_script": script,
        "FAIL_TO_PASS": [f"{NEW}::test_odd"],
        "PASS_TO_PASS": [],
    }
    benchmark.rows.write_text(json.dumps(row | changed))
    cheat = diff(repo, {NEW: "def test_odd():\n    pass\n"})

    outcomes = []
    for number, patch in enumerate([cheat, row["patch"]]):
        predictions = benchmark.predictions({"made-for-its-tests": patch})
        out = tmp_path / f"run{number}"
        outcomes.append(hw.run(benchmark.spec(), f"predictions:{predictions}", out=out, workers=0).outcomes)

    assert outcomes == [{"failed": 1}, {"passed": 1}]


def verdicts_of(run: Path) -> dict[str, Verdict]:
    with LedgerReader(run) as reader:
        found = {row.instance: reader.verdict(row.attempt) for row in reader.outcomes()}
    return {name: verdict for name, verdict in found.items() if verdict is not None}
