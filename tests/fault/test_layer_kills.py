"""Layers that many processes ask for: built once, also when builders are killed, cancelled or out of room."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.layer_projects import backend, required
from tests.wait_bounds import stretch

from holdwater.core.errors import ImageFailed
from holdwater.core.image import AgentSource
from holdwater.core.records import GiB, MiB
from holdwater.image.layer.agent_layer import prepare_agent
from holdwater.image.layer.cache import LayerCache
from holdwater.image.layer.program import ProgramRunner

ASKING = """
import asyncio, os, sys
from pathlib import Path
from holdwater.image.layer.cache import LayerCache
from holdwater.image.layer.program import ProgramRunner
from holdwater.image.layer.tree import pack

base = Path(sys.argv[1])

async def build(scratch):
    with (base / "built").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    (scratch.path / "tree").mkdir()
    (scratch.path / "tree" / "file").write_text("content")
    if (base / "hang").exists():
        (base / "hang").unlink()
        programs = ProgramRunner(base / "log", scratch.path, keep=[scratch.lock], env={})
        await programs.run(["sh", "-c", f"echo $$ > {base}/hangs; exec sleep 600"], 600)
    await asyncio.sleep(0.2)
    return pack(scratch.path / "tree", "/opt/agent", scratch.path / "layer")

async def main():
    async with LayerCache(base / "cache", 2**30) as cache:
        layer = await cache.get("k1", build)
        assert Path(layer.path).stat().st_size == layer.size
        print(layer.digest, flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


def ask(base: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", ASKING, base], stdin=pipe, stdout=pipe, text=True)


def answers(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each was given, while all of them still live; they have ended then."""
    told = [process.stdout.readline().strip() for process in processes if process.stdout]
    for process in processes:
        process.communicate(timeout=stretch(30))
        assert process.returncode == 0
    return told


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    """It was killed: the kernel is at it."""
    async with asyncio.timeout(stretch(10)):
        while alive(pid):
            await asyncio.sleep(0.01)


def left(base: Path) -> set[str]:
    return {
        str(path.relative_to(base / "cache")) for path in (base / "cache").rglob("*") if not path.is_dir()
    }


WHOLE = {"lock", "locks/k1.use", "layers/k1/layer.json", "layers/k1/layer.tar.gz"}


def test_ten_processes_that_ask_for_a_layer_at_once_build_it_once(tmp_path: Path) -> None:
    told = answers([ask(tmp_path) for _ in range(10)])

    assert len(told) == 10 and len(set(told)) == 1 and told[0].startswith("sha256:")
    assert len((tmp_path / "built").read_text().split()) == 1
    assert left(tmp_path) == WHOLE


def test_when_the_builder_is_killed_another_takes_over_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    os.mkfifo(tmp_path / "hangs")
    processes = [ask(tmp_path) for _ in range(10)]
    program = int((tmp_path / "hangs").read_text())  # as soon as it writes that
    builder = int((tmp_path / "built").read_text())
    assert alive(program)

    os.kill(builder, signal.SIGKILL)
    killed = next(process for process in processes if process.pid == builder)
    killed.communicate()
    told = answers([process for process in processes if process is not killed])

    assert len(told) == 9 and len(set(told)) == 1 and told[0].startswith("sha256:")
    assert len((tmp_path / "built").read_text().split()) == 2
    assert not alive(program)
    assert left(tmp_path) == WHOLE


async def test_leftovers_of_a_killed_builder_are_removed_and_those_in_use_stay(
    tmp_path: Path,
) -> None:
    (tmp_path / "hang").touch()
    os.mkfifo(tmp_path / "hangs")
    builder = ask(tmp_path)
    program = int(await asyncio.to_thread((tmp_path / "hangs").read_text))
    scratch = tmp_path / "cache" / "scratch"

    async with LayerCache(tmp_path / "cache", 0):
        assert (next(path for path in scratch.iterdir() if path.is_dir()) / "tree" / "file").exists()
    builder.kill()
    builder.communicate()
    await gone(program)
    async with LayerCache(tmp_path / "cache", 0):
        pass

    assert left(tmp_path) == {"lock"}


async def test_a_cancelled_build_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    required("patchelf", "uv")
    os.mkfifo(tmp_path / "begun")
    hang = f"import os, time\nopen({str(tmp_path / 'begun')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    source = AgentSource(source=str(backend(tmp_path / "project", hang)))
    async with LayerCache(tmp_path / "cache", GiB) as cache, asyncio.TaskGroup() as tasks:
        building = tasks.create_task(prepare_agent(source, cache, tmp_path / "log"))
        pid = int(await asyncio.to_thread((tmp_path / "begun").read_text))

        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

        assert not list((tmp_path / "cache" / "scratch").iterdir())
        await gone(pid)


async def test_a_program_that_exceeds_its_time_is_killed_with_its_children(tmp_path: Path) -> None:
    programs = ProgramRunner(tmp_path / "log", tmp_path, keep=[], env={})

    with pytest.raises(ImageFailed, match=r"`sh` took longer than 0\.5 s"):
        await programs.run(["sh", "-c", "sleep 600 & echo $! > child; wait"], 0.5)

    await gone(int((tmp_path / "child").read_text()))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=False)
    if mounted.returncode != 0:
        reason = "cannot mount a tmpfs: needs root"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


async def test_a_layer_too_large_for_the_disk_fails_and_leaves_nothing(
    small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "noise").write_bytes(os.urandom(8 * MiB))
    source = AgentSource(directory=str(tmp_path / "agent"))
    async with LayerCache(small_disk / "cache", GiB) as cache:
        with pytest.raises(ImageFailed, match="No space left"):
            await prepare_agent(source, cache, tmp_path / "log")
        assert not list((small_disk / "cache" / "scratch").iterdir())

        (tmp_path / "agent" / "noise").write_bytes(b"less")
        assert (await prepare_agent(source, cache, tmp_path / "log")).layer.size
