"""A run whose samples are scored in groups is killed again and again: no group mixes two scorings."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from tests.command_runner import Command, Scene, lines, until

from holdwater.ledger.reader import LedgerReader

SUITE = """
import asyncio, os, uuid

import holdwater as hw


def note(word, instance):
    fd = os.open(TRACE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{word} {instance.id}\\n".encode())
    os.close(fd)


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}", data={"n": n})


async def solve(instance, sandbox, model):
    await asyncio.sleep(0.05 * (1 + instance.data["n"] % 3))
    while instance.data["n"] == COUNT - 1 and not os.path.exists(GATE):
        await asyncio.sleep(0.05)  # a fast machine would finish the run between two kills
    await sandbox.write("work", instance.id)


async def grade(instance, sandbox, answer):
    note("grade", instance)
    return hw.Grade(passed=True, score=1.0, detail="alone")


async def group(instance, members):
    scoring = uuid.uuid4().hex
    works = [(await member.sandbox.read("work")).decode() for member in members]
    await asyncio.sleep(0.05)
    note("score", instance)
    return [hw.Grade(passed=True, score=1.0, detail=f"{scoring} {len(works)}") for _ in members]


suite = hw.Suite(name="groups", instances=instances, grade=grade, group=group)
"""
SAMPLES = 3


@pytest.mark.parametrize(
    ("count", "kills", "seed"), [(12, 3, 5), pytest.param(120, 20, 9, marks=pytest.mark.proof)]
)
def test_killed_with_9_no_group_is_scored_twice(scene: Scene, count: int, kills: int, seed: int) -> None:
    trace, gate = scene.place / "trace", scene.place / "gate"
    scene.suite(SUITE, COUNT=count, TRACE=str(trace), GATE=str(gate))
    chance = random.Random(seed)
    flags = (*scene.agent(), "--samples", str(SAMPLES), "--concurrency", "6", "--workers", "2")
    command = scene.run(*flags)
    most = count * (SAMPLES + 1) // (kills + 1)
    for _ in range(kills):
        lines_left = (count - 1) * (SAMPLES + 1) - len(lines(trace))
        kill_after(command, trace, min(chance.randint(1, most), max(0, lines_left)), chance)
        command = scene.resume()
    gate.touch()

    assert command.wait(300) == 0, command

    rows = scene.export("outcomes")
    attempts = {row["attempt"]: row for row in scene.export("attempts")}
    details: dict[str, list[str]] = {}
    for row in rows:
        details.setdefault(row["instance"], []).append(attempts[row["attempt"]]["detail"])
    assert len(details) == count
    for name, found in details.items():
        assert len(found) == SAMPLES
        scorings = Counter(found)
        scorings.pop("alone", None)
        # A member that was lost while its group closed keeps its own grade; the others have one scoring.
        ((scoring, _),) = scorings.items()
        assert scoring.endswith(f" {SAMPLES}"), (name, found)
    apart = sum(detail == "alone" for found in details.values() for detail in found)
    with LedgerReader(scene.out) as reader:
        assert apart == sum(event.kind == "group.apart" for event in reader.events(10_000))
    assert apart < count * SAMPLES // 4
    assert scene.audit()["ok"]
    scene.assert_clean()


def kill_after(command: Command, trace: Path, more: int, chance: random.Random) -> None:
    """Kill the command a moment after so many further lines of the trace."""
    goal = len(lines(trace)) + more
    until("progress", lambda: len(lines(trace)) >= goal or not command.running, 60)
    command.live_on(chance.uniform(0.0, 0.1))
    assert command.running, f"it was over before it could be killed: {command}"
    command.kill()
