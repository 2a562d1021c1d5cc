"""How many workers a server wants: more at once, fewer one by one, never beyond its bounds, never swaying."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.records import MiB
from holdwater.core.worker_scaling import (
    LONGEST_PAUSE,
    StartBackoff,
    WorkerDemand,
    WorkerScaling,
    decide_workers,
)

COST = 100 * MiB
PLENTY = 1000 * COST


def demand(**given: Any) -> WorkerDemand:
    standard = {"running": 0, "waiting": 0, "workers": 1, "share": 8, "room": PLENTY, "cost": COST, "most": 4}
    return WorkerDemand(**{**standard, **given})


def test_what_does_not_fit_gets_workers_at_once() -> None:
    assert decide_workers(demand(running=8)) == 1
    assert decide_workers(demand(running=8, waiting=1)) == 2
    assert decide_workers(demand(running=8, waiting=17)) == 4
    assert decide_workers(demand(running=8, waiting=1000)) == 4, "never more than the run has"


def test_memory_says_how_many_more() -> None:
    full = {"running": 8, "waiting": 100}
    assert decide_workers(demand(**full, room=COST - 1)) == 1
    assert decide_workers(demand(**full, room=2 * COST)) == 3
    assert decide_workers(demand(**full, room=-PLENTY)) == 1


def test_an_idle_worker_is_removed_unless_the_others_would_be_nearly_full() -> None:
    assert decide_workers(demand(workers=4, running=8, idle=29.9)) == 4
    assert decide_workers(demand(workers=4, running=8, idle=30.0)) == 3
    assert decide_workers(demand(workers=2, running=7, idle=1e6)) == 2, "7 of 8 places are too near"
    assert decide_workers(demand(workers=2, least=2, idle=1e6)) == 2


counts = st.integers(0, 200)
demands = st.builds(
    WorkerDemand,
    running=counts,
    waiting=counts,
    workers=st.integers(0, 20),
    share=st.integers(1, 64),
    room=st.integers(-PLENTY, PLENTY),
    cost=st.integers(1, COST),
    idle=st.floats(0, 100),
    least=st.integers(1, 3),
    most=st.integers(3, 12),
)


@given(demands)
def test_it_stays_within_its_bounds_and_moves_only_with_a_reason(asked: WorkerDemand) -> None:
    now = decide_workers(asked)
    assert asked.least <= now <= asked.most
    before = min(asked.most, max(asked.least, asked.workers))
    if now > before:
        assert asked.needed > asked.workers and asked.room >= (now - asked.workers) * asked.cost
    if now < before:
        assert now == before - 1 and asked.spare and asked.idle >= asked.patience


@given(st.lists(st.tuples(counts, st.floats(0.1, 10)), max_size=200))
def test_however_the_load_sways_one_goes_at_most_each_quiet_while(looks: list[tuple[int, float]]) -> None:
    scaling = WorkerScaling(1, 8, 8, 30.0)
    at, changed = 0.0, 0.0
    for load, seconds in looks:
        at += seconds
        before = scaling.wanted
        now = scaling.update(at, load, 0, PLENTY, COST)
        assert now * 8 >= min(load, 64), "everything has a place, up to the bound"
        if now < before:
            assert before - now == 1 and at - changed >= 30.0
        if now != before:
            changed = at


def test_a_load_that_comes_and_goes_within_the_while_changes_nothing() -> None:
    scaling = WorkerScaling(1, 8, 8, 30.0)
    seen = [scaling.update(float(at), 64 if at % 20 < 2 else 0, 0, PLENTY, COST) for at in range(1000)]
    assert set(seen) == {8}


def test_when_none_is_needed_they_go_down_to_the_least() -> None:
    scaling = WorkerScaling(2, 8, 8, 30.0)
    scaling.update(0.0, 64, 0, PLENTY, COST)
    seen = [scaling.update(float(at), 0, 0, PLENTY, COST) for at in range(1, 300)]
    assert seen[28] == 8 and seen[-1] == 2
    assert sorted(seen, reverse=True) == seen


def test_the_pause_after_failed_starts_doubles_to_a_bound_until_one_succeeds() -> None:
    births = StartBackoff(patient=True)
    births.succeed()
    pauses, at = [], 100.0
    for _ in range(8):
        births.fail(at, "no licence")
        due = next(second for second in range(100) if births.due(at + second))
        pauses.append(due)
        at += due
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert births.unfit == "no licence" and not births.hopeless(3)
    births.succeed()
    assert births.unfit == "" and births.due(at)


def test_who_never_had_a_worker_gives_up_and_does_not_pause() -> None:
    births = StartBackoff(patient=True)
    for _ in range(3):
        assert not births.hopeless(3) and births.due(0.0)
        births.fail(0.0, "no licence")
    assert births.hopeless(3)
