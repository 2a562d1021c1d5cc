"""A daemon that goes away: attempts are interrupted and tried again for free; without one none starts."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, until
from tests.container_runs import IMAGE, Ground, ground

SLOW = """
import os

import holdwater as hw


def instances():
    for number in range(COUNT):
        yield hw.Instance(id=f"i-{number}", start=hw.SandboxSpec(workdir="/work"))


async def solve(instance, sandbox, model):
    await sandbox.run(f"sleep {1 if os.path.exists(GATE) else SECONDS}; touch done")


async def grade(instance, sandbox, answer):
    return (await sandbox.run("test -e done")).ok


suite = hw.Suite(name="slow", instances=instances, grade=grade, size=COUNT)
"""
PROOF = pytest.mark.proof
SIZES = [
    pytest.param({"count": 6, "at_once": 3}, id="small"),
    pytest.param({"count": 40, "at_once": 20}, id="full", marks=PROOF),
]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Ground]:
    """A daemon that may be stopped: nobody else's."""
    with ground(tmp_path / "ground") as found:
        yield found


@pytest.fixture
def scene(tmp_path: Path, own: Ground) -> Iterator[Scene]:
    found = own.scene(tmp_path)
    yield found
    found.close()


AWAY = [pytest.param(0.0, id="at once"), pytest.param(5.0, id="later")]


@pytest.mark.parametrize("away", AWAY)
@pytest.mark.parametrize("size", SIZES)
def test_a_restart_of_the_daemon_costs_no_instance_and_no_retry(
    scene: Scene, own: Ground, size: dict[str, int], away: float
) -> None:
    gate = scene.place / "gate"
    scene.suite(SLOW, COUNT=size["count"], SECONDS=600, GATE=str(gate))
    flags = ("--sandbox", "docker", "--image", IMAGE, "--concurrency", str(size["at_once"]))
    flags += ("--retries", "0")
    command = scene.run(*scene.agent(), *flags)
    until("containers", lambda: len(own.left()["containers"]) >= size["at_once"], 90)
    gate.touch()
    own.stop(signal.SIGKILL)
    if away:
        command.live_on(away)
    assert command.running, command
    own.start()

    assert command.wait(600) == 0, command
    scene.assert_whole(size["count"])
    assert set(scene.outcomes().values()) == {"passed"}
    failed = [row for row in scene.export("attempts") if row["where"]]
    assert {(row["where"], row["failure_kind"]) for row in failed} == {("interrupted", "daemon")}, failed
    assert len(failed) <= 2 * size["at_once"], "nobody is admitted while the daemon is gone"
    assert not away or {"daemon.gone", "daemon.back"} <= set(command.document()["events"])
    if "cleanup.failed" in command.document()["events"]:
        remove_miscounted(own)
    own.assert_clean()
    scene.assert_clean()


def remove_miscounted(own: Ground) -> None:
    """Remove a network whose endpoints docker 20.10 has miscounted: a daemon that starts counts them anew."""
    (name,) = own.left()["networks"]
    (network,) = json.loads(own.docker("network", "inspect", name))
    assert network["Containers"] == {}, network
    own.stop()
    own.start()
    own.docker("network", "rm", name)


def test_without_a_daemon_there_is_one_clear_error_and_nothing_else(tmp_path: Path) -> None:
    scene = Scene(tmp_path, env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    scene.suite(SLOW, COUNT=1, SECONDS=0, GATE="")

    command = scene.run(*scene.agent(), "--sandbox", "docker", "--image", IMAGE)

    assert command.wait(30) == 4
    assert command.stdout == "" or json.loads(command.stdout)
    assert "the docker daemon does not answer" in command.stderr and "hint: " in command.stderr
    assert not scene.out.exists()
