"""Groups in remote sandboxes: places for all members or for none, also for members that are tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Command, Scene, lines, until
from tests.sandbox_server import TOKEN, ServedSandboxes, sandbox_server

from holdwater.core.records import MiB
from holdwater.core.sandbox_protocol import ServerAccess
from holdwater.sandbox.remote.connection import ask_health

SUITE = """
import os

import holdwater as hw
from holdwater.core.errors import SandboxFailed


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}")


def note(word):
    fd = os.open(TRACE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    count = os.pread(fd, 10000, 0).decode().split().count(word)
    os.write(fd, f"{word}\\n".encode())
    os.close(fd)
    return count


async def setup(instance, sandbox):
    begun = note(instance.id)
    if begun in BROKEN:
        raise SandboxFailed("it does not start")
    await sandbox.write("late", str(begun % 2 * LATE * (not os.path.exists(GATE))))


async def solve(instance, sandbox, model):
    await sandbox.run("sleep 0.5; sleep $(cat late); echo done > work")


async def grade(instance, sandbox, answer):
    note("graded")
    return 0.5


async def group(instance, members):
    works = [(await member.sandbox.read("work")).decode() for member in members]
    assert works == ["done\\n"] * 2, works
    return [float(10 + member.number) for member in members]


suite = hw.Suite(name="groups", instances=instances, setup=setup, grade=grade, group=group)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServedSandboxes]:
    with sandbox_server(tmp_path / "there", "--client-grace", "1", "--memory", "1GiB") as served:
        yield served


def begin(scene: Scene, server: ServedSandboxes, broken: tuple[int, ...] = (), late: float = 0) -> Command:
    """Three groups of two, on a server with room for three sandboxes."""
    room = asyncio.run(ask_health(ServerAccess(url=server.url, token=TOKEN))).memory_room
    files = {"TRACE": str(scene.place / "trace"), "GATE": str(scene.place / "gate")}
    scene.suite(SUITE, COUNT=3, BROKEN=broken, LATE=late, **files)
    memory = ("--sandbox-memory", f"{int(room / 3.5) // MiB - 8}MiB")
    words = (*scene.agent(), *memory, "--samples", "2", "--concurrency", "6", "--workers", "1")
    return scene.run(*words, "--backoff", "0.1", *server.options())


def assert_scored_together(scene: Scene, command: Command) -> None:
    assert command.wait() == 0, command
    rows = scene.export("outcomes")
    scores = sorted((row["instance"], row["score"]) for row in rows)
    assert scores == [(f"i{n}", score) for n in range(3) for score in (10.0, 11.0)], command
    assert "group.apart" not in command.document()["events"]
    scene.assert_whole(6)


def test_groups_wait_for_the_places_of_all_members(scene: Scene, server: ServedSandboxes) -> None:
    command = begin(scene, server, broken=(0,))
    most = 0
    while command.running:
        most = max(most, len(server.sandboxes()))
        command.live_on(0.02)

    assert_scored_together(scene, command)
    assert most == 2  # a third sandbox would be half of another group
    server.assert_clean()


def test_a_killed_server_gives_whole_groups_their_places_again(scene: Scene, server: ServedSandboxes) -> None:
    """When it is killed, one member waits for the score and the other still acts."""
    command = begin(scene, server, late=600.0)
    until("a member is graded", lambda: "graded\n" in lines(scene.place / "trace"))

    (scene.place / "gate").touch()
    server.kill()
    server.start()

    assert_scored_together(scene, command)
    assert command.document()["events"]["sandbox.lost"] >= 2
    server.assert_clean()
