"""Links that sandboxed code plants where holdwater writes, reads, measures and removes: none is followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdwater.core.errors import SandboxFailed
from holdwater.core.records import Limits, MiB, Network
from holdwater.sandbox import confined_paths
from holdwater.sandbox.confined_paths import remove_tree
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process import LONGEST_LINE
from holdwater.sandbox.process_sandboxes import ProcessSandboxes
from holdwater.sandbox.resource_usage import count_bytes

NO_SUCH_CALL = 100_000
LONG = f"echo ran; : {'x' * LONGEST_LINE}"


@pytest.fixture(params=["bubblewrap", "plain"])
def boxes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessSandboxes]:
    if request.param == "bubblewrap" and not probe().works and os.environ.get("CI") != "true":
        pytest.skip(f"bubblewrap does not work here: {probe().why_not}")
    machine = (
        probe() if request.param == "bubblewrap" else MachineFeatures(why_not="not here", root=probe().root)
    )
    found = ProcessSandboxes(tmp_path / "scratch", f"run-{os.getpid()}", Network.GATEWAY, machine=machine)
    yield found
    found.threads.shutdown()


@pytest.fixture(params=["openat2", "step by step"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's own call, and on a kernel that does not have it."""
    if request.param == "step by step":
        monkeypatch.setattr(confined_paths, "OPENAT2", NO_SUCH_CALL)
    return str(request.param)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the host, in a directory that nothing in a sandbox may reach."""
    victim = tmp_path / "host" / "victim"
    victim.parent.mkdir()
    victim.write_text("as it was")
    return victim


async def test_a_long_line_is_not_written_where_a_link_leads(boxes: ProcessSandboxes, victim: Path) -> None:
    async with boxes.open(1, Limits(memory=512 * MiB), None) as box:
        await box.run(
            f'for n in $(seq 9); do for place in ~ . /tmp "{box.private}"; do '
            f'ln -s {victim} "$place/.line-$n"; done; done 2>/dev/null; true'
        )

        results = [await box.run(LONG) for _ in range(3)]

    assert [result.stdout for result in results] == 3 * ["ran\n"]
    assert victim.read_text() == "as it was"


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("steps", [["out", "victim"], ["a", "out", "victim"], ["a", "out", "b", "victim"]])
def test_a_directory_that_became_a_link_is_not_entered(
    tmp_path: Path, victim: Path, steps: list[str]
) -> None:
    work = tmp_path / "work"
    (work / "a").mkdir(parents=True)
    (victim.parent / "b").mkdir()
    (victim.parent / "b" / "victim").symlink_to(victim)
    for place in (work, work / "a"):
        (place / "out").symlink_to(victim.parent)

    for attempt in (
        lambda: confined_paths.read(str(work), steps),
        lambda: confined_paths.write(str(work), steps, b"changed"),
        lambda: confined_paths.replace(str(work), steps, b"changed"),
        lambda: confined_paths.read_size(str(work), steps),
        lambda: confined_paths.read_link(str(work), steps),
        lambda: confined_paths.is_program(str(work), steps),
        lambda: confined_paths.open_directory(str(work), steps[:-1]).__enter__(),
    ):
        with pytest.raises(NotADirectoryError):
            attempt()

    assert victim.read_text() == "as it was"
    assert sorted(path.name for path in victim.parent.iterdir()) == ["b", "victim"]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    "steps", [["..", "host", "victim"], ["a", "..", "..", "host", "victim"], ["a/../../host"]]
)
def test_steps_that_lead_up_are_refused(tmp_path: Path, victim: Path, steps: list[str]) -> None:
    (tmp_path / "work" / "a").mkdir(parents=True)

    with pytest.raises(SandboxFailed, match="invalid path below"):
        confined_paths.read(str(tmp_path / "work"), steps)


@pytest.mark.usefixtures("calls")
def test_a_path_longer_than_the_kernel_takes_is_written_and_read(tmp_path: Path) -> None:
    steps = [*(f"{n:0200d}" for n in range(40)), "file"]

    confined_paths.write(str(tmp_path), steps, b"deep")

    assert confined_paths.read(str(tmp_path), steps) == b"deep"
    assert count_bytes(str(tmp_path)) > 40 * 4096
    assert remove_tree(tmp_path / steps[0]) == ""


def test_removing_a_locked_tree_leaves_what_its_links_lead_to(tmp_path: Path, victim: Path) -> None:
    work = tmp_path / "work"
    locked = work / "locked" / "inner"
    locked.mkdir(parents=True)
    (locked / "file").write_text("x")
    for place in (work, locked):
        (place / "file-link").symlink_to(victim)
        (place / "directory-link").symlink_to(victim.parent)
    victim.chmod(0o400)
    victim.parent.chmod(0o500)
    for directory in (locked, locked.parent):
        directory.chmod(0)
    fd = os.open(work, os.O_RDONLY)
    for _ in range(1500):  # deeper than Python follows: root is kept from nothing by a mode
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)

    assert remove_tree(work) == ""

    assert not work.exists()
    assert (victim.stat().st_mode & 0o777, victim.parent.stat().st_mode & 0o777) == (0o400, 0o500)
    victim.parent.chmod(0o700)


async def test_a_link_that_is_taken_replaces_no_file_beside_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "result.json").write_text("of the host")
    boxes = ProcessSandboxes(tmp_path / "scratch", f"taken-{os.getpid()}", Network.NONE)

    async with boxes.open(1, Limits(), None) as box:
        await box.run("echo agent > result.json; ln -s result.json out.txt")
        left_out = await box.take("out.txt", kept / "out.txt")
    boxes.close()

    assert left_out == ()
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "result.json": "of the host",
        "out.txt": "agent\n",
    }
