"""The memory of a sandbox over time: maxima of steps, bounded, from a real run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.records import MemorySeries
from holdwater.rollout.attempt_state import MOST_VALUES, MemoryRecorder


@given(st.lists(st.tuples(st.floats(0, 3000), st.integers(0, 1 << 20)), min_size=1, max_size=400))
def test_a_series_is_bounded_and_keeps_the_highest_reading(readings: list[tuple[float, int]]) -> None:
    recorder = MemoryRecorder()
    for seconds, kib in sorted(readings):
        recorder.add(seconds, kib << 10)

    series = recorder.build()

    last = max(seconds for seconds, _ in readings)
    if series is None:
        assert last < 1.0
        return
    assert 2 <= len(series.kib) <= MOST_VALUES
    assert max(series.kib) == max(kib for _, kib in readings)
    assert (len(series.kib) - 1) * series.step <= last < len(series.kib) * series.step


def test_steps_without_a_reading_repeat_the_last_one() -> None:
    recorder = MemoryRecorder()
    for seconds, memory in ((0.2, 4096), (0.9, 8192), (3.5, 2048)):
        recorder.add(seconds, memory)

    assert recorder.build() == MemorySeries(step=1.0, kib=(8, 8, 8, 2))
