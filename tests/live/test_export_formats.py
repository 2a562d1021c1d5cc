"""Runs as other programs read them: OpenHands' rows, SWE-bench's predictions, Harbor's jobs."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import in_process_run
from tests.export_readers import read_by_others
from tests.ledger_runs import new_run
from tests.recorded_conversations import CONVERSATIONS, IMAGE, Recording, chat, says

import holdwater as hw
from holdwater.cli import main
from holdwater.core.records import (
    Attempt,
    AttemptFailure,
    FailureOrigin,
    Grade,
    Instance,
    ModelUsage,
    Outcome,
    PhaseTimes,
    Verdict,
)
from holdwater.ledger.attempt_files import log_path, patch_path, taken_out_path
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import segment_path
from holdwater.ledger.ledger import Ledger, PlannedInstance

PATCH = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-é\n+è\n"
USED = ModelUsage(
    requests=2, input_tokens=30, cached_tokens=10, output_tokens=7, nanodollars=5_000_000, priced=2
)
TIMES = PhaseTimes(setup=1.0, acting=5.0, grading=2.0)


class Told:
    """A run in which each instance is a story: how it ended, what it left, in which dialect it talked."""

    def __init__(self, path: Path, **asked: Any) -> None:
        self.path = path
        self.directory: RunDirectory = new_run(path, model="openai/gpt-5", samples=2, **asked)

    async def tell(self) -> RunDirectory:
        async with Ledger(self.directory) as ledger:
            self.ledger = ledger
            await self.settle("good", "passed", patch=PATCH, dialect="chat")
            await self.settle("bad", "failed", patch="", dialect="responses")
            await self.settle("late", "failed", FailureOrigin.LIMIT, patch=PATCH, dialect="messages")
            await self.settle("broken/../x y", "model", FailureOrigin.MODEL)
            await self.settle("rescued", "sandbox", FailureOrigin.SANDBOX, patch=PATCH, dialect="gemini")
            await self.again("good")
        return self.directory

    async def settle(
        self,
        name: str,
        kind: str,
        where: FailureOrigin | None = None,
        *,
        patch: str | None = None,
        dialect: str = "",
    ) -> None:
        instance = Instance(id=name, instruction=f"Fix {name}.", data={"repo": "a/b", "n": [1, None]})
        payload = msgspec.msgpack.encode(instance)
        planned = PlannedInstance(name=name, digest=payload[:16], payload=payload, place="x")
        [row] = await self.ledger.plan([planned])
        await self.attempt(row, name, kind, where, patch=patch, dialect=dialect)

    async def attempt(
        self,
        row: int,
        name: str,
        kind: str,
        where: FailureOrigin | None,
        *,
        patch: str | None,
        dialect: str = "",
        sample: int = 0,
    ) -> None:
        attempt = await self.ledger.next_attempt()
        await self.ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=sample, number=1, round=2))
        exchanges = 0
        if dialect:
            recording = Recording(self.directory, attempt, dialect)
            for request, reply in CONVERSATIONS[dialect]:
                recording.add(request, reply)
                exchanges += 1
            recording.log.close()
        if patch is not None:
            patch_path(self.directory, attempt).write_bytes(patch.encode())
        scored = kind in ("passed", "failed")
        verdict = Verdict(
            attempt=attempt,
            token=self.ledger.token,
            failure=AttemptFailure(where=where, kind="timeout", message="it ended") if where else None,
            grade=Grade(kind == "passed", 0.5, "2 of 4 tests", {"tests": 0.5}) if scored else None,
            answer='{"said": "done"}',
            usage=USED,
            times=TIMES,
            exchanges=exchanges,
            patch=None if patch is None else len(patch.encode()),
        )
        await self.ledger.settle(verdict)
        score = 0.5 if scored else None
        outcome = Outcome(instance=row, sample=sample, attempt=attempt, kind=kind, score=score, where=where)
        await self.ledger.close_sample(outcome)

    async def again(self, name: str) -> None:
        """A second sample of the first instance."""
        await self.attempt(1, name, "passed", None, patch=PATCH, sample=1)


@pytest.fixture
async def told(tmp_path: Path) -> RunDirectory:
    return await Told(tmp_path / "told").tell()


def rows(path: Path) -> dict[str, dict[str, Any]]:
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["instance_id"]: row for row in read}


# OpenHands.

READ_OPENHANDS = """
import json, sys
from pathlib import Path
from typing import Any
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from openhands.sdk import LLM, Event
from openhands.sdk.critic import CriticBase
from openhands.sdk.event import LLMConvertibleEvent
from openhands.sdk.llm import Metrics

