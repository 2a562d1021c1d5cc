"""Kept work that is graded again: what a regrade must never do to an outcome, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdwater as hw
from holdwater.cli import main
from holdwater.core.errors import BadInput
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.rows import OutcomeRow
from holdwater.rollout.user_calls import LONGEST_ANSWER
from holdwater.sandbox import salvage_archive

MOST_SECONDS = 120.0  # for what takes a second on a quiet machine


class Scene:
    """A suite of a few instances whose grader is exchanged between a run and its regrades."""

    def __init__(self, out: Path, *names: str) -> None:
        self.out = out
        self.names = names
        self.acted: Counter[str] = Counter()
        self.graded: list[tuple[str, Any]] = []
        self.grader: Callable[..., Any] = self.reads_work

    async def act(self, instance: hw.Instance, sandbox: Any, model: Any) -> Any:
        self.acted[instance.id] += 1
        await sandbox.write("work", instance.id)
        return instance.id

    async def reads_work(self, instance: hw.Instance, sandbox: Any, answer: Any) -> bool:
        return (await sandbox.read("work")).decode() == instance.id

    async def grade(self, instance: hw.Instance, sandbox: Any, answer: Any) -> Any:
        self.graded.append((instance.id, answer))
        return await self.grader(instance, sandbox, answer)

    @property
    def suite(self) -> hw.Suite:
        def instances() -> Iterator[hw.Instance]:
            return (hw.Instance(id=name) for name in self.names)

        return hw.Suite(name="kept", instances=instances, grade=self.grade)

    async def run(self, **options: Any) -> Any:
        return await hw.arun(self.suite, self.act, out=self.out, backoff=0.01, **options)

    async def regrade(self, *only: str) -> Any:
        self.graded.clear()
        return await hw.aregrade(self.out, suite=self.suite, only=only)

    def rows(self) -> dict[str, OutcomeRow]:
        with LedgerReader(self.out) as reader:
            return {row.instance: row for row in reader.outcomes()}


def fails(times: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """A grader that cannot grade at first."""
    left = [times]

    async def grade(*arguments: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise hw.GradeFailed("the grader's machine is away")
        return await then(*arguments)

    return grade


# What cannot be put back whole is not graded.


async def test_work_that_is_not_kept_whole_keeps_its_outcome(tmp_path, monkeypatch):
    monkeypatch.setattr(salvage_archive, "LARGEST", 1000)
    scene = Scene(tmp_path / "run", "large", "odd", "long", "plain")
    answers = {"odd": {1: "one"}, "long": "x" * (LONGEST_ANSWER + 1), "plain": {"1": 1.5}}

    async def act(instance: hw.Instance, sandbox: Any, model: Any) -> Any:
        await sandbox.write("work", instance.id)
        await sandbox.write("file", "y" * (2000 if instance.id == "large" else 20))
        return answers.get(instance.id)

    async def sees_all(instance: hw.Instance, sandbox: Any, answer: Any) -> bool:
        return len(await sandbox.read("file")) in (20, 2000) and answer == answers.get(instance.id)

    scene.grader = sees_all
    await hw.arun(scene.suite, act, out=scene.out)

    summary = await scene.regrade()

    assert summary.outcomes == {"passed": 4}
    assert {name for name, _ in scene.graded} == {"long", "plain"}
    rows = scene.rows()
    assert rows["odd"].regrade == "not regraded: a JSON round trip changes the answer"
    assert rows["large"].regrade.startswith("not regraded: 1 changed files are too large")
    assert (rows["long"].regrade, rows["plain"].regrade) == ("", "")
    assert (summary.regrade.graded, summary.regrade.refused) == (2, 2)


async def test_a_missing_salvage_is_an_error_of_its_row(tmp_path, capfd):
    scene = Scene(tmp_path / "run", "gone", "there")
    await scene.run()
    (scene.out / "artifacts" / "000001.tar.zst").unlink()

    summary = await scene.regrade()

    assert (summary.outcomes, summary.exit_status) == ({"passed": 2}, 1)
    assert [name for name, _ in scene.graded] == ["there"]
    assert "`000001.tar.zst` cannot be read" in scene.rows()["gone"].regrade
    assert main(["show", str(scene.out)]) == 0
    told = capfd.readouterr().out
    assert "not regraded" in told and "1 of 2 samples not regraded" in " ".join(told.split())


async def test_a_grader_that_is_away_keeps_the_outcome_and_the_work(tmp_path):
    scene = Scene(tmp_path / "run", "one")
    await scene.run(retries=1)
    scene.grader = fails(99, scene.reads_work)

    failed = await scene.regrade()
    kept = scene.rows()["one"]
    scene.grader = fails(1, scene.reads_work)
    graded = await scene.regrade()

    assert (failed.outcomes, failed.exit_status, failed.attempts) == ({"passed": 1}, 1, 3)
    assert (kept.kind, kept.attempt) == ("passed", 1)
    assert kept.regrade == "not regraded: grade: the grader's machine is away"
    assert (graded.outcomes, graded.exit_status) == ({"passed": 1}, 0)
    assert scene.graded == [("one", "one")] * 2 and scene.acted == {"one": 1}
    with LedgerReader(scene.out) as reader:
        assert [row.regrades for row in reader.attempts()] == [None, 1, 1, 1, 1]


async def test_an_instance_whose_agent_never_acted_stays_unscored(tmp_path):
    scene = Scene(tmp_path / "run", "never", "acted")
    away = {"never"}

    def set_up(instance: hw.Instance, sandbox: Any) -> None:
        if instance.id in away:
            raise hw.SandboxFailed("the machine is away")

    suite = msgspec.structs.replace(scene.suite, setup=set_up, grade=lambda *_: False)
    first = await hw.arun(suite, scene.act, out=scene.out, retries=0)
    away.clear()

    again = await hw.aregrade(scene.out, suite=suite)

    assert first.outcomes == again.outcomes == {"sandbox": 1, "failed": 1}
    assert (first.exit_status, again.exit_status) == (1, 1)
    assert scene.rows()["never"].regrade == "not regraded: the agent did not act"


async def test_a_regrade_leaves_usage_and_times_of_the_agent(tmp_path):
    scene = Scene(tmp_path / "run", "one")

    async def act(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        await model.chat([{"role": "user", "content": "hello"}])
        return str(await scene.act(instance, sandbox, model))

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        return {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}

    await hw.arun(scene.suite, act, out=scene.out, policy=reply)
    before = scene.rows()["one"]

    summary = await scene.regrade()

    after = scene.rows()["one"]
    assert (before.usage.tokens, after.usage, after.spent) == (10, before.usage, before.usage)
    assert (after.attempt, after.times.acting) == (2, before.times.acting)
    assert summary.usage == before.usage
    (read,) = hw.read(scene.out)
    assert (read.usage, read.verdict.exchanges) == (before.usage, 1)
    exported = BytesIO()
    hw.export(scene.out, exported, what="outcomes")
    row = json.loads(exported.getvalue())
    assert (row["input_tokens"], row["output_tokens"], row["requests"]) == (7, 3, 1)


# A regrade is whole.


async def test_a_grader_that_has_changed_does_not_go_on_with_a_regrade(tmp_path):
    scene = Scene(tmp_path / "run", "one", "two")
    await scene.run()
    with LedgerReader(scene.out) as reader:
        directory = reader.directory
    async with Ledger(directory) as ledger:
        await ledger.begin_regrade("another grader", ())

    with pytest.raises(BadInput, match="the grader has changed"):
        await hw.aresume(scene.out, suite=scene.suite, agent=scene.act)
    summary = await scene.regrade()

    assert (summary.regrade.graded, summary.regrade.ended is not None) == (2, True)
    assert (await hw.aresume(scene.out, suite=scene.suite, agent=scene.act)).state == "finished"


SUITE = """
import asyncio, pathlib
import holdwater as hw

