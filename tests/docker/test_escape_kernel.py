"""An agent in a container that tries the kernel: what the doctor says of containers is what it finds."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.container_image import START, sandboxes
from tests.docker_daemon import Daemon

from holdwater.core.records import Limits
from holdwater.run.builds.build_daemon import list_protections
from holdwater.run.setup.config import ProcessEnvironment

ATTACKS = Path(__file__).parents[1] / "escape_attacks.py"
# How attacks begin that a container never lets through, and those that the daemon's filter stops.
ALWAYS = (
    *("write /proc/sys/", "read /proc/k", "read /proc/timer_list", "gain privileges"),
    *("signal a process", "see a process", "trace a process", "look at a process"),
)
FILTERED = (
    *("keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "mount", "umount2"),
    *("pivot_root", "setns", "kexec_load", "init_module", "delete_module", "swapon", "reboot", "unshare"),
)


async def test_a_container_keeps_an_agent_from_the_kernel(netdaemon: Daemon) -> None:
    protections = await list_protections(ProcessEnvironment(docker_host=netdaemon.host))

    async with sandboxes(netdaemon) as boxes, boxes.open(1, Limits(), None, START) as box:
        await box.write("attacks.py", ATTACKS.read_bytes())
        result = await box.run(["python3", "attacks.py", str(os.getpid())])

    assert result.ok, result
    successes = json.loads(result.stdout)
    assert [success for success in successes if success.startswith(ALWAYS)] == []
    assert any(success.startswith(FILTERED) for success in successes) == ("seccomp" not in protections)