class Row(BaseModel):
    # The fields that a row of its benchmarks has, and no other.
    model_config = ConfigDict(extra="forbid")
    instance_id: str
    attempt: int = Field(ge=1)
    test_result: dict[str, Any]
    instruction: str | None
    metadata: None
    history: list[Event]
    metrics: Metrics
    error: str | None
    instance: dict[str, Any]
    runtime_runs: list[dict[str, Any]]

place = Path(sys.argv[1])
told = {}
for name in ("output.jsonl", "output_errors.jsonl"):
    for line in (place / name).read_text().splitlines():
        row = Row.model_validate_json(line)
        said = LLMConvertibleEvent.events_to_messages(
            [event for event in row.history if isinstance(event, LLMConvertibleEvent)]
        )
        assert row.history == [] or len({event.id for event in row.history}) == len(row.history)
        told[row.instance_id] = [
            [message.role, len(message.tool_calls or ()), message.contains_image] for message in said
        ]
metadata = json.loads((place / "metadata.json").read_text())
LLM.model_validate(metadata["llm"])
critic = TypeAdapter(CriticBase).validate_python(metadata["critic"])
told["critic"] = type(critic).__name__
print(json.dumps(told))
"""
TALKED = [["system", 0, False], ["user", 0, True], ["assistant", 1, False], ["tool", 0, False]]


async def test_openhands_sdk_reads_our_rows(told: RunDirectory, tmp_path: Path) -> None:
    hw.export(told.path, tmp_path / "out", format="openhands")

    read = json.loads(read_by_others(READ_OPENHANDS, tmp_path / "out"))

    assert read.pop("critic") == "PassCritic"
    assert read.pop("broken/../x y") == []
    for dialect, messages in read.items():
        assert [message[0] for message in messages[:4]] == [role for role, _, _ in TALKED], dialect
        assert [message[1] for message in messages[:4]] == [0, 0, 1, 0], dialect
        assert messages[1][2], dialect


async def test_a_row_with_an_error_and_a_patch_is_scored(told: RunDirectory, tmp_path: Path) -> None:
    omitted = hw.export(told.path, tmp_path, format="openhands")

    output, errors = rows(tmp_path / "output.jsonl"), rows(tmp_path / "output_errors.jsonl")
    assert list(output) == ["good", "bad", "late", "rescued"]
    assert list(errors) == ["broken/../x y"]
    assert output["rescued"]["error"] == "sandbox: it ended"
    assert output["rescued"]["test_result"]["git_patch"] == PATCH
    assert output["rescued"]["test_result"]["git_patch_captured_on_error"] is True
    assert output["good"]["error"] is None
    assert omitted == "left out: 1 samples beyond the first of their instance"


async def test_a_row_has_what_was_asked_used_and_made_of_it(told: RunDirectory, tmp_path: Path) -> None:
    hw.export(told.path, tmp_path, format="openhands")

    row = rows(tmp_path / "output.jsonl")["good"]
    assert row["attempt"] == 2
    assert row["instruction"] == "Fix good."
    assert row["instance"] == {"repo": "a/b", "n": [1, None]}
    assert row["test_result"]["answer"] == {"said": "done"}
    assert (row["test_result"]["passed"], row["test_result"]["outcome"]) == (True, "passed")
    assert row["metrics"]["accumulated_cost"] == 0.005
    assert row["metrics"]["accumulated_token_usage"]["prompt_tokens"] == 30
    assert [run["critic_attempt"] for run in row["runtime_runs"]] == [2]


async def test_what_lies_beside_the_rows_is_about_the_same_instances(
    told: RunDirectory, tmp_path: Path
) -> None:
    hw.export(told.path, tmp_path, format="openhands")

    predictions = rows(tmp_path / "output.swebench.jsonl")
    assert predictions["late"]["model_patch"] == PATCH
    report = json.loads((tmp_path / "output.report.json").read_text())
    assert (report["total_instances"], report["resolved_ids"]) == (5, ["good"])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "cost_report.jsonl",
        "metadata.json",
        "output.critic_attempt_2.jsonl",
        "output.jsonl",
        "output.report.json",
        "output.swebench.jsonl",
        "output_errors.jsonl",
    ]


async def test_an_export_that_fails_leaves_what_was_there(told: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hw.export(told.path, out, format="openhands")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    segment = segment_path(told, 5)
    content = bytearray(segment.read_bytes())
    content[40] ^= 0xFF
    segment.write_bytes(content)

    with pytest.raises(hw.HoldwaterError):
        hw.export(told.path, out, format="openhands")

    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


# Harbor.

READ_HARBOR = """
import json, sys
from pathlib import Path
from harbor.models.job.lock import JobLock
from harbor.models.trial.artifact_manifest import ArtifactManifestEntry
from harbor.utils.trajectory_validator import TrajectoryValidator
from harbor.viewer.scanner import JobScanner

