"""Runs in remote sandboxes whose server, connection or conductor fails: nothing is lost or a zero."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Command, Scene, lines, until
from tests.docker_daemon import needed
from tests.sandbox_server import CutConnection, ServedSandboxes, sandbox_server
from tests.wait_bounds import stretch

SUITE = """
import os

import holdwater as hw


def note(word, instance):
    fd = os.open(TRACE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{word} {instance.id}\\n".encode())
    os.close(fd)


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}")


async def setup(instance, sandbox):
    await sandbox.write("task.txt", instance.id)
    await sandbox.write("seconds", "0" if os.path.exists(GATE) else str(SECONDS))
    note("start", instance)


async def grade(instance, sandbox, answer):
    return (await sandbox.read("done.txt")).decode() == instance.id


suite = hw.Suite(name="remote", instances=instances, setup=setup, grade=grade)
"""
# The orphan must be ended too.
AGENT = "sh -c 'sleep 600 & sleep $(cat seconds); cat task.txt > done.txt'"
FOR_EVER = 600.0  # it acts until its sandbox is lost; attempts that start after `let_go` act for an instant


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServedSandboxes]:
    with sandbox_server(tmp_path / "there", "--client-grace", "2") as served:
        yield served


def begin(scene: Scene, options: list[str], *words: str, count: int = 4, seconds: float = 1.0) -> Command:
    files = {"TRACE": str(scene.place / "trace"), "GATE": str(scene.place / "gate")}
    scene.suite(SUITE, COUNT=count, SECONDS=seconds, **files)
    agent = ("--agent", "command", "--command", AGENT, "--concurrency", str(count), "--workers", "1")
    return scene.run(*agent, "--retries", "0", "--backoff", "0.1", *options, *words)


def let_go(scene: Scene) -> None:
    (scene.place / "gate").touch()


def started(scene: Scene) -> list[str]:
    return lines(scene.place / "trace")


def until_acting(scene: Scene, server: ServedSandboxes, command: Command, count: int = 4) -> None:
    def are_acting() -> bool:
        assert command.running, command
        return len(started(scene)) >= count and len(server.processes()) >= count

    until("all attempts are acting", are_acting)


def assert_all_passed(scene: Scene, command: Command, count: int = 4) -> dict[str, Any]:
    assert command.wait() == 0, command
    summary: dict[str, Any] = command.document()
    assert summary["outcomes"] == {"passed": count}, command
    scene.assert_whole(count)
    return summary


def test_a_server_that_is_killed_costs_no_instance_and_no_retry(
    scene: Scene, server: ServedSandboxes
) -> None:
    command = begin(scene, server.options(), seconds=FOR_EVER)
    until_acting(scene, server, command)

    let_go(scene)
    server.kill()
    server.start()
    summary = assert_all_passed(scene, command)

    assert len(started(scene)) > 4
    assert {"server.gone", "server.back"} <= set(summary["events"])
    server.assert_clean()
    scene.assert_clean()


def test_a_server_that_was_killed_leaves_nothing_after_its_restart(
    scene: Scene, server: ServedSandboxes
) -> None:
    command = begin(scene, server.options(), seconds=FOR_EVER)
    until_acting(scene, server, command)
    assert len(server.sandboxes()) == 4

    command.kill()
    server.kill()
    server.start()

    server.assert_clean()
    server.command.signal(signal.SIGTERM)
    assert server.command.wait() == 0
    assert list((server.directory / "scratch").iterdir()) == []


def test_a_short_cut_of_the_connection_loses_nothing(scene: Scene, tmp_path: Path) -> None:
    """Given a server whose grace is longer than the cut on the slowest machine."""
    with (
        sandbox_server(tmp_path / "there", "--client-grace", str(stretch(5.0))) as server,
        CutConnection(server.port) as proxy,
    ):
        command = begin(scene, server.options(proxy.url), seconds=stretch(1.0))
        until_acting(scene, server, command)

        proxy.cut()
        proxy.heal()
        summary = assert_all_passed(scene, command)

    assert summary["attempts"] == 4 and len(started(scene)) == 4
    assert proxy.passed > 4


def test_a_long_cut_ends_the_sandboxes_and_runs_the_attempts_again(
    scene: Scene, server: ServedSandboxes
) -> None:
    with CutConnection(server.port) as proxy:
        command = begin(scene, server.options(proxy.url), seconds=FOR_EVER)
        until_acting(scene, server, command)

        let_go(scene)
        proxy.cut()
        server.assert_clean()  # its client is gone for the grace period
        proxy.heal()
        assert_all_passed(scene, command)

    assert len(started(scene)) > 4
    server.assert_clean()


def test_a_run_that_is_killed_resumes_in_remote_sandboxes(scene: Scene, server: ServedSandboxes) -> None:
    command = begin(scene, server.options(), seconds=FOR_EVER)
    until_acting(scene, server, command)

    let_go(scene)
    command.kill()
    server.assert_clean()
    resumed = scene.resume()
    assert_all_passed(scene, resumed)

    server.assert_clean()
    scene.assert_clean()


def test_a_worker_that_is_killed_loses_its_sandboxes_at_once(scene: Scene, server: ServedSandboxes) -> None:
    command = begin(scene, server.options(), seconds=FOR_EVER)
    until_acting(scene, server, command)

    let_go(scene)
    for worker in scene.workers():
        worker.kill()
    assert_all_passed(scene, command)

    server.assert_clean()


def test_the_first_signal_drains_a_server_and_the_open_sandboxes_finish(
    scene: Scene, server: ServedSandboxes
) -> None:
    command = begin(scene, server.options(), seconds=stretch(1.0))
    until_acting(scene, server, command)

    server.command.signal(signal.SIGTERM)

    assert_all_passed(scene, command)
    assert server.command.wait() == 0
    assert "draining: 4 open sandboxes" in server.command.stderr
    assert list((server.directory / "scratch").iterdir()) == []


def test_a_drained_server_ends_sandboxes_after_its_grace_and_another_takes_over(
    scene: Scene, tmp_path: Path
) -> None:
    with sandbox_server(tmp_path / "there", "--grace", "0.5") as server:
        command = begin(scene, server.options(), seconds=FOR_EVER)
        until_acting(scene, server, command)

        let_go(scene)
        server.command.signal(signal.SIGTERM)
        assert server.command.wait() == 0
        server.start()

        assert_all_passed(scene, command)


def test_a_run_stops_when_the_server_stays_away_and_can_be_resumed(
    scene: Scene, server: ServedSandboxes
) -> None:
    command = begin(scene, server.options(), "--disk-patience", "1", seconds=FOR_EVER)
    until_acting(scene, server, command)

    let_go(scene)
    server.kill()
    assert command.wait() == 4, command
    assert command.document()["reason"].startswith("no connection to the sandbox server: ")
    server.start()

    assert_all_passed(scene, scene.resume())


def test_more_attempts_than_the_server_has_places_wait_for_one(scene: Scene, tmp_path: Path) -> None:
    with sandbox_server(tmp_path / "there", "--concurrency", "1") as server:
        command = begin(scene, [*server.options(), "--setup-timeout", str(stretch(0.5))], seconds=0.7)
        most = 0
        while command.running:
            most = max(most, len(server.sandboxes()))
            command.live_on(0.02)
        assert_all_passed(scene, command)

    assert most == 1


def test_more_memory_than_the_server_has_is_an_infrastructure_failure(
    scene: Scene, server: ServedSandboxes, tmp_path: Path
) -> None:
    with sandbox_server(tmp_path / "small", "--memory", "300MiB") as server:
        command = begin(scene, [*server.options(), "--sandbox-memory", "1GiB"], count=1)

        assert command.wait() == 1, command

    assert command.document()["outcomes"] == {"sandbox": 1}
    [verdict] = scene.export("attempts")
    assert "the sandbox server cannot give so much: needs 1032 MiB of memory" in json.dumps(verdict)


def test_a_full_disk_of_the_server_is_never_a_zero(scene: Scene, tmp_path: Path) -> None:
    needed("mount", "umount")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M", "tmpfs", disk], check=True)
    try:
        with sandbox_server(tmp_path / "there", "--scratch", str(disk)) as server:
            scene.suite(SUITE, TRACE=str(scene.place / "trace"), GATE="", COUNT=1, SECONDS=0)
            line = "sh -c 'cat /dev/zero > zeros; echo wrong > done.txt; true'"
            words = ("--agent", "command", "--command", line, "--workers", "1", "--retries", "1")
            command = scene.run(*words, *server.options(), "--backoff", "0.1")

            assert command.wait() == 1, command
        assert command.document()["outcomes"] == {"sandbox": 1}, command
        assert "disk" in json.dumps(scene.export("attempts"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


BUILT = """
import holdwater as hw

def instances():
    yield hw.Instance(id="one", start=hw.SandboxSpec(build=BUILD))

def grade(instance, sandbox, answer):
    return True

suite = hw.Suite(name="built", instances=instances, grade=grade)
"""


def test_a_server_without_builds_refuses_a_dockerfile(scene: Scene, server: ServedSandboxes) -> None:
    context = scene.place / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\n")
    scene.suite(BUILT, BUILD=str(context))

    command = scene.run("--agent", "nop", "--workers", "1", *server.options())

    assert command.wait() == 1, command
    assert command.document()["outcomes"] == {"image": 1}
    assert "the sandbox server builds no Dockerfiles" in json.dumps(scene.export("attempts"))


def test_two_servers_cannot_have_one_directory(server: ServedSandboxes, tmp_path: Path) -> None:
    words = ["sandboxd", "--listen", "127.0.0.1:0", "--token-file", str(server.token)]
    second = Command(tmp_path, *words, "--out", str(server.directory))

    assert second.wait() == 2
    assert f"held by process {server.command.pid}" in second.stderr
