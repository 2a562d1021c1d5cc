"""What a directory takes on disk, and how often that is measured."""

import os
import re
import threading
from pathlib import Path

import pytest

from holdwater.core.records import Limits
from holdwater.sandbox.confined_paths import remove_tree
from holdwater.sandbox.launcher import build_launcher
from holdwater.sandbox.resource_usage import MeasurePace, count_bytes

KiB = 1024


@pytest.fixture
def base(tmp_path: Path) -> int:
    """What an empty directory takes here."""
    return count_bytes(str(tmp_path))


def test_blocks_are_counted_and_each_file_once(tmp_path: Path, base: int) -> None:
    (tmp_path / "full").write_bytes(b"x" * 300 * KiB)
    for n in range(3):
        os.link(tmp_path / "full", tmp_path / f"again-{n}")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "out").symlink_to("/")

    assert 300 * KiB <= count_bytes(str(tmp_path)) - base <= 320 * KiB


def test_a_directory_deeper_than_any_path_is_seen_to_its_bottom(tmp_path: Path, base: int) -> None:
    depth = 3000
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("dd", dir_fd=fd)
        inner = os.open("dd", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    bottom = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    os.write(bottom, b"x" * 100 * KiB)
    empty = os.fstat(fd).st_blocks * 512

    found = count_bytes(str(tmp_path))

    os.close(bottom)
    os.close(fd)
    assert remove_tree(tmp_path / "dd") == ""  # pytest could not
    assert found >= depth * empty + 100 * KiB


def test_files_mounted_below_a_directory_are_not_counted() -> None:
    assert count_bytes("/dev") < count_bytes("/dev/shm") + 64 * KiB


def test_a_deleted_file_counts_for_as_long_as_it_is_open(tmp_path: Path, base: int) -> None:
    with (tmp_path / "gone").open("wb", buffering=0) as file:
        file.write(b"x" * 300 * KiB)
        (tmp_path / "gone").unlink()

        assert count_bytes(str(tmp_path)) == base
        assert count_bytes(str(tmp_path), [os.getpid(), 0]) >= base + 300 * KiB
    assert count_bytes(str(tmp_path), [os.getpid()]) == base


def test_files_that_vanish_meanwhile_are_no_error(tmp_path: Path) -> None:
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for n in range(50):
                (tmp_path / f"{n}/inner").mkdir(parents=True)
                (tmp_path / f"{n}/inner/file").write_text("x")
            for n in range(50):
                (tmp_path / f"{n}/inner/file").unlink()
                (tmp_path / f"{n}/inner").rmdir()
                (tmp_path / f"{n}").rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert all(count_bytes(str(tmp_path)) for _ in range(200))
    finally:
        over.set()
        thread.join()
    assert count_bytes(str(tmp_path / "never")) == 0


def test_what_costs_more_is_measured_less_often() -> None:
    pace = MeasurePace(least=0.5, share=0.01)
    assert (pace.wait(now=100.0), pace.due(now=100.0)) == (0.5, True)

    pace.record_cost(now=100.0, cost=0.001)
    assert pace.wait(now=100.2) == pytest.approx(0.3)
    assert pace.affordable(now=100.2) and not pace.due(now=100.2)

    pace.record_cost(now=101.0, cost=0.03)
    assert pace.wait(now=101.5) == pytest.approx(2.5)
    assert not pace.affordable(now=103.9)
    assert pace.affordable(now=104.1) and pace.due(now=104.1)


@pytest.mark.parametrize(
    ("limits", "root", "expected"),
    [
        (Limits(pids=None), False, {"-c", "-n", "-d unlimited"}),
        (
            Limits(pids=9, lease=4096),
            True,
            {"-c", "-n", "-d unlimited"},
        ),  # it may grow: no process knows by how much
        (Limits(pids=9), False, {"-c", "-n", "-d unlimited", "-u", "-p"}),
        (Limits(pids=None, memory=4096, disk=1, cpu_seconds=0.5), True, {"-c", "-n", "-d 4", "-f", "-t"}),
    ],
)
def test_rlimits_stand_in_for_a_missing_group(limits: Limits, root: bool, expected: set[str]) -> None:
    script = build_launcher(None, limits, root)[2]

    assert set(re.findall(r"ulimit (?:-[SH] )?(-d \w+|-\w)", script)) == expected