scanner = JobScanner(Path(sys.argv[1]))
[job] = scanner.list_jobs()
assert scanner.get_job_config(job).job_name == job
result = scanner.get_job_result(job)
place = scanner.jobs_dir / job
lock = JobLock.model_validate_json((place / "lock.json").read_text())
told = {}
for name in scanner.list_trials(job):
    config, trial = scanner.get_trial_config(job, name), scanner.get_trial_result(job, name)
    assert config.trial_name == trial.trial_name == name and trial.config == config
    for path in (place / name / "agent").glob("trajectory.json"):
        validator = TrajectoryValidator()
        assert validator.validate(path), validator.get_errors()
    for entry in json.loads((place / name / "artifacts" / "manifest.json").read_text()):
        ArtifactManifestEntry.model_validate(entry)
    told[name] = {
        "task": trial.task_name,
        "rewards": trial.verifier_result and trial.verifier_result.rewards,
        "error": trial.exception_info and trial.exception_info.exception_type,
        "tokens": trial.compute_token_cost_totals()[:3],
        "files": sorted(str(p.relative_to(place / name)) for p in (place / name).rglob("*") if p.is_file()),
    }
assert len(lock.trials) == len(told)
[evals] = result.stats.evals.values()
print(json.dumps({"trials": told, "total": result.n_total_trials, "done": result.stats.n_completed_trials,
                  "errors": result.stats.n_errored_trials, "metrics": evals.metrics}))
