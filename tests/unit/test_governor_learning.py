"""What is learned from peaks, and the steps of reclaiming."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.records import GiB, MiB
from holdwater.governor.leases import KEPT_PEAKS, TRUSTED_PEAKS, PeakHistory, sandbox_memory, worker_memory
from holdwater.governor.memory_control import (
    HASTY_READINGS,
    STEP_READINGS,
    ReclaimAction,
    ReclaimSteps,
)


def test_before_anything_is_known_the_prior_counts_and_its_word_fades():
    peaks = PeakHistory(prior=800, least=1, quantile=0.5)
    needs = [peaks.need]
    for _ in range(TRUSTED_PEAKS):
        peaks.add(10)
        needs.append(peaks.need)

    assert needs[0] == 800 and needs[-1] == 11
    assert needs == sorted(needs, reverse=True)


def test_a_quantile_of_what_was_seen_counts_with_a_margin():
    peaks = PeakHistory(prior=0, least=0, quantile=0.65)
    for peak in range(0, 1000, 10):
        peaks.add(peak)

    assert peaks.need == int(650 * 1.1)


def test_only_the_latest_count():
    peaks = PeakHistory(prior=0, least=0, quantile=1.0)
    peaks.add(10_000)
    for _ in range(KEPT_PEAKS):
        peaks.add(100)

    assert peaks.need == 110


def test_of_what_neighbours_share_nearly_all_that_was_seen_counts():
    sandboxes, workers = sandbox_memory(GiB), worker_memory()
    for mib in itertools.chain([200, 200, 200], itertools.repeat(20, 30)):
        sandboxes.add(mib * MiB)
        workers.add(mib * MiB)

    assert sandboxes.need == 22 * MiB
    assert workers.need == 220 * MiB


def test_one_whose_lease_was_too_small_begins_with_the_prior_at_least():
    sandboxes = sandbox_memory(GiB)
    for _ in range(TRUSTED_PEAKS):
        sandboxes.add(0)

    assert sandboxes.need == 2 * MiB and sandboxes.retry_need == 64 * MiB


@given(st.lists(st.integers(0, 1 << 40)))
def test_a_need_is_never_less_than_the_least(peaks):
    learned = PeakHistory(prior=5, least=3, quantile=0.65)
    for peak in peaks:
        learned.add(peak)

    assert learned.need >= 3


def steps(shares: list[float]) -> list[ReclaimAction | None]:
    reclaim = ReclaimSteps()
    return [reclaim.next(int(share * 1000), 1000) for share in shares]


def test_steps_follow_each_other_with_time_to_work():
    taken = steps([0.95] * (2 * STEP_READINGS + 1))

    assert taken[0] is ReclaimAction.TRIM
    assert taken[STEP_READINGS] is ReclaimAction.RECYCLE
    assert taken[2 * STEP_READINGS] is ReclaimAction.PREEMPT
    assert sum(step is not None for step in taken) == 3


def test_when_it_is_critical_they_follow_fast():
    taken = steps([0.98] * (2 * HASTY_READINGS + 1))

    assert [step for step in taken if step] == [
        ReclaimAction.TRIM,
        ReclaimAction.RECYCLE,
        ReclaimAction.PREEMPT,
    ]


def test_use_that_varies_around_the_mark_does_not_make_it_flap():
    reclaim = ReclaimSteps()
    held = []
    for share in (0.93, 0.95, 0.93, 0.91, 0.93, 0.89, 0.93, 0.91):
        reclaim.next(int(share * 1000), 1000)
        held.append(reclaim.holding)

    assert held == [False, True, True, True, True, False, False, False]


def test_after_relief_it_begins_with_the_mildest_step_again():
    assert [s for s in steps([0.98] * 20 + [0.5, 0.95]) if s][-1] is ReclaimAction.TRIM


@pytest.mark.parametrize("limit", [0, 1])
def test_a_limit_of_nothing_is_no_division_by_zero(limit):
    assert ReclaimSteps().next(1, limit) is ReclaimAction.TRIM


def test_a_declared_need_of_the_agent_is_the_first_estimate() -> None:
    sandboxes, workers = sandbox_memory(GiB, 300 * MiB), worker_memory(24 * MiB)

    assert (sandboxes.need, workers.need) == (300 * MiB, 24 * MiB)
    for _ in range(TRUSTED_PEAKS):
        sandboxes.add(40 * MiB)

    assert sandboxes.need == int(40 * MiB * 1.1)
    assert sandboxes.retry_need == 300 * MiB
