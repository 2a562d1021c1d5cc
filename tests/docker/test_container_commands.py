"""Commands in a container: what they print, how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.container_image import START, import_image, sandboxes
from tests.docker_daemon import Daemon
from tests.wait_bounds import stretch

from holdwater.core.authoring import ManagedSandbox
from holdwater.core.errors import AttemptOver, ImageFailed, LimitReached, SandboxFailed
from holdwater.core.records import Limits, MiB, SandboxSpec
from holdwater.core.sandbox_kind import ATTEMPT_LABEL, HOME_LABEL, RUN_LABEL
from holdwater.sandbox.docker.sandbox import DockerSandbox
from holdwater.sandbox.docker.sandboxes import DockerSandboxes

PROCESSES = "for p in /proc/[0-9]*; do read -r c < $p/comm && echo $c; done 2>/dev/null"


@pytest.fixture
async def boxes(netdaemon: Daemon) -> AsyncIterator[DockerSandboxes]:
    async with sandboxes(netdaemon) as found:
        yield found


@pytest.fixture
async def box(boxes: DockerSandboxes) -> AsyncIterator[DockerSandbox]:
    async with boxes.open(1, Limits(), None, START) as found:
        yield found
    assert found.leftovers == []


async def test_a_line_and_a_program_run_in_the_working_directory(box: DockerSandbox) -> None:
    kept: ManagedSandbox = box  # what rollout needs
    line = await kept.run("pwd; echo wrong >&2; exit 3", env={"A": "b c"})
    program = await kept.run(["sh", "-c", "echo $A $HOLDWATER_ATTEMPT"], env={"A": "b c"}, workdir="deep")
    killed = await kept.run("kill -9 $$")

    assert (line.exit_code, line.stdout, line.stderr) == (3, "/work\n", "wrong\n")
    assert (program.exit_code, program.stdout) == (0, "b c 1\n")
    assert killed.exit_code == 137


async def test_a_container_carries_labels_and_no_more_rights_than_it_needs(
    netdaemon: Daemon, boxes: DockerSandboxes
) -> None:
    limits = Limits(memory=100 * MiB, cpus=0.5, pids=50)
    async with boxes.open(4, limits, None, START) as box:
        status = (await box.run("cat /proc/self/status; ls /var/run/docker.sock")).stdout
        (told,) = json.loads(netdaemon.docker("inspect", f"holdwater-{boxes.containers.run}-4-1"))

    labels, host = told["Config"]["Labels"], told["HostConfig"]
    assert (labels[RUN_LABEL], labels[ATTEMPT_LABEL], labels[HOME_LABEL]) == (
        boxes.containers.run,
        "4",
        "tests",
    )
    assert (host["Memory"], host["MemorySwap"]) == (100 * MiB, 100 * MiB)
    assert (host["NanoCpus"], host["PidsLimit"], host["LogConfig"]["Type"]) == (5 * 10**8, 50, "none")
    rows = dict(row.split(":\t") for row in status.splitlines() if ":\t" in row)
    assert rows["NoNewPrivs"] == "1"
    granted = {n for n in range(40) if int(rows["CapBnd"], 16) >> n & 1}
    assert granted == {0, 1, 3, 4, 5, 6, 7, 10, 18, 29}
    assert "docker.sock" not in status


async def test_a_sandbox_that_is_not_used_makes_nothing(netdaemon: Daemon, boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(), None, START) as box:
        await box.mark()
        assert box.workdir == "/work"
        assert netdaemon.docker("ps", "--all", "--quiet") == ""


async def test_a_timeout_ends_the_commands_whole_tree_and_no_other_command(box: DockerSandbox) -> None:
    other = asyncio.create_task(box.run("sleep 31 & sleep 2; echo fine"))
    while "sleep" not in (await box.run(PROCESSES)).stdout:
        pass
    started = time.monotonic()
    result = await box.run("setsid sleep 77 & (sleep 78 &) ; exec sleep 79", timeout=stretch(0.3))
    seconds = time.monotonic() - started
    left = (await box.run("cat /proc/[0-9]*/cmdline")).stdout

    assert (result.timed_out, result.exit_code) == (True, 143)
    assert seconds < stretch(2)
    assert not any(f"sleep\x00{n}" in left for n in (77, 78, 79))
    assert "sleep\x0031" in left
    assert (await other).stdout == "fine\n"


async def test_a_command_that_ignores_the_signal_is_killed(box: DockerSandbox) -> None:
    result = await box.run("trap '' TERM; echo on; while :; do sleep 1; done", timeout=stretch(0.5))

    assert (result.timed_out, result.exit_code, result.stdout) == (True, 137, "on\n")
    assert "bash" not in (await box.run(["sh", "-c", PROCESSES])).stdout


async def test_a_timeout_may_come_before_the_start(box: DockerSandbox) -> None:
    await box.run("true")
    results = [await box.run("sleep 77", timeout=seconds) for seconds in (0.0, 0.005, 0.05)]

    assert [result.timed_out for result in results] == [True] * 3
    assert "sleep\x0077" not in (await box.run("cat /proc/[0-9]*/cmdline")).stdout


async def test_the_tree_of_another_user_is_ended_too(box: DockerSandbox) -> None:
    result = await box.run("id -u; id -g; setsid sleep 77 & sleep 78", timeout=stretch(0.5), user="agent")

    assert (result.timed_out, result.stdout) == (True, "1000\n1001\n")
    assert "sleep\x0077" not in (await box.run("cat /proc/[0-9]*/cmdline")).stdout


async def test_cancelling_kills_the_tree_and_the_sandbox_goes_on(box: DockerSandbox) -> None:
    task = asyncio.create_task(box.run("sleep 77"))
    while "sleep\x0077" not in (await box.run("cat /proc/[0-9]*/cmdline")).stdout:
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert "sleep\x0077" not in (await box.run("cat /proc/[0-9]*/cmdline")).stdout


async def test_a_background_child_outlives_its_command_and_delays_it_only_briefly(
    box: DockerSandbox,
) -> None:
    started = time.monotonic()
    result = await box.run("sleep 60 & echo started")

    assert (result.exit_code, result.stdout) == (0, "started\n")
    assert time.monotonic() - started < stretch(5)  # and not 60
    assert "sleep\x0060" in (await box.run("cat /proc/[0-9]*/cmdline")).stdout


async def test_orphans_that_have_ended_are_reaped(box: DockerSandbox) -> None:
    await box.run("for i in 1 2 3 4 5; do (sleep 0.01 &) ; done; sleep 0.2", env={"A": "1"})

    states = (await box.run("cat /proc/[0-9]*/stat")).stdout
    assert ") Z " not in states


async def test_a_flood_is_kept_at_both_ends_and_stopped_at_its_limit(
    boxes: DockerSandboxes, tmp_path: Path
) -> None:
    async with boxes.open(1, Limits(output=8 * MiB), None, START) as box:
        some = await box.run("echo first; head -c 3000000 /dev/zero; echo last", log=tmp_path / "log")
        with pytest.raises(LimitReached, match="killed at 8 MiB: sandbox output") as caught:
            await box.run("cat /dev/zero")
        assert caught.value.kind == "output"
        await box.mark()
        assert (await box.run("echo on")).stdout == "on\n"

    assert some.truncated
    assert some.stdout.startswith("first\n")
    assert some.stdout.endswith("last\n")
    assert (tmp_path / "log").stat().st_size == 3000000 + len("first\nlast\n")


@pytest.mark.parametrize("program", ["nope", "/not/there", "./here"])
async def test_a_program_that_cannot_be_run_is_named(box: DockerSandbox, program: str) -> None:
    with pytest.raises(SandboxFailed, match=program) as caught:
        await box.run([program])

    assert (caught.value.kind, caught.value.again) == ("spawn" if program == "./here" else "missing", False)


@pytest.mark.parametrize("wrong", [{"user": "nobody-here"}, {"workdir": "/not/there"}])
async def test_a_user_and_a_directory_that_are_not_there_are_named(
    box: DockerSandbox, wrong: dict[str, str]
) -> None:
    with pytest.raises(SandboxFailed, match=next(iter(wrong.values()))):
        await box.run("true", **wrong)


async def test_a_line_longer_than_an_argument_can_be(box: DockerSandbox) -> None:
    text = "ä" * 200_000

    result = await box.run(f"t='{text}'; echo ${{#t}} $0 $#")

    assert (result.exit_code, result.stdout.split()[1:]) == (0, ["/bin/bash", "0"])


async def test_a_line_that_no_process_can_be_given_is_refused(box: DockerSandbox) -> None:
    with pytest.raises(SandboxFailed):
        await box.run("echo \0")
    with pytest.raises(SandboxFailed):
        await box.run("echo \udc80")


async def test_an_image_without_a_shell_and_a_missing_image_are_reported(
    netdaemon: Daemon, boxes: DockerSandboxes
) -> None:
    bare = import_image(netdaemon, without=("sleep", "python3", "git"), name="bare:1")
    none = import_image(netdaemon, without=("sh", "sleep", "bash", "python3", "git"), name="none:1")
    for image in (bare, none):
        async with boxes.open(1, Limits(), None, SandboxSpec(image=image)) as box:
            with pytest.raises(SandboxFailed, match=r"ended as soon as|is gone") as caught:
                await box.run("true")
            assert "sleep" in caught.value.hint
    with pytest.raises(ImageFailed) as missing:
        async with boxes.open(1, Limits(), None, SandboxSpec(image="not:there")):
            pass
    assert missing.value.kind == "missing"


async def test_an_image_that_goes_after_it_was_looked_at_is_missing(
    netdaemon: Daemon, boxes: DockerSandboxes
) -> None:
    netdaemon.docker("tag", "box:1", "brief:1")
    async with boxes.open(1, Limits(), None, SandboxSpec(image="brief:1")) as box:
        netdaemon.docker("rmi", "brief:1")
        with pytest.raises(ImageFailed) as caught:
            await box.run("true")

    assert caught.value.kind == "missing"


async def test_what_a_start_asks_for_is_there(boxes: DockerSandboxes, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the agent is not root
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text("#!/bin/sh\necho tool $B\n")
    (tmp_path / "bin" / "tool").chmod(0o755)
    boxes.containers = msgspec.structs.replace(boxes.containers, mounts=((str(tmp_path), "/opt/agent"),))
    boxes.search = ("/opt/agent/bin",)
    start = SandboxSpec(
        image="box:1",
        user="agent",
        workdir="/new/place",
        env={"B": "c"},
        directories=("/logs/agent", "/tests"),
    )
    async with boxes.open(1, Limits(), None, start) as box:
        result = await box.run("pwd; tool; echo x > mine; echo y > /logs/agent/z; echo $PATH; echo $HOME")
        as_root = await box.run("touch /opt/agent/new || id -u", user="root")

    assert result.stdout.splitlines() == [
        "/new/place",
        "tool c",
        "/opt/agent/bin:/usr/local/bin:/usr/bin:/bin",
        "/home/agent",
    ], result.stderr
    assert (as_root.stdout, result.stderr) == ("0\n", "")


async def test_many_commands_at_once_make_one_container(netdaemon: Daemon, boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(), None, START) as box:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(box.run(f"echo {n}")) for n in range(6)]
        assert len(netdaemon.docker("ps", "--all", "--quiet").split()) == 1

    assert [task.result().stdout for task in running] == [f"{n}\n" for n in range(6)]


async def test_closing_ends_what_still_runs_and_is_the_end(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(), None, START) as box:
        task = asyncio.create_task(box.run("sleep 60"))
        await box.run("true")
    with pytest.raises((AttemptOver, SandboxFailed)):
        await task
    with pytest.raises(AttemptOver):
        await box.run("true")


async def test_one_that_is_closed_while_it_is_made_is_removed(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(), None, START) as box:
        task = asyncio.create_task(box.run("true"))
        await asyncio.sleep(0.05)
        task.cancel()

    assert box.leftovers == []  # and `sandboxes` looks that there is none
