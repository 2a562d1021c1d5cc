"""A taskset of verifiers in a container: its image, its user, and files that the agent left anywhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.command_runner import SOURCE
from tests.container_runs import Ground
from tests.verifiers_commands import copy_taskset, find_interpreter
from tests.wait_bounds import stretch

from holdwater.ledger.reader import LedgerReader

COMMAND = "sh -c 'cp /opt/plans/part work && echo left > /tmp/beside'"


@pytest.mark.proof  # the package is imported twice
def test_a_task_runs_and_is_scored_in_its_own_container(ground: Ground, tmp_path: Path) -> None:
    path, out = copy_taskset(tmp_path, "boxed"), tmp_path / "run"
    words = ("run", f"vf:{path}", "--agent", "command", "--command", COMMAND, "--sandbox", "docker")

    done = subprocess.run(
        [
            *ground.before,
            find_interpreter().python,
            "-m",
            "holdwater",
            *words,
            "--workers",
            "0",
            "--out",
            out,
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "DOCKER_HOST": ground.host},
        capture_output=True,
        text=True,
        timeout=stretch(200),
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    with LedgerReader(out) as reader:
        (row,) = reader.attempts()
    assert row.verdict is not None
    assert row.verdict.failure is None, row.verdict.failure
    assert row.verdict.grade is not None
    assert row.verdict.grade.score == 1.0
    ground.assert_clean()
