"""What the doctor makes of a reading: who binds first, and what about pressure and disks is worth a note."""

from pathlib import Path

import pytest

from holdwater.api.machine import (
    report_bound,
    report_disk,
    report_group,
    report_memory_disk,
    report_pressure,
    report_start,
)
from holdwater.core.records import GiB, MiB
from holdwater.governor.cgroups import OwnCgroups
from holdwater.governor.resource_reading import DiskReading, ResourceBound, ResourceReading

CONTAINER = ResourceBound("container", limit=4 * GiB, used=GiB, source="`/sys/fs/cgroup/memory.max`")
PLENTY = DiskReading(path="/data", free=50 * GiB, total=80 * GiB, memory=False, names=("run", "temp"))


def changed(**changes: object) -> DiskReading:
    return DiskReading(
        **{**{field: getattr(PLENTY, field) for field in DiskReading.__struct_fields__}, **changes}
    )


def test_a_bound_is_reported_with_its_source_and_whether_it_binds_first():
    first, second = report_bound(CONTAINER, first=True), report_bound(CONTAINER, first=False)

    assert first.value == "container: 3.0 GiB left of 4.0 GiB, `/sys/fs/cgroup/memory.max`; binds first"
    assert second.value == first.value.removesuffix("; binds first")


def test_this_machine_has_one_bound_that_binds_first():
    found = report_memory_disk()

    assert sum("; binds first" in finding.value for finding in found) == 1
    assert {"memory", "pressure", "own group", "disk", "at once"} == {finding.what for finding in found}


@pytest.mark.parametrize(
    ("disk", "note"),
    [
        (PLENTY, ""),
        (changed(free=0, total=0), ""),
        (changed(free=MiB), "set `--out` and `TMPDIR` to a directory with more"),
        (
            changed(memory=True),
            "files there use memory, and are gone after a restart. "
            "hint: set `--out` and `TMPDIR` to a directory on a disk",
        ),
        (changed(memory=True, names=("temp",)), "hint: set `TMPDIR` to a directory on a disk"),
        (changed(memory=True, names=("cache",)), "hint: set `HOLDWATER_CACHE` to a directory on a disk"),
        (changed(memory=True, names=("scratch",)), "hint: set `--scratch` to a directory on a disk"),
        (changed(filesystem="overlay"), "files there are gone with it, and count as its storage"),
        (changed(filesystem="ext4"), ""),
    ],
)
def test_a_disk_that_is_small_or_memory_is_worth_a_note(disk: DiskReading, note: str):
    told = report_disk(disk)

    assert bool(told.note) == bool(note)
    assert note in told.note


def test_a_kernel_without_psi_is_worth_a_note():
    def told(pressure: float | None) -> str:
        return report_pressure(
            ResourceReading(bounds=(CONTAINER,), disks=(), pressure=pressure, oom_kills=0)
        ).note

    assert told(0.0) == ""
    assert "psi=1" in told(None)


def test_the_version_of_control_groups_and_their_kills_are_reported(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    assert report_group(OwnCgroups(tmp_path / "proc", tmp_path), 0).value == "none with a memory controller"

    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    told = report_group(OwnCgroups(tmp_path / "proc", tmp_path), 2).value

    assert told == f"`{tmp_path}`, control groups version 2, where the kernel killed 2 for memory so far"


def test_it_says_how_many_attempts_would_begin_and_what_limits_them() -> None:
    def reading(memory: int, disk: int) -> ResourceReading:
        place = DiskReading(path="/run", free=disk, total=100 * GiB, memory=False, names=("run",))
        bounds = (ResourceBound("budget", memory, 0, "`--memory`"),)
        return ResourceReading(bounds=bounds, disks=(place,), pressure=None, oom_kills=0)

    many = 1e6  # cores
    assert "limited by slots" in report_start(reading(1000 * GiB, 90 * GiB), many).value
    assert "limited by memory" in report_start(reading(1 * GiB, 90 * GiB), many).value
    assert "limited by disk" in report_start(reading(100 * GiB, 6 * GiB + 100 * MiB), many).value
    assert report_start(reading(1000 * GiB, 90 * GiB), 3.0).value.startswith("6 attempts")
    assert "limited by cpu" in report_start(reading(1000 * GiB, 90 * GiB), 3.0).value
    nothing = report_start(reading(20 * MiB, 90 * GiB), many)
    assert nothing.value.startswith("0 attempts") and "too little memory" in nothing.note
