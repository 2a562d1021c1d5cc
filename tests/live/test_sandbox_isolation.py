"""What the doctor says of files and the network is what a command in the same sandbox finds."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from holdwater.core.records import Limits, Network
from holdwater.sandbox.bubblewrap import find_home
from holdwater.sandbox.isolation import HOST_PLACES, describe_isolation, try_isolation
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

CONNECT = "import socket; socket.create_connection(('127.0.0.1', {}), 5)"


@pytest.mark.parametrize("confined", [True, False])
async def test_the_doctor_says_what_a_command_sees_writes_and_reaches(tmp_path: Path, confined: bool) -> None:
    if confined and not probe().works:
        assert os.environ.get("CI") != "true"
        pytest.skip(f"bubblewrap does not work here: {probe().why_not}")
    machine = msgspec.structs.replace(probe(), works=confined)
    boxes = ProcessSandboxes(tmp_path, f"isolation-{os.getpid()}", Network.GATEWAY, machine=machine)

    findings = describe_isolation(await try_isolation(machine), machine)
    said = {finding.what.removeprefix("isolation: "): finding for finding in findings}
    with socket.create_server(("127.0.0.1", 0)) as service:
        async with boxes.open(1, Limits(), None) as box:
            listed = (await box.run(["ls", "-A", find_home() or "/nowhere"])).stdout.splitlines()
            tested = [(await box.run(["test", "-w", place])).ok for place in HOST_PLACES]
            reached = (await box.run(["python3", "-c", CONNECT.format(service.getsockname()[1])])).ok

    home = Path(find_home() or "/nowhere")
    there = {path.name for path in home.iterdir()} if home.is_dir() else set()
    assert said["home"].value.startswith(f"{len(there & set(listed))} of {len(there)} entries")
    assert bool(said["files"].note) == any(tested)
    assert bool(said["network"].note) == reached == (not confined)
