"""Sandboxes that take all they can get: every attempt settles, inside the budget, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, until
from tests.container_runs import IMAGE, MB, Ground
from tests.wait_bounds import stretch

HOSTILE = """
import holdwater as hw

KINDS = {
    "calm": "touch done",
    "memory": "python3 -c 'x = bytearray(10**9); x[::4096] = bytes(len(x[::4096]))'",
    "forks": "f() { f | f & f; }; f",
    "stubborn": "trap '' TERM INT HUP; while :; do sleep 1; done",
    "asleep": "python3 -c 'import ctypes; c = ctypes.CDLL(None); c.vfork() or c.pause()'",
    "stopped": "sh -c 'kill -STOP $$'",
    "away": "setsid sh -c 'trap \\"\\" TERM; sleep 1000' & wait",
    "disk": "dd if=/dev/zero of=big bs=1M count=5000",
    "files": "i=0; while :; do head -c 1M /dev/zero > $i; i=$((i+1)); done",
    "prints": "yes",
}


def instances():
    for number in range(COUNT):
        kind = list(KINDS)[number % len(KINDS)]
        start = hw.SandboxSpec(workdir="/work")
        yield hw.Instance(id=f"{kind}-{number}", instruction=KINDS[kind], start=start)


async def solve(instance, sandbox, model):
    await sandbox.run(instance.instruction, timeout=SECONDS)


async def grade(instance, sandbox, answer):
    return (await sandbox.run("test -e done")).ok


suite = hw.Suite(name="hostile", instances=instances, grade=grade, size=COUNT)
"""
FLAGS = (
    *("--sandbox", "docker", "--image", IMAGE, "--agent", "suite.py:solve", "--sandbox-memory", "64MiB"),
    *("--sandbox-disk", "40MiB", "--sandbox-pids", "64", "--sandbox-output", "4MiB", "--retries", "0"),
)
EXPECTED = {  # the kind of a sandbox -> how its instance ends, and for which failure
    "calm": ("passed", None),
    "memory": ("failed", "resource"),
    "forks": ("failed", "limit"),
    "stubborn": ("failed", None),
    "asleep": ("failed", None),
    "stopped": ("failed", None),
    "away": ("failed", None),
    "disk": ("failed", "resource"),
    "files": ("failed", "resource"),
    "prints": ("failed", "limit"),
}
SMALL = {"count": 10, "at_once": 5, "seconds": 2.0}
FULL = {"count": 60, "at_once": 20, "seconds": 10.0}
SIZES = [
    pytest.param(SMALL, id="small"),
    pytest.param(FULL, id="full", marks=pytest.mark.proof),
]


@pytest.fixture
def scene(tmp_path: Path, ground: Ground) -> Iterator[Scene]:
    found = ground.scene(tmp_path)
    yield found
    found.close()


def begun(scene: Scene, size: dict[str, float]) -> tuple[str, ...]:
    scene.suite(HOSTILE, COUNT=size["count"], SECONDS=stretch(size["seconds"]))
    flags = tuple(f"{scene.file}:solve" if flag == "suite.py:solve" else flag for flag in FLAGS)
    return (*flags, "--concurrency", str(size["at_once"]))


@pytest.mark.parametrize("size", SIZES)
def test_all_settle_inside_the_budget_and_nothing_is_left(
    scene: Scene, ground: Ground, size: dict[str, float]
) -> None:
    flags = begun(scene, size)
    images = ground.images()
    with Highest(ground) as highest:
        command = scene.run(*flags)
        assert command.wait(1500) == 1, command

    scene.assert_whole(int(size["count"]))
    assert ended(scene) == EXPECTED
    assert highest.bytes < size["at_once"] * 150 * MB  # what a watched quota lets through in a moment
    ground.assert_clean()
    scene.assert_clean()
    assert ground.images() == images


@pytest.mark.parametrize("size", SIZES)
def test_a_kill_in_the_middle_and_a_resume_leave_nothing_either(
    scene: Scene, ground: Ground, size: dict[str, float]
) -> None:
    command = scene.run(*begun(scene, size))
    until("containers", lambda: len(ground.left()["containers"]) >= 3, 60)
    command.kill()
    assert ground.left()["containers"]

    again = scene.resume()
    assert again.wait(1500) == 1, again

    scene.assert_whole(int(size["count"]))
    assert ended(scene) == EXPECTED
    ground.assert_clean()
    scene.assert_clean()


def test_a_run_removes_only_the_leftovers_of_dead_runs(tmp_path: Path, ground: Ground) -> None:
    for name in ("dead", "alive"):
        (tmp_path / name).mkdir()
    dead, alive = ground.scene(tmp_path / "dead"), ground.scene(tmp_path / "alive")
    alive.env = dead.env
    ground.docker("run", "--detach", "--name", "foreign", "--network", "none", IMAGE, "sleep", "1000")
    try:
        flags = begun(dead, SMALL)
        command = dead.run(*flags)
        until("containers", lambda: len(ground.left()["containers"]) >= 3, 60)
        command.kill()

        begun(alive, {**SMALL, "count": 1})
        words = ["--agent", f"{alive.file}:solve", "--sandbox", "docker", "--image", IMAGE]
        second = alive.run(*words)
        assert second.wait(60) == 0, second

        assert [name.split()[0] for name in ground.left()["containers"]] == ["foreign"]
        assert ground.left()["networks"] == [] and ground.left()["rules"] == []
    finally:
        ground.docker("rm", "--force", "foreign")
        dead.close()
        alive.close()


def ended(scene: Scene) -> dict[str, tuple[str, str | None]]:
    """How each kind of sandbox ended: all of a kind alike."""
    rows = {
        (row["instance"].partition("-")[0], row["kind"], row["where"]) for row in scene.export("outcomes")
    }
    found = {name: (kind, where) for name, kind, where in rows}
    assert len(found) == len(rows), rows
    return found


class Highest:
    """The most bytes that were taken on the daemon's disk since it began to look."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._before = ground.used()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.bytes = 0

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.bytes = max(self.bytes, self._ground.used() - self._before)
