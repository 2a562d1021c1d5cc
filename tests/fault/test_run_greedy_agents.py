"""A sandbox that fills its disk, forks without end or prints a gigabyte hurts only itself, and says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene
from tests.in_process_run import attempts
from tests.wait_bounds import stretch

from holdwater.sandbox.probe import probe

GREEDY = """
import time

import holdwater as hw

GREEDY = {
    "small files": "i=0; while :; do head -c 1M /dev/zero > $i; i=$((i+1)); done",
    "large file": f"head -c {16 * DISK}M /dev/zero > large",
    "fits twice": f"head -c {DISK * 3 // 2}M /dev/zero > large && touch done",
    "forks": "f() { f | f & f; }; f",
    "prints": f"dd if=/dev/zero bs=1M count={PRINTED}",
    "calm": "",
}


def instances():
    for name, line in GREEDY.items():
        yield hw.Instance(id=name, instruction=line)


async def solve(instance, sandbox, model):
    if instance.instruction:
        await sandbox.run(instance.instruction, timeout=SECONDS)
        return None
    longest, until = 0.0, time.monotonic() + SECONDS + 1
    while time.monotonic() < until:
        started = time.monotonic()
        await sandbox.run("echo calm")
        longest = max(longest, time.monotonic() - started)
    await sandbox.run("touch done")
    return longest


async def grade(instance, sandbox, answer):
    return (await sandbox.run("test -e done")).ok


suite = hw.Suite(name="greedy", instances=instances, grade=grade)
"""
SMALL = {"disk": 16, "pids": 100, "output": 32, "printed": 100, "seconds": stretch(1.0)}  # sizes in MiB
FULL = {"disk": 128, "pids": 512, "output": 256, "printed": 1024, "seconds": stretch(4.0)}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    if not (probe().cgroup.usable and probe().cgroup.pids):
        assert os.environ.get("CI") != "true", probe().cgroup
        pytest.skip(f"no control group for processes can be made here: {probe().cgroup.why}")
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def failures(scene: Scene) -> dict[str, list[str]]:
    """Why each attempt at each instance ended; empty for one that did not fail."""
    found: dict[str, list[str]] = {}
    for row in attempts(scene.out):
        failure = row.verdict.failure if row.verdict else None
        found.setdefault(row.instance, []).append(f"{failure.where}: {failure.message}" if failure else "")
    return found


def play(scene: Scene, size: dict[str, float]) -> None:
    disk = size["disk"]
    scene.suite(GREEDY, DISK=disk, PRINTED=size["printed"], SECONDS=size["seconds"])
    command = scene.run(
        *scene.agent(),
        *("--workers", "1", "--concurrency", "6", "--retries", "1", "--backoff", "0.01"),
        *("--sandbox-disk", f"{disk}MiB", "--sandbox-pids", f"{size['pids']}"),
        *("--sandbox-output", f"{size['output']}MiB"),
    )

    assert command.wait(100) == 1, command  # a full disk is left
    full = [f"resource: killed at {disk * scale} MiB: sandbox disk" for scale in (1, 2, 4, 8)]
    assert failures(scene) == {
        "small files": full,
        "large file": full,
        "fits twice": [full[0], ""],
        "forks": [f"limit: stopped at {size['pids']} processes: sandbox pids"],
        "prints": [f"limit: killed at {size['output']} MiB: sandbox output"],
        "calm": [""],
    }
    passed = {name for name, kind in scene.outcomes().items() if kind == "passed"}
    assert passed == {"fits twice", "calm"}
    [calm] = attempts(scene.out, "calm")
    assert calm.verdict is not None and calm.verdict.answer is not None
    assert float(calm.verdict.answer) < stretch(2.0), "its commands went on beside all that"
    scene.assert_whole(planned=6)
    scene.assert_clean()


def test_greedy_sandboxes_hurt_only_themselves(scene: Scene) -> None:
    play(scene, SMALL)


@pytest.mark.proof
def test_greedy_sandboxes_hurt_only_themselves_at_full_size(scene: Scene) -> None:
    play(scene, FULL)
