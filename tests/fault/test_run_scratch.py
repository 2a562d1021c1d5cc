"""Runs that keep their sandboxes where others keep files too, and copies of runs: neither hurts the other."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Command, Scene, lines, until

from holdwater.sandbox.scratch import list_temporary_places

SUITE = """
import asyncio
import os
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}")


async def solve(instance, sandbox, model):
    await sandbox.run("echo content > file")
    fd = os.open(HERE / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{instance.id}\\n".encode())
    os.close(fd)
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)


async def grade(instance, sandbox, answer):
    return (await sandbox.run("grep content file")).ok


suite = hw.Suite(name="work", instances=instances, grade=grade)
"""
COUNT = 3


@pytest.fixture
def scenes(tmp_path: Path) -> Iterator[list[Scene]]:
    """Two scenes beside each other, with one directory that both may use."""
    (tmp_path / "shared").mkdir()
    scenes = [Scene(tmp_path / name) for name in ("a", "b")]
    for scene in scenes:
        scene.place.mkdir()
        scene.suite(SUITE, COUNT=COUNT, HERE=str(scene.place))
    yield scenes
    for scene in scenes:
        scene.close()


def begin(scene: Scene, *words: str) -> Command:
    """A run whose agents have written their file and wait."""
    command = scene.run(*scene.agent(), "--concurrency", str(COUNT), *words)
    until("all agents wait", lambda: len(lines(scene.place / "trace")) == COUNT, 120)
    return command


def finish(scene: Scene, command: Command) -> dict[str, Any]:
    (scene.place / "go").touch()
    assert command.wait(120) == 0, command
    document: dict[str, Any] = command.document()
    return document


def temporary_files(scene: Scene) -> list[Path]:
    """The copies of `/etc` that workers of the run have made."""
    return [copy for place in list_temporary_places() for copy in place.glob(f"holdwater-{scene.id}-*/etc")]


def kill(command: Command) -> None:
    command.signal(signal.SIGKILL)
    command.kill()


def test_files_of_others_in_the_scratch_directory_stay(scenes: list[Scene], tmp_path: Path) -> None:
    shared, (scene, _) = tmp_path / "shared", scenes
    for name in ("2024/important.txt", "7/x", "holdwater-notes/mine.txt"):
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".holdwater").touch()
    (shared / "holdwater-link").symlink_to(tmp_path / "elsewhere")
    before = sorted(path.relative_to(shared) for path in shared.rglob("*"))

    command = begin(scene, "--scratch", str(shared))
    kill(command)
    document = finish(scene, scene.resume())

    assert document["outcomes"] == {"passed": COUNT}
    assert sorted(path.relative_to(shared) for path in shared.rglob("*")) == before
    assert (tmp_path / "elsewhere" / ".holdwater").exists()


def test_runs_that_share_a_scratch_directory_leave_each_other_alone(
    scenes: list[Scene], tmp_path: Path
) -> None:
    shared, (one, other) = tmp_path / "shared", scenes
    first = begin(one, "--scratch", str(shared))
    second = begin(other, "--scratch", str(shared))

    assert finish(one, first)["outcomes"] == {"passed": COUNT}
    assert finish(other, second)["outcomes"] == {"passed": COUNT}

    assert len(one.export("attempts")) == len(other.export("attempts")) == COUNT
    assert list(shared.iterdir()) == []


def test_a_dead_run_leaves_nothing_after_the_next_one(scenes: list[Scene], tmp_path: Path) -> None:
    shared, (dead, next_one) = tmp_path / "shared", scenes
    kill(begin(dead, "--scratch", str(shared)))
    (left,) = shared.iterdir()
    assert left.name == f"holdwater-{dead.id}"
    assert temporary_files(dead)

    finish(next_one, begin(next_one, "--scratch", str(shared)))

    assert list(shared.iterdir()) == []
    assert temporary_files(dead) == []
    assert finish(dead, dead.resume())["outcomes"] == {"passed": COUNT}


def test_a_scratch_directory_with_files_of_others_is_refused(scenes: list[Scene], tmp_path: Path) -> None:
    shared, (scene, _) = tmp_path / "shared", scenes
    kill(begin(scene, "--scratch", str(shared)))
    (place,) = shared.iterdir()
    (place / ".holdwater").unlink()

    resumed = scene.resume()

    assert resumed.wait(60) == 2, resumed
    assert f"has no `.holdwater`: `{place}`" in resumed.stderr
    assert "hint: use another `--scratch`" in resumed.stderr
    assert sorted(entry.name for entry in place.iterdir()) == [str(n) for n in range(1, COUNT + 1)]


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_resuming_a_copy_of_a_run_leaves_the_original_alone(
    scenes: list[Scene], tmp_path: Path, share: bool
) -> None:
    original, copy = scenes
    words = ["--scratch", str(tmp_path / "shared")] if share else []
    command = begin(original, *words)
    workers = {worker.pid for worker in original.workers()}
    subprocess.run(["cp", "-a", original.out, copy.out], check=True)  # with the socket of its conductor

    resumed = copy.resume()
    until("the copy works", lambda: len(lines(original.place / "trace")) == 2 * COUNT, 120)

    assert {worker.pid for worker in original.workers()} == workers
    assert finish(original, command)["outcomes"] == {"passed": COUNT}
    assert resumed.wait(120) == 0, resumed
    assert resumed.document()["outcomes"] == {"passed": COUNT}
    assert len(original.export("attempts")) == COUNT, "the copy disturbed the original"
    for scene in scenes:
        assert list((scene.out / "scratch").iterdir()) == []
    assert list((tmp_path / "shared").iterdir()) == []
