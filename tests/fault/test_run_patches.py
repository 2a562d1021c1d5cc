"""An agent that does nothing leaves nothing: no file of holdwater's own counts as its work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command_runner import Scene
from tests.swebench_rows import Benchmark


@pytest.mark.parametrize("line", ["true", "test -s {instruction_file}"])
def test_a_critic_of_patches_sees_no_file_of_ours(scene: Scene, tmp_path: Path, line: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"id": "one", "instruction": "do it", "grade": "false"}) + "\n"
    )
    words = ("--command", line, "--attempts", "3", "--critic", "patch")

    command = scene.start("run", str(tmp_path / "tasks.jsonl"), "--out", str(scene.out), "--json", *words)

    assert command.wait(120) == 0, command
    assert [row["kind"] for row in scene.export("attempts")] == ["failed"] * 3
    assert [path.name for path in (scene.out / "artifacts").rglob("*")] == []


def test_a_prediction_of_no_work_is_empty(scene: Scene, tmp_path: Path) -> None:
    rows = Benchmark(tmp_path / "rows")
    rows.add("me__it-1")

    command = scene.start("run", rows.spec(), "--command", "true", "--out", str(scene.out), "--json")
    assert command.wait(240) == 0, command
    exported = scene.start("export", str(scene.out), "--format", "swebench")
    assert exported.wait(60) == 0, exported

    (prediction,) = map(json.loads, exported.stdout.splitlines())
    assert (prediction["instance_id"], prediction["model_patch"]) == ("me__it-1", "")
