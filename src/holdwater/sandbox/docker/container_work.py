"""Finds the changes below a container's working directory since `mark`, archives and restores them.

The daemon reports which paths differ from the image. A few paths are inspected one by one; for many, the
whole directory is read once. `sandbox/salvage_archive.py` has the format of the archive: work salvaged from
one kind of sandbox can be restored in the other.
"""

from __future__ import annotations

import asyncio
import copy
import io
import os
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TypeVar

import blake3
import msgspec

from ...core.errors import SandboxFailed
from ...core.records import GiB, MiB, Salvage
from .. import salvage_archive
from ..changes import TRACES
from ..tree_copy import split_name
from ..tree_stream import FileOwner, open_tar
from .files import ContainerFiles, read_through, write_through

T = TypeVar("T")

FEW = 32  # paths inspected one by one
MOST = 20_000  # paths remembered, and paths kept
READ_THROUGH = 2 * GiB  # bytes of a directory that are read
IN_MEMORY = 64 * MiB  # bytes of files fetched one by one
PIECE = 1 << 20  # bytes
MODIFIED, ADDED, DELETED = 0, 1, 2  # the daemon's numbers
KEPT = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)


class PathState(msgspec.Struct, frozen=True):
    """The state of a path."""

    like: str  # fingerprint: changes when the path changes
    kind: bytes  # tar type
    mode: int
    size: int = 0
    first: str = ""  # for a hard link: the path under which the tar has the content


Member = tuple[tarfile.TarInfo, IO[bytes] | None]


class WorkSnapshot(msgspec.Struct, frozen=True):
    """The differences between a working directory and its image."""

    kinds: dict[str, int]  # by path below the working directory; bound: MOST
    seen: dict[str, PathState]  # paths that exist; bound: MOST
    hashed: bool
    cut: bool = False  # there is more than was read
    outside: frozenset[str] = frozenset()  # paths outside the working directory; bound: MOST


class ReadBounds:
    """Limits how much of a directory is read; `exceeded` is set when there is more."""

    def __init__(self) -> None:
        self.bytes = READ_THROUGH
        self.paths = MOST
        self.exceeded = False

    def allow(self, member: tarfile.TarInfo) -> bool:
        """Return whether one more member may be read."""
        self.exceeded = self.exceeded or self.bytes <= 0 or self.paths <= 0
        self.bytes -= member.size
        return not self.exceeded


