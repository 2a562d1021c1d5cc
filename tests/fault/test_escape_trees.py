"""Trees that sandboxed code builds so that they are not seen: too deep, too many, locked, dated back."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.core.errors import ResourceExhausted, SandboxFailed
from holdwater.core.records import Limits, MiB, Network, Salvage
from holdwater.sandbox import changes, resource_usage
from holdwater.sandbox.confined_paths import remove_tree
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

NOBODY = 65534
NAME = "d" * 250
DIG = f"""
import os
for _ in range({{levels}}):
    os.mkdir("{NAME}")
    os.chdir("{NAME}")
"""
LOCKED = """
import os, sys
from pathlib import Path
from holdwater.sandbox import changes, resource_usage
if os.geteuid() == 0:
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
work, manifest = Path("work"), Path("manifest")
(work / "old").write_bytes(b"x" * 300_000)
changes.write_manifest("work", manifest)
(work / "new").write_text("new")
work.chmod(0)
print(resource_usage.measure(".").used >= 300_000)
work.chmod(0)
print([entry.path.decode() for entry in changes.walk(b"work")])
work.chmod(0)
print([change.new.path.decode() for change in changes.compare("work", manifest)])
"""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    work = tmp_path / "work"
    work.mkdir()
    yield work
    assert remove_tree(work) == ""  # pytest could not


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


def mark(work: Path) -> None:
    changes.write_manifest(str(work), work.with_name("manifest"))


def salvage(work: Path) -> Salvage | None:
    return changes.salvage(str(work), work.with_name("manifest"), work.with_name("kept.tar.zst"))


def dig(work: Path, levels: int, files: int = 0) -> None:
    script = DIG.format(levels=levels) + f"\nfor n in range({files}): open(str(n), 'x').close()"
    subprocess.run([sys.executable, "-c", script], cwd=work, check=True, timeout=stretch(60))


def refuse_restoring(work: Path) -> None:
    with pytest.raises(SandboxFailed, match="salvage is incomplete"):
        changes.restore(str(work), work.with_name("kept.tar.zst"))


def test_a_locked_work_directory_is_measured_walked_and_compared(work: Path) -> None:
    user = os.geteuid() or NOBODY  # a mode keeps root from nothing
    for place in (work, work.parent):
        os.chown(place, user, user if user == NOBODY else -1)
    words = [sys.executable, "-c", LOCKED, str(user)]

    done = subprocess.run(
        words, cwd=work.parent, capture_output=True, text=True, timeout=stretch(60), check=False
    )

    assert done.stdout.splitlines() == ["True", "['new', 'old']", "['new']"], done.stderr
    assert stat.S_IMODE(work.stat().st_mode) == 0o700


async def test_work_that_its_agent_locked_is_kept_and_can_be_graded(
    boxes: ProcessSandboxes, tmp_path: Path
) -> None:
    async with boxes.open(1, Limits(), None) as box:
        await box.write("old", "old")
        await box.mark()
        await box.run("echo new > new; chmod 000 .")

        kept = await box.salvage(tmp_path / "kept")

        assert kept is not None and (kept.files, kept.left_out) == (1, 0)
        assert await box.clear_outside()
        assert (await box.run("stat -c %a . && cat new")).stdout == "700\nnew\n"


def test_a_link_in_the_place_of_the_work_is_not_unlocked(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir(mode=0o500)
    (tmp_path / "work").symlink_to(host)

    resource_usage.measure(str(tmp_path))
    with pytest.raises(OSError):
        mark(tmp_path / "work")

    assert stat.S_IMODE(host.stat().st_mode) == 0o500


def test_an_edit_that_sets_the_time_back_is_kept(work: Path) -> None:
    file = work / "file"
    file.write_text("before")
    before = file.stat()
    mark(work)
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # on some disks this time is coarse
        file.write_text("after!")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    kept = salvage(work)

    assert kept is not None and kept.files == 1
    file.write_text("before")
    changes.restore(str(work), work.with_name("kept.tar.zst"))
    assert file.read_text() == "after!"


def test_a_mode_that_was_set_before_the_mark_is_no_change(work: Path) -> None:
    (work / "file").write_text("x")
    (work / "file").chmod(0o755)
    mark(work)

    assert salvage(work) is None


def test_a_file_that_is_dated_beyond_all_clocks_is_kept(work: Path) -> None:
    mark(work)
    (work / "file").write_text("x")
    os.utime(work / "file", (15_000_000_000, 15_000_000_000))

    kept = salvage(work)

    assert kept is not None and (kept.files, kept.left_out) == (1, 0)


def test_a_deep_tree_takes_little_memory_and_is_left_out(work: Path) -> None:
    mark(work)
    (work / "shallow").write_text("x")
    dig(work, levels=1000, files=3000)
    tracemalloc.start()
    try:
        kept = salvage(work)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 32 * MiB
    assert kept is not None and (kept.left_out, kept.files) == (1, 18)
    refuse_restoring(work)


def test_many_entries_take_memory_for_their_names_alone(work: Path) -> None:
    below = work / NAME / NAME / NAME / NAME
    below.mkdir(parents=True)
    for n in range(5000):
        (below / str(n)).touch()
    tracemalloc.start()
    try:
        count = sum(1 for _ in changes.walk(os.fsencode(work)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == 5004
    assert peak < 5000 * 200


@pytest.mark.parametrize("place", ["", "many", "one/many"])
def test_more_entries_than_are_held_are_left_out(
    work: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / place).mkdir(parents=True, exist_ok=True)
    (work / place / "old").write_text("x")
    mark(work)
    monkeypatch.setattr(changes, "MOST_HELD", 5000)
    for n in range(100):
        (work / place / str(n)).touch()

    kept = salvage(work)

    assert kept is not None and kept.left_out == 1  # and `old` is not taken for deleted
    refuse_restoring(work)
    with pytest.raises(SandboxFailed, match="too many files"):  # a caller that needs all of them
        list(changes.walk(os.fsencode(work)))


@pytest.mark.parametrize("place", ["", "many"])
def test_work_that_could_not_be_noted_is_never_said_to_be_whole(
    work: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / place).mkdir(exist_ok=True)
    for n in range(100):
        (work / place / str(n)).touch()
    monkeypatch.setattr(changes, "MOST_HELD", 5000)
    mark(work)
    same = salvage(work)
    for n in range(1, 100):
        (work / place / str(n)).unlink()

    fewer = salvage(work)

    assert same is not None and same.left_out == 1
    assert fewer is not None and fewer.left_out == 1
    refuse_restoring(work)


async def test_a_tree_too_deep_to_be_measured_is_over_the_limit(boxes: ProcessSandboxes) -> None:
    async with boxes.open(1, Limits(disk=100 * MiB), None) as box:
        with pytest.raises(ResourceExhausted, match="sandbox disk"):
            async with asyncio.timeout(stretch(120)):
                await box.run(["python3", "-c", DIG.format(levels=540) + "import time; time.sleep(600)"])
        await box.mark()  # what an agent left does not keep its grader from its work

        assert (await box.run("echo graded")).stdout == "graded\n"


def test_a_descriptor_that_vanishes_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a process that closes one file between the listing of its files and the look at each."""
    with (tmp_path / "gone").open("wb", buffering=0) as file:
        file.write(b"x" * 300_000)
        (tmp_path / "gone").unlink()
        listed = Path.iterdir
        monkeypatch.setattr(Path, "iterdir", lambda self: iter([self / "1000000", *listed(self)]))

        assert resource_usage.count_bytes(str(tmp_path), [os.getpid()]) >= 300_000
