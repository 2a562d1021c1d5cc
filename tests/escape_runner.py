"""Plays attacks inside a process sandbox, as this user or as another one, and says which of them succeeded.

`python -m tests.escape_runner KIND PLACE ATTACKS ARGUMENTS...` is how another user plays. It prints JSON: the
attacks that succeeded, and the report of the doctor on the same sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.user_commands import find_python, run_as, staged
from tests.wait_bounds import stretch

from holdwater.core.records import Limits, MiB, Network
from holdwater.sandbox.isolation import describe_isolation, try_isolation
from holdwater.sandbox.kernel_protection import protect_devices
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes


class Played(NamedTuple):
    """What came of attacks in one kind of sandbox."""

    successes: list[str]
    doctor: dict[str, bool]  # line of the doctor -> whether it has a note: commands are not kept from it


def play(user: int, attacks: Path, *arguments: str, kind: str = "bubblewrap") -> Played:
    """What `attacks` print in a sandbox of this user: with bubblewrap, or `plain`."""
    with staged(user) as place:
        words = [find_python(user), "-m", "tests.escape_runner", kind, str(place), str(attacks), *arguments]
        done = run_as(user, words, stretch(60))
    assert done.returncode == 0, done
    return Played(**json.loads(done.stdout))


async def attack(kind: str, place: Path, attacks: Path, arguments: list[str]) -> Played:
    machine = probe()
    assert machine.works, machine.why_not
    if kind == "plain":
        machine = msgspec.structs.replace(machine, works=False, why_not="it is not used here")
    protect_devices()  # as workers do
    run = f"escape-{os.getpid()}"  # a sweep of another test must not find it
    boxes = ProcessSandboxes(place / "scratch", run, Network.GATEWAY, machine=machine)
    async with boxes.open(1, Limits(memory=512 * MiB), None) as box:
        await box.write("attacks.py", attacks.read_bytes())
        result = await box.run(["python3", "attacks.py", *arguments])
    assert result.ok, result
    findings = describe_isolation(await try_isolation(machine), machine)
    said = {finding.what.removeprefix("isolation: "): bool(finding.note) for finding in findings}
    return Played(json.loads(result.stdout), said)


if __name__ == "__main__":
    played = asyncio.run(attack(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
    print(json.dumps(played._asdict()))