class ContainerWork:
    """The work in one container. `counted`: not on a volume, so that the daemon can report the changes."""

    def __init__(self, files: ContainerFiles, workdir: str, counted: bool, threads: Executor) -> None:
        self._files = files
        self._workdir = workdir
        self._counted = counted
        self._threads = threads
        self._before = WorkSnapshot({}, {}, hashed=not counted)
        self.outside = 0  # number of paths changed outside the working directory, found by the last salvage

    async def mark(self) -> None:
        """Record the current state; later changes are the agent's work."""
        self._before = await self._take_snapshot()

    async def salvage(self, into: Path) -> Salvage | None:
        """Write the changes since `mark` to the file `into`; return None if there are none."""
        before = self._before
        now = await self._take_snapshot(hashed=before.hashed)
        altered = {
            path: seen
            for path, seen in now.seen.items()
            if not (path in before.seen and before.seen[path].like == seen.like)
            and not (seen.kind == tarfile.DIRTYPE and now.kinds[path] == MODIFIED)
        }
        deleted = [path for path, kind in before.kinds.items() if kind != DELETED and path not in now.kinds]
        deleted += [path for path, kind in now.kinds.items() if kind == DELETED != before.kinds.get(path)]
        cut = before.cut or now.cut
        self.outside = len(now.outside - before.outside)
        if not (altered or deleted or cut):
            return None
        return await self._write_salvage(altered, sorted(deleted), into, cut)

    async def _take_snapshot(self, hashed: bool = False) -> WorkSnapshot:
        kinds, outside = await self._list_changes() if self._counted else (None, frozenset[str]())
        cut = kinds is not None and len(kinds) >= MOST
        there = [path for path, kind in (kinds or {}).items() if kind != DELETED]
        if kinds is None or hashed or len(there) > FEW:
            wanted = None if kinds is None else frozenset(there)
            bounds = ReadBounds()
            seen = await self._read_through(lambda stream: _hash_members(stream, self._depth, wanted, bounds))
            found = dict.fromkeys(seen, ADDED) if kinds is None else kinds
            return WorkSnapshot(found, seen, hashed=True, cut=cut or bounds.exceeded, outside=outside)
        return WorkSnapshot(kinds, await self._inspect_paths(there), hashed=False, cut=cut, outside=outside)

    async def _list_changes(self) -> tuple[dict[str, int], frozenset[str]]:
        """Return the differences to the image: path -> kind in the working directory, and paths elsewhere."""
        told = await self._files.client.get(f"{posixpath.dirname(self._files.archive)}/changes")
        prefix = self._workdir.rstrip("/") + "/"
        below = [one for one in told or () if one["Path"].startswith(prefix)]
        elsewhere = (one["Path"] for one in told or () if not one["Path"].startswith(prefix))
        paths = sorted(elsewhere, key=lambda path: path.split("/"))
        # The daemon lists a directory along with the changes in it, sorted right before them.
        leaves = (
            path
            for path, following in pairwise([*paths, ""])
            if not following.startswith(f"{path}/") and not prefix.startswith(f"{path}/")
        )
        outside = frozenset(islice((path for path in leaves if not TRACES.match(path)), MOST))
        return {one["Path"][len(prefix) :]: one["Kind"] for one in below[:MOST]}, outside

    async def _inspect_paths(self, paths: Sequence[str]) -> dict[str, PathState]:
        """Inspect paths one by one."""
        seen = {}
        for path in paths:
            found = await self._files.lstat(posixpath.join(self._workdir, path))
            if found is not None and found.kind in KEPT:
                changing = "" if found.is_directory else f"{found.size} {found.mtime} {found.link}"
                like = f"{found.mode} {changing}"
                seen[path] = PathState(like, found.kind, found.mode & 0o777, found.size)
        return seen

    async def _write_salvage(
        self, altered: dict[str, PathState], deleted: list[str], into: Path, cut: bool
    ) -> Salvage:
        chosen, left_out = _choose_paths(altered)

        def pack(found: Iterable[Member]) -> Salvage:
            missing = set(chosen)
            with salvage_archive.create_archive(into) as made:
                made.missing += cut
                for path in deleted:
                    made.delete(os.fsencode(path))
                for info, content in found:
                    missing.discard(info.name)
                    made.add(info, content)
                for path in (*left_out, *sorted(missing)):
                    made.leave_out(os.fsencode(path))
            return made.describe(into)

        if len(chosen) > FEW or sum(altered[path].size for path in chosen) > IN_MEMORY:
            firsts = {path: altered[path].first for path in chosen if altered[path].first}
            wanted, bounds = frozenset([*chosen, *firsts.values()]), ReadBounds()
            return await self._read_through(
                lambda stream: pack(
                    _expand(_read_members(stream, self._depth, wanted, bounds), chosen, firsts)
                )
            )
        fetched = [await self._fetch(path, altered[path]) for path in chosen]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, pack, fetched)

    async def _fetch(self, path: str, seen: PathState) -> Member:
        if seen.kind == tarfile.DIRTYPE:
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, seen.mode
            return info, None
        info, content = await self._files.fetch(posixpath.join(self._workdir, path))
        info.name = path
        return info, io.BytesIO(content)

    @property
    def _depth(self) -> int:
        """Number of leading parts of a member's name up to the working directory."""
        return 0 if self._workdir == "/" else 1

    async def _read_through(self, work: Callable[[IO[bytes]], T]) -> T:
        return await read_through(self._files, self._workdir, work, self._threads)


async def restore(
    files: ContainerFiles, workdir: str, source: Path, owner: FileOwner, threads: Executor
) -> None:
    """Write the changed and added paths; the deleted ones (`read_deleted`) must be gone already."""

    def pack(into: IO[bytes]) -> None:
        with salvage_archive.open_archive(source) as kept, open_tar(into) as tar:
            for member in salvage_archive.read_members(kept):
                if salvage_archive.is_restored(member):
                    tar.addfile(
                        _set_owner(member, owner), kept.extractfile(member) if member.isreg() else None
                    )

    await write_through(files, workdir, pack, threads)


