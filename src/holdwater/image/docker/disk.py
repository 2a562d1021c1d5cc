"""The file system that a docker daemon really writes to: what is free there, and whether that is enough.

The daemon may live in a mount name space of its own: its directory is looked at through its own root.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...core.errors import RunStopped
from ...core.records import MiB, Record
from ...docker.client import DockerClient


class DaemonDisk(Record, frozen=True):
    """The file system of the daemon's data."""

    path: str  # as it is seen from here
    total: int  # bytes
    free: int


async def daemon_disk(client: DockerClient, proc: Path = Path("/proc")) -> DaemonDisk:
    """As it is now; raises `RunStopped`, naming the path, where it cannot be seen."""
    told = await client.get("/info")
    return reread(_seen(client, Path(told["DockerRootDir"]), proc))


def reread(path: str | Path) -> DaemonDisk:
    """The same file system as it is now."""
    told = os.statvfs(path)
    free, total = told.f_bavail * told.f_frsize, told.f_blocks * told.f_frsize
    return DaemonDisk(path=str(path), total=total, free=free)


def preflight(need: int, disk: DaemonDisk) -> None:
    """Stop the build before it begins if less than it needs is free."""
    if need > disk.free:
        raise RunStopped(
            f"the docker daemon's disk has too little room: {_mib(need)} are needed, "
            f"{_mib(disk.free)} are free: `{disk.path}`",
            "make room there, or build fewer images at once",
        )


def _seen(client: DockerClient, root: Path, proc: Path) -> Path:
    pid = client.peer()
    if pid is None:
        raise _unseen(root, f"the daemon at `{client.host}` is no process of this machine's")
    try:
        same = (proc / f"{pid}/ns/mnt").readlink() == (proc / "self/ns/mnt").readlink()
        path = root if same else proc / f"{pid}/root" / root.relative_to("/")
        path.stat()
    except OSError as error:
        raise _unseen(root, f"process {pid}: {error}") from error
    return path


def _unseen(root: Path, why: str) -> RunStopped:
    return RunStopped(
        f"the docker daemon's disk cannot be seen from here: `{root}`: {why}",
        "run this where the daemon runs, with the right to look at its files",
    )


def _mib(size: int) -> str:
    return f"{size / MiB:,.1f} MiB"
