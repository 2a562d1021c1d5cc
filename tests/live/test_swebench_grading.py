"""Predictions graded in real repositories by real pytest: what resolves, and what only looks as if it did.

The `swebench` package reads what is written here. Where it is missing the tests are skipped, but never in CI.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.swebench_rows import FOOLING, MENDED, Benchmark, cheats, diff
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api import grading
from holdwater.core.records import Verdict
from holdwater.export.swebench import write_predictions
from holdwater.ledger.attempt_files import patch_path, taken_out_path
from holdwater.ledger.reader import LedgerReader
from holdwater.suite.loader import load

pytestmark = pytest.mark.skipif(
    find_spec("swebench") is None and os.environ.get("CI") != "true",
    reason="`swebench` is not installed: `scripts/setup dev`",
)

NOT_A_PATCH = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
REFERENCE = """
import json, sys
from swebench.harness.grading import get_eval_report
from swebench.harness.utils import make_test_spec
resolved = {}
for row, log in json.load(sys.stdin):
    prediction = {"instance_id": row["instance_id"], "model_patch": "x"}
    found = get_eval_report(make_test_spec(row | {"image": ""}), prediction, log, True)
    resolved[row["instance_id"]] = found[row["instance_id"]]["resolved"]
print(json.dumps(resolved))
"""


class Played:
    """A run that graded everything there is to tell apart."""

    def __init__(self, place: Path) -> None:
        self.benchmark = Benchmark(place)
        rows = [self.benchmark.add("mended")]
        repo = self.benchmark.repos / "mended"
        self.patches = {
            "mended": rows[0]["patch"],
            "empty": "",
            "breaks-another": diff(repo, {"calc.py": MENDED.replace("a + b", "a - b")}),
            "not-a-patch": NOT_A_PATCH,
            **cheats(repo),
        }
        self.names = [*self.patches, "left-out"]
        rows += [self.benchmark.add(name) for name in self.names[1:]]
        self.rows = {row["instance_id"]: row for row in rows}
        self.out = place / "run"
        predictions = self.benchmark.predictions(self.patches)
        self.summary = grading.grade(
            predictions, self.benchmark.spec(), out=self.out, workers=0, concurrency=2
        )
        self.report = grading.report(self.out, self.benchmark.spec())
        with LedgerReader(self.out) as reader:
            found = [(row, reader.verdict(row.attempt)) for row in reader.outcomes()]
            self.verdicts: dict[str, Verdict] = {row.instance: verdict for row, verdict in found if verdict}
            self.logs = {
                row.instance: taken_out_path(reader.directory, row.attempt) / "test_output.txt"
                for row, _ in found
            }
            self.kept = {row.instance: patch_path(reader.directory, row.attempt) for row, _ in found}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(tmp_path_factory.mktemp("swebench"))


def test_only_the_patch_that_mends_it_resolves(played: Played) -> None:
    assert played.summary.outcomes == {"passed": 1, "failed": len(played.patches) - 1}
    assert played.report["resolved_ids"] == ["mended"]


def test_the_instruction_names_the_directory_where_the_repository_is(tmp_path: Path) -> None:
    """Given rows with repositories of this machine, played in processes and in an image."""
    benchmark = Benchmark(tmp_path)
    benchmark.add("mended")
    seen = []

    async def look(instance, sandbox, model):  # type: ignore[no-untyped-def]
        seen.append((instance.instruction, (await sandbox.run("ls calc.py")).ok))

    for kind in ("swebench", "swt"):
        hw.run(benchmark.spec(kind), agent=look, out=tmp_path / kind, workers=0)
    suite = load(benchmark.spec(image="some:1", workdir="/repo"))

    assert isinstance(suite, hw.Suite)
    assert [there for _, there in seen] == [True, True]
    assert all("is your working directory." in told and "/testbed" not in told for told, _ in seen)
    assert "is in /repo." in next(iter(suite.instances())).instruction


def test_a_repository_without_pytests_report_is_graded_all_the_same(tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path)
    row = benchmark.add("mended", more={"pytest.ini": "[pytest]\naddopts = -p no:junitxml\n"})

    predictions = benchmark.predictions({"mended": row["patch"]})
    summary = grading.grade(predictions, benchmark.spec(), out=tmp_path / "run", workers=0)

    assert summary.outcomes == {"passed": 1}


def test_a_patch_that_breaks_another_test_says_which(played: Played) -> None:
    grade = played.verdicts["breaks-another"].grade

    assert grade is not None and not grade.passed
    assert grade.detail.endswith("1 of 2 PASS_TO_PASS pass; failed: tests/test_calc.py::test_add")
    assert grade.metrics == {"f2p_passed": 1, "f2p_total": 1, "p2p_passed": 1, "p2p_total": 2}


def test_what_fools_the_reference_does_not_resolve(played: Played, tmp_path: Path) -> None:
    given = []
    for name in sorted(FOOLING | {"mended", "breaks-another"}):
        log = tmp_path / name
        log.write_text(as_the_reference_prints(played.logs[name].read_text()))
        given.append((played.rows[name], str(log)))

    by_the_reference = asked(REFERENCE, given, tmp_path)

    assert by_the_reference == {"mended": True, "breaks-another": False, **dict.fromkeys(FOOLING, True)}
    assert set(played.report["unresolved_ids"]) >= FOOLING


def test_the_report_is_the_one_that_the_reference_makes(played: Played, tmp_path: Path) -> None:
    logs = tmp_path / "logs/run_evaluation/graded/some__model"
    for name, log in played.logs.items():
        if (report := log.with_name("report.json")).exists():
            (logs / name).mkdir(parents=True)
            (logs / name / "report.json").write_bytes(report.read_bytes())
            (logs / name / "test_output.txt").write_bytes(log.read_bytes())
    predictions = {
        name: {"instance_id": name, "model_name_or_path": "some/model", "model_patch": patch}
        for name, patch in played.patches.items()
    }
    program = """
import json, sys
from swebench.harness.reporting import make_run_report
predictions, names = json.load(sys.stdin)
path = make_run_report(predictions, [{"instance_id": name} for name in names], "graded", report_dir="out")
sys.stdout = sys.__stdout__
print()
print(path.read_text().replace("\\n", ""))
"""

    assert asked(program, (predictions, played.names), tmp_path) == played.report


def test_predictions_are_exported_as_the_reference_reads_them(played: Played, tmp_path: Path) -> None:
    out = io.BytesIO()
    with LedgerReader(played.out) as reader:
        assert write_predictions(reader, out) == ""
    (tmp_path / "predictions.jsonl").write_bytes(out.getvalue())
    program = """
import json
from swebench.harness.utils import get_predictions_from_file
print(json.dumps(get_predictions_from_file("predictions.jsonl", "", "")))
"""

    read = asked(program, None, tmp_path)

    assert {row["instance_id"]: row["model_patch"] for row in read} == played.patches
    assert {row["model_name_or_path"] for row in read} == {"some/model"}


def as_the_reference_prints(log: str) -> str:
    """Our log as the reference's own script would have printed it: its marks, and the status."""
    nonce = log.partition(">>>>> Start Test Output ")[2].partition("'")[0]
    status = log.partition("+ HOLDWATER_STATUS=")[2].partition("\n")[0]
    return log.replace(f" {nonce}'", "'") + f">>>>> Test Exit Code: {status}\n"


def asked(program: str, given: Any, cwd: Path) -> Any:
    """What a program that uses the whole `swebench` package prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=stretch(100),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
