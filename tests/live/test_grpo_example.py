"""TRL trains a small model on a real server, and learns; also while workers and the server are killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.server_harness import kill, server
from tests.trainer_programs import DRAWERS, ROOT, find_trainers
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.trainers.token_rows import make_row

GRPO = ROOT / "examples" / "grpo"
STEPS, ROLLOUTS = 120, 64
pytestmark = [pytest.mark.proof, pytest.mark.timeout(5400)]


class Training:
    """`examples/grpo/train.py` in a process of its own."""

    def __init__(self, out: Path, *words: str) -> None:
        self.out = out
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
        with (out / "train.log").open("wb") as log:
            command = [find_trainers(), str(GRPO / "train.py"), "--out", str(out), *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=out)

    def read_rows(self) -> list[dict[str, Any]]:
        path = self.out / "rows.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_step(self, step: int) -> None:
        """Wait until the rollouts of a step are there: those of the next one are running."""
        until = time.monotonic() + stretch(600)
        while len(self.read_rows()) < step:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < until, self.log
            time.sleep(0.1)

    @property
    def log(self) -> str:
        return (self.out / "train.log").read_text(errors="replace")[-4000:]


@contextmanager
def start_training(out: Path, *words: str) -> Iterator[Training]:
    training = Training(out, *words)
    try:
        yield training
    finally:
        if training.process.poll() is None:
            training.process.kill()
        training.process.wait()


def assert_learned(training: Training, served: Path) -> None:
    """The example learned, and trained on every rollout of the ledger, as the ledger has it, once."""
    assert training.process.wait(stretch(3600)) == 0, training.log
    rows = training.read_rows()
    trained = [
        (tuple(ids), reward) for row in rows for ids, reward in zip(row["ids"], row["rewards"], strict=True)
    ]
    assert len(trained) == STEPS * ROLLOUTS
    assert all(reward is not None for _, reward in trained)
    recorded = Counter(
        (tuple((row := make_row(trajectory, 0)).prompt + row.response), trajectory.reward)
        for trajectory in hw.read(served)
    )
    assert recorded == Counter(trained)
    found = hw.audit(served)  # a server that was interrupted is not finished, so `ok` does not count
    assert (found.planned, found.settled) == (STEPS * ROLLOUTS, STEPS * ROLLOUTS)
    assert (found.lost, found.duplicated, found.corrupt) == (0, 0, 0)


def test_the_example_learns(tmp_path: Path) -> None:
    with start_training(tmp_path, "--steps", str(STEPS)) as training:
        assert_learned(training, tmp_path / "served")


def test_kills_in_the_middle_do_not_change_that(tmp_path: Path) -> None:
    flags = ("--network", "none", "--workers", "2", "--least-workers", "2")
    with (
        server(tmp_path, *flags, suite=DRAWERS) as serving,
        start_training(tmp_path, "--steps", str(STEPS), "--url", serving.url) as training,
    ):
        for step in (10, 40):
            training.wait_step(step)
            kill(serving.workers()[0])
            training.wait_step(step + 10)
            serving.kill()
            serving.start()
        assert_learned(training, serving.out)
