"""A memory budget that holds, in a real control group, with sandboxes and workers that want more than it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks import group as groups
from benchmarks.group import GREEDY
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.records import MiB
from holdwater.ledger.reader import LedgerReader

SIZES = [("few", 20), pytest.param("many", 150, marks=pytest.mark.proof)]
AT_ONCE = ("--concurrency", "30")
FETCHED, FETCHING = 260, 3.0  # MiB and seconds, as in the suite


@contextmanager
def memory_group(limit: int) -> Iterator[groups.Group]:
    """A real memory group; a visible skip where none can be made, except in CI."""
    try:
        with groups.memory_group(limit) as group:
            yield group
    except groups.NoGroup as error:
        assert os.environ.get("CI") != "true", error
        pytest.skip(f"no control group can be made here: {error}")


@pytest.mark.parametrize(("suite", "count"), SIZES)
@pytest.mark.parametrize("agent", ["in_sandbox", "in_worker", "in_thread"])
def test_what_runs_at_once_fits_into_the_group(tmp_path: Path, agent: str, suite: str, count: int) -> None:
    with memory_group(512 * MiB) as group:
        played = group.run(tmp_path / "run", f"{GREEDY}:{suite}", "--agent", f"{GREEDY}:{agent}", *AT_ONCE)

        assert played.status == 0
        assert played.summary["outcomes"] == {"passed": count}
        assert group.kills() == 0
    assert hw.audit(tmp_path / "run").ok


@pytest.mark.parametrize("suite", ["lasting", pytest.param("many", marks=pytest.mark.proof)])
def test_without_the_governor_the_same_run_is_killed(tmp_path: Path, suite: str) -> None:
    """Given attempts that need no more, but keep it: on a slow machine they are there at once too."""
    with memory_group(512 * MiB) as group:
        words = (f"{GREEDY}:{suite}", "--agent", f"{GREEDY}:in_sandbox", *AT_ONCE, "--ungoverned")
        group.run(tmp_path / "run", *words, seconds=stretch(120), during=lambda: group.kills() > 0)

        assert group.kills() > 0


LEAKS = ("leak_references", "leak_cycles", "leak_heap")


@pytest.mark.parametrize("leak", LEAKS[:2])  # all of them below
def test_workers_that_leak_are_replaced_and_nothing_is_lost(tmp_path: Path, leak: str) -> None:
    leaking(tmp_path, leak, "leaking_30", 30)


@pytest.mark.proof
def test_leaks_cost_little_of_the_rate(tmp_path: Path) -> None:
    without = leaking(tmp_path, "leak_nothing", "leaking_500", 500)
    for leak in LEAKS:
        assert leaking(tmp_path, leak, "leaking_500", 500) < without / 0.8


def leaking(place: Path, leak: str, suite: str, count: int) -> float:
    """The seconds that it took, with nothing lost."""
    with memory_group(400 * MiB) as group:
        words = ("--agent", f"{GREEDY}:{leak}", "--concurrency", "4")
        played = group.run(place / leak, f"{GREEDY}:{suite}", *words)

        assert played.status == 0
        assert played.summary["outcomes"] == {"passed": count}
        assert group.kills() == 0
    assert hw.audit(place / leak).ok
    retired = played.summary["events"].get("worker.retired", 0)
    assert bool(retired) == (leak in ("leak_references", "leak_heap")), (
        "cycles are collected, the rest is not"
    )
    return float(played.summary["seconds"])


NEEDY = [("needy_4", 4), pytest.param("needy_30", 30, marks=pytest.mark.proof)]


@pytest.mark.parametrize(("suite", "count"), NEEDY)
def test_one_that_needs_more_is_killed_alone_and_passes_with_more(
    tmp_path: Path, suite: str, count: int
) -> None:
    with memory_group(1024 * MiB) as group:
        agent = ("--agent", f"{GREEDY}:in_sandbox")
        played = group.run(tmp_path / "run", f"{GREEDY}:{suite}", *agent, *AT_ONCE)

        assert played.status == 0
        assert played.summary["outcomes"] == {"passed": count}
        assert played.summary["verdicts"] == {
            "resource": 2 * count,
            "passed": count,
        }  # 128, 256, 512 MiB
        assert group.kills() == 0
        assert played.highest < 1024 * MiB


def test_a_stream_of_small_ones_does_not_keep_a_large_one_out(tmp_path: Path) -> None:
    with memory_group(512 * MiB) as group:
        agent = ("--agent", f"{GREEDY}:in_sandbox")
        played = group.run(tmp_path / "run", f"{GREEDY}:mixed", *agent, "--concurrency", "10")

        assert played.summary["outcomes"] == {"passed": 40}
    with LedgerReader(tmp_path / "run") as reader:
        ended = sorted(reader.attempts(), key=lambda row: row.settled or 0)
        order = [row.instance for row in ended]
    assert order.index("large") < 20


def test_an_attempt_that_can_never_fit_fails_with_the_available_memory(tmp_path: Path) -> None:
    with memory_group(256 * MiB) as group:
        agent = ("--agent", f"{GREEDY}:in_sandbox")
        words = ("--only", "large", "--only", "small-00")
        played = group.run(tmp_path / "run", f"{GREEDY}:mixed", *agent, *words)

        assert played.status == 1
        assert played.summary["outcomes"] == {"passed": 1, "budget": 1}
    with LedgerReader(tmp_path / "run") as reader:
        told = {row.instance: row.failure for row in reader.outcomes()}["large"]
    assert re.fullmatch(r"needs 2\d\d MiB of memory; at most \d+ MiB are available", told)


def test_a_limit_that_is_lowered_in_mid_run_is_followed(tmp_path: Path) -> None:
    with memory_group(700 * MiB) as group:
        lowered = []

        def lower() -> None:
            if not lowered and group.used > 250 * MiB:
                lowered.append(True)
                group.set(420 * MiB)

        agent = ("--agent", f"{GREEDY}:in_sandbox")
        played = group.run(tmp_path / "run", f"{GREEDY}:few", *agent, *AT_ONCE, during=lower)

        assert played.summary["outcomes"] == {"passed": 20}
        assert group.kills() == 0
    with LedgerReader(tmp_path / "run") as reader:
        limits = [gauge.memory_limit // MiB for gauge in reader.gauges()]
    assert 650 < max(limits) <= 700 and 380 < limits[-1] <= 420


def test_pressure_during_set_up_delays_admission_and_is_in_the_timeline(tmp_path: Path) -> None:
    """The suite fetches something in a process that takes most of the memory there is, and then ends."""
    with memory_group(400 * MiB) as group:
        played = group.run(tmp_path / "run", f"{GREEDY}:fetching", "--agent", f"{GREEDY}:in_sandbox")

        assert played.summary["outcomes"] == {"passed": 4}
        assert group.kills() == 0
    with LedgerReader(tmp_path / "run") as reader:
        first = min(row.started for row in reader.attempts())
        begun = reader.summary().started
        gauges = list(reader.gauges())
    assert first - begun > FETCHING
    held = [gauge for gauge in gauges if gauge.at < first and gauge.binds == "memory"]
    assert held and max(gauge.memory for gauge in held) > FETCHED * MiB
