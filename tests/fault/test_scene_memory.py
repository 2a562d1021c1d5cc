"""A memory budget that holds, in a real control group, with sandboxes and workers that want more than it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.memory_scene import GREEDY, memory_group

import holdwater as hw
from holdwater.core.records import MiB

SIZES = [("few", 30), pytest.param("many", 150, marks=[pytest.mark.proof, pytest.mark.timeout(900)])]
AT_ONCE = ("--concurrency", "30")


@pytest.mark.parametrize(("suite", "count"), SIZES)
@pytest.mark.parametrize("agent", ["in_sandbox", "in_worker", "in_thread"])
def test_what_runs_at_once_fits_into_the_group(tmp_path: Path, agent: str, suite: str, count: int) -> None:
    with memory_group(512 * MiB) as group:
        played = group.run(tmp_path / "run", f"{GREEDY}:{suite}", "--agent", f"{GREEDY}:{agent}", *AT_ONCE)

        assert played.status == 0
        assert played.summary["outcomes"] == {"passed": count}
        assert group.kills() == 0
    assert hw.audit(tmp_path / "run").ok


@pytest.mark.parametrize(("suite", "count"), SIZES)
def test_without_the_governor_the_same_run_is_killed(tmp_path: Path, suite: str, count: int) -> None:
    with memory_group(512 * MiB) as group:
        agent = ("--agent", f"{GREEDY}:in_sandbox")
        group.run(tmp_path / "run", f"{GREEDY}:{suite}", *agent, *AT_ONCE, "--ungoverned", seconds=120)

        assert group.kills() > 0
