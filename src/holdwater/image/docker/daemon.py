"""Inspect a docker daemon's images, disk and build cache, and remove own objects from it.

`ownership.py` decides which objects are own, and `janitor.py` when they are removed. The daemon may run in
its own mount namespace, so its directory is read through the root of its process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import RunStopped
from ...core.image import Note
from ...core.records import MiB, Record
from ...docker.build import BuildCache, CacheRecord
from ...docker.client import DockerClient, DockerError
from ...ledger.durable_files import hold_lock
from .ownership import SOURCE_KIND, BuildTrace, find_own_records, find_unfinished

NAMESPACE = "holdwater.local"  # no registry has this name, so these tags are never pushed or pulled
ABANDON_SECONDS = 10.0  # time in which a daemon notices that the client of a build is dead


class DaemonLeftover(Record, frozen=True):
    """One of holdwater's own objects on the daemon."""

    kind: str  # `tag`, `base`, `cache`
    name: str
    size: int = 0  # bytes; 0: unknown


async def has_image(client: DockerClient, reference: str) -> bool:
    """Return whether the daemon has an image with this name, owned or foreign."""
    return await client.get_or_none(f"/images/{reference}/json") is not None


async def read_image_size(client: DockerClient, reference: str) -> int:
    """Return the unpacked size of an image in bytes."""
    return int((await client.get(f"/images/{reference}/json"))["Size"])


async def tag_image(client: DockerClient, source: str, target: str) -> None:
    name, _, tag = target.rpartition(":")
    await client.post(f"/images/{source}/tag", {"repo": name, "tag": tag})


async def list_tags(client: DockerClient, run: str = "") -> list[str]:
    """Return the tags in holdwater's namespace: of one run, or of all runs for an empty name."""
    images = await client.get("/images/json")
    prefix = f"{NAMESPACE}/{run}:" if run else f"{NAMESPACE}/"
    return [tag for image in images for tag in image["RepoTags"] or () if tag.startswith(prefix)]


async def delete_image(client: DockerClient, reference: str) -> bool:
    """Remove an image name; return whether the name is gone. An image that a container uses stays."""
    try:
        await client.delete(f"/images/{reference}", {"noprune": "true", "force": "false"})
    except DockerError as error:
        if error.status not in (404, 409):
            raise
        return error.status == 404
    return True


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


class CachePruner:
    """Prunes one build cache. `lock` is a file that all builds of this machine share."""

    def __init__(self, records: BuildCache, lock: Path, note: Note, quiet: float) -> None:
        self._records = records
        self._lock = lock
        self._note = note
        self._quiet = quiet

    async def list_records(self) -> list[CacheRecord]:
        """Return the cache's records; wait a bounded time until no own build runs.

        A daemon that lists its records at the moment when a build becomes an image may count one reference
        to a layer too many, and then never frees the layer.
        """
        async with hold_lock(self._lock, self._quiet):
            return await self._records.records()

    async def is_idle(self) -> bool:
        """Return whether no own build runs at this moment."""
        async with hold_lock(self._lock, 0.0) as given:
            return given

    async def prune(self, traces: Sequence[BuildTrace], *, sources: bool) -> list[CacheRecord]:
        """Remove the records of builds with these traces; return the remaining records."""
        if not traces:
            return []
        records = await self.list_records()
        mine = [one for one in find_own_records(records, traces) if sources or one.kind != SOURCE_KIND]
        stuck = [one for one in mine if not await self._records.remove(one.id)]
        if not stuck:
            gone = {one.id for one in mine}
            return [one for one in records if one.id not in gone]
        records = await self.list_records()
        still = {one.id for one in find_own_records(records, traces)}.intersection(one.id for one in stuck)
        if still:
            size = sum(one.size for one in stuck if one.id in still)
            self._note(
                "cleanup.failed",
                f"build cache: {len(still)} idle records stay, {size} bytes: the prune reclaimed 0 B of them",
            )
        return records

    async def prune_all(self, traces: Sequence[BuildTrace]) -> list[BuildTrace]:
        """Remove all records of these builds, including interrupted builds that the daemon is still ending.

        Return the traces of builds with remaining records, which others need now.
        """
        broken = [trace for trace in traces if not trace.whole]
        until = time.monotonic() + ABANDON_SECONDS
        while True:
            left = await self.prune(traces, sources=True)
            going = any(one.in_use and trace.covers(one) for one in left for trace in broken)
            if not going or time.monotonic() > until:
                return find_unfinished(left, traces)
            await asyncio.sleep(0.2)  # the daemon sends no event for it
