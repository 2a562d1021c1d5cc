"""The run directory's disk is filled from outside in mid-run, and is given room again in time, or is not.

Admission pauses, verdicts go on being committed out of the reserve, and nobody is blamed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Command, Scene, lines, serving, until
from tests.in_process_run import attempts, events, kinds, whole

from holdwater.core.errors import HoldwaterError
from holdwater.ledger.reader import LedgerReader

COUNT = 24
AT_ONCE = 4
SUITE = """
import asyncio
import os
from pathlib import Path

import holdwater as hw


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:02d}")


def note(instance):
    with open(TRACE, "a") as trace:
        trace.write(f"{instance.id}\\n")


async def chatty(instance, sandbox, model):
    '''Writes exchanges, a log, a file and an artifact, and takes whatever happens for its own fault.'''
    note(instance)
    while instance.id >= "i04" and not Path(GO).exists():
        await asyncio.sleep(0.02)  # for the disk to be full
    try:
        for turn in range(4):
            await model.chat([{"role": "user", "content": f"{turn} {os.urandom(20_000).hex()}"}])
            print(os.urandom(5_000).hex())
            await sandbox.write(f"work-{turn}", os.urandom(20_000))
            await asyncio.sleep(0.1)
    except Exception:
        return "I gave up"
    return instance.id


async def patient(instance, sandbox, model):
    '''Is nearly done when the disk is full, and needs no more of it.'''
    await model.chat([{"role": "user", "content": "hello"}])
    note(instance)
    while not Path(GO).exists():
        await asyncio.sleep(0.02)
    return instance.id


async def heavy(instance, sandbox, model):
    print(os.urandom(250_000).hex())
    await asyncio.sleep(0.2)
    return instance.id


def grade(instance, sandbox, answer):
    return answer == instance.id


