"""The reserve on a real disk: real bytes, given back piece by piece by any process, never too much of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.ledger_runs import new_run

from holdwater.core.records import GiB, MiB
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.disk_reserve import LARGEST_RESERVE, NO_PIECE, PIECES, DiskReserve


def on_disk(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.iterdir())


@pytest.mark.parametrize("free", [100 * GiB, 1 * GiB, 64 * MiB, 16 * MiB])
def test_it_is_real_bytes_and_a_hundredth_at_most(tmp_path: Path, free: int) -> None:
    reserve = DiskReserve(tmp_path / "reserve")

    assert reserve.make_pieces(free) == PIECES
    assert 0 < reserve.bytes <= min(LARGEST_RESERVE, free // 100)
    assert on_disk(tmp_path / "reserve") >= reserve.bytes


def test_a_disk_without_room_to_spare_has_none(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve")

    assert reserve.make_pieces(1 * MiB) == 0
    assert not reserve.release_piece()
    assert reserve.oldest_piece == NO_PIECE


def test_pieces_are_given_once_each_and_some_are_kept(tmp_path: Path) -> None:
    reserve, other = DiskReserve(tmp_path / "reserve"), DiskReserve(tmp_path / "reserve")
    reserve.make_pieces(1 * GiB)

    half = [other.release_piece(keep=PIECES // 2) for _ in range(PIECES)]
    rest = [reserve.release_piece() for _ in range(PIECES)]

    assert sum(half) == sum(rest) == PIECES // 2
    assert reserve.pieces == on_disk(tmp_path / "reserve") == 0


def test_a_reserve_shows_that_a_piece_was_given_even_after_its_renewal(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve")
    reserve.make_pieces(1 * GiB)
    before = reserve.oldest_piece
    reserve.make_pieces(1 * GiB)
    assert reserve.oldest_piece == before

    DiskReserve(tmp_path / "reserve").remove()
    assert reserve.oldest_piece > before
    reserve.make_pieces(1 * GiB)

    assert before < reserve.oldest_piece < NO_PIECE
    assert reserve.pieces == PIECES


def test_what_a_killed_conductor_left_is_taken_over(tmp_path: Path) -> None:
    DiskReserve(tmp_path / "reserve").make_pieces(1 * GiB)
    reserve = DiskReserve(tmp_path / "reserve")
    reserve.release_piece()

    assert reserve.make_pieces(1 * GiB) == 1
    reserve.remove()
    assert list((tmp_path / "reserve").iterdir()) == []


def test_where_nothing_can_be_allocated_it_is_written(tmp_path: Path) -> None:
    """A process whose `posix_fallocate` fails, as on some file systems and with some libcs."""
    script = (
        "import os, sys\n"
        "def refuse(*given): raise OSError(95, 'not supported')\n"
        "os.posix_fallocate = refuse\n"
        "from pathlib import Path\n"
        "from holdwater.ledger.disk_reserve import DiskReserve\n"
        "print(DiskReserve(Path(sys.argv[1])).make_pieces(1 << 30))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "reserve")], capture_output=True, text=True, check=True
    )

    assert told.stdout.strip() == str(PIECES)
    assert on_disk(tmp_path / "reserve") >= DiskReserve(tmp_path / "reserve").bytes > 9 * MiB


def test_a_run_directory_of_an_earlier_version_gets_one(tmp_path: Path) -> None:
    directory = new_run(tmp_path / "run")
    directory.reserve.rmdir()

    reserve = DiskReserve(RunDirectory.open(directory.path).reserve)

    assert reserve.oldest_piece == NO_PIECE
    assert reserve.make_pieces(1 * GiB) == PIECES
