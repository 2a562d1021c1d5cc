"""Blocking agents that hang for ever: each gets its verdict in time, the others get their full time.

A thread cannot be killed, so what it does after its attempt is over must hurt nobody.
"""

from __future__ import annotations

import time

import pytest
from tests.command_runner import Scene, until
from tests.wait_bounds import stretch

SUITE = """
import threading
import time

import holdwater as hw


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}", data={"n": n, "hangs": n % 5 == 2})


def solve(instance, sandbox, model):
    sandbox.write("began", instance.id)
    if instance.data["hangs"]:
        if instance.data["n"] % 2:
            threading.Event().wait()
        time.sleep(1e9)
    time.sleep(NEEDS if instance.data["n"] % 2 else 0.1)
    sandbox.write("done", instance.id)


def grade(instance, sandbox, answer):
    return sandbox.run("cat done").stdout == instance.id


suite = hw.Suite(name="hanging", instances=instances, grade=grade)
"""

LATE = """
import logging
import time
from pathlib import Path

import holdwater as hw

WOKE, OVER = Path(HERE) / "woke", Path(HERE) / "over"


def instances():
    yield hw.Instance(id="late", limits=hw.LimitOverrides(acting=0.5))
    yield hw.Instance(id="neighbour")


def solve(instance, sandbox, model):
    if instance.id == "late":
        linger(sandbox)
        wake(sandbox)
        return
    print("from the neighbour")
    wait_for(WOKE)
    time.sleep(0.2)  # what the late thread said has had time to go astray
    sandbox.write("mine", "neighbour")


def linger(sandbox):
    if not BY_COMMAND:
        wait_for(OVER)
        return
    try:
        sandbox.run(f"sleep {0.5 + LATER}; printf late > mine")
    except hw.HoldwaterError:
        pass


def wake(sandbox):
    print("printed late")
    logging.getLogger("agent").warning("logged late")
    try:
        sandbox.write("mine", "late")
        WOKE.write_text("written")
    except hw.HoldwaterError as error:
        WOKE.write_text(type(error).__name__)


def wait_for(file):
    deadline = time.monotonic() + MOST_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def grade(instance, sandbox, answer):
    if GRADED:
        OVER.touch()
        wait_for(WOKE)
        time.sleep(LATER if BY_COMMAND else 0)
    return sandbox.run("ls; cat mine").stdout == "mine\\nneighbour"


suite = hw.Suite(name="late", instances=instances, grade=grade)
"""


@pytest.mark.parametrize(
    ("count", "needs", "concurrency"),
    [
        pytest.param(20, 2.2, 10),
        pytest.param(60, 4.2, 30, marks=pytest.mark.proof),
    ],
)
def test_a_fifth_of_the_agents_hang_for_ever(
    scene: Scene, count: int, needs: float, concurrency: int
) -> None:
    scene.suite(SUITE, COUNT=count, NEEDS=needs)
    timeout = str(needs + stretch(0.4))

    command = scene.run(
        *scene.agent(), "--timeout", timeout, "--concurrency", str(concurrency), "--workers", "2"
    )
    assert command.wait(200) == 0, command
    ended = time.time()

    scene.assert_clean()
    scene.assert_whole(count)
    attempts = scene.export("attempts")
    hung = {f"i{n:03d}" for n in range(count) if n % 5 == 2}
    assert {row["instance"] for row in attempts if row["where"] == "limit"} == hung
    expected = {f"i{n:03d}": "failed" if f"i{n:03d}" in hung else "passed" for n in range(count)}
    assert scene.outcomes() == expected
    assert {row["kind"] for row in attempts} <= {"failed", "passed", "interrupted"}
    assert ended - max(row["settled"] for row in attempts) < stretch(10)


@pytest.mark.parametrize(
    ("graded", "by_command"),
    [
        pytest.param(False, False, id="after its attempt"),
        pytest.param(True, False, id="while it is graded"),
        pytest.param(True, True, id="by a command that it waits for"),
    ],
)
def test_a_thread_that_acts_after_its_deadline_changes_no_result(
    scene: Scene, graded: bool, by_command: bool
) -> None:
    constants = {"HERE": str(scene.place), "LATER": stretch(0.5), "MOST_SECONDS": stretch(30)}
    scene.suite(LATE, GRADED=graded, BY_COMMAND=by_command, **constants)

    command = scene.run(*scene.agent(), "--timeout", str(stretch(30)), "--workers", "1")
    if not graded:
        until("the late attempt is over", lambda: created(scene) and "late" in scene.outcomes(), 60)
        (scene.place / "over").touch()
    assert command.wait(60) == 0, command

    assert (scene.place / "woke").read_text() == "AttemptOver"
    assert scene.outcomes() == {"late": "failed", "neighbour": "passed"}
    (late, neighbour) = scene.export("attempts")
    assert (late["where"], late["salvage"]) == ("limit", None)
    assert neighbour["number"] == 1
    logs = {path.name: path.read_text() for path in (scene.out / "logs").glob("*.log")}
    assert logs["000002-neighbour.log"] == "from the neighbour\n"
    said = "".join(text for name, text in logs.items() if name != "000001-late.log")
    assert "late" not in said + (scene.out / "run.log").read_text()
    scene.assert_clean()
    # Only a thread that outlives its attempt costs the worker that it hangs in.
    assert command.document()["events"] == ({} if graded else {"worker.retired": 1})


def created(scene: Scene) -> bool:
    return (scene.out / "run.json").exists()