def read_deleted(source: Path) -> list[str]:
    """Return the deleted paths; refuse an incomplete archive. Blocks."""
    gone: list[str] = []
    with salvage_archive.open_archive(source) as kept:
        for member in salvage_archive.read_members(kept):
            salvage_archive.check_whole(member)
            if member.name == "deleted" and (listed := kept.extractfile(member)):
                paths = [os.fsdecode(path) for path in listed.read().split(b"\0") if path]
                gone = ["/".join(salvage_archive.split_path(path)) for path in paths]
    return gone


def _set_owner(member: tarfile.TarInfo, owner: FileOwner) -> tarfile.TarInfo:
    member.name = "/".join(salvage_archive.split_path(member.name.removeprefix("work/")))
    if member.type not in KEPT:
        raise SandboxFailed(f"neither file, link nor directory: `{member.name}`", again=False)
    member.uid, member.gid, member.uname, member.gname = owner.uid, owner.gid, "", ""
    if member.isdir():
        member.mode |= 0o700  # later members must be able to enter it
    return member


def _choose_paths(altered: dict[str, PathState]) -> tuple[list[str], list[str]]:
    """Return the paths to keep, and the paths that would exceed the size limit."""
    limit = salvage_archive.SizeLimit(seen.size for seen in altered.values() if seen.kind == tarfile.REGTYPE)
    chosen: list[str] = []
    left_out: list[str] = []
    for path, seen in sorted(altered.items()):
        fits = seen.kind != tarfile.REGTYPE or limit.admit(seen.size)
        (chosen if fits else left_out).append(path)
    return chosen, left_out


def _read_members(
    stream: IO[bytes], depth: int, wanted: Collection[str] | None, bounds: ReadBounds
) -> Iterator[Member]:
    """Yield a tar's members, named by their path below the working directory, up to the bounds."""
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in salvage_archive.read_members(tar):
            if not bounds.allow(member):
                break
            path = "/".join(split_name(member.name)[depth:])
            if path and member.type in (*KEPT, tarfile.LNKTYPE) and (wanted is None or path in wanted):
                bounds.paths -= 1
                member.name = path
                if member.islnk():
                    member.linkname = "/".join(split_name(member.linkname)[depth:])
                yield member, tar.extractfile(member) if member.isreg() else None


def _expand(members: Iterator[Member], chosen: Collection[str], firsts: dict[str, str]) -> Iterator[Member]:
    """Yield the chosen members; hard links become separate files, right after the file with their content."""
    names: dict[str, list[str]] = {first: [] for first in firsts.values()}  # bound: MOST
    for path, first in firsts.items():
        names[first].append(path)
    wanted = frozenset(chosen)
    for member, content in members:
        if member.islnk() or content is None or member.name not in names:
            if not member.islnk() and member.name in wanted:
                yield member, content
            continue
        with tempfile.TemporaryFile() as spool:
            shutil.copyfileobj(content, spool)
            for path in (member.name, *names[member.name]):
                if path in wanted:
                    spool.seek(0)
                    info = copy.copy(member)
                    info.name = path
                    yield info, spool


def _hash_members(
    stream: IO[bytes], depth: int, wanted: Collection[str] | None, bounds: ReadBounds
) -> dict[str, PathState]:
    seen: dict[str, PathState] = {}
    for member, content in _read_members(stream, depth, wanted, bounds):
        if member.islnk():
            like = f"{member.mode} another name of {member.linkname}"
            first = seen.get(member.linkname, PathState(like, tarfile.REGTYPE, member.mode & 0o777))
            seen[member.name] = msgspec.structs.replace(first, first=member.linkname)
            continue
        digest = blake3.blake3()
        while content and (piece := content.read(PIECE)):
            digest.update(piece)
        like = f"{member.mode} {member.linkname} {digest.hexdigest(16)}"
        seen[member.name] = PathState(like, member.type, member.mode & 0o777, member.size)
    return seen
