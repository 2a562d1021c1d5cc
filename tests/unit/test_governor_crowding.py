"""How many attempts the CPU bears: what follows from what is measured, and how it is read."""

from __future__ import annotations

import os
from pathlib import Path

from holdwater.governor.cpu import (
    SETTLING_SECONDS,
    WINDOW_SECONDS,
    CpuLimit,
    CpuUse,
    count_cores,
    read_queued,
    read_stalled,
    read_used,
)


class Machine:
    """Two cores; each turn is a look after `SECONDS`."""

    def __init__(self, cores: float = 2.0) -> None:
        self.limit = CpuLimit(cores)
        self._use = CpuUse(at=0.0, used=0.0, stalled=0.0)
        self.limit.update(self._use, 0, waiting=False)

    def turn(self, busy: float, stalled: float, times: int = 1, running: int | None = None) -> int:
        """The run uses `busy` cores, and in that part of the time some task waits."""
        for _ in range(times):
            use = self._use
            self._use = CpuUse(
                at=use.at + WINDOW_SECONDS,
                used=use.used + busy * WINDOW_SECONDS,
                stalled=use.stalled + stalled * WINDOW_SECONDS,
            )
            self.limit.update(self._use, self.limit.most if running is None else running, waiting=True)
        return self.limit.most


def test_with_cpu_to_spare_the_limit_grows_quickly() -> None:
    machine = Machine()

    assert [machine.turn(0.2, 0.1) for _ in range(6)] == [6, 9, 13, 19, 28, 42]


def test_attempts_that_crowd_the_cpu_become_fewer_down_to_the_cores() -> None:
    machine = Machine()
    machine.turn(0.2, 0.1, times=4)

    assert machine.turn(1.9, 1.0) == 14
    assert machine.turn(1.9, 1.0, times=200) == 2


def test_attempts_above_the_limit_have_to_end_before_it_is_lowered_again() -> None:
    machine = Machine()
    first = machine.turn(1.9, 1.0, running=4)

    assert machine.turn(1.9, 1.0, times=int(SETTLING_SECONDS), running=4) == first == 3


def test_after_a_crowd_the_limit_grows_slowly() -> None:
    machine = Machine()
    machine.turn(0.2, 0.1, times=3)
    lower = machine.turn(1.9, 1.0)

    assert machine.turn(0.5, 0.2) == lower + lower // 8


def test_load_by_others_does_not_count_against_a_quiet_run() -> None:
    machine = Machine()

    assert machine.turn(0.1, 1.0, times=3) == 13


def test_a_used_up_quota_counts_as_crowding_without_any_stall() -> None:
    machine = Machine(0.5)

    assert machine.turn(0.5, 0.0) == 3


def test_an_empty_queue_does_not_raise_the_limit() -> None:
    limit = CpuLimit(2.0)
    limit.update(CpuUse(at=0.0, used=0.0, stalled=0.0), 1, waiting=False)

    assert not limit.update(CpuUse(at=WINDOW_SECONDS, used=0.0, stalled=0.0), 1, waiting=False)


def test_pressure_is_read_from_the_own_group_or_the_machine(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/pressure/cpu").write_text("some avg10=1.00 avg60=0 avg300=0 total=2500000\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (tmp_path / "cgroup/box").mkdir(parents=True)
    roots = tmp_path / "proc", tmp_path / "cgroup"

    assert read_stalled(*roots) == 2.5
    (tmp_path / "cgroup/box/cpu.pressure").write_text("some avg10=0 avg60=0 avg300=0 total=1000000\n")
    assert read_stalled(*roots) == 1.0
    (tmp_path / "cgroup/box/cpu.max").write_text("50000 100000\n")
    assert count_cores(*roots) == 0.5


def test_run_queues_are_read_where_pressure_is_not_available(tmp_path: Path) -> None:
    rows = (
        "version 15\ncpu0 0 0 0 0 0 0 3000000000 1000000000 9\ncpu1 0 0 0 0 0 0 1000000000 0 9\ndomain0 3\n"
    )
    (tmp_path / "schedstat").write_text(rows)

    assert read_stalled(tmp_path, tmp_path) is None
    assert read_queued(tmp_path) == (4.0, 1.0)
    assert read_queued(tmp_path / "nowhere") is None


def test_what_processes_use_is_counted() -> None:
    assert read_used([os.getpid()]) > 0.0
    assert read_used([2**22 + 1]) == 0.0
