"""The run directory's disk fills up and stays so: exit 4, a message, nothing is lost, resume completes.

A disk that has room again in time is in `test_run_disk_space.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import SOURCE, Scene, lines, until
from tests.in_process_run import attempts, kinds, whole
from tests.wait_bounds import stretch

COUNT = 60
ROOM = 9  # MiB
SCRIPT = """
import asyncio
import os
import sys
from pathlib import Path

import holdwater as hw
from holdwater.api import runs as api

HERE = Path(__file__).parent


def noise(size):
    return os.urandom(size // 2).hex()


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n:03d}")


def grade(instance, sandbox, answer):
    return answer == instance.id


async def logs(instance, sandbox, model):
    print(noise(400_000))
    return instance.id


async def output(instance, sandbox, model):
    await sandbox.run("head -c 400000 /dev/urandom | base64")
    return instance.id


async def artifacts(instance, sandbox, model):
    await sandbox.write("work.bin", os.urandom(400_000))
    return instance.id


async def exchanges(instance, sandbox, model):
    await model.chat([{"role": "user", "content": noise(400_000)}])
    return instance.id


async def sandboxes(instance, sandbox, model):
    '''Fills the disk from within a sandbox, and is told so by the kernel alone.'''
    result = await sandbox.run("head -c 12000000 /dev/zero > large")
    return instance.id if result.ok else None


async def quiet(instance, sandbox, model):
    await asyncio.sleep(0.05)
    return instance.id


suite = hw.Suite(name="filling", instances=instances, grade=grade)


def acknowledge(verdict):
    with (HERE / "acknowledged").open("a") as file:
        file.write(f"{verdict.attempt}\\n")


async def conduct(out, agent, workers):
    from holdwater.testing.scripted_model import ScriptedReply, serve_script

    async with serve_script(lambda request: ScriptedReply(text="hello"), PORT) as url:
        if (Path(out) / "run.json").exists():
            setup = api.prepare_resume(out, api.CallerObjects(), {})
            return await api.start(setup, observers=[acknowledge])
        options = {"workers": workers, "concurrency": 4, "base_url": url, "backoff": 0.01}
        options |= {"disk_patience": 2.0}
        options |= {"model": "m"} if agent == "exchanges" else {}
        prepared = api.prepare(f"{__file__}:suite", f"{__file__}:{agent}", out, options)
        return await api.start(prepared, observers=[acknowledge])


if __name__ == "__main__":
    out, agent, workers = sys.argv[1:]
    os.environ["OPENAI_API_KEY"] = "sk-of-the-upstream"
    try:
        summary = asyncio.run(conduct(out, agent, int(workers)))
    except hw.HoldwaterError as error:
        print(f"{error.message}; {error.hint}", file=sys.stderr)
        os._exit(error.exit_status)
    print(summary.reason, file=sys.stderr)
    os._exit(summary.exit_status)
"""


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={ROOM}m", "tmpfs")

    def grow(self) -> None:
        self._mount("-o", "remount,size=200m")

    def fill(self) -> Path:
        """Take every byte that is left, from outside."""
        ballast = self.path / "ballast"
        with ballast.open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(b"x" * size)
                except OSError:
                    size //= 2
        return ballast

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def _mount(self, *words: str) -> None:
        subprocess.run(["mount", *words, str(self.path)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path / "disk")
    except (subprocess.CalledProcessError, FileNotFoundError):
        if os.environ.get("CI"):
            raise
        pytest.skip("a file system can be mounted by root alone")
    yield disk
    disk.close()


def free_port() -> int:
    """A resumed run goes on with the model's address that it was given first."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Filling:
    """A run on the small disk, by a conductor that notes what it acknowledged."""

    def __init__(self, place: Path, disk: Disk, agent: str, workers: int) -> None:
        self.out = disk.path / "run"
        self.file = place / "filling.py"
        self.file.write_text(SCRIPT.replace("COUNT", str(COUNT)).replace("PORT", str(free_port())))
        self._words = [sys.executable, str(self.file), str(self.out), agent, str(workers)]
        self._acknowledged = place / "acknowledged"

    def start(self) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        return subprocess.Popen(self._words, stderr=subprocess.PIPE, text=True, env=env)

    def acknowledged(self) -> set[int]:
        return {int(line) for line in lines(self._acknowledged)}

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        _, told = process.communicate(timeout=stretch(60))
        assert "Traceback" not in told, told
        return process.returncode, told

    def assert_nothing_lost(self) -> None:
        """Every verdict that anybody was told of is there, and none is anybody's fault."""
        settled = {row.attempt: row for row in attempts(self.out) if row.verdict is not None}
        assert self.acknowledged() <= set(settled)
        others = [row for row in settled.values() if row.kind not in ("passed", "interrupted")]
        assert not others, [row.verdict.failure for row in others]
        assert set(kinds(self.out).values()) <= {"passed"}

    def assert_resumes(self) -> None:
        status, told = self.ended(self.start())
        assert status == 0, told
        assert kinds(self.out) == {f"i{n:03d}": "passed" for n in range(COUNT)}
        self.assert_nothing_lost()
        whole(self.out)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("agent", ["logs", "output", "artifacts", "exchanges"])
