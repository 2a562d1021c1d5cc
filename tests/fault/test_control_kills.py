"""Kills around the control of a run: of its conductor, workers or a display; requests during its start."""

from __future__ import annotations

import os
import signal

import pytest
from tests.command_runner import Command, Scene, lines, until

import holdwater as hw
from holdwater.core.control import CONTROL_SOCKET
from holdwater.ledger.reader import LedgerReader

COUNT = 4
SUITE = """
import asyncio
import os
import time
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    while (HERE / "block").exists():
        time.sleep(0.02)
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}")


async def solve(instance, sandbox, model):
    fd = os.open(HERE / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{instance.id}\\n".encode())
    os.close(fd)
    while not (HERE / "finish").exists():
        await asyncio.sleep(0.02)
    return instance.id


async def grade(instance, sandbox, answer):
    return answer == instance.id


suite = hw.Suite(name="controlled", instances=instances, grade=grade)
"""


def begin(scene: Scene) -> Command:
    scene.suite(SUITE, HERE=str(scene.place), COUNT=COUNT)
    command = scene.run(*scene.agent(), "--workers", "2", "--concurrency", "2")
    until("two attempts act", lambda: len(lines(scene.place / "trace")) == 2, 90)
    return command


def end(scene: Scene, command: Command) -> None:
    (scene.place / "finish").touch()
    assert command.wait(120) == 0, command
    assert command.document()["outcomes"] == {"passed": COUNT}
    scene.assert_clean()
    scene.assert_whole(COUNT)


def events(scene: Scene, kind: str) -> list[str]:
    with LedgerReader(scene.out) as reader:
        return [event.message for event in reader.events(1000) if event.kind == kind]


def test_a_run_that_is_killed_in_a_pause_resumes_unpaused(scene: Scene) -> None:
    command = begin(scene)
    hw.pause(scene.out)
    command.kill()
    assert (scene.out / CONTROL_SOCKET).is_socket(), "a killed conductor leaves its socket"
    with pytest.raises(hw.BadInput, match="no process conducts the run, it is unfinished"):
        hw.unpause(scene.out)

    resumed = scene.resume()
    until("attempts act again", lambda: len(lines(scene.place / "trace")) == 4, 90)

    assert hw.note(scene.out, "the new conductor answers").changed
    assert hw.show(scene.out).paused is None
    assert "the run was paused when its last conductor ended: it continues unpaused" in resumed.stderr
    assert events(scene, "control.unpause") == [
        "the run was paused when its last conductor ended: it continues unpaused"
    ]
    end(scene, resumed)
    assert not (scene.out / CONTROL_SOCKET).exists()


def test_a_pause_outlives_its_workers_and_displays(scene: Scene) -> None:
    command = begin(scene)
    display = scene.start("top", str(scene.out))
    until("the display is attached", lambda: events(scene, "control.top"))
    hw.pause(scene.out)

    display.kill()
    for worker in scene.workers():
        os.kill(worker.pid, signal.SIGKILL)
    until("the workers are replaced", lambda: len(events(scene, "worker.lost")) == 2, 60)
    until("both attempts wait again", lambda: hw.show(scene.out).verdicts.get("worker") == 2, 60)
    assert len(lines(scene.place / "trace")) == 2, "an attempt started in the pause"
    hw.unpause(scene.out)

    until("they act again", lambda: len(lines(scene.place / "trace")) == 4, 90)
    end(scene, command)


def test_requests_during_the_start_count_from_then_on(scene: Scene) -> None:
    command = begin(scene)
    command.signal(signal.SIGINT)
    command.signal(signal.SIGINT)
    command.wait(60)
    (scene.place / "block").touch()  # the resume compares the suite before it schedules

    resumed = scene.resume()
    until("the conductor listens", lambda: (scene.out / CONTROL_SOCKET).is_socket(), 60)
    assert hw.pause(scene.out).changed
    with pytest.raises(hw.BadInput, match="it is starting or ending"):
        hw.change(scene.out, concurrency=1)
    (scene.place / "block").unlink()
    until("the run is scheduled", lambda: "pause" in scheduled(scene), 60)
    assert len(lines(scene.place / "trace")) == 2, "an attempt started in the pause"
    hw.unpause(scene.out)

    end(scene, resumed)


def scheduled(scene: Scene) -> str:
    gauge = hw.show(scene.out).gauge
    return gauge.binds if gauge is not None else ""


def test_a_stop_during_the_start_is_an_interruption(scene: Scene) -> None:
    command = begin(scene)
    command.signal(signal.SIGINT)
    command.signal(signal.SIGINT)
    command.wait(60)
    (scene.place / "block").touch()
    resumed = scene.resume()
    until("the conductor listens", lambda: (scene.out / CONTROL_SOCKET).is_socket(), 60)

    hw.stop(scene.out)

    assert resumed.wait(60) == 3, resumed
