"""The report, one instance's story, and the verbs that read a run, on a real ledger."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from tests.forked_command import run_forked

from holdwater.core.config import RunConfig
from holdwater.core.records import (
    Attempt,
    AttemptFailure,
    AttemptPhase,
    FailureOrigin,
    Grade,
    ModelUsage,
    Outcome,
    PhaseTimes,
    Verdict,
)
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.resume_state import PlannedInstance
from holdwater.view.instance_report import make_report, render_instance
from holdwater.view.report import MOST_ROWS, render_report

ODD = "it's [bold]odd[/bold]; rm -rf"
LOST = AttemptFailure(
    where=FailureOrigin.MODEL,
    kind="upstream",
    message="the upstream\nanswered\x1b[2J 503",
    hint="wait",
    phase=AttemptPhase.ACTING,
)
BAD = Grade(
    passed=False, score=0.25, detail="2 of 8 tests failed\ntest_b: \x1b[31mred\x1b[0m", metrics={"tests": 8}
)
GOOD = Grade(passed=True, score=1.0)


USED = ModelUsage(requests=2, input_tokens=1000, output_tokens=50)


async def make_run(
    path: Path, kinds: list[str], *, planned: int | None = None, state: str = "finished", used: bool = True
) -> Path:
    """A run whose instances `i0`, `i1`, ... ended as `kinds` say; the first is called ODD."""
    directory = RunDirectory.create(path)
    Ledger.create(directory)
    config = RunConfig(id="r1", suite="/x/suite.py:adding", agent="bash", created=1.0, version="0", model="m")
    directory.write_config(config)
    names = [ODD, *(f"i{number}" for number in range(1, planned or len(kinds)))]
    async with Ledger(directory) as ledger:
        await ledger.set_total(len(names))
        items = [
            PlannedInstance(name=name, digest=b"d", payload=b"{}", place=f"row {name}") for name in names
        ]
        rows = await ledger.plan(items)
        for number, (row, kind) in enumerate(zip(rows, kinds, strict=False), start=1):
            await settle(ledger, number, row, kind, USED if used else ModelUsage())
            (directory.logs / f"{number:06d}-x.log").write_text("log")
        await ledger.note("worker.lost", "signal 9")
        if state != "unfinished":
            await ledger.finish(state, "disk full" if state == "stopped" else "", 0)
    return path


async def settle(ledger: Ledger, number: int, row: int, kind: str, usage: ModelUsage) -> None:
    await ledger.begin_attempt(Attempt(id=number, instance=row, sample=0, number=1))
    failure = LOST if kind == "model" else None
    grade = {"passed": GOOD, "failed": BAD}.get(kind)
    await ledger.settle(
        Verdict(
            attempt=number,
            token=ledger.token,
            failure=failure,
            grade=grade,
            usage=usage,
            times=PhaseTimes(setup=0.5, acting=float(number), grading=1.0),
        )
    )
    score = grade.score if grade else None
    where = failure.where if failure else None
    await ledger.close_sample(
        Outcome(instance=row, sample=0, attempt=number, kind=kind, score=score, where=where)
    )


def report(path: Path, width: int = 100) -> str:
    with LedgerReader(path) as reader:
        return page(render_report(reader.summary(), reader), width)


def page(renderable: object, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False, force_terminal=False).print(
        renderable
    )
    return out.getvalue()


def holdwater(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(*words, cwd=cwd)


@pytest.mark.parametrize("width", [60, 80, 120])
async def test_the_report_fits_its_terminal_and_names_every_outcome(tmp_path: Path, width: int) -> None:
    path = await make_run(tmp_path / "run", ["passed", "failed", "model"])

    shown = report(path, width)

    assert max(map(len, shown.splitlines())) <= width
    assert "3 of 3: 1 passed, 1 failed, 1 model error" in shown
    assert "0.625, the mean over 2 scored" in shown
    assert "1 worker.lost" in shown
    rows = {row.split()[0]: row for row in shown.splitlines() if row.startswith(("i1 ", "i2 "))}
    assert "failed" in rows["i1"] and "0.25" in rows["i1"]
    assert "model error" in rows["i2"]


async def test_what_happened_is_on_the_row_where_there_is_room(tmp_path: Path) -> None:
    path = await make_run(tmp_path / "run", ["passed", "failed", "model"])

    shown = report(path, 120)

    assert "  test_b: red" in shown
    assert "the upstream answered" in shown
    assert "\x1b" not in shown


async def test_names_reach_the_page_as_they_are_and_the_shell_quoted(tmp_path: Path) -> None:
    path = await make_run(tmp_path / "run", ["failed"])

    shown = report(path, 300)

    assert ODD in shown
    assert f"holdwater show {path} 'it'\"'\"'s [bold]odd[/bold]; rm -rf'\n" in shown


async def test_problems_come_first_when_there_are_too_many_rows(tmp_path: Path) -> None:
    kinds = ["passed"] * (MOST_ROWS + 10) + ["failed", "passed", "model"]
    path = await make_run(tmp_path / "run", kinds)

    shown = report(path).splitlines()

    rows = [row.split()[0] for row in shown[3 : 3 + MOST_ROWS]]
    assert rows[:2] == ["i52", "i50"]
    assert rows[3] == "i1"
    assert "... and 13 more" in "\n".join(shown)


@pytest.mark.parametrize("state", ["stopped", "unfinished", "interrupted"])
async def test_a_run_that_did_not_finish_is_to_be_resumed(tmp_path: Path, state: str) -> None:
    path = await make_run(tmp_path / "run", ["passed"], planned=3, state=state)

    shown = report(path)

    assert f"next: holdwater resume {path}" in shown
    assert ("stopped: disk full" in shown) == (state == "stopped")


async def test_a_finished_run_is_not_to_be_resumed(tmp_path: Path) -> None:
    path = await make_run(tmp_path / "run", ["passed"])

    shown = report(path)

    assert "holdwater resume" not in shown
    assert f"holdwater audit {path}" in shown


async def test_a_run_without_an_outcome_has_a_report(tmp_path: Path) -> None:
    path = await make_run(tmp_path / "run", [], planned=2, state="unfinished")

    assert "0 of 2: none yet" in report(path)


async def test_the_story_of_an_instance_tells_each_attempt(tmp_path: Path) -> None:
    path = await make_run(tmp_path / "run", ["passed", "failed", "model"])

    with LedgerReader(path) as reader:
        found = [reader.find_instance("i1"), reader.find_instance("i2")]
        assert found[0] and found[1]
        failed, lost = (page(render_instance(make_report(reader, row))) for row in found if row)

    assert "attempt 1: failed" in failed and "score 0.25, tests 8" in failed
    assert "test_b: red" in failed
    assert f"{path}/logs/000002-x.log" in failed.replace("\n", "").replace(" ", "")  # a long one is folded
    assert "0.5s set-up, 2.0s acting, 1.0s grading" in failed
    assert "model: upstream, in phase acting" in lost and "hint      wait" in lost


async def test_show_prints_every_count_as_json(tmp_path: Path) -> None:
    await make_run(tmp_path / "runs" / "a", ["passed", "failed"])

    done = holdwater("show", "--json", cwd=tmp_path)

    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (told["planned"], told["settled"], told["state"]) == (2, 2, "finished")
    assert told["outcomes"] == {"passed": 1, "failed": 1}
    assert told["usage"]["cached_tokens"] == 0


async def test_latest_is_the_newest_run(tmp_path: Path) -> None:
    old = await make_run(tmp_path / "runs" / "z", ["passed"])
    await make_run(tmp_path / "runs" / "a", ["passed"])
    os.utime(old / "run.json", (1, 1))

    done = holdwater("show", "latest", "--json", cwd=tmp_path)

    assert json.loads(done.stdout)["directory"] == "runs/a"


async def test_watching_a_run_that_is_over_shows_it(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed"])

    done = holdwater("show", "run", "--watch", cwd=tmp_path)

    assert done.returncode == 0
    assert "1 of 1: 1 passed" in done.stdout


async def test_an_unknown_instance_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed", "passed"])

    done = holdwater("show", "run", "i11", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr == "error: no such instance in the run: `i11`\nhint: did you mean `i1`?\n"


async def test_show_tells_the_story_as_json(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed", "failed"])

    told = json.loads(holdwater("show", "run", "i1", "--json", cwd=tmp_path).stdout)

    assert told["instance"] == "i1"
    assert told["attempts"][0]["attempt"]["verdict"]["grade"]["score"] == 0.25
    assert told["attempts"][0]["files"] == ["run/logs/000002-x.log"]


@pytest.mark.parametrize(
    ("planned", "state", "status", "lost"),
    [(2, "finished", 0, 0), (3, "finished", 1, 1), (3, "interrupted", 3, 0)],
)
async def test_audit_is_the_exit_status(
    tmp_path: Path, planned: int, state: str, status: int, lost: int
) -> None:
    await make_run(tmp_path / "run", ["passed", "failed"], planned=planned, state=state, used=False)

    done = holdwater("audit", "run", "--json", cwd=tmp_path)

    told = json.loads(done.stdout)
    assert done.returncode == status
    assert (told["planned"], told["settled"], told["lost"], told["ok"]) == (
        planned,
        2,
        lost,
        status == 0,
    )
    assert {"duplicated", "corrupt", "problems"} <= set(told)


async def test_audit_in_words_names_the_missing_instances(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed"], planned=2)

    done = holdwater("audit", "run", cwd=tmp_path)

    assert "does not hold water" in done.stdout
    assert "`i1`" in done.stdout


async def test_export_streams_to_stdout_and_to_a_file_alike(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed", "failed"])

    streamed = holdwater("export", "run", cwd=tmp_path)
    filed = holdwater("export", "run", "--out", "out.jsonl", cwd=tmp_path)

    assert filed.stdout == ""
    assert streamed.stdout == (tmp_path / "out.jsonl").read_text()
    assert [json.loads(row)["kind"] for row in streamed.stdout.splitlines()] == ["passed", "failed"]


async def test_export_as_csv(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed", "failed"])

    done = holdwater("export", "run", "--what", "attempts", "--format", "csv", cwd=tmp_path)

    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["instance"] for row in rows] == [ODD, "i1"]


async def test_an_export_that_fails_leaves_the_earlier_file_alone(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed"])
    (tmp_path / "out.csv").write_text("earlier")

    done = holdwater("export", "run", "--what", "exchanges", "--format", "csv", "-o", "out.csv", cwd=tmp_path)

    assert done.returncode == 2
    assert (tmp_path / "out.csv").read_text() == "earlier"
    assert {entry.name for entry in tmp_path.iterdir()} == {"run", "out.csv"}


async def test_export_writes_into_a_pipe_and_never_replaces_it(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", ["passed"])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = holdwater("export", "run", "--out", "pipe", cwd=tmp_path)
        received = os.read(reader, 65536)
    finally:
        os.close(reader)

    assert done.returncode == 0
    assert json.loads(received)["kind"] == "passed"
    assert pipe.is_fifo()
