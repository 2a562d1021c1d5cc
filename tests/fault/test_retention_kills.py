"""Killed with -9 while files are being dropped, by a run or by a prune: what is left is whole and goes on."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.command_runner import SOURCE, Command, Scene, serving, until
from tests.ledger_runs import exchange, new_run, passed, planned

from holdwater.core.records import Attempt, Outcome
from holdwater.ledger.attempt_files import attempt_files, log_path
from holdwater.ledger.audit import audit_run
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader

SUITE = """
import asyncio
import os

import holdwater as hw


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}", data={"n": n})


async def solve(instance, sandbox, model):
    await model.chat([{"role": "user", "content": instance.id}])
    await sandbox.run("echo done > work.txt; sleep 0.2")
    while instance.data["n"] == COUNT - 1 and not os.path.exists(GATE):
        await asyncio.sleep(0.05)  # a fast machine would finish the run before it is killed


def grade(instance, sandbox, answer):
    return instance.data["n"] % 3 != 0


suite = hw.Suite(name="dropping", instances=instances, grade=grade)
"""
COUNT = 18


def test_a_run_that_keeps_failures_is_killed_again_and_again(scene: Scene) -> None:
    gate = scene.place / "gate"
    scene.suite(SUITE, COUNT=COUNT, GATE=str(gate))
    chance = random.Random(3)
    with serving("-m", "holdwater.testing.scripted_model", "--bytes", "400") as url:
        options = ("--model", "m", "--base-url", url, "--workers", "1", "--concurrency", "4")
        command = scene.run(*scene.agent(), *options, "--keep", "failures")
        for goal in (2, 6):
            until("some are dropped", lambda goal=goal: dropped(scene.out) >= goal)  # type: ignore[misc]
            command.live_on(chance.uniform(0.0, 0.3))
            assert command.running, command
            command.kill()
            found = scene.audit()
            assert found["corrupt"] == found["duplicated"] == 0, found
            command = scene.resume()
        gate.touch()
        assert command.wait(120) == 0, command

    with LedgerReader(scene.out) as reader:
        passed = {row.instance for row in reader.outcomes() if row.kind == "passed"}
        rows = list(reader.attempts())
        kept = {
            row.attempt for row in rows if any(attempt_files(reader.directory, row.attempt, row.instance))
        }
    scene.assert_whole(COUNT, dropped=sum(row.instance in passed for row in rows))
    assert len(passed) == 12
    assert kept <= {row.attempt for row in rows if row.instance not in passed}
    assert kept >= {row.attempt for row in rows if row.kind == "failed"}
    assert unfinished(scene.out) == 0


ATTEMPTS = 3000
LOG = b"what an agent says, and says again\n" * 300
# what is asked for -> what goes first, and what has gone in the end
FIRST = {
    "--keep=none": "exchanges/0/1.seg",
    "--compress": "logs/000001-i0.log",
    "--remove": "artifacts",
}
LAST = {
    "--keep=none": f"exchanges/{ATTEMPTS // 1000}/{ATTEMPTS}.seg",
    "--compress": f"logs/{ATTEMPTS:06d}-i{ATTEMPTS - 1}.log",
    "--remove": "run.json",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of many attempts, each with an exchange, a picture and a log."""
    directory = new_run(tmp_path_factory.mktemp("large") / "run")
    asyncio.run(_fill(directory))
    return directory.path


async def _fill(directory: RunDirectory) -> None:
    async with Ledger(directory) as ledger:
        rows = await ledger.plan([planned(f"i{n}") for n in range(ATTEMPTS)])
        async with asyncio.TaskGroup() as group:
            for number, row in enumerate(rows, 1):
                group.create_task(_attempt(directory, ledger, number, row))
        await ledger.finish("finished", "", 0)


async def _attempt(directory: RunDirectory, ledger: Ledger, number: int, row: int) -> None:
    await ledger.begin_attempt(Attempt(id=number, instance=row, sample=0, number=1))
    log = AttemptLog(directory, number)
    picture = log.blob(f"picture {number % 50}".encode())
    log.append(exchange(1, [b'{"role":"user","content":"holdwater-blob:%s:image/png"}' % picture.encode()]))
    log.close()
    log_path(directory, number, f"i{row - 1}").write_bytes(LOG)
    await ledger.settle(passed(number, ledger.token, exchanges=1))
    await ledger.close_sample(Outcome(instance=row, sample=0, attempt=number, kind="passed", score=1.0))


HALT = """
import os
import sys
import time


def look(event, arguments):
    if event in ("os.remove", "os.rename", "os.rmdir") and not os.path.exists({first!r}):
        open({halted!r}, "w").close()
        time.sleep(600)


sys.addaudithook(look)
"""


def start_halting(scene: Scene, first: Path, halted: Path, *words: str) -> Command:
    """Start a command that writes `halted` and stops where it would go on after `first` has gone."""
    (scene.place / "sitecustomize.py").write_text(HALT.format(first=str(first), halted=str(halted)))
    scene.env, scene.interpreter = {"PYTHONPATH": f"{scene.place}:{SOURCE}"}, True
    try:
        return scene.start(*words)
    finally:
        scene.env, scene.interpreter = None, False


@pytest.mark.parametrize("what", FIRST)
def test_a_prune_is_killed_on_its_way_and_asked_for_again(
    tmp_path: Path, large: Path, scene: Scene, what: str
) -> None:
    run = tmp_path / "copy"
    shutil.copytree(large, run, copy_function=_link)
    first, last = run / FIRST[what], run / LAST[what]
    halted = tmp_path / "halted"
    command = start_halting(scene, first, halted, "prune", str(run), what, "--yes")
    until("it has begun", lambda: halted.exists() or not command.running, 60)
    command.kill()
    assert not first.exists() and last.exists(), command
    if what != "--remove":
        assert audit_run(run).ok

    again = scene.start("prune", str(run), what, "--yes")

    assert again.wait(60) == 0, again
    assert not first.exists() and not last.exists()
    if what == "--remove":
        assert not run.exists()
    else:
        assert audit_run(run).ok
        assert unfinished(run) == 0


def _link(source: str, target: str) -> None:
    """Of these files none is changed in place, but for those of the ledger."""
    if Path(source).name.startswith(("ledger.db", "lock", "run.json")):
        shutil.copy(source, target)
    else:
        os.link(source, target)


def dropped(path: Path) -> int:
    return _count(path, "SELECT count(*) FROM dropped")


def unfinished(path: Path) -> int:
    return _count(path, "SELECT count(*) FROM dropped WHERE bytes IS NULL")


def _count(path: Path, query: str) -> int:
    if not (path / "run.json").exists():
        return 0
    with closing(sqlite3.connect(path / "ledger.db")) as connection:
        return int(connection.execute(query).fetchone()[0])
