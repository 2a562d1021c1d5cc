"""Workers that die, hang, or never come up: no instance is lost, and only the guilty one is blamed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.command_runner import Scene, lines, until

from holdwater.sandbox.cgroup import find_leftovers

SUITE = """
import asyncio
import ctypes
import os
import time
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}")


async def solve(instance, sandbox, model):
    fd = os.open(HERE / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{instance.id} {os.getpid()}\\n".encode())
    os.close(fd)
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    if instance.id == GUILTY:
        ctypes.string_at(0) if CRIME == "segfault" else time.sleep(1e9)
    await asyncio.sleep(0.3)
    return instance.id


async def grade(instance, sandbox, answer):
    return answer == instance.id


suite = hw.Suite(name="dying", instances=instances, grade=grade)
"""
STILLBORN = """
import os
import sys

if sys.argv[0].endswith("worker.py"):
    os.write(2, b"the licence server is down\\n")
    os._exit(1)
"""
SIZES = [
    pytest.param(16),
    pytest.param(100, marks=pytest.mark.proof),
]


@pytest.mark.parametrize("count", SIZES)
def test_a_killed_worker_costs_no_instance(scene: Scene, count: int) -> None:
    scene.suite(SUITE, COUNT=count, HERE=str(scene.place), GUILTY="", CRIME="")
    command = scene.run(*scene.agent(), "--concurrency", "8", "--workers", "2")
    until("all in flight", lambda: len(lines(scene.place / "trace")) == 8)

    os.kill(scene.workers()[0].pid, signal.SIGKILL)
    (scene.place / "go").touch()

    assert command.wait(60) == 0, command
    assert command.document()["outcomes"] == {"passed": count}
    assert command.document()["events"] == {"worker.lost": 1}
    lost = [row for row in scene.export("attempts") if row["kind"] != "passed"]
    assert [(row["where"], row["failure_kind"]) for row in lost] == [("worker", "lost")] * 4
    assert "killed by SIGKILL" in lost[0]["failure"]
    scene.assert_whole(count)
    scene.assert_clean()


def test_kills_from_outside_make_no_instance_poison(scene: Scene) -> None:
    scene.suite(SUITE, COUNT=1, HERE=str(scene.place), GUILTY="", CRIME="")
    command = scene.run(*scene.agent(), "--concurrency", "1", "--workers", "1")

    for kills in range(1, 6):
        until("it runs again", lambda: len(lines(scene.place / "trace")) == kills, 60)  # noqa: B023
        _, pid = lines(scene.place / "trace")[-1].split()
        os.kill(int(pid), signal.SIGKILL)
    (scene.place / "go").touch()

    assert command.wait(60) == 0, command
    assert command.document()["outcomes"] == {"passed": 1}
    attempts = scene.export("attempts")
    assert [row["failure_kind"] for row in attempts[:-1]] == ["lost"] * 5
    assert [row["alone"] for row in attempts] == [False] * 2 + [True] * 4
    scene.assert_whole(1)
    scene.assert_clean()


SILENCE = 2.0


@pytest.mark.parametrize("everything", [False, True])
def test_a_suspended_run_goes_on_with_its_workers(scene: Scene, everything: bool) -> None:
    scene.suite(SUITE, COUNT=4, HERE=str(scene.place), GUILTY="", CRIME="")
    timeout = str(8 * SILENCE if everything else 1000)  # workers that run on count their time
    words = ("--concurrency", "4", "--workers", "2", "--silence", str(SILENCE), "--timeout", timeout)
    command = scene.run(*scene.agent(), *words)
    until("all in flight", lambda: len(lines(scene.place / "trace")) == 4, 60)
    suspended = [*(worker.pid for worker in scene.workers() if everything), command.pid]

    for pid in suspended:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(10 * SILENCE)
    for pid in reversed(suspended):  # the conductor first: it has heard of nobody
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    (scene.place / "go").touch()

    assert command.wait(60) == 0, command
    assert command.document()["outcomes"] == {"passed": 4}
    assert command.document()["events"] == {}
    assert len(scene.export("attempts")) == 4
    scene.assert_clean()


SHELLS = """
import asyncio
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    for n in range(4):
        yield hw.Instance(id=f"i{n}")


async def solve(instance, sandbox, model):
    await sandbox.write("large", "x" * 100_000)
    while not (HERE / "go").exists():
        await sandbox.run("sleep 0.1")


async def grade(instance, sandbox, answer):
    return True


suite = hw.Suite(name="shells", instances=instances, grade=grade)
"""


def test_what_a_killed_worker_leaves_is_removed_while_the_run_goes_on(scene: Scene) -> None:
    scene.suite(SHELLS, HERE=str(scene.place))
    command = scene.run(*scene.agent(), "--concurrency", "4", "--workers", "2")
    made = scene.out / "scratch"
    until("all have their directories", lambda: made.exists() and len(scene.scratch()) == 4)

    os.kill(scene.workers()[0].pid, signal.SIGKILL)

    until("others run in their place", lambda: {"5", "6"} <= set(scene.scratch()))
    until("theirs are gone", lambda: len(scene.scratch()) == 4)
    lost = {"1", "2", "3", "4"} - set(scene.scratch())
    assert len(lost) == 2
    groups = [group.name.rpartition("-")[2] for group in find_leftovers(scene.id)]
    assert lost.isdisjoint(groups)
    (scene.place / "go").touch()
    assert command.wait(60) == 0, command
    scene.assert_clean()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    ("crime", "reason"), [("segfault", "killed by SIGSEGV"), ("block", "no sign of life for")]
)
def test_the_guilty_is_poison_and_its_neighbours_pass(
    scene: Scene, count: int, crime: str, reason: str
) -> None:
    scene.suite(SUITE, COUNT=count, HERE=str(scene.place), GUILTY="i003", CRIME=crime)
    (scene.place / "go").touch()

    command = scene.run(*scene.agent(), "--concurrency", "8", "--workers", "2", "--silence", "4")

    assert command.wait(110) == 1, command
    everyone = {f"i{n:03d}": "passed" for n in range(count)}
    assert scene.outcomes() == {**everyone, "i003": "worker"}
    attempts = scene.export("attempts")
    poison = [row for row in attempts if row["failure_kind"] == "poison"]
    assert [row["instance"] for row in poison] == ["i003"]
    assert reason in poison[0]["failure"]
    assert poison[0]["number"] == 4 and poison[0]["alone"]
    scene.assert_whole(count)
    scene.assert_clean()


def test_workers_that_die_at_start_up_end_the_run_with_their_error(scene: Scene) -> None:
    scene.suite(STILLBORN + SUITE, COUNT=16, HERE=str(scene.place), GUILTY="", CRIME="")
    (scene.place / "go").touch()

    command = scene.run(*scene.agent(), "--workers", "2")

    assert command.wait(60) == 4, command
    summary = command.document()
    assert summary["state"] == "stopped"
    assert "workers die at start-up: exited with 1: the licence server is down" in summary["reason"]
    assert summary["settled"] == 0
    assert len(list((scene.out / "logs").glob("worker-*.log"))) <= 5, "restarted again and again"
    scene.assert_clean()
