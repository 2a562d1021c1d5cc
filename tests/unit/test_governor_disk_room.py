"""The levels of a disk: where each begins, where it ends again, and that they do not flap."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdwater.core.records import GiB, MiB
from holdwater.governor.disks import (
    CALM_READINGS,
    DEEPEST_LEVEL,
    FULL_BELOW,
    LONGEST_CALM,
    DiskLevel,
    DiskLevels,
    make_budget_room,
    make_disk_room,
    measure_usage,
)
from holdwater.governor.resource_reading import DiskReading

TOTAL = 100 * GiB
LOW = 128 * MiB


def disk(free: int, total: int = TOTAL) -> DiskReading:
    return DiskReading(path="/runs", free=free, total=total, memory=False, names=("run",))


def read(levels: DiskLevels, *free: int, total: int = TOTAL) -> list[DiskLevel]:
    """What a row of readings makes of the levels."""
    return [levels.next([make_disk_room(disk(bytes_, total))]) for bytes_ in free]


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [
        (TOTAL, LOW, DiskLevel.AMPLE),
        (TOTAL, LOW - 1, DiskLevel.LOW),
        (TOTAL, FULL_BELOW, DiskLevel.LOW),
        (TOTAL, FULL_BELOW - 1, DiskLevel.FULL),
        (1 * GiB, 1 * GiB // 50, DiskLevel.AMPLE),
        (1 * GiB, 1 * GiB // 50 - 1, DiskLevel.LOW),
        (16 * MiB, 2 * FULL_BELOW, DiskLevel.AMPLE),  # a small disk can be used, too
        (16 * MiB, 2 * FULL_BELOW - 1, DiskLevel.LOW),
    ],
)
def test_where_a_level_begins(total: int, free: int, level: DiskLevel) -> None:
    assert read(DiskLevels(), free, total=total) == [level]


def test_a_level_ends_well_above_where_it_began() -> None:
    levels = DiskLevels()

    assert read(levels, FULL_BELOW - 1, FULL_BELOW, int(1.5 * FULL_BELOW)) == [
        DiskLevel.FULL,
        DiskLevel.FULL,
        DiskLevel.LOW,
    ]
    assert read(levels, LOW, int(1.5 * LOW) - 1) == [DiskLevel.LOW] * 2
    assert read(levels, *[int(1.5 * LOW)] * CALM_READINGS) == [DiskLevel.LOW] * (CALM_READINGS - 1) + [
        DiskLevel.AMPLE
    ]
    assert read(levels, LOW) == [DiskLevel.AMPLE]


def test_room_that_comes_and_goes_is_not_ample() -> None:
    assert read(DiskLevels(), *[LOW - 1, 2 * LOW] * 20) == [DiskLevel.LOW] * 40


def test_the_worst_disk_counts() -> None:
    rooms = [
        make_disk_room(disk(2 * LOW)),
        make_disk_room(disk(FULL_BELOW - 1)),
        make_disk_room(disk(LOW - 1)),
    ]

    assert DiskLevels().next(rooms) is DiskLevel.FULL


def test_a_reserve_that_was_needed_is_a_full_disk() -> None:
    levels = DiskLevels()

    assert levels.next([make_disk_room(disk(2 * FULL_BELOW))], given=True) is DiskLevel.FULL
    assert read(levels, 2 * FULL_BELOW) == [DiskLevel.LOW]


def test_a_budget_is_low_near_its_end_and_never_full() -> None:
    budget = 1 * GiB
    near = budget - budget // 50

    assert [
        DiskLevels().next([make_budget_room(budget, used)])
        for used in (0, near, near + 1, budget, 2 * budget)
    ] == [
        DiskLevel.AMPLE,
        DiskLevel.AMPLE,
        DiskLevel.LOW,
        DiskLevel.LOW,
        DiskLevel.LOW,
    ]


def pauses(levels: DiskLevels, times: int) -> list[int]:
    """How many readings with ample room it takes after each hit until it counts as ample."""
    found = []
    for _ in range(times):
        levels.record_shortage()
        assert levels.level is DiskLevel.LOW
        found.append(next(n for n in range(1, 1000) if read(levels, TOTAL) == [DiskLevel.AMPLE]))
    return found


def test_who_is_hit_again_and_again_waits_longer_until_something_ends_well() -> None:
    levels = DiskLevels()

    assert pauses(levels, 6) == [4, 8, 16, 32, LONGEST_CALM, LONGEST_CALM]
    levels.record_success()
    assert pauses(levels, 1) == [4]


def test_the_calm_is_no_longer_than_the_patience_allows() -> None:
    assert pauses(DiskLevels(longest_calm=5), 3) == [4, 5, 5]
    assert pauses(DiskLevels(longest_calm=0.5), 3) == [CALM_READINGS, CALM_READINGS, CALM_READINGS]


def test_usage_is_the_blocks_below_a_directory(tmp_path: Path) -> None:
    before = measure_usage(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(os.urandom(100_000))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 * GiB)
    (tmp_path / "link").symlink_to("/usr")

    assert 100_000 <= measure_usage(tmp_path) - before < 1 * MiB
    assert measure_usage(tmp_path / "missing") == 0


def test_a_tree_without_end_is_looked_into_only_so_far(tmp_path: Path) -> None:
    place = tmp_path.joinpath(*["d"] * (DEEPEST_LEVEL + 50))
    place.mkdir(parents=True)
    before = measure_usage(tmp_path)
    (place / "file").write_bytes(b"x" * 100_000)

    assert measure_usage(tmp_path) == before > 0
