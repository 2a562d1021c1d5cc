"""A daemon that dies, a container that something else removes, what killed runs leave: nobody's zero."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import docker_daemon
from tests.container_image import START, import_image, sandboxes
from tests.docker_daemon import Daemon
from tests.wait_bounds import stretch

from holdwater.core.errors import SandboxFailed
from holdwater.core.records import Limits
from holdwater.core.sandbox_kind import Containers
from holdwater.docker.client import DockerClient
from holdwater.sandbox.docker.sandbox import DockerSandbox
from holdwater.sandbox.docker.sweep import reap, sweep


async def running(box: DockerSandbox, line: str) -> asyncio.Task[object]:
    """A command that has been started for certain."""
    task = asyncio.create_task(box.run(f"echo > /tmp/started; {line}"))
    while not (await box.run("ls /tmp/started")).ok:
        pass
    return task


@pytest.mark.parametrize("how", [("rm", "--force"), ("kill",), ("stop", "--time", "0")], ids=" ".join)
async def test_a_container_that_something_else_ends_is_a_failure_of_the_sandbox(
    netdaemon: Daemon, how: tuple[str, ...]
) -> None:
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, START) as box:
        task = await running(box, "sleep 60")
        netdaemon.docker(*how, f"holdwater-{boxes.containers.run}-1-1")
        for again in (
            task,
            box.run("true"),
            box.read("here"),
            box.write("a", "b"),
            box.take("here", Path("x")),
        ):
            with pytest.raises(SandboxFailed) as caught:
                await again
            assert (caught.value.kind, caught.value.again) == ("daemon", True), caught.value
            assert caught.value.hint
    assert box.leftovers == []


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of this test's own, with the image in it."""
    with docker_daemon.daemon(tmp_path / "mortal") as found:
        import_image(found)
        yield found


async def test_the_death_of_a_daemon_that_comes_back_is_a_sandbox_failure(mortal: Daemon) -> None:
    async with sandboxes(mortal) as boxes:
        async with boxes.open(1, Limits(), None, START) as box:
            task = await running(box, "sleep 60")
            started = time.monotonic()
            mortal.kill()
            with pytest.raises(SandboxFailed) as caught:
                await task
            assert (caught.value.kind, caught.value.again) == ("daemon", True)
            with pytest.raises(SandboxFailed, match="does not answer"):
                await box.run("true")
            assert time.monotonic() - started < stretch(10)
        assert len(box.leftovers) == 1
        assert f"holdwater-{boxes.containers.run}-1-1" in box.leftovers[0]

        mortal.start()
        async with boxes.open(2, Limits(), None, START) as later:
            assert (await later.run("echo again")).stdout == "again\n"
            swept = await reap(boxes.client, boxes.containers, [2])
            assert (await later.run("echo on")).stdout == "on\n"
        assert swept.left == ()


async def test_a_command_of_before_a_restart_is_known_to_be_lost(mortal: Daemon) -> None:
    async with sandboxes(mortal) as boxes, boxes.open(1, Limits(), None, START) as box:
        await box.run("true")
        mortal.kill()
        mortal.start()
        with pytest.raises(SandboxFailed) as caught:
            await box.run("true")

    assert (caught.value.kind, caught.value.again) == ("daemon", True)


async def test_what_dead_runs_left_is_removed_and_nothing_else(netdaemon: Daemon) -> None:
    host = netdaemon.host
    dead, alive = (Containers(host=host, run=run, home="sweeping") for run in ("dead", "alive"))
    strange = Containers(host=host, run="dead", home="another")
    plain = ["--network", "none", "--entrypoint", "sleep", "box:1", "100"]
    for number, one in enumerate((dead, dead, alive, strange)):
        labels = [word for item in one.labels(number).items() for word in ("--label", "=".join(item))]
        netdaemon.docker(
            "run", "--detach", "--rm", "--name", f"left-{number}", "--volume", "/data", *labels, *plain
        )
        if number:
            netdaemon.docker("network", "create", *labels, f"left-{number}")
    netdaemon.docker("run", "--detach", "--rm", "--name", "not-ours", *plain)
    try:
        async with DockerClient(host) as client:
            swept = await sweep(client, "sweeping", lambda run: run == "alive")
            again = await sweep(client, "sweeping", lambda run: run == "alive")
            names = set(netdaemon.docker("ps", "--format", "{{.Names}}").split())
            networks = netdaemon.docker("network", "ls", "--format", "{{.Name}}").split()
            reaped = await reap(client, alive, [1, 2])
            over = await reap(client, alive, [1])
    finally:
        left = netdaemon.docker("ps", "--all", "--quiet").split()
        netdaemon.docker("rm", "--force", "--volumes", *left, check=False)
        netdaemon.docker("network", "prune", "--force")

    assert (swept.containers, swept.networks, swept.left) == (2, 1, ())
    assert (again.containers, again.networks) == (0, 0)
    assert names == {"left-2", "left-3", "not-ours"}
    assert {"left-2", "left-3"} <= set(networks)
    assert "left-1" not in networks
    assert (reaped.containers, over.containers) == (0, 1)
    assert len(left) == 2
    assert netdaemon.docker("volume", "ls", "--quiet") == ""
