"""An image's entrypoint runs in its containers, as `docker run IMAGE COMMAND` has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.container_image import IMAGE, sandboxes
from tests.docker_daemon import Daemon
from tests.wait_bounds import stretch

from holdwater.core.errors import ResourceExhausted, SandboxFailed
from holdwater.core.records import Limits, MiB, SandboxSpec

SERVICE = "(while :; do echo $WORD > /tmp/beat; sleep 0.1; done) &"
HANDS_OVER = 'exec "$@"'


def derive(daemon: Daemon, name: str, script: str | list[str], *changes: str) -> SandboxSpec:
    """An image with this entrypoint, made in the daemon."""
    entrypoint = script if isinstance(script, list) else ["sh", "-c", script, "entry"]
    words = [f"ENTRYPOINT {json.dumps(entrypoint)}", *changes]
    options = [word for change in words for word in ("--change", change)]
    made = daemon.docker("create", "--network", "none", IMAGE, "true").strip()
    daemon.docker("commit", *options, made, name)
    daemon.docker("rm", made)
    return SandboxSpec(image=name)


async def test_services_of_an_entrypoint_are_up_before_the_first_command(netdaemon: Daemon) -> None:
    script = f"sleep 1; {SERVICE} until [ -s /tmp/beat ]; do sleep 0.1; done; {HANDS_OVER}"
    start = derive(netdaemon, "entry:service", script, "ENV WORD=up")
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        first = await box.run("cat /tmp/beat; rm /tmp/beat")
        again = await box.run(
            "until [ -s /tmp/beat ]; do sleep 0.1; done; cat /tmp/beat", timeout=stretch(60)
        )

    assert (first.stdout, again.stdout) == ("up\n", "up\n")


async def test_an_entrypoint_has_the_user_directory_and_variables_of_its_container(netdaemon: Daemon) -> None:
    script = f'echo "$(id -u) $PWD $WORD $(ls -d /given)" > /tmp/seen; {HANDS_OVER}'
    start = derive(netdaemon, "entry:seen", script, "USER agent", "WORKDIR /home/agent", "ENV WORD=image")
    start = SandboxSpec(
        image=start.image, env={"WORD": "start"}, user="root", workdir="/new/place", directories=("/given",)
    )
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        seen = await box.run("cat /tmp/seen; id -u; pwd")

    assert seen.stdout == "1000 /home/agent start /given\n0\n/new/place\n"


async def test_an_entrypoint_that_keeps_the_command_to_itself_stays(netdaemon: Daemon) -> None:
    start = derive(netdaemon, "entry:stays", "echo here > /tmp/seen; exec sleep 1000")
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        seen = await box.run("cat /tmp/seen")

    assert seen.stdout == "here\n"


@pytest.mark.parametrize("status", [0, 3])
async def test_an_entrypoint_that_ends_fails_the_sandbox_with_its_words(
    netdaemon: Daemon, status: int
) -> None:
    start = derive(netdaemon, "entry:ends", f"echo no such database >&2; exit {status}")
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        with pytest.raises(SandboxFailed) as caught:
            await box.run("true")

    assert caught.value.kind == "entrypoint"
    assert f"status {status}: no such database" in caught.value.message


async def test_an_entrypoint_without_its_program_is_named(netdaemon: Daemon) -> None:
    start = derive(netdaemon, "entry:missing", ["/no/such/entry.sh"])
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        with pytest.raises(SandboxFailed, match=r"/no/such/entry\.sh"):
            await box.run("true")


async def test_an_entrypoint_over_the_memory_limit_is_a_matter_of_memory(netdaemon: Daemon) -> None:
    start = derive(netdaemon, "entry:greedy", ["python3", "-c", "x = b'x' * (200 << 20)"])
    limits = Limits(memory=64 * MiB)
    async with sandboxes(netdaemon) as boxes, boxes.open(1, limits, None, start) as box:
        with pytest.raises(ResourceExhausted, match="sandbox memory"):
            await box.run("true")


@pytest.mark.parametrize("words", [["bash"], ["/bin/sh", "-c"], ["python3", "-u"]], ids=" ".join)
async def test_a_bare_interpreter_as_entrypoint_is_left_out(netdaemon: Daemon, words: list[str]) -> None:
    start = derive(netdaemon, "entry:bare", words)
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        seen = await box.run("echo runs")

    assert seen.stdout == "runs\n"


async def test_the_health_check_of_an_image_is_waited_for(netdaemon: Daemon) -> None:
    late = f"(sleep 2; echo up > /tmp/up) & {HANDS_OVER}"
    check = "HEALTHCHECK --interval=10s --retries=6 CMD cat /tmp/up"
    start = derive(netdaemon, "entry:late", late, check)
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        seen = await box.run("cat /tmp/up")

    assert seen.stdout == "up\n"


async def test_an_image_that_never_gets_healthy_fails_the_sandbox(netdaemon: Daemon) -> None:
    check = "HEALTHCHECK --interval=1s --retries=2 CMD cat /tmp/up"
    start = derive(netdaemon, "entry:never", HANDS_OVER, check)
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        with pytest.raises(SandboxFailed, match=r"health check does not pass: .*No such file") as caught:
            await box.run("true")

    assert caught.value.kind == "unhealthy"


async def test_what_an_entrypoint_writes_is_not_the_agents_work(netdaemon: Daemon, tmp_path: Path) -> None:
    start = derive(netdaemon, "entry:writes", f"echo x > /work/of-the-image; {HANDS_OVER}", "WORKDIR /work")
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, start) as box:
        await box.mark()
        nothing = await box.salvage(tmp_path / "nothing")
        await box.write("of-the-agent", "y")
        kept = await box.salvage(tmp_path / "kept")

    assert nothing is None
    assert kept is not None and kept.files == 1


async def test_a_killed_sleep_does_not_end_the_container(netdaemon: Daemon) -> None:
    find = "for p in /proc/[0-9]*; do case $(cat $p/comm) in sleep) kill -9 ${p#/proc/};; esac; done"
    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, SandboxSpec(image=IMAGE)) as box:
        await box.run(find)
        seen = await box.run("sleep 0.5; echo runs")

    assert seen.stdout == "runs\n"
