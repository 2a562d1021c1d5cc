"""The memory of a sandbox over time, in the verdict of a real attempt: in a worker, and in the conductor."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.command_runner import Scene
from tests.wait_bounds import stretch

from holdwater.ledger.reader import LedgerReader

HOLDING = 24 << 20

HOLDING_SUITE = """
import holdwater as hw

suite = hw.Suite(name="hold", instances=lambda: [hw.Instance(id="one")], grade=lambda *_: True)
PROGRAM = f"import time; kept = b'x' * {HOLDING}; time.sleep({SECONDS})"

async def solve(instance, sandbox, model):
    await sandbox.run(["python3", "-c", PROGRAM])
"""


@pytest.mark.parametrize("workers", ["1", "0"])
def test_an_attempt_records_the_memory_of_its_sandbox(tmp_path: Path, workers: str) -> None:
    scene = Scene(tmp_path)
    scene.suite(HOLDING_SUITE, HOLDING=HOLDING, SECONDS=stretch(1.0))
    try:
        running = scene.run(*scene.agent(), "--workers", workers)
        assert running.wait() == 0, running
    finally:
        scene.close()

    with LedgerReader(scene.out) as reader:
        verdict = reader.verdict(1)
    assert verdict is not None and verdict.memory is not None
    assert len(verdict.memory.kib) >= 3
    assert HOLDING <= max(verdict.memory.kib) << 10 <= verdict.peak_memory + 1024
