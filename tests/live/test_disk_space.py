"""What a run's space is bound by, what it does about a commit without room, and what is said in `run.log`."""

from __future__ import annotations

import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.ledger_runs import new_run
from tests.wait_bounds import stretch

from holdwater.core.errors import HoldwaterError, LedgerFailed
from holdwater.core.failures import make_disk_failure, make_interrupt_failure
from holdwater.core.records import GiB, MiB, Verdict
from holdwater.governor.disks import DiskLevel
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.disk_reserve import PIECES
from holdwater.rollout.logs import RunLog
from holdwater.run.resources.disk_space import PAUSE, DiskControls, DiskSpace


class Watched:
    """A run that is watched, and what its space did to it."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.directory: RunDirectory = new_run(path)
        asked = msgspec.structs.replace(self.directory.read_config(), **config)
        places = {"run": self.directory.path, "scratch": self.directory.scratch}
        self.space = DiskSpace(asked, self.directory, places)
        self.held: set[str] = set()
        self.notes: list[str] = []
        self.stopped: list[HoldwaterError] = []
        self.levers = DiskControls(
            hold=self.held.add,
            release=self.held.discard,
            note=lambda kind, message: self.notes.append(kind),
            stop=self.stopped.append,
            running=lambda: 0,
        )

    def pieces(self) -> int:
        return len(list(self.directory.reserve.iterdir()))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "run", disk_patience=1000.0)


def hit(failure: Any) -> Verdict:
    return Verdict(attempt=1, token=1, failure=failure)


def test_the_reserve_is_there_while_the_run_runs(watched: Watched) -> None:
    with watched.space.watch_run(watched.levers):
        assert watched.pieces() == PIECES
    watched.space.close()

    assert watched.pieces() == 0


async def test_a_piece_taken_from_the_reserve_means_full_disk_and_is_renewed(watched: Watched) -> None:
    with watched.space.watch_run(watched.levers):
        assert watched.space.relieve(1)
        await watched.space.look()

        assert watched.space.level is DiskLevel.FULL
        assert watched.held == {"disk"}
        assert watched.notes == ["reserve.given", "disk.full"]
        await watched.space.look()
        await watched.space.look()
        assert watched.held == set()
        assert watched.notes == ["reserve.given", "disk.full", "disk.low", "disk.ample"]


async def test_an_attempt_that_was_hit_holds_admission_at_once(watched: Watched) -> None:
    with watched.space.watch_run(watched.levers):
        watched.space.on_settled(hit(make_interrupt_failure("a signal")))
        assert watched.held == set()

        watched.space.on_settled(hit(make_disk_failure()))

        assert (watched.held, watched.notes) == ({"disk"}, ["disk.low"])


async def test_attempts_that_are_hit_again_and_again_stop_the_run(tmp_path: Path) -> None:
    """Each time there is ample room, until they run."""
    watched = Watched(tmp_path / "run", disk_patience=0.02)
    with watched.space.watch_run(watched.levers):
        end = time.monotonic() + stretch(20.0)
        while not watched.stopped:
            assert time.monotonic() < end
            watched.space.on_settled(hit(make_disk_failure()))
            await watched.space.look()

    assert "the disk is full" in watched.stopped[0].message
    assert watched.stopped[0].exit_status == 4


def test_a_commit_waits_for_room_until_the_run_is_in_a_hurry(watched: Watched) -> None:
    with watched.space.watch_run(watched.levers):
        assert [watched.space.relieve(1) for _ in range(PIECES)] == [True] * PIECES
        assert watched.space.relieve(1)
        assert not watched.space.relieve(10_000), "there is ample room: this is another failure"

        threading.Timer(PAUSE / 10, watched.space.stop_waiting).start()
        began = time.monotonic()
        while watched.space.relieve(1):
            assert time.monotonic() < began + stretch(20.0)


def test_the_tightest_bound_is_the_budget_or_the_disk(tmp_path: Path) -> None:
    small = Watched(tmp_path / "small", disk=1 * MiB).space.bound()
    large = Watched(tmp_path / "large", disk=1 << 60).space.bound()

    assert (small.name, small.limit, small.room, small.source) == ("disk", 1 * MiB, 1 * MiB, "`--disk`")
    assert (large.name, large.source) == ("disk", f"`{tmp_path / 'large'}`")
    assert 0 < large.room < large.limit


async def test_a_reserve_is_a_small_part_of_a_small_budget(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", disk=1 * GiB)
    with watched.space.watch_run(watched.levers):
        sizes = [piece.stat().st_size for piece in watched.directory.reserve.iterdir()]

    assert 0 < sum(sizes) <= 1 * GiB // 100


def test_lines_that_found_no_room_are_written_later(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    log = RunLog(path, lambda line: None)
    sound = log._file
    with FileIO("/dev/full", "ab") as log._file:
        log.say("first\n")
    log._file = sound
    log.say("second\n")
    log.check()
    log.close()

    assert path.read_text() == "first\nsecond\n"


def test_lines_that_never_find_room_are_an_error(tmp_path: Path) -> None:
    log = RunLog(Path("/dev/full"), lambda line: None)
    log.say("first\n")

    with pytest.raises(LedgerFailed, match="No space left"):
        log.check()
    log.close()
