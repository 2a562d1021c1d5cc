"""The journals of workers that are gone go too: a run of days does not gather them."""

from __future__ import annotations

from pathlib import Path

import holdwater as hw
from holdwater.core.records import Verdict

SUITE = """
import os, signal
import holdwater as hw

def instances():
    for n in range(6):
        yield hw.Instance(id=f"i{n}")

def grade(instance, sandbox, answer):
    return True

async def solve(instance, sandbox, model):
    if instance.id == "i3":
        os.kill(os.getpid(), signal.SIGSEGV)

suite = hw.Suite(name="journals", instances=instances, grade=grade)
"""


def test_the_journal_of_a_lost_worker_is_removed_after_its_verdicts_commit(
    tmp_path: Path,
) -> None:
    (tmp_path / "command_runner.py").write_text(SUITE)
    exchanges = tmp_path / "run" / "exchanges"
    seen: list[set[str]] = []

    def look(verdict: Verdict) -> None:
        seen.append({path.name for path in exchanges.glob("worker-*.journal")})

    summary = hw.run(
        f"{tmp_path}/command_runner.py:suite",
        f"{tmp_path}/command_runner.py:solve",
        out=tmp_path / "run",
        observers=[look],
        workers=1,
        concurrency=1,
    )

    assert summary.outcomes == {"passed": 5, "worker": 1}
    assert "worker-1-1.journal" in seen[0]
    assert "worker-1-1.journal" not in seen[-1]
