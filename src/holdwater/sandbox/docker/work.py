"""What changed below a container's working directory since it was marked, as an archive, and back again.

Which paths changed is what the daemon counts against the image. What they are like is asked for one by one if
they are few, and found in one reading of the whole directory otherwise. The archive is that of
`sandbox/changes.py`: what is kept in one kind of sandbox can be put back in the other.
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
from .. import changes
from ..outside import TRACES
from ..unpack import steps_of
from . import trees
from .files import Files, Owner

T = TypeVar("T")

FEW = 32  # paths that are asked for one by one
MOST = 20_000  # paths that are remembered, and that are kept
READ_THROUGH = 2 * GiB  # bytes of a directory that are looked at
IN_MEMORY = 64 * MiB  # bytes of files that are asked for one by one
PIECE = 1 << 20  # bytes
MODIFIED, ADDED, DELETED = 0, 1, 2  # as the daemon says
KEPT = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)


class Seen(msgspec.Struct, frozen=True):
    """What is at a path."""

    like: str  # the same as long as it stays the same
    kind: bytes  # as in a tar
    mode: int
    size: int = 0
    first: str = ""  # of a hard link: the path under which its content came


Member = tuple[tarfile.TarInfo, IO[bytes] | None]


class Look(msgspec.Struct, frozen=True):
    """What of a working directory is not as in its image."""

    kinds: dict[str, int]  # by path below it; bound: MOST
    seen: dict[str, Seen]  # of those that are there; bound: MOST
    hashed: bool
    cut: bool = False  # there is more than was looked at
    outside: frozenset[str] = frozenset()  # not below the working directory; bound: MOST


class ReadBounds:
    """How much of a directory is read; `exceeded` says that there is more."""

    def __init__(self) -> None:
        self.bytes = READ_THROUGH
        self.paths = MOST
        self.exceeded = False

    def allow(self, member: tarfile.TarInfo) -> bool:
        """Whether one more member may be read."""
        self.exceeded = self.exceeded or self.bytes <= 0 or self.paths <= 0
        self.bytes -= member.size
        return not self.exceeded


class Work:
    """The work in one container. `counted`: the daemon can say what changed, as it is not on a volume."""

    def __init__(self, files: Files, workdir: str, counted: bool, threads: Executor) -> None:
        self._files = files
        self._workdir = workdir
        self._counted = counted
        self._threads = threads
        self._before = Look({}, {}, hashed=not counted)
        self.outside = 0  # paths that changed outside the working directory, as the last salvage found

    async def mark(self) -> None:
        """What changes from now on is the agent's work."""
        self._before = await self._look()

    async def salvage(self, into: Path) -> Salvage | None:
        """Keep what changed since in the file `into`; None when nothing did."""
        before = self._before
        now = await self._look(hashed=before.hashed)
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
        return await self._keep(altered, sorted(deleted), into, cut)

    async def _look(self, hashed: bool = False) -> Look:
        kinds, outside = await self._kinds() if self._counted else (None, frozenset[str]())
        cut = kinds is not None and len(kinds) >= MOST
        there = [path for path, kind in (kinds or {}).items() if kind != DELETED]
        if kinds is None or hashed or len(there) > FEW:
            wanted = None if kinds is None else frozenset(there)
            bounds = ReadBounds()
            seen = await self._read_through(lambda stream: _hashed(stream, self._depth, wanted, bounds))
            found = dict.fromkeys(seen, ADDED) if kinds is None else kinds
            return Look(found, seen, hashed=True, cut=cut or bounds.exceeded, outside=outside)
        return Look(kinds, await self._ask(there), hashed=False, cut=cut, outside=outside)

    async def _kinds(self) -> tuple[dict[str, int], frozenset[str]]:
        """What is not as in the image: below the working directory by its kind, and elsewhere."""
        told = await self._files.client.get(f"{posixpath.dirname(self._files.archive)}/changes")
        prefix = self._workdir.rstrip("/") + "/"
        below = [one for one in told or () if one["Path"].startswith(prefix)]
        elsewhere = (one["Path"] for one in told or () if not one["Path"].startswith(prefix))
        paths = sorted(elsewhere, key=lambda path: path.split("/"))
        # A directory is told along with what changed in it, and stands right before that.
        leaves = (
            path
            for path, following in pairwise([*paths, ""])
            if not following.startswith(f"{path}/") and not prefix.startswith(f"{path}/")
        )
        outside = frozenset(islice((path for path in leaves if not TRACES.match(path)), MOST))
        return {one["Path"][len(prefix) :]: one["Kind"] for one in below[:MOST]}, outside

    async def _ask(self, paths: Sequence[str]) -> dict[str, Seen]:
        """One by one."""
        seen = {}
        for path in paths:
            found = await self._files.look(posixpath.join(self._workdir, path))
            if found is not None and found.kind in KEPT:
                changing = "" if found.is_directory else f"{found.size} {found.mtime} {found.link}"
                like = f"{found.mode} {changing}"
                seen[path] = Seen(like, found.kind, found.mode & 0o777, found.size)
        return seen

    async def _keep(self, altered: dict[str, Seen], deleted: list[str], into: Path, cut: bool) -> Salvage:
        chosen, left_out = _chosen(altered)

        def pack(found: Iterable[Member]) -> Salvage:
            missing = set(chosen)
            with changes.archive(into) as made:
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
                lambda stream: pack(_expand(_members(stream, self._depth, wanted, bounds), chosen, firsts))
            )
        fetched = [await self._fetched(path, altered[path]) for path in chosen]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, pack, fetched)

    async def _fetched(self, path: str, seen: Seen) -> Member:
        if seen.kind == tarfile.DIRTYPE:
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, seen.mode
            return info, None
        info, content = await self._files.fetch(posixpath.join(self._workdir, path))
        info.name = path
        return info, io.BytesIO(content)

    @property
    def _depth(self) -> int:
        """How many parts of a member's name are not below the working directory."""
        return 0 if self._workdir == "/" else 1

    async def _read_through(self, work: Callable[[IO[bytes]], T]) -> T:
        return await trees.read_through(self._files, self._workdir, work, self._threads)