suite = hw.Suite(name="filling", instances=instances, grade=grade)
"""


class Disk:
    """A small file system of its own, which others fill too."""

    def __init__(self, place: Path, kind: str) -> None:
        self.path = place / "disk"
        self.path.mkdir()
        if kind == "tmpfs":
            words = ["-t", "tmpfs", "-o", "size=48m", "tmpfs"]
        else:
            image = place / "image"
            with image.open("wb") as file:
                file.truncate(64 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
            words = ["-o", "loop", str(image)]
        subprocess.run(["mount", *words, str(self.path)], check=True, capture_output=True)
        self._ballast = self.path / "ballast"

    def fill(self) -> None:
        """Take every byte that is left."""
        with self._ballast.open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(b"x" * size)
                except OSError:
                    size //= 2

    def free(self) -> None:
        self._ballast.unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def kind() -> str:
    return "tmpfs"


@pytest.fixture
def disk(tmp_path: Path, kind: str) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path, kind)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"a file system can be mounted by root alone: {error}")
    yield disk
    disk.close()


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with serving("-m", "holdwater.testing.scripted_model", "--bytes", "400") as url:
        yield url


class Filled(Scene):
    """A run with a model, on the small disk; its trace is elsewhere."""

    def __init__(self, place: Path, disk: Disk, model: str) -> None:
        super().__init__(place)
        self.out = disk.path / "run"
        self.trace, self.go = place / "trace", place / "go"
        self.suite(SUITE, COUNT=COUNT, TRACE=str(self.trace), GO=str(self.go))
        self._model = ("--model", "model", "--base-url", model)

    def begin(self, agent: str, workers: int, patience: float) -> Command:
        slots = ("--workers", str(workers), "--concurrency", str(AT_ONCE))
        patience_ = ("--disk-patience", str(patience))
        return self.run(*self.agent(agent), *self._model, *slots, *patience_, "--backoff", "0.01")

    def settled(self) -> int:
        try:
            with LedgerReader(self.out) as reader:
                return reader.summary().verdicts.get("passed", 0)
        except HoldwaterError:
            return 0  # it has not begun

    def happened(self, kind: str) -> bool:
        return bool(events(self.out, kind))

    def was_hit(self) -> bool:
        return any(row.kind == "interrupted" for row in attempts(self.out))

    def assert_all_passed_and_nobody_was_blamed(self) -> None:
        assert kinds(self.out) == {f"i{n:02d}": "passed" for n in range(COUNT)}
        ended = {
            (row.kind, row.verdict.failure.kind if row.verdict.failure else "") for row in attempts(self.out)
        }
        assert ended <= {("passed", ""), ("interrupted", "disk"), ("interrupted", "interrupted")}
        whole(self.out)
        assert list((self.out / "reserve").iterdir()) == []


@pytest.fixture
def scene(tmp_path: Path, disk: Disk, model: str) -> Iterator[Filled]:
    scene = Filled(tmp_path, disk, model)
    yield scene
    scene.close()


@pytest.mark.parametrize(("kind", "workers"), [("tmpfs", 0), ("tmpfs", 2), ("ext4", 2)])
def test_verdicts_are_committed_on_a_full_disk(scene: Filled, disk: Disk, workers: int) -> None:
    command = scene.begin("patient", workers, patience=120)
    until("all that may run do", lambda: len(lines(scene.trace)) == AT_ONCE)
    until("the reserve is there", lambda: any((scene.out / "reserve").iterdir()))

    disk.fill()
    until("it was noticed", lambda: scene.happened("disk.full"))
    scene.go.touch()
    until("what ran is settled", lambda: scene.settled() == AT_ONCE)
    until("the others wait for the disk", lambda: _waiting(scene.out).get("disk") == AT_ONCE)
    assert len(lines(scene.trace)) == AT_ONCE, "somebody was admitted"
    disk.free()

    assert command.wait(60) == 0, command
    scene.assert_all_passed_and_nobody_was_blamed()
    assert scene.happened("reserve.given")
    assert scene.happened("disk.ample")


@pytest.mark.parametrize("workers", [0, 2])
def test_work_goes_on_when_there_is_room_again(scene: Filled, disk: Disk, workers: int) -> None:
    command = scene.begin("chatty", workers, patience=120)
    until("a few verdicts", lambda: scene.settled() >= 2)

    disk.fill()
    until("it was noticed", lambda: scene.happened("disk.full"))
    scene.go.touch()
    until("an attempt was hit", scene.was_hit)
    disk.free()

    assert command.wait(60) == 0, command
    scene.assert_all_passed_and_nobody_was_blamed()


@pytest.mark.parametrize("workers", [0, 2])
def test_without_room_in_time_it_stops_and_resumes(scene: Filled, disk: Disk, workers: int) -> None:
    command = scene.begin("chatty", workers, patience=2)
    until("a few verdicts", lambda: scene.settled() >= 2)

    disk.fill()
    scene.go.touch()
    status = command.wait(60)

    assert status == 4, command
    assert "Traceback" not in command.stderr, command
    assert "make space, then `holdwater resume`" in " ".join(command.stderr.split()), command
    before = {row.attempt for row in attempts(scene.out) if row.kind == "passed"}
    disk.free()
    resumed = scene.resume()
    assert resumed.wait(60) == 0, resumed
    scene.assert_all_passed_and_nobody_was_blamed()
    assert before <= {row.attempt for row in attempts(scene.out) if row.kind == "passed"}


def test_a_budget_of_disk_that_is_used_up_stops_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    count = 120
    scene.suite(SUITE, COUNT=count, TRACE="", GO="")
    words = ("--workers", "0", "--concurrency", "2", "--disk", "2MiB", "--disk-patience", "1")
    command = scene.run(*scene.agent("heavy"), *words)

    assert command.wait(60) == 4, command
    told = " ".join(command.stderr.split())
    assert "the disk budget is used up" in told and "of 2.0 MiB" in told, command
    with LedgerReader(scene.out) as reader:
        gauge = reader.gauge()
    assert gauge is not None and gauge.disk_limit == 2 << 20 <= gauge.disk_used
    assert 0 < len(kinds(scene.out)) < count
    larger = scene.start("resume", str(scene.out), "--disk", "1GiB", "--json")
    assert larger.wait(60) == 0, larger
    assert kinds(scene.out) == {f"i{n:02d}": "passed" for n in range(count)}


def _waiting(out: Path) -> dict[str, int]:
    with LedgerReader(out) as reader:
        gauge = reader.gauge()
        return gauge.waiting if gauge else {}
