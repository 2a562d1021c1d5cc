"""What containers of the tests start from: an image of programs of this machine, Python among them.

The daemon is `docker_daemon.py`'s.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.docker_daemon import Daemon, needed

from holdwater.core.records import Network, SandboxSpec
from holdwater.core.sandbox_kind import RUN_LABEL, Containers
from holdwater.docker.client import DockerClient
from holdwater.sandbox.docker.sandboxes import DockerSandboxes

IMAGE = "box:1"
START = SandboxSpec(image=IMAGE)
POOL = "10.213.0.0/16"
NUMBERS = count(1)  # of runs
PROGRAMS = (
    *("sh", "sleep", "id", "cat", "ls", "mkdir", "ln", "head", "dd", "kill", "setsid", "env", "rm", "chmod"),
    *("chown", "touch", "true", "mv", "mkfifo", "git", "bash", "seq"),
)
PYTHON = Path("/usr/bin/python3")
LEFT_OUT = {
    "test",
    "idlelib",
    "ensurepip",
    "tkinter",
    "__pycache__",
    "dist-packages",
    "lib2to3",
    "pydoc_data",
}
USERS = b"root:x:0:0::/root:/bin/sh\nagent:x:1000:1001::/home/agent:/bin/sh\n"
GROUPS = b"root:x:0:\nagent:x:1001:\n"


def import_image(daemon: Daemon, *, without: tuple[str, ...] = (), name: str = IMAGE) -> str:
    """The image in the daemon, made if need be."""
    needed("ldd")
    change = ["--change", "WORKDIR /work", "--change", "ENV PATH=/usr/local/bin:/usr/bin:/bin"]
    daemon.docker("import", *change, "-", name, data=_root(without))
    return name


def _root(without: tuple[str, ...]) -> bytes:
    files = dict(_programs([name for name in PROGRAMS if name not in without]))
    if "python3" not in without:
        files.update(_python())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, path in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = path.stat().st_size, 0o755
            with path.open("rb") as file:
                made.addfile(info, file)
        for name, mode in (("tmp", 0o1777), ("root", 0o700), ("home/agent", 0o755), ("work", 0o755)):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            if name == "home/agent":
                info.uid, info.gid = 1000, 1001
            made.addfile(info)
        for name, content in (
            ("etc/passwd", USERS),
            ("etc/group", GROUPS),
            ("work/here", b"in the image\n"),
            ("work/deep/down", b"in the image too\n"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _programs(names: list[str]) -> Iterator[tuple[str, Path]]:
    for name in names:
        program = Path(shutil.which(name, path="/bin:/usr/bin:/sbin:/usr/sbin") or f"/bin/{name}")
        yield f"bin/{name}", program.resolve()
        yield from _libraries(program)


def _libraries(program: Path) -> Iterator[tuple[str, Path]]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    for library in re.findall(r"(/\S+) \(0x", told):
        yield library.lstrip("/"), Path(library).resolve()


def _python() -> Iterator[tuple[str, Path]]:
    needed(str(PYTHON))
    program = PYTHON.resolve()
    yield "usr/bin/python3", program
    yield from _libraries(program)
    library = Path("/usr/lib", program.name)
    for path in library.rglob("*"):
        if path.is_file() and not LEFT_OUT & set(path.relative_to(library).parts):
            yield str(path).lstrip("/"), path
            if path.suffix == ".so":
                yield from _libraries(path)


@asynccontextmanager
async def sandboxes(
    daemon: Daemon, network: Network = Network.NONE, run: str = "", **containers: Any
) -> AsyncIterator[DockerSandboxes]:
    """Opens containers in the daemon; none of them is left at the end."""
    told = Containers(host=daemon.host, run=run or f"r{next(NUMBERS)}", home="tests", **containers)
    threads = ThreadPoolExecutor(2)
    async with DockerClient(daemon.host) as client:
        yield DockerSandboxes(client, told, network, threads)
    threads.shutdown()
    assert containers_of(daemon, told.run) == []


def containers_of(daemon: Daemon, run: str) -> list[str]:
    return daemon.docker("ps", "--all", "--quiet", "--filter", f"label={RUN_LABEL}={run}").split()
