"""Harbor tasks in containers: the same verdicts as in processes, and those that only containers can give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.container_runs import IMAGE, Ground
from tests.harbor_tasks import WORD, write


@pytest.mark.parametrize(("agent", "ended"), [("oracle", ("passed", 1.0)), ("nop", ("failed", 0.0))])
def test_the_oracle_scores_one_and_nop_zero_on_every_task(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, ended: tuple[str, float]
) -> None:
    monkeypatch.setenv(WORD, "a word")
    planned = write(tmp_path / "tree", IMAGE)
    scene = ground.scene(tmp_path)
    words = [
        "--agent",
        agent,
        "--sandbox",
        "docker",
        "--retries",
        "0",
        "--concurrency",
        "4",
        "--workers",
        "1",
        "--network",
        "open",
        "--pass-env",
        WORD,
    ]

    command = scene.start("run", str(tmp_path / "tree"), "--out", str(scene.out), "--json", *words)

    assert command.wait(300) == 0, command
    rows = {row["instance"]: (row["kind"], row["score"], row["failure"]) for row in scene.export("attempts")}
    assert rows == dict.fromkeys(planned, (*ended, "")), json.dumps(rows, indent=1)
    ground.assert_clean()
    scene.close()
