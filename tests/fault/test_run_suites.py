"""Suites that yield an id twice, too few instances, no end or nothing for a shard: runs and resumes."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.command_runner import Command, Scene, lines, until

SUITE = """
import asyncio
import itertools
import os
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    for name in NAMES or (f"i{n:03d}" for n in itertools.count()):
        yield hw.Instance(id=name)


async def solve(instance, sandbox, model):
    fd = os.open(HERE / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{instance.id}\\n".encode())
    os.close(fd)
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.02)


async def grade(instance, sandbox, answer):
    return True


suite = hw.Suite(name="odd", instances=instances, grade=grade, size=SIZE)
"""
PATIENCE = 120.0  # seconds for a run of a few instances, however busy the machine


def test_a_duplicate_id_is_refused_by_a_resume_too(scene: Scene) -> None:
    begin(scene, [*names(20), "i003"], at_once=2).kill()
    (scene.place / "go").touch()

    resumed = scene.resume()

    assert resumed.wait(PATIENCE) == 2, resumed
    assert resumed.document()["settled"] == 20
    first, again = "instance 4 of suite `odd`", "instance 21 of suite `odd`"
    assert resumed.document()["reason"].startswith(f"duplicate id `i003`: first in {first}, again in {again}")


def test_a_suite_that_changed_its_order_resumes(scene: Scene) -> None:
    begin(scene, names(12), at_once=2).kill()
    (scene.place / "go").touch()
    scene.suite(SUITE, HERE=str(scene.place), NAMES=names(12)[::-1], SIZE=None)

    resumed = scene.resume()

    assert resumed.wait(PATIENCE) == 0, resumed
    scene.assert_whole(12)


def test_a_suite_that_yields_less_than_its_size_is_not_finished(scene: Scene) -> None:
    (scene.place / "go").touch()
    scene.suite(SUITE, HERE=str(scene.place), NAMES=names(6), SIZE=10)

    for begin_or_resume in (lambda: scene.run(*scene.agent()), scene.resume):
        command = begin_or_resume()
        assert command.wait(PATIENCE) == 2, command
        summary = command.document()
        assert (summary["state"], summary["settled"]) == ("stopped", 6)
        assert summary["reason"].startswith("suite `odd` declares 10 instances (`size`) and yielded 6")
    audit = scene.audit()
    assert (audit["ok"], audit["unfinished"]) == (False, 4)
    assert audit["notes"] == ["not planned yet: the suite declares 10 samples and yielded 6"]


def test_a_suite_without_an_end_is_resumed(scene: Scene) -> None:
    begin(scene, [], at_once=3).kill()
    (scene.place / "go").touch()
    before = len(lines(scene.place / "trace"))

    resumed = scene.resume()
    until("further attempts", lambda: len(lines(scene.place / "trace")) > before + 6, PATIENCE)
    resumed.signal(signal.SIGINT)

    assert resumed.wait(PATIENCE) == 3, resumed
    assert len(scene.outcomes()) > 3


def test_an_empty_shard_is_a_finished_run_with_a_warning(scene: Scene) -> None:
    (scene.place / "go").touch()
    scene.suite(SUITE, HERE=str(scene.place), NAMES=names(3), SIZE=3)

    empty = scene.run(*scene.agent(), "--shard", "5/8")

    assert empty.wait(PATIENCE) == 0, empty
    summary = empty.document()
    assert (summary["state"], summary["planned"], summary["events"]) == ("finished", 0, {"shard.empty": 1})
    assert "warning: no instance of the suite falls into `--shard 5/8`" in empty.stderr
    scene.assert_whole(0)


def test_a_pattern_that_matches_nothing_is_an_error_in_a_shard_too(scene: Scene) -> None:
    scene.suite(SUITE, HERE=str(scene.place), NAMES=names(3), SIZE=3)

    missed = scene.run(*scene.agent(), "--shard", "1/2", "--only", "x*")

    assert missed.wait(PATIENCE) == 2, missed


def test_starts_in_the_same_second_get_different_directories(tmp_path: Path) -> None:
    scene = Scene(tmp_path, before=("env", "-C", str(tmp_path)))
    (tmp_path / "go").touch()
    spec = scene.suite(SUITE, HERE=str(tmp_path), NAMES=names(1), SIZE=1)

    commands = [scene.start("run", spec, *scene.agent(), "--json") for _ in range(3)]

    assert [command.wait(PATIENCE) for command in commands] == [0, 0, 0], commands
    assert len({command.document()["directory"] for command in commands}) == 3


def begin(scene: Scene, named: list[str], at_once: int) -> Command:
    """A run whose first `at_once` attempts are under way and wait for `go`."""
    scene.suite(SUITE, HERE=str(scene.place), NAMES=named, SIZE=None)
    command = scene.run(*scene.agent(), "--concurrency", str(at_once), "--workers", "1")
    until("attempts under way", lambda: len(lines(scene.place / "trace")) == at_once, PATIENCE)
    return command


def names(count: int) -> list[str]:
    return [f"i{number:03d}" for number in range(count)]