"""


async def test_harbors_viewer_reads_our_job(told: RunDirectory, tmp_path: Path) -> None:
    taken = taken_out_path(told, 1)
    (taken / "verifier").mkdir(parents=True)
    (taken / "verifier" / "test-stdout.txt").write_text("4 passed")
    (taken / "notes.txt").write_text("kept")
    (taken / "out").symlink_to("/etc/passwd")
    log_path(told, 1, "good").write_text("said")

    hw.export(told.path, tmp_path / "jobs", format="harbor")
    read = json.loads(read_by_others(READ_HARBOR, tmp_path / "jobs"))

    trials = read["trials"]
    assert (read["total"], read["done"], read["errors"]) == (10, 6, 3)
    assert read["metrics"] == [{"mean": 0.5}]
    assert trials["good__0000001"]["rewards"] == {"reward": 0.5, "tests": 0.5}
    assert trials["good__0000001"]["tokens"] == [30, 10, 7]
    assert trials["broken-..-x-y__0000004"]["rewards"] is None
    assert trials["broken-..-x-y__0000004"]["task"] == "broken/../x y"
    assert trials["late__0000003"]["error"] == "limit.timeout"
    files = trials["good__0000001"]["files"]
    assert {"trial.log", "artifacts/notes.txt", "artifacts/model.patch", "verifier/reward.json"} <= set(files)
    job = tmp_path / "jobs" / "told" / "good__0000001"
    assert (job / "verifier" / "test-stdout.txt").read_text() == "4 passed"
    assert (job / "artifacts" / "out").is_symlink()


async def test_a_job_is_replaced_only_by_an_export_of_the_same_run(
    told: RunDirectory, tmp_path: Path
) -> None:
    hw.export(told.path, tmp_path / "jobs", format="harbor")
    stale = tmp_path / "jobs" / "told" / "stale__0000009"
    stale.mkdir()
    hw.export(told.path, tmp_path / "jobs", format="harbor")
    assert not stale.exists()

    (tmp_path / "jobs" / "told" / "result.json").unlink()
    with pytest.raises(hw.BadInput, match="not an export of this run"):
        hw.export(told.path, tmp_path / "jobs", format="harbor")

    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["told"]


# SWE-bench.


async def test_predictions_go_to_a_file_or_with_their_report_to_a_directory(
    told: RunDirectory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(told.path)
    assert main(["export", run, "--format", "swebench", "--out", str(tmp_path / "all.jsonl")]) == 0
    assert main(["export", run, "--format", "swebench", "--out", str(tmp_path / "both")]) == 0
    assert main(["export", run, "--format", "swebench"]) == 0

    assert (tmp_path / "all.jsonl").read_bytes() == (tmp_path / "both" / "predictions.jsonl").read_bytes()
    assert (tmp_path / "all.jsonl").read_text() == capfd.readouterr().out
    assert json.loads((tmp_path / "both" / "report.json").read_text())["schema_version"] == 2
    assert rows(tmp_path / "all.jsonl")["good"]["model_patch"] == PATCH


def test_predictions_of_a_suite_without_patches_say_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = hw.Suite(name="s", instances=lambda: [hw.Instance(id="a")], grade=lambda *_: True)
    hw.run(suite, lambda instance, sandbox, model: "done", out=tmp_path / "run")

    for out in ([], ["--out", str(tmp_path / "both")]):
        assert main(["export", str(tmp_path / "run"), "--format", "swebench", *out]) == 0

        told = capfd.readouterr()
        assert (told.out, told.err) == ("", "note: left out: instances without a patch: 1\n")


# The command.


async def test_the_last_line_on_stdout_says_where_the_rows_are(
    told: RunDirectory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval"

    assert main(["export", str(told.path), "--format", "openhands", "--out", str(out), "--json"]) == 0

    said = capfd.readouterr()
    assert said.out == json.dumps({"output_json": str(out / "output.jsonl")}, separators=(",", ":")) + "\n"
    assert "samples beyond the first" in said.err


@pytest.mark.parametrize(
    "words",
    [
        ["--format", "openhands"],
        ["--format", "harbor"],
        ["--format", "jsonl", "--json"],
        ["--format", "harbor", "--what", "attempts", "--out", "x"],
    ],
)
async def test_what_does_not_fit_together_is_refused(
    told: RunDirectory, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(told.path), *words]) == 2
    assert capfd.readouterr().out == ""


# Memory.


@pytest.mark.parametrize("format", ["openhands", "harbor"])
async def test_many_large_attempts_are_written_in_the_memory_of_one_exchange(
    tmp_path: Path, format: str
) -> None:
    size, turns = 200_000, 30
    story = Told(tmp_path / "run")
    async with Ledger(story.directory) as story.ledger:
        for n in range(3):
            await story.settle(f"i{n}", "passed", patch="x" * size)
            recording = Recording(story.directory, n + 1)
            texts: list[str] = []
            for turn in range(turns):
                texts += [f"{turn} {n}" + "y" * size, f"{turn} said"]
                recording.add(chat(*texts[:-1]), says(texts[-1]))
            recording.log.close()
    del texts, recording

    tracemalloc.start()
    hw.export(tmp_path / "run", tmp_path / "out", format=format)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert written > 3 * turns * size
    assert peak < 14 * size


def test_a_real_run_is_read_by_all_of_them(tmp_path: Path) -> None:
    """Objects, workers and a scripted model in place of rows that were made up."""

    async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
        said = await model.chat(
            [{"role": "user", "content": [{"type": "text", "text": instance.instruction}]}]
        )
        text: str = said["choices"][0]["message"]["content"]
        await sandbox.write("made.txt", text)
        return text

    async def patch(instance: hw.Instance, sandbox: hw.Sandbox, answer: str | None) -> str:
        return (await sandbox.read("made.txt")).decode()

    def instances() -> list[hw.Instance]:
        return [hw.Instance(id=name, instruction=f"{IMAGE[:30]} {name}") for name in in_process_run.names(3)]

    def grade(instance: hw.Instance, sandbox: hw.Sandbox, work: str) -> hw.Grade:
        return hw.Grade(passed=work == "done", score=1.0, metrics={"words": 1.0})

    suite = hw.Suite(name="real", instances=instances, grade=grade, patch=patch)
    summary = hw.run(suite, solve, out=tmp_path / "run", workers=0, policy=lambda request: says("done"))
    assert summary.outcomes == {"passed": 3}

    for format in ("openhands", "harbor"):
        hw.export(tmp_path / "run", tmp_path / format, format=format)
    openhands = json.loads(read_by_others(READ_OPENHANDS, tmp_path / "openhands"))
    harbor = json.loads(read_by_others(READ_HARBOR, tmp_path / "harbor"))

    assert openhands["i0"] == [["user", 0, False], ["assistant", 0, False]]
    assert [trial["rewards"]["reward"] for trial in harbor["trials"].values()] == [1.0] * 3
    assert all("agent/trajectory.json" in trial["files"] for trial in harbor["trials"].values())
