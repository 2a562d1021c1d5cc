"""SIGINT and SIGTERM with attempts in flight: the first drains, the second leaves, and the run resumes."""

from __future__ import annotations

import signal
import time

import pytest
from tests.command_runner import Command, Scene, lines, until
from tests.wait_bounds import stretch

SUITE = """
import os
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    for n in range(2 * COUNT):
        yield hw.Instance(id=f"i{n:03d}", data={"slow": n % 2 == 1})


async def solve(instance, sandbox, model):
    fd = os.open(HERE / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{instance.id}\\n".encode())
    os.close(fd)
    while not ((HERE / "quick").exists() or (HERE / "drains").exists() and not instance.data["slow"]):
        await sandbox.run("sleep 600" if instance.data["slow"] else "sleep 0.1")
    return instance.id


async def grade(instance, sandbox, answer):
    return answer == instance.id


suite = hw.Suite(name="signalled", instances=instances, grade=grade)
"""

PROOF = pytest.mark.proof


def sizes(small: signal.Signals) -> pytest.MarkDecorator:
    """One of the two signals in the small size, both in the promised one."""
    both = (signal.SIGINT, signal.SIGTERM)
    large = [pytest.param(number, 30, marks=PROOF, id=f"{number.name}-30") for number in both]
    return pytest.mark.parametrize(
        ("number", "count"), [pytest.param(small, 8, id=f"{small.name}-8"), *large]
    )


@sizes(signal.SIGINT)
def test_the_first_signal_drains(scene: Scene, number: int, count: int) -> None:
    command = in_flight(scene, count, grace=stretch(1.5))

    command.signal(number)
    until("draining", lambda: "draining: " in command.stderr)
    (scene.place / "drains").touch()

    assert command.wait(40) == 3, command
    assert command.document()["state"] == "interrupted"
    scene.assert_clean()
    started = [line.strip() for line in lines(scene.place / "trace")]
    assert len(started) == count, "attempts were started after the signal"
    kinds = {row["instance"]: row["kind"] for row in scene.export("attempts")}
    quick = {name: "passed" for name in started if int(name[1:]) % 2 == 0}
    assert kinds == {**dict.fromkeys(started, "interrupted"), **quick}
    complete(scene, count, already=set(quick))


@sizes(signal.SIGTERM)
def test_the_second_signal_leaves_at_once(scene: Scene, number: int, count: int) -> None:
    command = in_flight(scene, count, grace=600)
    command.signal(number)
    until("draining", lambda: f"draining: {count} running attempts get 600 s" in command.stderr)

    second = time.monotonic()
    command.signal(number)

    assert command.wait(40) == 3, command
    assert time.monotonic() - second < stretch(3)  # the grace is 600 s
    assert command.document()["state"] == "interrupted"
    scene.assert_clean()
    complete(scene, count, already=set())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_before_anything_runs_leaves_a_run_that_resumes(scene: Scene, number: int) -> None:
    scene.suite(SUITE, COUNT=4, HERE=str(scene.place))
    (scene.place / "quick").touch()
    command = scene.run(*scene.agent())
    until("a lock", lambda: (scene.out / "run.log").exists())

    command.signal(number)

    assert command.wait(40) == 3, command
    assert command.document()["state"] == "interrupted"
    complete(scene, 4, already=set())


def in_flight(scene: Scene, count: int, grace: float) -> Command:
    """A run of twice `count` instances with `count` of them acting."""
    scene.suite(SUITE, COUNT=count, HERE=str(scene.place))
    command = scene.run(*scene.agent(), "--concurrency", str(count), "--grace", str(grace), "--workers", "2")
    until("all in flight", lambda: len(lines(scene.place / "trace")) == count)
    return command


def complete(scene: Scene, count: int, already: set[str]) -> None:
    """Resume to the end: nothing is lost, and what had passed is not run again."""
    before = len(lines(scene.place / "trace"))
    (scene.place / "quick").touch()

    command = scene.resume()

    assert command.wait(60) == 0, command
    assert command.document()["outcomes"] == {"passed": 2 * count}
    scene.assert_whole(2 * count)
    scene.assert_clean()
    again = {line.strip() for line in lines(scene.place / "trace")[before:]}
    assert not again & already
