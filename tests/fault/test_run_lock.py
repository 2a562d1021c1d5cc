"""Two conductors for one run: one runs, the other says who holds the lock and touches nothing."""

from __future__ import annotations

import signal

import pytest
from tests.command_runner import Scene, lines, until

SUITE = """
import asyncio
import os
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}")


async def solve(instance, sandbox, model):
    fd = os.open(HERE / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{instance.id}\\n".encode())
    os.close(fd)
    await sandbox.write("file", "content")
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)


async def grade(instance, sandbox, answer):
    return await sandbox.read("file") == b"content"


suite = hw.Suite(name="held", instances=instances, grade=grade)
"""


@pytest.mark.parametrize(
    ("count", "rivals"),
    [pytest.param(8, 2), pytest.param(60, 6, marks=pytest.mark.proof)],
)
def test_of_many_resumes_one_runs_and_the_others_name_it(scene: Scene, count: int, rivals: int) -> None:
    scene.suite(SUITE, COUNT=count, HERE=str(scene.place))
    first = scene.run(*scene.agent(), "--concurrency", str(count))
    until("all in flight", lambda: len(lines(scene.place / "trace")) == count)
    first.signal(signal.SIGKILL)
    first.kill()

    resumes = [scene.resume() for _ in range(rivals)]
    until("one is left", lambda: sum(command.running for command in resumes) == 1)
    until("it runs", lambda: len(lines(scene.place / "trace")) == 2 * count)
    (scene.place / "go").touch()

    assert sorted(command.wait(60) for command in resumes) == [0] + [2] * (rivals - 1), resumes
    (winner,) = [command for command in resumes if command.wait(0) == 0]
    for loser in resumes:
        if loser is not winner:
            assert loser.stdout == ""
            assert f"error: the run is held by process {winner.pid} on " in loser.stderr
            assert "hint: wait for it, or end that process" in loser.stderr
    assert winner.document()["outcomes"] == {"passed": count}
    scene.assert_whole(count)
    scene.assert_clean()
    assert len(lines(scene.place / "trace")) == 2 * count, "a rival disturbed the one that runs"
