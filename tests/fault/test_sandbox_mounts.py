"""Mounts of the host that come and go while bubblewrap looks at them: no command fails for that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdwater.core.errors import SandboxFailed
from holdwater.core.records import Limits, Network
from holdwater.sandbox import probe as probing
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

TROUBLE = (
    "Can't bind mount /oldroot/ on /newroot/: Unable to apply mount flags: "
    'remount "/newroot/var/lib/docker/overlay2/x/merged": No such file or directory'
)


class Stumbling:
    """A bubblewrap that meets a mount which is gone, so many times; then it is the real one."""

    def __init__(self, place: Path, times: int, words: str = TROUBLE) -> None:
        self.path = place / "bwrap"
        self._left = place / "left"
        self._left.write_text("x" * times)
        self.path.write_text(
            f"#!/bin/sh\nif [ -s {self._left} ]; then truncate -s -1 {self._left}\n"
            f"echo 'bwrap: {words.replace(chr(39), chr(39) + chr(34) + chr(39) + chr(34) + chr(39))}' >&2\n"
            f'exit 1; fi\nexec {probe().bubblewrap} "$@"\n'
        )
        self.path.chmod(0o755)

    @property
    def left(self) -> int:
        return self._left.stat().st_size

    @property
    def machine(self) -> MachineFeatures:
        return msgspec.structs.replace(probe(), bubblewrap=str(self.path))


@pytest.fixture(autouse=True)
def bubblewrap() -> None:
    if not probe().works and os.environ.get("CI") != "true":
        pytest.skip(f"bubblewrap does not work here: {probe().why_not}")


@pytest.fixture
def boxes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ProcessSandboxes]:
    stumbling: Stumbling = request.getfixturevalue("stumbling")
    found = ProcessSandboxes(
        tmp_path / "scratch", f"run-{os.getpid()}", Network.GATEWAY, machine=stumbling.machine
    )
    yield found
    found.threads.shutdown()


@pytest.fixture
def stumbling(tmp_path: Path, request: pytest.FixtureRequest) -> Stumbling:
    return Stumbling(tmp_path, *request.param)


@pytest.mark.parametrize("stumbling", [(3,)], indirect=True)
async def test_a_command_starts_although_mounts_come_and_go(
    boxes: ProcessSandboxes, stumbling: Stumbling
) -> None:
    async with boxes.open(1, Limits(), None) as box:
        result = await box.run("echo once >> trace; cat trace; exit 3")

    assert (result.stdout, result.exit_code) == ("once\n", 3)
    assert stumbling.left == 0


@pytest.mark.parametrize("stumbling", [(99,)], indirect=True)
async def test_a_mount_that_stays_in_the_way_is_named(boxes: ProcessSandboxes, stumbling: Stumbling) -> None:
    async with boxes.open(1, Limits(), None) as box:
        with pytest.raises(SandboxFailed, match="cannot start the command: bwrap: Can't bind mount"):
            await box.run("true")


@pytest.mark.parametrize("stumbling", [(99, "Creating new namespace failed")], indirect=True)
async def test_only_mount_failures_are_retried(boxes: ProcessSandboxes, stumbling: Stumbling) -> None:
    async with boxes.open(1, Limits(), None) as box:
        with pytest.raises(SandboxFailed, match="Creating new namespace failed"):
            await box.run("true")

    assert stumbling.left == 98


def test_the_probe_is_not_misled_either(tmp_path: Path) -> None:
    assert probing._why_not(str(Stumbling(tmp_path, 3).path), b"") == ""