def test_filled_by_the_run_itself(tmp_path: Path, disk: Disk, agent: str, workers: int) -> None:
    filling = Filling(tmp_path, disk, agent, workers)

    status, told = filling.ended(filling.start())

    assert status == 4, told
    assert "No space left on device" in told or "disk is full" in told, told
    assert "make space" in told, told
    assert filling.acknowledged(), "the scene begins with room for some"
    filling.assert_nothing_lost()
    disk.grow()
    filling.assert_resumes()


@pytest.mark.parametrize("workers", [0, 2])
def test_filled_by_a_sandbox_that_gives_its_room_back(tmp_path: Path, disk: Disk, workers: int) -> None:
    """When the attempt is over there is room again: its agent is not to blame all the same."""
    filling = Filling(tmp_path, disk, "sandboxes", workers)

    status, told = filling.ended(filling.start())

    assert status == 4, told
    assert "make space" in told, told
    filling.assert_nothing_lost()
    disk.grow()
    filling.assert_resumes()


@pytest.mark.parametrize("workers", [0, 2])
def test_filled_from_outside_in_mid_run(tmp_path: Path, disk: Disk, workers: int) -> None:
    filling = Filling(tmp_path, disk, "quiet", workers)
    process = filling.start()
    until("a few verdicts", lambda: len(filling.acknowledged()) >= 8)

    ballast = disk.fill()
    status, told = filling.ended(process)

    assert status == 4, told
    assert "make space" in told, told
    ballast.unlink()
    filling.assert_nothing_lost()
    filling.assert_resumes()


@pytest.mark.parametrize("left", [0, 8, 64, 200])
def test_full_before_the_run_is_made(tmp_path: Path, disk: Disk, left: int) -> None:
    """Whatever room there is (in KiB), creation ends cleanly, and the same command works afterwards."""
    ballast = disk.fill()
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - left * 1024)
    scene = Scene(tmp_path)
    scene.out = disk.path / "run"
    words = ["run", "demo", "--agent", "nop", "--limit", "1", "--out", str(scene.out), "--json"]
    words += ["--disk-patience", "1"]
    command = scene.start(*words)

    assert command.wait(60) == 4, command
    assert "Traceback" not in command.stderr and "internal" not in command.stderr, command
    assert "space" in command.stderr, command
    ballast.unlink()
    again = scene.resume() if (scene.out / "run.json").exists() else scene.start(*words)
    assert again.wait(60) == 0, again
    assert len(kinds(scene.out)) == 1


def test_the_command_says_so(tmp_path: Path, disk: Disk) -> None:
    filling = Filling(tmp_path, disk, "logs", 2)
    scene = Scene(tmp_path)
    scene.out = filling.out
    words = ["run", f"{filling.file}:suite", "--agent", f"{filling.file}:logs", "--out", str(scene.out)]
    command = scene.start(*words, "--disk-patience", "2", "--json")

    assert command.wait(60) == 4, command
    assert "Traceback" not in command.stderr and "internal" not in command.stderr, command
    told = " ".join(command.stderr.split())
    assert "make space, then `holdwater resume`" in told, command
    disk.grow()
    resumed = scene.resume()
    assert resumed.wait(60) == 0, resumed
    assert resumed.document()["outcomes"] == {"passed": COUNT}
