"""The journals of workers that are gone go too: a run of days does not gather them."""

from __future__ import annotations

from pathlib import Path

from tests.serve_scene import SUITE

import holdwater as hw
from holdwater.core.records import Verdict


def test_the_journal_of_a_worker_that_was_replaced_is_removed_when_its_verdicts_are_committed(
    tmp_path: Path,
) -> None:
    (tmp_path / "scene.py").write_text(SUITE)
    exchanges = tmp_path / "run" / "exchanges"
    seen: list[int] = []

    def look(verdict: Verdict) -> None:
        seen.append(len(list(exchanges.glob("worker-*.journal"))))

    summary = hw.run(
        f"{tmp_path}/scene.py:suite",
        "nop",
        out=tmp_path / "run",
        observers=[look],
        workers=1,
        concurrency=1,
        recycle_after=1,
    )

    assert (summary.settled, len(seen)) == (8, 8)
    assert max(seen) <= 4  # the worker that is there, its successor, and what is just going
