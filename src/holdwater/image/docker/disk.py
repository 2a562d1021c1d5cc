"""Measure the file system that a docker daemon writes to, and check that a build fits on it.

The daemon may run in its own mount namespace, so its directory is read through the root of its process.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...core.errors import RunStopped
from ...core.records import MiB, Record
from ...docker.client import DockerClient


class DaemonDisk(Record, frozen=True):
    """The file system that holds the daemon's data."""

    path: str  # as this process reaches it
    total: int  # bytes
    free: int


async def find_daemon_disk(client: DockerClient, proc: Path = Path("/proc")) -> DaemonDisk:
    """Return the daemon's disk as it is now; raise `RunStopped` with the path if it is not accessible."""
    told = await client.get("/info")
    return measure_disk(_find_path(client, Path(told["DockerRootDir"]), proc))


def measure_disk(path: str | Path) -> DaemonDisk:
    """Return the current size and free space of the file system at `path`."""
    told = os.statvfs(path)
    free, total = told.f_bavail * told.f_frsize, told.f_blocks * told.f_frsize
    return DaemonDisk(path=str(path), total=total, free=free)


def preflight(need: int, disk: DaemonDisk) -> None:
    """Raise `RunStopped` before the build starts if the disk has less free space than the build needs."""
    if need > disk.free:
        raise RunStopped(
            f"the docker daemon's disk has too little room: {_format_mib(need)} are needed, "
            f"{_format_mib(disk.free)} are free: `{disk.path}`",
            "make room there, or build fewer images at once",
        )


def _find_path(client: DockerClient, root: Path, proc: Path) -> Path:
    pid = client.find_peer()
    if pid is None:
        raise _unseen_error(root, f"the daemon at `{client.host}` is not a process on this machine")
    try:
        same = (proc / f"{pid}/ns/mnt").readlink() == (proc / "self/ns/mnt").readlink()
        path = root if same else proc / f"{pid}/root" / root.relative_to("/")
        path.stat()
    except OSError as error:
        raise _unseen_error(root, f"process {pid}: {error}") from error
    return path


def _unseen_error(root: Path, why: str) -> RunStopped:
    return RunStopped(
        f"the docker daemon's disk cannot be seen from here: `{root}`: {why}",
        "run this on the daemon's machine, with permission to read its files",
    )


def _format_mib(size: int) -> str:
    return f"{size / MiB:,.1f} MiB"
