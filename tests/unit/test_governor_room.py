"""The levels of a disk: where each begins, where it ends again, and that they do not flap."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdwater.core.records import GiB, MiB
from holdwater.governor.disks import DEEPEST, FULL, used
from holdwater.governor.reading import Disk
from holdwater.governor.room import CALM, LONGEST_CALM, Level, Levels, room_in, room_of

TOTAL = 100 * GiB
LOW = 128 * MiB


def disk(free: int, total: int = TOTAL) -> Disk:
    return Disk(path="/runs", free=free, total=total, memory=False, names=("run",))


def read(levels: Levels, *free: int, total: int = TOTAL) -> list[Level]:
    """What a row of readings makes of the levels."""
    return [levels.next([room_of(disk(bytes_, total))]) for bytes_ in free]


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [
        (TOTAL, LOW, Level.AMPLE),
        (TOTAL, LOW - 1, Level.LOW),
        (TOTAL, FULL, Level.LOW),
        (TOTAL, FULL - 1, Level.FULL),
        (1 * GiB, 1 * GiB // 50, Level.AMPLE),
        (1 * GiB, 1 * GiB // 50 - 1, Level.LOW),
        (16 * MiB, 2 * FULL, Level.AMPLE),  # a small disk can be used, too
        (16 * MiB, 2 * FULL - 1, Level.LOW),
    ],
)
def test_where_a_level_begins(total: int, free: int, level: Level) -> None:
    assert read(Levels(), free, total=total) == [level]


def test_a_level_ends_well_above_where_it_began() -> None:
    levels = Levels()

    assert read(levels, FULL - 1, FULL, int(1.5 * FULL)) == [Level.FULL, Level.FULL, Level.LOW]
    assert read(levels, LOW, int(1.5 * LOW) - 1) == [Level.LOW] * 2
    assert read(levels, *[int(1.5 * LOW)] * CALM) == [Level.LOW] * (CALM - 1) + [Level.AMPLE]
    assert read(levels, LOW) == [Level.AMPLE]


def test_room_that_comes_and_goes_is_not_ample() -> None:
    assert read(Levels(), *[LOW - 1, 2 * LOW] * 20) == [Level.LOW] * 40


def test_the_worst_disk_counts() -> None:
    rooms = [room_of(disk(2 * LOW)), room_of(disk(FULL - 1)), room_of(disk(LOW - 1))]

    assert Levels().next(rooms) is Level.FULL


def test_a_reserve_that_was_needed_is_a_full_disk() -> None:
    levels = Levels()

    assert levels.next([room_of(disk(2 * FULL))], given=True) is Level.FULL
    assert read(levels, 2 * FULL) == [Level.LOW]


def test_a_budget_is_low_near_its_end_and_never_full() -> None:
    budget = 1 * GiB
    near = budget - budget // 50

    assert [Levels().next([room_in(budget, used)]) for used in (0, near, near + 1, budget, 2 * budget)] == [
        Level.AMPLE,
        Level.AMPLE,
        Level.LOW,
        Level.LOW,
        Level.LOW,
    ]


def pauses(levels: Levels, times: int) -> list[int]:
    """How many readings with ample room it takes after each hit until it counts as ample."""
    found = []
    for _ in range(times):
        levels.hurt()
        assert levels.level is Level.LOW
        found.append(next(n for n in range(1, 1000) if read(levels, TOTAL) == [Level.AMPLE]))
    return found


def test_who_is_hit_again_and_again_waits_longer_until_something_ends_well() -> None:
    levels = Levels()

    assert pauses(levels, 6) == [4, 8, 16, 32, LONGEST_CALM, LONGEST_CALM]
    levels.recovered()
    assert pauses(levels, 1) == [4]


def test_the_calm_is_no_longer_than_the_patience_allows() -> None:
    assert pauses(Levels(longest_calm=5), 3) == [4, 5, 5]
    assert pauses(Levels(longest_calm=0.5), 3) == [CALM, CALM, CALM]


def test_what_is_used_is_blocks_below_a_directory(tmp_path: Path) -> None:
    before = used(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(os.urandom(100_000))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 * GiB)
    (tmp_path / "link").symlink_to("/usr")

    assert 100_000 <= used(tmp_path) - before < 1 * MiB
    assert used(tmp_path / "missing") == 0


def test_a_tree_without_end_is_looked_into_only_so_far(tmp_path: Path) -> None:
    place = tmp_path.joinpath(*["d"] * (DEEPEST + 50))
    place.mkdir(parents=True)
    before = used(tmp_path)
    (place / "file").write_bytes(b"x" * 100_000)

    assert used(tmp_path) == before > 0
