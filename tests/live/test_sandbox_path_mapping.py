"""Directories of its own in a process sandbox: `/logs`, `/tests`, a working directory by its path."""

import os
import shutil
from pathlib import Path

import pytest

from holdwater.core.errors import SandboxFailed
from holdwater.core.records import Limits, MiB, Network, SandboxSpec
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes, VisibilitySpec

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)

START = SandboxSpec(workdir="/app", directories=("/logs/agent", "/logs/verifier", "/tests"))


@pytest.fixture
def place():
    """Outside /tmp, of which every sandbox has its own."""
    place = Path("/var/lib" if os.geteuid() == 0 else Path.home(), f"holdwater-places-{os.getpid()}")
    place.mkdir()
    yield place
    shutil.rmtree(place)


def opened(place: Path, start: SandboxSpec = START, machine: MachineFeatures | None = None, **given):
    boxes = ProcessSandboxes(
        place / "scratch", f"run-{os.getpid()}", Network.GATEWAY, machine=machine, **given
    )
    return boxes.open(1, Limits(memory=512 * MiB), None, start)


async def test_they_are_there_can_be_written_and_nothing_else_can(place):
    async with opened(place) as box:
        result = await box.run("pwd; touch a /logs/agent/b /tests/c; touch /logs/d /e /app/../f; ls / /logs")

    assert box.workdir == "/app"
    assert result.stdout.splitlines()[0] == "/app"
    assert result.stderr.count("cannot touch") == 3
    assert {"app", "logs", "tests", "agent", "verifier", "etc"} <= set(result.stdout.split())
    assert not Path("/app").exists() and not Path("/logs").exists()


async def test_commands_and_files_mean_the_same_paths(place):
    async with opened(place) as box:
        await box.write("/logs/verifier/reward.txt", "1")
        await box.write("mine.txt", "m")
        await box.run("echo 2 > /tests/two; echo 3 > three")
        seen = await box.run("cat /logs/verifier/reward.txt /app/mine.txt", workdir="/tests")

        assert seen.stdout == "1m"
        assert (await box.read("/tests/two"), await box.read("/app/three")) == (b"2\n", b"3\n")
        with pytest.raises(FileNotFoundError):
            await box.read("/logs/agent/none")
        with pytest.raises(SandboxFailed, match="not below"):
            await box.read("/etc/passwd")


async def test_trees_are_put_in_and_taken_out(place):
    source = place / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "test.sh").write_text("echo ran")
    (source / "deep" / "test.sh").chmod(0o755)

    async with opened(place) as box:
        await box.put(source, "/tests")
        result = await box.run("/tests/deep/test.sh; cp -r /tests/deep /logs/agent")
        await box.take("/logs/agent", place / "taken")

    assert result.stdout == "ran\n"
    assert (place / "taken" / "deep" / "test.sh").read_text() == "echo ran"


async def test_a_sandbox_that_begins_anew_has_those_of_its_new_start(place):
    async with opened(place) as box:
        await box.run("touch left /tests/left")
        await box.renew(SandboxSpec(workdir="/srv", directories=("/tests",)))
        result = await box.run("pwd; ls -A . /tests; ls -d /app")

    assert result.stdout.split() == ["/srv", ".:", "/tests:"]


async def test_a_hidden_file_stays_hidden_below_a_shown_directory(place, tmp_path):
    """Given a shown directory below /tmp, inside of one that is hidden."""
    (tmp_path / "hidden" / "shown").mkdir(parents=True)
    (tmp_path / "hidden" / "shown" / "file").write_text("secret")
    shown = str(tmp_path / "hidden" / "shown")
    given = {"hide": (tmp_path / "hidden",), "visible": VisibilitySpec(mounts=((shown, shown),))}

    async with opened(place, **given) as box:
        result = await box.run(f"cat {tmp_path}/hidden/shown/file")

    assert (result.ok, result.stdout) == (False, "")


@pytest.mark.parametrize("start", [SandboxSpec(workdir="/app"), SandboxSpec(directories=("/tests",))])
async def test_without_bubblewrap_they_are_refused(place, start):
    async with opened(place, start, MachineFeatures(why_not="not here")) as box:
        with pytest.raises(SandboxFailed, match="needs a container"):
            await box.run("true")
