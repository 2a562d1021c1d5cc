"""Evaluations of OpenHands' benchmarks on holdwater: a stand-in of their package, and their real SDK."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.export_readers import PYTHON, QUIET
from tests.wait_bounds import stretch

from holdwater.sandbox.probe import probe

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "clients" / "openhands_evaluations.py"
KINDS = ("finish-1", "silent-1", "empty-1", "raise-1", "model-1", "files-1", "error-1")

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The export of a run with an instance of each kind; the SDK takes seconds to import."""
    if not PYTHON.exists():
        reason = "OpenHands' SDK is not installed: `scripts/clients` does it"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), str(tmp_path_factory.mktemp("played")), *KINDS],
        capture_output=True,
        text=True,
        timeout=stretch(120),
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def result_of(played: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = played["rows"][name]["test_result"]
    return found


def test_their_critic_grades_their_outputs(played: dict[str, Any]) -> None:
    graded = {name: result_of(played, name) for name in ("finish-1", "silent-1", "empty-1")}

    assert {name: result["outcome"] for name, result in graded.items()} == {
        "finish-1": "passed",
        "silent-1": "failed",
        "empty-1": "failed",
    }
    assert (
        graded["finish-1"]["git_patch"].endswith("-one\n+one\n+three\n")
        or "+three" in graded["finish-1"]["git_patch"]
    )
    assert "No FinishAction" in graded["silent-1"]["detail"]
    assert played["metadata"]["critic"]["kind"] == "AgentFinishedCritic"


def test_an_evaluation_that_raises_is_retried_and_never_a_zero(played: dict[str, Any]) -> None:
    row = played["rows"]["raise-1"]

    assert row["test_result"]["outcome"] == "sandbox"
    assert "score" not in row["test_result"]
    said = "sandbox: the evaluation raised: RuntimeError: the evaluation is broken (run_infer.py:"
    assert row["error"].startswith(said)
    assert [run["retry"] for run in row["runtime_runs"]] == [1, 2]
    assert "+two" in row["test_result"]["git_patch"]  # by its `collect_failure_test_result`
    assert row["test_result"]["git_patch_captured_on_error"] is True


def test_an_output_with_an_error_is_no_result(played: dict[str, Any]) -> None:
    row = played["rows"]["error-1"]

    assert row["test_result"]["outcome"] == "sandbox"
    assert row["error"] == "sandbox: the evaluation returned an error: it says so"


def test_a_failed_model_call_is_the_models_failure(played: dict[str, Any]) -> None:
    row = played["rows"]["model-1"]

    assert row["test_result"]["outcome"] == "model"
    assert row["error"] == "model: the upstream answered 400: no"


def test_the_workspace_is_the_sandbox(played: dict[str, Any]) -> None:
    result = result_of(played, "files-1")

    assert (result["sent"], result["fetched"], result["lost"]) == (True, "one\nmore\n", [False, True])
    assert sorted(result["changes"]) == [["ADDED", "there.txt"], ["UPDATED", "notes.txt"]]
    assert result["diff"] == ["one\n", "one\nmore\n"]
    assert (result["late"], result["status"]) == ([-1, True], 7)


def test_the_tools_of_their_agent_act_in_the_sandbox(played: dict[str, Any]) -> None:
    row = played["rows"]["finish-1"]

    actions = [event["action"]["kind"] for event in row["history"] if event["kind"] == "ActionEvent"]
    assert actions == ["TerminalAction", "FileEditorAction", "FinishAction"]
    shell = next(event for event in row["history"] if event["kind"] == "ObservationEvent")
    assert shell["observation"]["metadata"]["working_dir"] == "/workspace/notes"
    assert shell["observation"]["exit_code"] == 0
    assert row["instruction"] == "story finish-1"


def test_a_tool_that_does_not_act_in_a_sandbox_is_refused(played: dict[str, Any]) -> None:
    assert played["refused"] == [
        "a tool of the evaluation's agent does not act in a sandbox: `task_tool_set`",
        "",
    ]
