"""The whole run is killed with -9 again and again, its creation too: nothing is lost or done twice."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from tests.command_runner import Command, Scene, lines, until

from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.journal import list_journals, read_journal
from holdwater.ledger.reader import LedgerReader

SUITE = """
import asyncio
import os

import holdwater as hw


def note(word, instance):
    fd = os.open(TRACE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{word} {instance.id}\\n".encode())
    os.close(fd)


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}", instruction=f"0.{n % 4}", data={"n": n})


async def setup(instance, sandbox):
    note("start", instance)
    while instance.data["n"] == COUNT - 1 and not os.path.exists(GATE):
        await asyncio.sleep(0.05)  # a fast machine would finish the run between two kills


async def grade(instance, sandbox, answer):
    note("grade", instance)
    return (await sandbox.read("slept.txt")).decode().strip() == instance.instruction


suite = hw.Suite(name="killed", instances=instances, setup=setup, grade=grade)
"""
# The orphan must be ended too: by bubblewrap, or by the sweep.
AGENT = "sh -c 'sleep 600 & sleep $0; echo $0 > slept.txt' {instruction}"


@pytest.mark.parametrize(
    ("count", "kills", "seed"),
    [
        (24, 5, 7),
        pytest.param(200, 20, 11, marks=pytest.mark.proof),
    ],
)
def test_killed_with_9_at_random_moments_and_resumed_each_time(
    scene: Scene, count: int, kills: int, seed: int
) -> None:
    trace, gate = scene.place / "trace", scene.place / "gate"
    scene.suite(SUITE, COUNT=count, TRACE=str(trace), GATE=str(gate))
    chance = random.Random(seed)
    done: dict[str, int] = {}  # instance -> how often it had been started when its verdict was on disk

    for number in range(kills):
        command = go_on(scene)
        wait_for_a_moment(chance, number, command, trace, count, count // (kills + 1))
        command.kill()
        starts = Counter(line.split()[1] for line in lines(trace) if line.startswith("start"))
        for name in verdicts(scene):
            done.setdefault(name, starts[name])
    gate.touch()
    last = go_on(scene)
    assert last.wait(300) == 0, last

    assert last.document()["state"] == "finished"
    scene.assert_whole(count)
    scene.assert_clean()
    attempts = scene.export("attempts")
    assert Counter(row["instance"] for row in attempts if row["kind"] == "passed") == dict.fromkeys(
        scene.outcomes(), 1
    )
    assert {row["kind"] for row in attempts} == {"passed", "interrupted"}
    starts = Counter(line.split()[1] for line in lines(trace) if line.startswith("start"))
    assert len(done) >= kills // 2, "the kills came too early to show anything"
    assert {name: starts[name] for name in done} == done, "what had a verdict was run again"


def go_on(scene: Scene) -> Command:
    """Resume the run, or begin it if it was killed before there was one."""
    if (scene.out / "run.json").exists():
        return scene.resume()
    return scene.run("--agent", "command", "--command", AGENT, "--concurrency", "8", "--workers", "2")


def wait_for_a_moment(
    chance: random.Random, number: int, command: Command, trace: Path, count: int, most: int
) -> None:
    """A moment of the creation, the start-up or the recovery, or one after some more attempts."""
    if number % 3 == 0:
        command.live_on(chance.uniform(0.0, 2.0 if number else 0.6))
        return
    goal = len(graded(trace)) + chance.randint(1, most)

    def moved_on() -> bool:
        names = graded(trace)
        return len(names) >= goal or len(set(names)) == count - 1 or not command.running

    until("progress", moved_on, 60)
    command.live_on(chance.uniform(0.0, 0.1))
    assert command.running, f"it was over before it could be killed: {command}"


def graded(trace: Path) -> list[str]:
    return [line.split()[1] for line in lines(trace) if line.startswith("grade")]


def verdicts(scene: Scene) -> set[str]:
    """The instances that have a verdict of their own: committed, or noted by a worker just before."""
    if not (scene.out / "run.json").exists():
        return set()
    read = (read_journal(path, pytest.fail) for path in list_journals(RunDirectory(scene.out)))
    noted = {v.attempt for v in chain.from_iterable(read) if v.failure is None}
    with LedgerReader(scene.out) as reader:
        return {row.instance for row in reader.attempts() if row.kind == "passed" or row.attempt in noted}
