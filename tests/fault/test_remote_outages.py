"""Sandboxes that a run loses again and again, and losses that an agent hides: bounded, and never a zero."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Command, Scene, lines, until
from tests.sandbox_server import TOKEN, CutConnection, ServedSandboxes, sandbox_server

from holdwater.core.sandbox_protocol import ServerAccess
from holdwater.sandbox.remote.connection import ask_health

SUITE = """
import os

import holdwater as hw


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}")


async def setup(instance, sandbox):
    fd = os.open(TRACE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"start {instance.id}\\n".encode())
    os.close(fd)


async def grade(instance, sandbox, answer):
    try:
        return answer == "worked" and (await sandbox.run(sleep_for(GRADING))).ok
    except Exception:
        return False


def sleep_for(seconds):
    return "true" if os.path.exists(GATE) else f"sleep {seconds}"


async def solve(instance, sandbox, model):
    try:
        result = await sandbox.run(f"{sleep_for(ACTING)}; echo worked")
    except Exception:
        raise RuntimeError("a tool did not work") from None
    return result.stdout.strip()


suite = hw.Suite(name="outages", instances=instances, setup=setup, grade=grade)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServedSandboxes]:
    with sandbox_server(tmp_path / "there", "--client-grace", "1") as served:
        yield served


def begin(
    scene: Scene, options: list[str], *, count: int = 1, acting: float = 3.0, grading: float = 0.0
) -> Command:
    files = {"TRACE": str(scene.place / "trace"), "GATE": str(scene.place / "gate")}
    scene.suite(SUITE, COUNT=count, ACTING=acting, GRADING=grading, **files)
    words = (*scene.agent(), "--concurrency", str(count), "--workers", "1", "--retries", "0")
    return scene.run(*words, *([] if "--backoff" in options else ["--backoff", "0.1"]), *options)


def until_acting(scene: Scene, server: ServedSandboxes, command: Command, starts: int = 1) -> None:
    def is_acting() -> bool:
        assert command.running, command
        return len(lines(scene.place / "trace")) >= starts and len(server.processes()) > 0

    until("an attempt acts", is_acting)


@pytest.mark.parametrize(("part", "acting", "grading"), [("conductor", 600.0, 0.0), ("worker", 0.0, 600.0)])
def test_a_loss_that_agent_or_grader_hide_is_no_zero(
    scene: Scene, server: ServedSandboxes, part: str, acting: float, grading: float
) -> None:
    with CutConnection(server.port) as proxy:
        command = begin(scene, server.options(proxy.url), acting=acting, grading=grading)
        until_acting(scene, server, command)

        (scene.place / "gate").touch()
        proxy.cut(part)
        server.assert_clean()
        proxy.heal()
        assert command.wait() == 0, command

    summary = command.document()
    assert summary["outcomes"] == {"passed": 1}, command
    assert summary["events"]["sandbox.lost"] == summary["attempts"] - 1 > 0
    scene.assert_whole(1)


@pytest.mark.proof
def test_a_server_that_always_loses_its_clients_ends_as_infrastructure_failure(
    scene: Scene, server: ServedSandboxes
) -> None:
    with CutConnection(server.port) as proxy:
        command = begin(scene, server.options(proxy.url), count=2, acting=600.0)
        for starts in range(2, 21, 2):
            until_acting(scene, server, command, starts)
            proxy.cut()
            server.assert_clean()
            proxy.heal()
        assert command.wait() == 1, command

    summary = command.document()
    assert summary["outcomes"] == {"sandbox": 2} and summary["attempts"] == 20
    assert summary["events"]["sandbox.lost"] == 20
    last = [row for row in scene.export("attempts") if row["number"] == 10]
    assert all("lost its sandbox 10 times" in json.dumps(row) for row in last)
    scene.assert_whole(2)


@pytest.mark.proof
def test_a_wait_for_a_place_that_is_always_lost_ends(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Scene(tmp_path / "other")
    with (
        sandbox_server(tmp_path / "there", "--client-grace", "0.2", "--concurrency", "1") as server,
        CutConnection(server.port) as proxy,
    ):
        until_acting(other, server, begin(other, server.options(), acting=600.0))  # has the only place
        command = begin(scene, [*server.options(proxy.url), "--backoff", "0.01"])
        for _ in range(10):
            until("the run waits for a place", lambda: count_waiting(server) == 1)
            proxy.cut()
            until("the server has ended its session", lambda: count_waiting(server) == 0)
            proxy.heal()
        assert command.wait() == 1, command
        other.close()

    assert command.document()["outcomes"] == {"sandbox": 1}
    assert command.document()["events"]["server.lost"] == 10
    [row] = scene.export("attempts")
    assert "the sandbox server was lost 10 times before it gave a place" in row["failure"]


def count_waiting(server: ServedSandboxes) -> int:
    return asyncio.run(ask_health(ServerAccess(url=server.url, token=TOKEN))).waiting


FAULTS = ("server", "link", "run")


@pytest.mark.proof
@pytest.mark.parametrize("order", list(itertools.permutations(FAULTS)), ids="-".join)
def test_kills_and_cuts_in_any_order_lose_nothing(
    scene: Scene, server: ServedSandboxes, order: tuple[str, ...]
) -> None:
    """All three faults come one after the other, and are mended in the same order."""
    with CutConnection(server.port) as proxy:
        command = begin(scene, server.options(proxy.url), count=3, acting=3.0)
        until_acting(scene, server, command, 3)
        for fault in order:
            {"server": server.kill, "link": proxy.cut, "run": command.kill}[fault]()
            time.sleep(0.3)  # so that the others notice one before the next
        for fault in order:
            if fault == "run":
                command = scene.resume()
            else:
                {"server": server.start, "link": proxy.heal}[fault]()
        assert command.wait() == 0, command

    assert command.document()["outcomes"] == {"passed": 3}
    scene.assert_whole(3)
    server.assert_clean()
    scene.assert_clean()
