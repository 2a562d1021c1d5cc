"""Runs that were edited by hand or have lost a file: an audit finds what contradicts the rest."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, until

import holdwater as hw
from holdwater.cli import main
from holdwater.core.exchange import Exchange
from holdwater.core.records import ModelUsage
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog

LONG = "x" * 2_000_000  # an answer that is a file

WAITS = """
    import asyncio, pathlib
    import holdwater as hw

    def instances():
        return (hw.Instance(id=f"i{n}") for n in range(4))

    async def solve(instance, sandbox, model):
        pathlib.Path(PLACE, "acting").touch()
        await asyncio.sleep(3600)

    suite = hw.Suite(name="waits", instances=instances, grade=lambda instance, sandbox, answer: True)
"""


def instances() -> Iterator[hw.Instance]:
    return (hw.Instance(id=name) for name in ("good", "bad"))


async def act(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    await model.chat([{"role": "user", "content": instance.id}])
    await sandbox.write("work", instance.id)
    return LONG


def grade(instance: hw.Instance, sandbox: Any, answer: Any) -> float:
    return 1.0 if instance.id == "good" else 0.25


def reply(request: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    out = tmp_path / "run"
    suite = hw.Suite(name="edited", instances=instances, grade=grade)
    await hw.arun(suite, act, out=out, policy=reply, concurrency=1)
    assert hw.audit(out).ok
    return out


def edit(run: Path, statement: str) -> None:
    with closing(sqlite3.connect(run / "ledger.db")) as connection:
        assert connection.execute(statement).rowcount == 1
        connection.commit()


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        (
            "UPDATE outcome SET kind = 'passed', score = 1.0 WHERE kind = 'failed'",
            "the outcome of `bad` sample 0 is passed, score 1.0; the verdict of attempt 2 is failed",
        ),
        (
            "UPDATE outcome SET score = 0.5 WHERE kind = 'failed'",
            "the verdict of attempt 2 is failed, score 0.25",
        ),
        ("UPDATE outcome SET place = 'model' WHERE kind = 'failed'", "the outcome of `bad` sample 0"),
        ("UPDATE attempt SET passed = 1 WHERE id = 2", "attempt 2 has `passed` 1, its verdict says False"),
        (
            "UPDATE tally SET value = value + 1 WHERE key = 'usage:input_tokens'",
            "the tally says usage requests 2, input_tokens 15",
        ),
        ("UPDATE tally SET value = value - 1 WHERE key = 'verdict:failed'", "the tally says {'passed': 1}"),
        (
            "UPDATE attempt SET verdict = (SELECT verdict FROM attempt WHERE id = 1) WHERE id = 2",
            "attempt 2 has the verdict of attempt 1",
        ),
    ],
)
async def test_an_edited_row_contradicts_the_rest(run: Path, statement: str, finding: str) -> None:
    edit(run, statement)

    found = hw.audit(run)

    assert not found.ok and not found.sound
    assert any(finding in problem for problem in found.problems), found.problems


async def test_a_record_that_is_not_the_attempts_own_contradicts_its_verdict(run: Path) -> None:
    first, _ = sorted((run / "exchanges" / "0").glob("*.seg"))
    exchange = Exchange(
        number=1,
        parent=None,
        keep=0,
        append=(),
        head=None,
        reply=None,
        status=200,
        usage=ModelUsage(requests=1),
    )
    first.unlink()
    log = AttemptLog(RunDirectory(run), 1)
    log.append(exchange)
    log.close()

    (problem,) = hw.audit(run).problems

    assert problem == (
        "attempt 1: usage by verdict requests 1, input_tokens 7, output_tokens 3, by record requests 1"
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["000001.tar.zst", "000002.answer.json"])
@pytest.mark.parametrize(
    ("harm", "finding"),
    [(Path.unlink, "cannot be read"), (cut, "were written"), (flip, "does not match its digest")],
)
async def test_an_artifact_that_is_not_as_written_is_found(
    run: Path, name: str, harm: Callable[[Path], None], finding: str
) -> None:
    harm(run / "artifacts" / name)

    found = hw.audit(run)

    (problem,) = found.problems
    assert not found.ok and f"`{name}`" in problem and finding in problem


def test_work_that_has_not_run_yet_is_unfinished_and_not_lost(tmp_path, capfd):
    scene = Scene(tmp_path)
    scene.suite(WAITS, PLACE=str(tmp_path))
    try:
        command = scene.run(*scene.agent(), "--concurrency", "1", "--workers", "1")
        until("an agent acts", (tmp_path / "acting").exists)
        command.kill()
        until("its workers are gone", lambda: not scene.workers())

        found = hw.audit(scene.out)
        status = main(["audit", str(scene.out)])
    finally:
        scene.close()

    assert (found.lost, found.unfinished, found.problems, found.ok) == (0, found.planned, (), False)
    assert found.planned > 0 and status == 3
    told = capfd.readouterr().out
    assert "holds water so far" in told and "does not hold water" not in told and "problem" not in told
