"""A copy of a run whose sandboxes are containers: resumed beside the original, it touches nothing of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, lines, until
from tests.container_runs import IMAGE, Ground

SUITE = """
import asyncio
import os
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    yield hw.Instance(id="one", start=hw.SandboxSpec(workdir="/work"))


async def solve(instance, sandbox, model):
    await sandbox.run("echo content > file")
    with open(HERE / "trace", "a") as trace:
        trace.write(f"{instance.id}\\n")
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)


async def grade(instance, sandbox, answer):
    return (await sandbox.run("grep content file")).ok


suite = hw.Suite(name="work", instances=instances, grade=grade)
"""


@pytest.fixture
def scenes(tmp_path: Path, ground: Ground) -> Iterator[list[Scene]]:
    """The original and its copy: one suite, one cache directory, two run directories."""
    scenes = [ground.scene(tmp_path), ground.scene(tmp_path)]
    scenes[1].out = tmp_path / "copy"
    yield scenes
    for scene in scenes:
        scene.close()


def test_a_resumed_copy_leaves_the_original_s_containers_alone(
    scenes: list[Scene], ground: Ground, tmp_path: Path
) -> None:
    original, copy = scenes
    original.suite(SUITE, HERE=str(tmp_path))
    command = original.run(*original.agent(), "--sandbox", "docker", "--image", IMAGE)
    until("the agent waits", lambda: len(lines(tmp_path / "trace")) == 1, 120)
    subprocess.run(["cp", "-a", original.out, copy.out], check=True)  # with the socket of its conductor

    resumed = copy.resume()
    until("that of the copy waits as well", lambda: len(lines(tmp_path / "trace")) == 2, 120)
    (tmp_path / "go").touch()

    for scene, ended in ((original, command), (copy, resumed)):
        assert ended.wait(120) == 0, ended
        assert ended.document()["outcomes"] == {"passed": 1}
        scene.assert_clean()
    assert len(original.export("attempts")) == 1, "the copy disturbed the original"
    ground.assert_clean()
