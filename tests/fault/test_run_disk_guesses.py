"""Sandboxes of which nobody said how much disk they need: they may use all that is there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene
from tests.in_process_run import attempts

SUITE = """
import holdwater as hw


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}")


async def solve(instance, sandbox, model):
    await sandbox.run(LINE)


async def grade(instance, sandbox, answer):
    return (await sandbox.run("test -e done")).ok


suite = hw.Suite(name="writes", instances=instances, grade=grade)
"""
MOST = "head -c 70M /dev/zero > large && sleep 2 && touch done"  # seconds: it is looked at meanwhile
SLOW = "for n in $(seq 200); do head -c 1M /dev/zero >> large || exit 1; sleep 0.1; done; touch done"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 100 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        words = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(place)]
        subprocess.run(words, check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError):
        if os.environ.get("CI"):
            raise
        pytest.skip("a file system can be mounted by root alone")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_an_attempt_may_use_most_of_the_disk_without_asking(scene: Scene, disk: Path) -> None:
    scene.suite(SUITE, COUNT=3, LINE=MOST)

    command = scene.run(*scene.agent(), "--scratch", str(disk), "--concurrency", "1")

    assert command.wait(120) == 0, command
    assert [row.kind for row in attempts(scene.out)] == ["passed"] * 3


def test_an_attempt_that_fills_the_disk_is_stopped_and_not_scored(scene: Scene, disk: Path) -> None:
    scene.suite(SUITE, COUNT=1, LINE=SLOW)

    command = scene.run(*scene.agent(), "--scratch", str(disk), "--disk-patience", "2")

    assert command.wait(240) == 4, command
    assert "`--sandbox-disk` bounds what one sandbox may use" in command.document()["reason"]
    rows = attempts(scene.out)
    assert {row.kind for row in rows} == {"interrupted"}, rows
    assert scene.outcomes() == {}


@pytest.mark.parametrize("bound", ["--sandbox-disk", "--disk"])
def test_a_declared_bound_ends_the_attempt(scene: Scene, tmp_path: Path, bound: str) -> None:
    scene.suite(SUITE, COUNT=1, LINE=MOST)

    command = scene.run(*scene.agent(), bound, "20MiB", "--retries", "0")

    assert command.wait(120) == 1, command
    (row,) = attempts(scene.out)
    assert row.verdict is not None and row.verdict.failure is not None
    assert row.verdict.failure.message == "killed at 20 MiB: sandbox disk"