async def restore(files: Files, workdir: str, source: Path, owner: Owner, threads: Executor) -> None:
    """Write what was changed or added; what was deleted has to be gone already (`deleted`)."""

    def pack(into: IO[bytes]) -> None:
        with changes.opened(source) as kept, trees.packing(into) as tar:
            for member in changes.members(kept):
                if changes.is_restored(member):
                    tar.addfile(_owned(member, owner), kept.extractfile(member) if member.isreg() else None)

    await trees.write_through(files, workdir, pack, threads)


def deleted(source: Path) -> list[str]:
    """The paths that were deleted; an archive that is not whole is refused. Blocks."""
    gone: list[str] = []
    with changes.opened(source) as kept:
        for member in changes.members(kept):
            changes.check_whole(member)
            if member.name == "deleted" and (listed := kept.extractfile(member)):
                paths = [os.fsdecode(path) for path in listed.read().split(b"\0") if path]
                gone = ["/".join(changes.steps_of(path)) for path in paths]
    return gone


def _owned(member: tarfile.TarInfo, owner: Owner) -> tarfile.TarInfo:
    member.name = "/".join(changes.steps_of(member.name.removeprefix("work/")))
    if member.type not in KEPT:
        raise SandboxFailed(f"neither file, link nor directory: `{member.name}`", again=False)
    member.uid, member.gid, member.uname, member.gname = owner.uid, owner.gid, "", ""
    if member.isdir():
        member.mode |= 0o700  # what follows must be able to go into it
    return member


def _chosen(altered: dict[str, Seen]) -> tuple[list[str], list[str]]:
    """Which of these are kept, and which are too large together."""
    files = [seen.size for seen in altered.values() if seen.kind == tarfile.REGTYPE]
    limit, of_limit = changes.largest_kept(files)
    chosen: list[str] = []
    left_out: list[str] = []
    for path, seen in sorted(altered.items()):
        regular = seen.kind == tarfile.REGTYPE
        of_limit -= regular and seen.size == limit
        too_large = regular and (seen.size > limit or (seen.size == limit and of_limit < 0))
        (left_out if too_large else chosen).append(path)
    return chosen, left_out


def _members(
    stream: IO[bytes], depth: int, wanted: Collection[str] | None, bounds: ReadBounds
) -> Iterator[Member]:
    """What a tar holds, by the path below the working directory; as far as is looked at all."""
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        while (member := tar.next()) and bounds.allow(member):
            tar.members.clear()  # type: ignore[attr-defined]  # it remembers every member
            path = "/".join(steps_of(member.name)[depth:])
            if path and member.type in (*KEPT, tarfile.LNKTYPE) and (wanted is None or path in wanted):
                bounds.paths -= 1
                member.name = path
                if member.islnk():
                    member.linkname = "/".join(steps_of(member.linkname)[depth:])
                yield member, tar.extractfile(member) if member.isreg() else None


def _expand(members: Iterator[Member], chosen: Collection[str], firsts: dict[str, str]) -> Iterator[Member]:
    """The chosen members; hard links as files of their own, right after the one that has their content."""
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


def _hashed(
    stream: IO[bytes], depth: int, wanted: Collection[str] | None, bounds: ReadBounds
) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    for member, content in _members(stream, depth, wanted, bounds):
        if member.islnk():
            like = f"{member.mode} another name of {member.linkname}"
            first = seen.get(member.linkname, Seen(like, tarfile.REGTYPE, member.mode & 0o777))
            seen[member.name] = msgspec.structs.replace(first, first=member.linkname)
            continue
        digest = blake3.blake3()
        while content and (piece := content.read(PIECE)):
            digest.update(piece)
        like = f"{member.mode} {member.linkname} {digest.hexdigest(16)}"
        seen[member.name] = Seen(like, member.type, member.mode & 0o777, member.size)
    return seen
