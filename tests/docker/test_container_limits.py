"""What a container may use: memory, processes, disk, CPU time; each limit is told as what it is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.container_image import START, sandboxes
from tests.docker_daemon import Daemon
from tests.wait_bounds import stretch

from holdwater.core.errors import LimitReached, ResourceExhausted
from holdwater.core.records import Limits, MiB
from holdwater.sandbox.docker import watch
from holdwater.sandbox.docker.sandboxes import DockerSandboxes

MANY_FILES = "i=0; while :; do i=$((i+1)); head -c 900000 /dev/zero > f$i; done"
EAT = "python3 -c 'x = bytearray({} << 20); print(len(x) >> 20)'"


@pytest.fixture
async def boxes(netdaemon: Daemon) -> AsyncIterator[DockerSandboxes]:
    async with sandboxes(netdaemon) as found:
        yield found


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "told by the daemon"])
async def test_the_memory_limit_is_a_resource_failure_and_the_sandbox_goes_on(
    boxes: DockerSandboxes, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    if not seen:
        monkeypatch.setattr(watch, "find_group", lambda pid, container: None)
    async with boxes.open(1, Limits(memory=64 * MiB), None, START) as box:
        with pytest.raises(ResourceExhausted, match="killed at 64 MiB: sandbox memory") as caught:
            await box.run(EAT.format(300))
        assert caught.value.kind == "memory"
        assert (await box.run("exit 137")).exit_code == 137
        peak = box.peak_memory

    assert peak == (64 * MiB if seen else 0)


async def test_a_limit_can_be_changed_while_it_runs(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(lease=48 * MiB), None, START) as box:
        with pytest.raises(ResourceExhausted, match="48 MiB"):
            await box.run(EAT.format(120))
        box.allow_memory(100 * MiB)
        box.allow_memory(400 * MiB)
        assert (await box.run(f"sleep 0.5; {EAT.format(120)}")).stdout == "120\n"
        box.allow_memory(64 * MiB)
        with pytest.raises(ResourceExhausted, match="64 MiB"):
            await box.run(f"sleep 0.5; {EAT.format(120)}")


async def test_a_fork_bomb_is_named_ended_and_survived(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(pids=40), None, START) as box:
        await box.write("kept", "yes")
        started = time.monotonic()
        with pytest.raises(LimitReached, match="stopped at 40 processes: sandbox pids") as caught:
            await box.run("f() { f | f & f; }; f", timeout=3)
        seconds = time.monotonic() - started
        assert caught.value.kind == "pids"
        left = await box.run("echo /proc/[0-9]*; cat kept")

    assert left.stdout.endswith("yes")
    assert len(left.stdout.split()) < 8
    assert seconds < stretch(25)


# Forks until it cannot, and then ends what it has started.
COPES = """
import os, signal
pids = []
try:
    while True:
        pids.append(os.fork())
        if not pids[-1]:
            signal.pause()
except OSError:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
"""


async def test_a_command_that_copes_with_the_limit_on_processes_goes_on(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(pids=20), None, START) as box:
        result = await box.run(["python3", "-c", COPES])

    assert result.ok


@pytest.mark.parametrize(
    "greedy", ["cat /dev/zero > big", "i=0; while :; do i=$((i+1)); head -c 900000 /dev/zero > f$i; done"]
)
async def test_a_sandbox_that_fills_its_disk_is_killed_at_its_quota(
    boxes: DockerSandboxes, greedy: str
) -> None:
    async with boxes.open(1, Limits(disk=20 * MiB), None, START) as box:
        with pytest.raises(ResourceExhausted, match="killed at 20 MiB: sandbox disk") as caught:
            await box.run(greedy, timeout=stretch(20))
        assert caught.value.kind == "disk"
        await box.mark()
        assert (await box.run("echo graded")).ok

    assert box.peak_disk >= 20 * MiB * 0.9


async def test_cpu_time_is_limited_over_all_commands_of_a_phase(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(cpu_seconds=0.6), None, START) as box:
        assert (await box.run("true")).ok
        with pytest.raises(LimitReached, match=r"killed after 0.6 s of CPU") as caught:
            await box.run("while :; do :; done", timeout=stretch(20))
        await box.mark()
        assert (await box.run("true")).ok

    assert caught.value.kind == "cpu"


async def test_memory_and_disk_are_known_while_it_runs(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(), None, START) as box:
        await box.run(
            "head -c 3000000 /dev/zero > file; python3 -c 'import time; x=bytearray(60<<20); time.sleep(1)'"
        )
        assert box.peak_memory > 60 * MiB
        assert box.disk > 3_000_000


def test_the_group_of_a_container_is_found_in_both_versions(tmp_path: Path) -> None:
    proc, root, name = tmp_path / "proc", tmp_path / "cgroup", "a" * 64
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(
        f"5:memory:/docker/{name}\n4:cpu,cpuacct:/docker/{name}\n1:pids:/docker/{name}\n"
    )
    for controller in ("memory", "cpu", "cpuacct", "pids"):
        (root / controller / "docker" / name).mkdir(parents=True)
    (root / "memory/docker" / name / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 3\n")
    (proc / "8").mkdir()
    (proc / "8" / "cgroup").write_text(f"0::/system.slice/docker-{name}.scope\n")
    (root / f"system.slice/docker-{name}.scope").mkdir(parents=True)
    (root / f"system.slice/docker-{name}.scope" / "memory.events").write_text("oom 1\noom_kill 2\n")
    (proc / "9").mkdir()
    (proc / "9" / "cgroup").write_text("0::/user.slice\n")

    first, second = (watch.find_group(pid, name, proc, root) for pid in (7, 8))

    assert first is not None
    assert second is not None
    assert (first.oom_kills(), second.oom_kills()) == (3, 2)
    assert watch.find_group(9, name, proc, root) is None
    assert watch.find_group(10, name, proc, root) is None
