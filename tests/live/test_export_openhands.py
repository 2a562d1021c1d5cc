"""An export for OpenHands beside what its SDK keeps itself, and beside the arithmetic of its cost script."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.export_readers import PYTHON, QUIET
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.errors import AgentFailed

ROOT = Path(__file__).parents[2]
COMPARISON = ROOT / "tests" / "clients" / "openhands_comparison.py"
PATCH = "diff --git a/x b/x\n"


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the SDK and our export say about the same conversations; the SDK takes seconds to import."""
    if not PYTHON.exists():
        reason = "OpenHands' SDK is not installed: `scripts/clients` does it"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    done = subprocess.run(
        [str(PYTHON), str(COMPARISON), str(tmp_path_factory.mktemp("stories"))],
        capture_output=True,
        text=True,
        timeout=stretch(120),
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_critics_of_the_sdk_judge_both_alike(stories: dict[str, Any]) -> None:
    verdicts = {name: story["verdicts"] for name, story in stories.items()}

    assert {name: sides["own"] for name, sides in verdicts.items()} == {
        "finished": [True, True],
        "unchanged": [False, False],
        "silent": [False, True],
        "refused": [False, True],
        "viewed": [True, True],
    }
    assert all(sides["ours"] == sides["own"] for sides in verdicts.values())


def test_the_sdk_loads_our_events_as_its_own_types(stories: dict[str, Any]) -> None:
    for name, story in stories.items():
        assert story["kinds"]["ours"] == story["kinds"]["own"], name
    assert stories["refused"]["kinds"]["ours"].count(["AgentErrorEvent", "NoneType"]) == 2
    finished = stories["finished"]["kinds"]["ours"]
    assert [inner for _, inner in finished[2:]] == [
        *("ThinkAction", "ThinkObservation", "FileEditorAction", "FileEditorObservation"),
        *("TerminalAction", "TerminalObservation", "TaskTrackerAction", "TaskTrackerObservation"),
        *("FinishAction", "FinishObservation"),
    ]


def test_the_sdk_renders_both_as_the_same_messages(stories: dict[str, Any]) -> None:
    for name, story in stories.items():
        assert story["messages"]["ours"] == story["messages"]["own"], name


def test_actions_and_observations_have_the_fields_of_the_tools(stories: dict[str, Any]) -> None:
    for name, story in stories.items():
        assert story["details"]["ours"] == story["details"]["own"], name
    commands = [
        found for found in stories["finished"]["details"]["ours"] if found[1] == "cat a.py; ls missing"
    ]
    ((failed, command, status, directory, _),) = commands
    assert not failed and command == "cat a.py; ls missing" and directory
    # On a busy machine the SDK's terminal can read the status of the prompt before the command's own.
    assert status in {0, 2}


def test_costs_are_those_that_the_sdk_has_counted(stories: dict[str, Any]) -> None:
    for name, story in stories.items():
        assert story["costs"]["own"] > 0
        assert story["costs"]["ours"] == pytest.approx(story["costs"]["own"], abs=1e-9), name


def test_the_sdk_opens_the_archive_of_a_conversation(stories: dict[str, Any]) -> None:
    for name, story in stories.items():
        archive = story["archive"]
        assert archive["kinds"] == story["kinds"]["ours"], name
        assert archive["cost"] == story["costs"]["ours"]
        assert archive["status"] == (
            "finished" if story["verdicts"]["ours"][0] or name == "unchanged" else "idle"
        )


# The rounds and their costs.


def export_rounds(path: Path) -> Path:
    """Export a run whose first instance fails once in the second round and passes in the third."""
    tries: dict[str, int] = {}

    async def act(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
        number = tries[instance.id] = tries.get(instance.id, 0) + 1
        await model.chat([{"role": "user", "content": f"round {number}"}])
        if instance.id == "thrice" and number == 2:
            raise AgentFailed("it gave up")
        return str(number)

    def grade(instance: hw.Instance, sandbox: hw.Sandbox, patch: str) -> bool:
        return instance.id == "once" or tries[instance.id] == 3

    async def reply(request: dict[str, Any]) -> dict[str, Any]:
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        message = {"role": "assistant", "content": "yes"}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}

    suite = hw.Suite(
        name="rounds",
        instances=lambda: (hw.Instance(id=name) for name in ("thrice", "once")),
        grade=grade,
        patch=lambda instance, sandbox, answer: PATCH,
    )
    (path / "prices.toml").write_text("[priced]\ninput = 10.0\noutput = 20.0\n")
    hw.run(
        suite,
        act,
        out=path / "run",
        policy=reply,
        model="priced",
        prices=str(path / "prices.toml"),
        workers=0,
        attempts=3,
        backoff=0.01,
    )
    hw.export(path / "run", path / "out", format="openhands")
    return path / "out"


def sum_costs(path: Path) -> float:
    """As their cost script adds: the costs of all lines."""
    return sum(json.loads(line)["metrics"]["accumulated_cost"] for line in path.read_text().splitlines())


def test_every_round_has_its_file_and_the_spend_is_exact(tmp_path: Path) -> None:
    out = export_rounds(tmp_path)

    files = sorted(out.glob("output.critic_attempt_*.jsonl"))
    rounds = [[json.loads(line)["instance_id"] for line in file.read_text().splitlines()] for file in files]
    assert rounds == [["thrice", "once"], ["thrice"], ["thrice"]]
    report = json.loads((out / "cost_report.jsonl").read_text())
    assert sum(map(sum_costs, files)) == pytest.approx(4 * 0.0012)
    assert report["summary"]["total_cost"] == pytest.approx(4 * 0.0012)
    assert report["summary"]["whole_run_cost"] == report["summary"]["sum_critic_files"]
    assert report["summary"]["only_main_output_cost"] == pytest.approx(sum_costs(out / "output.jsonl"))
    assert [found["lines"] for found in report["critic_files"]] == [2, 1, 1]


def test_a_round_without_the_outcome_keeps_its_error(tmp_path: Path) -> None:
    out = export_rounds(tmp_path)

    rows = [
        json.loads((out / f"output.critic_attempt_{n}.jsonl").read_text().splitlines()[0]) for n in (1, 2, 3)
    ]
    assert [row["attempt"] for row in rows] == [1, 2, 3]
    assert [row["error"] for row in rows] == [None, "agent: it gave up", None]
    assert [row["test_result"]["outcome"] for row in rows] == ["failed", "failed", "passed"]
    assert [len(row["runtime_runs"]) for row in rows] == [1, 2, 3]
    assert rows[2] == json.loads((out / "output.jsonl").read_text().splitlines()[0])


def test_an_earlier_export_leaves_no_rounds_behind(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "output.critic_attempt_9.jsonl").write_text("{}\n")

    out = export_rounds(tmp_path)

    assert not (out / "output.critic_attempt_9.jsonl").exists()


def test_logs_and_archives_are_named_by_the_instances(tmp_path: Path) -> None:
    out = export_rounds(tmp_path)

    assert sorted(path.name for path in (out / "conversations").iterdir()) == ["once.tar.gz", "thrice.tar.gz"]
    assert {path.name for path in (out / "logs").iterdir()} >= {
        "instance_once.log",
        "instance_once.output.log",
    }
    with tarfile.open(out / "conversations" / "once.tar.gz") as archive:
        names = archive.getnames()
    assert [name.rpartition("/")[2][:11] for name in names[:-1]] == ["event-00000", "event-00001"]
    assert names[-1].endswith("/base_state.json")
