"""`--concurrency auto` and the CPU: attempts that crowd it become fewer, attempts that wait do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, lines, until
from tests.in_process_run import events

from holdwater.core.errors import HoldwaterError
from holdwater.ledger.reader import LedgerReader

SUITE = """
import asyncio
import contextlib
from pathlib import Path

import holdwater as hw

BURN = "import time\\nwhile time.process_time() < 2: pass"


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}")


async def burn(instance, sandbox, model):
    # 2 s of CPU, or less: as much as it takes until the test has seen enough.
    burning = asyncio.ensure_future(sandbox.run(["python3", "-c", BURN]))
    while not burning.done() and not Path(GO).exists():
        await asyncio.sleep(0.05)
    burning.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await burning


async def wait(instance, sandbox, model):
    with open(TRACE, "a") as trace:
        trace.write(f"{instance.id}\\n")
    while not Path(GO).exists():
        await asyncio.sleep(0.2)


def grade(instance, sandbox, answer):
    return True


suite = hw.Suite(name="crowd", instances=instances, grade=grade)
"""
COUNT = 16 * max(2, len(os.sched_getaffinity(0)))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    scene.suite(SUITE, COUNT=COUNT, TRACE=str(tmp_path / "trace"), GO=str(tmp_path / "go"))
    yield scene
    scene.close()


@pytest.mark.timeout(900)
def test_attempts_that_crowd_the_cpu_become_fewer(scene: Scene, tmp_path: Path) -> None:
    command = scene.run(*scene.agent("burn"), "--workers", "2")

    until("the CPU bounds the attempts", lambda: not command.running or is_bound(scene.out), 400, every=0.5)
    (tmp_path / "go").touch()
    assert command.wait(800) == 0, command
    told = [event.message for event in events(scene.out, "governor.cpu")]
    assert any("tasks wait for the CPU" in message for message in told), told
    with LedgerReader(scene.out) as reader:
        crowded = [gauge.running for gauge in reader.gauges() if gauge.binds == "cpu"]
    assert crowded and max(crowded) < COUNT  # later, with less load from elsewhere, all may run


def is_bound(out: Path) -> bool:
    """Whether the CPU was short, and has kept an attempt waiting."""
    try:
        with LedgerReader(out) as reader:
            return any(gauge.binds == "cpu" for gauge in reader.gauges()) and any(
                "tasks wait for the CPU" in event.message for event in events(out, "governor.cpu")
            )
    except HoldwaterError:
        return False  # the run is being created


@pytest.mark.timeout(600)
def test_attempts_that_only_wait_all_run_at_once(scene: Scene, tmp_path: Path) -> None:
    command = scene.run(*scene.agent("wait"), "--workers", "2")

    until("all run", lambda: len(lines(tmp_path / "trace")) == COUNT, 240)

    (tmp_path / "go").touch()
    assert command.wait(240) == 0, command
