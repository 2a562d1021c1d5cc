"""What the doctor makes of a reading: who binds first, and what about pressure and disks is worth a note."""

from pathlib import Path

import pytest

from holdwater.cli.doctor import on_bound, on_disk, on_group, on_memory_and_disk, on_pressure, on_start
from holdwater.core.records import GiB, MiB
from holdwater.governor.cgroups import Groups
from holdwater.governor.reading import Bound, Disk, Reading

CONTAINER = Bound("container", limit=4 * GiB, used=GiB, source="`/sys/fs/cgroup/memory.max`")
PLENTY = Disk(path="/data", free=50 * GiB, total=80 * GiB, memory=False, names=("run", "temp"))


def changed(**changes: object) -> Disk:
    return Disk(**{**{field: getattr(PLENTY, field) for field in Disk.__struct_fields__}, **changes})


def test_a_bound_is_told_with_its_source_and_whether_it_binds_first():
    first, second = on_bound(CONTAINER, first=True), on_bound(CONTAINER, first=False)

    assert first.value == "container: 3.0 GiB left of 4.0 GiB, `/sys/fs/cgroup/memory.max`; binds first"
    assert second.value == first.value.removesuffix("; binds first")


def test_this_machine_has_one_bound_that_binds_first():
    found = on_memory_and_disk()

    assert sum("; binds first" in finding.value for finding in found) == 1
    assert {"memory", "pressure", "own group", "disk", "at once"} == {finding.what for finding in found}


@pytest.mark.parametrize(
    ("disk", "note"),
    [
        (PLENTY, ""),
        (changed(free=0, total=0), ""),
        (changed(free=MiB), "give `--out` a directory with more"),
        (changed(memory=True), "what is written there is memory. hint: give `--out` a directory on a disk"),
        (changed(memory=True, names=("temp",)), "hint: let `TMPDIR` name a directory on a disk"),
    ],
)
def test_a_disk_that_is_small_or_memory_is_worth_a_note(disk: Disk, note: str):
    told = on_disk(disk)

    assert bool(told.note) == bool(note)
    assert note in told.note


def test_a_kernel_without_psi_is_worth_a_note():
    def told(pressure: float | None) -> str:
        return on_pressure(Reading(bounds=(CONTAINER,), disks=(), pressure=pressure, oom_kills=0)).note

    assert told(0.0) == ""
    assert "psi=1" in told(None)


def test_the_version_of_control_groups_and_their_kills_are_told(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    assert on_group(Groups(tmp_path / "proc", tmp_path), 0).value == "none with a memory controller"

    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    told = on_group(Groups(tmp_path / "proc", tmp_path), 2).value

    assert told == f"`{tmp_path}`, control groups version 2, in which the kernel killed 2 for memory so far"


def test_it_says_how_many_attempts_would_begin_and_what_limits_them() -> None:
    def reading(memory: int, disk: int) -> Reading:
        place = Disk(path="/run", free=disk, total=100 * GiB, memory=False, names=("run",))
        bounds = (Bound("budget", memory, 0, "`--memory`"),)
        return Reading(bounds=bounds, disks=(place,), pressure=None, oom_kills=0)

    many = 1e6  # cores
    assert "limited by slots" in on_start(reading(1000 * GiB, 90 * GiB), many).value
    assert "limited by memory" in on_start(reading(1 * GiB, 90 * GiB), many).value
    assert "limited by disk" in on_start(reading(100 * GiB, 6 * GiB + 100 * MiB), many).value
    assert on_start(reading(1000 * GiB, 90 * GiB), 3.0).value.startswith("6 attempts")
    assert "limited by cpu" in on_start(reading(1000 * GiB, 90 * GiB), 3.0).value
    nothing = on_start(reading(20 * MiB, 90 * GiB), many)
    assert nothing.value.startswith("0 attempts") and "too little memory" in nothing.note