HERE = pathlib.Path(__file__).parent

def instances():
    return (hw.Instance(id=f"i{n}") for n in range(6))

async def grade(instance, sandbox, answer):
    new = (HERE / "new").exists()
    with (HERE / "graded").open("a") as file:
        file.write(f"{instance.id} {new}\\n")
    while new and instance.id in ("i3", "i4", "i5") and (HERE / "shut").exists():
        await asyncio.sleep(0.02)
    return 0.25 if new else 1.0

suite = hw.Suite(name="gated", instances=instances, grade=grade)
"""
AGENT = """
async def act(instance, sandbox, model):
    await sandbox.write("work", instance.id)
"""


def holdwater(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "holdwater", *arguments], **options)


def finish(*arguments: str) -> int:
    return holdwater(*arguments, "--quiet").wait(MOST_SECONDS)


def await_lines(path: Path, text: str, count: int) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not path.exists() or path.read_text().count(text) < count:
        assert time.monotonic() < deadline, f"{path} has no {count} lines with {text}"
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_regrade_changes_nothing_until_a_resume_completes_it(tmp_path, how, capfd):
    (tmp_path / "suite.py").write_text(SUITE)
    (tmp_path / "agent.py").write_text(AGENT)
    run, graded = tmp_path / "run", tmp_path / "graded"
    named = (f"{tmp_path}/suite.py:suite", "--agent", f"{tmp_path}/agent.py:act")
    assert (
        finish("run", *named, "--out", str(run), "--concurrency", "2", "--workers", "1", "--grace", "1") == 0
    )
    for flag in ("new", "shut"):
        (tmp_path / flag).touch()

    regrade = holdwater("regrade", str(run), "--quiet", start_new_session=True)
    await_lines(graded, "True", 5)  # three are graded, two are held
    os.kill(regrade.pid, how)
    status = regrade.wait(MOST_SECONDS)
    scores = {row.score for row in outcomes(run)}
    main(["show", str(run)])
    told = " ".join(capfd.readouterr().out.split())
    (tmp_path / "shut").unlink()

    assert status == (-signal.SIGKILL if how is signal.SIGKILL else 3)
    assert scores == {1.0}
    assert "3 of 6 samples are graded" in told and "outcomes are still the previous ones" in told
    assert finish("resume", str(run)) == 0
    assert {row.score for row in outcomes(run)} == {0.25}
    counted = Counter(graded.read_text().splitlines())
    assert [counted[f"i{n} True"] for n in range(3)] == [1, 1, 1]
    assert hw.audit(run).ok and hw.show(run).state == "finished"
    main(["show", str(run)])
    assert "grader gated " in " ".join(capfd.readouterr().out.split())


def outcomes(run: Path) -> list[OutcomeRow]:
    with LedgerReader(run) as reader:
        return list(reader.outcomes())


async def test_a_regrade_of_an_unfinished_run_does_not_finish_it(tmp_path):
    scene = Scene(tmp_path / "run", "one", "two")

    async def stops(instance: hw.Instance, sandbox: Any, model: Any) -> Any:
        if instance.id == "two":
            raise hw.RunFailed("no such model")
        return await scene.act(instance, sandbox, model)

    first = await hw.arun(scene.suite, stops, out=scene.out, concurrency=1)

    regraded = await scene.regrade()
    resumed = await hw.aresume(scene.out, suite=scene.suite, agent=scene.act)

    assert (first.state, regraded.state, regraded.exit_status) == ("stopped", "stopped", 4)
    assert (resumed.state, resumed.outcomes) == ("finished", {"passed": 2})


# A grading that fails does not cost the agent's work.


async def test_a_failed_grading_is_tried_again_without_the_agent(tmp_path):
    scene = Scene(tmp_path / "run", "one", "two")
    scene.grader = fails(2, scene.reads_work)

    summary = await scene.run(retries=2)

    assert (summary.outcomes, summary.attempts) == ({"passed": 2}, 4)
    assert scene.acted == {"one": 1, "two": 1}
    with LedgerReader(scene.out) as reader:
        graded = {row.regrades for row in reader.attempts() if row.regrades is not None}
    assert graded <= {1, 2} and graded
    assert hw.audit(scene.out).ok


async def test_work_that_cannot_be_put_back_runs_the_agent_again(tmp_path):
    scene = Scene(tmp_path / "run", "one")

    async def loses_the_work(*_: Any) -> bool:
        scene.grader = scene.reads_work
        (scene.out / "artifacts" / "000001.tar.zst").unlink()
        raise hw.GradeFailed("the grader's machine is away")

    scene.grader = loses_the_work

    summary = await scene.run(retries=2)

    assert (summary.outcomes, scene.acted) == ({"passed": 1}, {"one": 2})
    with LedgerReader(scene.out) as reader:
        assert [row.regrades for row in reader.attempts()] == [None, 1, None]


async def test_a_resumed_run_grades_the_work_whose_grading_was_interrupted(tmp_path):
    scene = Scene(tmp_path / "run", "one")

    async def stops(*_: Any) -> bool:
        raise hw.RunFailed("the grader's key is bad")

    scene.grader = stops
    first = await scene.run()
    scene.grader = scene.reads_work

    summary = await hw.aresume(scene.out, suite=scene.suite, agent=scene.act)

    assert (first.state, summary.outcomes, scene.acted) == ("stopped", {"passed": 1}, {"one": 1})
