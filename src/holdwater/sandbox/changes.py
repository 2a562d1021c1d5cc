"""What changed in a working directory: a manifest on disk, the changes since as an archive, and back again.

Manifest and directory are walked in the same order and merged, so that neither is held in memory.
The archive (`.tar.zst`) holds `work/...` (changed, added), `deleted` and `left-out` (paths, NUL-terminated).
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import tarfile
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

import msgspec
import zstandard

from ..core.errors import SandboxFailed
from ..core.failures import UNRESTORED
from ..core.masking import MaskedFile
from ..core.records import MiB, Salvage
from . import beneath

LARGEST = 512 * MiB  # of content in one salvage
SPOOLED = 1 * MiB  # lists above this go to disk
HEAD = struct.Struct("<IIQqQ")  # length of the path, mode, size, mtime in ns, inode
LEVEL = 3
LEFT_OUT = "left-out"
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Entry(msgspec.Struct, frozen=True):
    """One path below the working directory, relative to it."""

    path: bytes
    mode: int
    size: int = 0
    mtime: int = 0
    inode: int = 0

    @property
    def order(self) -> list[bytes]:
        return self.path.split(b"/")


class Change(msgspec.Struct, frozen=True):
    old: Entry | None
    new: Entry | None


def mark(work: str, manifest: Path) -> None:
    """Write down what is there now."""
    with manifest.open("wb") as file:
        for entry in _walk(os.fsencode(work)):
            file.write(HEAD.pack(len(entry.path), entry.mode, entry.size, entry.mtime, entry.inode))
            file.write(entry.path)


def salvage(work: str, manifest: Path, into: Path) -> Salvage | None:
    """Keep what changed since `mark` in the file `into`; None when nothing did."""
    sizes = array("q")
    count = 0
    for change in _changes(work, manifest):
        count += 1
        if change.new and stat.S_ISREG(change.new.mode):
            sizes.append(change.new.size)
    if not count:
        return None
    with archive(into) as made:
        _archive(work, manifest, made, largest_kept(sizes))
    return made.describe(into)


def restore(work: str, source: Path) -> None:
    """Put salvaged work back: delete what was deleted, then write what was changed or added."""
    with opened(source) as tar:
        for member in members(tar):
            check_whole(member)
            if member.name == "deleted":
                _delete(work, tar, member)
    with opened(source) as tar:
        for member in members(tar):
            if member.name.startswith("work/"):
                _put(work, tar, member)


def check_whole(member: tarfile.TarInfo) -> None:
    """Refuse an archive that names paths which it does not hold."""
    if member.name == LEFT_OUT and member.size:
        raise SandboxFailed("the salvage does not hold all of the work", kind=UNRESTORED)


def _walk(root: bytes) -> Iterator[Entry]:
    """Directories, files and links, each directory before what is in it, names in order.

    A directory that cannot be listed has size 1: nothing is known of what is in it.
    """
    waiting: list[tuple[bytes, os.stat_result]] = _listed(root, b"")
    while waiting:
        path, seen = waiting.pop()
        if stat.S_ISDIR(seen.st_mode):
            try:
                inner = _listed(root, path + b"/")
            except OSError:
                yield Entry(path, seen.st_mode, size=1)
                continue
            waiting += inner
            yield Entry(path, seen.st_mode)
        elif stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode):
            yield Entry(path, seen.st_mode, seen.st_size, seen.st_mtime_ns, seen.st_ino)


def _listed(root: bytes, prefix: bytes) -> list[tuple[bytes, os.stat_result]]:
    """What is in a directory, last name first."""
    with os.scandir(root + b"/" + prefix) as entries:
        found = [(prefix + entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return sorted(found, reverse=True)


def _recorded(manifest: Path) -> Iterator[Entry]:
    if not manifest.exists():
        return
    with manifest.open("rb") as file:
        while head := file.read(HEAD.size):
            length, mode, size, mtime, inode = HEAD.unpack(head)
            yield Entry(file.read(length), mode, size, mtime, inode)


def _changes(work: str, manifest: Path) -> Iterator[Change]:
    """The merge of two walks in the same order."""
    before, after = _recorded(manifest), _walk(os.fsencode(work))
    old, new = next(before, None), next(after, None)
    unknown: bytes | None = None  # the directory that cannot be listed: what was in it is not deleted
    while old or new:
        if old and (new is None or old.order < new.order):
            if unknown is None or not old.path.startswith(unknown):
                yield Change(old, None)
            old = next(before, None)
            continue
        assert new is not None
        if stat.S_ISDIR(new.mode) and new.size:
            unknown = new.path + b"/"
        same = old if old and old.path == new.path else None
        if not _alike(same, new):
            yield Change(same, new)
        old, new = next(before, None) if same else old, next(after, None)


def _alike(old: Entry | None, new: Entry) -> bool:
    if old and stat.S_ISDIR(old.mode):
        return old.mode == new.mode
    return old == new


def largest_kept(sizes: Iterable[int]) -> tuple[int, int]:
    """The smallest files first until `LARGEST`: the largest size that is kept, and how many of that size."""
    ordered = sorted(sizes)
    total = 0
    for i, size in enumerate(ordered):
        total += size
        if total > LARGEST:
            return size, i - ordered.index(size)
    return LARGEST + 1, 0


def _archive(work: str, manifest: Path, made: Archive, largest: tuple[int, int]) -> None:
    """Write the changes down."""
    limit, of_limit = largest
    for change in _changes(work, manifest):
        new = change.new
        if new is None:
            assert change.old is not None
            made.delete(change.old.path)
            continue
        regular = stat.S_ISREG(new.mode)
        of_limit -= regular and new.size == limit
        if regular and (new.size > limit or (new.size == limit and of_limit < 0)):
            made.leave_out(new.path)
        else:
            _add(work, made, new)


class Archive:
    """The archive while it is written."""

    def __init__(self, tar: tarfile.TarFile, deleted: IO[bytes], left_out: IO[bytes]) -> None:
        self.paths = 0  # that it holds
        self.missing = 0  # that it leaves out
        self._tar = tar
        self._deleted = deleted
        self._left_out = left_out

    def add(self, info: tarfile.TarInfo, content: Any = None) -> None:
        """A path below the working directory, as `info.name` has it, and what is in it if it is a file."""
        info.name = f"work/{info.name}"
        masked: Any = None if content is None else MaskedFile(content, info.size)
        self._tar.addfile(info, masked)
        _forget(self._tar)
        self.paths += 1

    def delete(self, path: bytes) -> None:
        self._deleted.write(path + b"\0")
        self.paths += 1

    def leave_out(self, path: bytes) -> None:
        self._left_out.write(path + b"\0")
        self.missing += 1

    def finish(self) -> None:
        for name, listed in (("deleted", self._deleted), (LEFT_OUT, self._left_out)):
            _add_list(self._tar, name, listed)

    def describe(self, path: Path) -> Salvage:
        """The finished archive, which lies at `path`."""
        return Salvage(name=path.name, files=self.paths, bytes=path.stat().st_size, left_out=self.missing)


@contextmanager
def archive(into: Path) -> Iterator[Archive]:
    """A new archive, which is there whole and durable when this ends, or not at all."""
    with (
        _replacing(into) as file,
        _spool() as deleted,
        _spool() as left_out,
        zstandard.ZstdCompressor(LEVEL).stream_writer(file, closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        made = Archive(tar, deleted, left_out)
        yield made
        made.finish()


def _add(work: str, made: Archive, entry: Entry) -> None:
    """Add one path; one that cannot be read is left out."""
    info = tarfile.TarInfo(os.fsdecode(entry.path))
    info.mode = stat.S_IMODE(entry.mode)
    info.mtime = entry.mtime // 1_000_000_000
    steps = os.fsdecode(entry.path).split("/")
    try:
        if stat.S_ISDIR(entry.mode):
            info.type = tarfile.DIRTYPE
            made.add(info)
            if entry.size:  # the directory could not be listed
                made.leave_out(entry.path)
        elif stat.S_ISLNK(entry.mode):
            info.type = tarfile.SYMTYPE
            with beneath.open_parent(work, steps) as parent:
                info.linkname = os.readlink(steps[-1], dir_fd=parent)
            made.add(info)
        else:
            with beneath.open_file(work, steps, os.O_RDONLY) as fd:
                info.size = entry.size
                made.add(info, Exactly(fd))
    except (PermissionError, FileNotFoundError, NotADirectoryError, SandboxFailed):
        made.leave_out(entry.path)


class Exactly(RawIOBase):
    """Gives as many bytes as it is asked for: a file that shrinks meanwhile must not break an archive."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, size: int = -1) -> bytes:
        return os.read(self._fd, size).ljust(size, b"\0")


def _add_list(tar: tarfile.TarFile, name: str, listed: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = listed.tell()
    if info.size:
        listed.seek(0)
        tar.addfile(info, listed)


def _spool() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(SPOOLED)


@contextmanager
def _replacing(into: Path) -> Iterator[IO[bytes]]:
    """A file that is there whole and durable, or not at all."""
    into.parent.mkdir(parents=True, exist_ok=True)
    partial = into.with_name(f".{into.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(into)
        directory = os.open(into.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)  # without it the new name may be gone after a loss of power
        finally:
            os.close(directory)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def opened(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with (
            source.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as content,
            tarfile.open(fileobj=content, mode="r|") as tar,
        ):
            yield tar
    except (OSError, tarfile.TarError, zstandard.ZstdError) as e:
        raise SandboxFailed(f"cannot restore `{source}`: {e}") from e


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while member := tar.next():
        _forget(tar)
        yield member


def _forget(tar: tarfile.TarFile) -> None:
    """tarfile remembers every member that it has met."""
    tar.members.clear()  # type: ignore[attr-defined]


def _delete(work: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    listed: Any = tar.extractfile(member)
    held = b""
    while chunk := listed.read(SPOOLED):
        *paths, held = (held + chunk).split(b"\0")
        for path in paths:
            steps = steps_of(os.fsdecode(path))
            try:
                with beneath.open_parent(work, steps) as parent:
                    _discard(steps[-1], parent)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it went with its directory


def _put(work: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Write one member; links are made as they were and never followed, other kinds are refused."""
    steps = steps_of(member.name.removeprefix("work/"))
    with beneath.open_parent(work, steps, make=True) as parent:
        if member.isdir():
            _put_directory(steps[-1], parent, member.mode)
            return
        _discard(steps[-1], parent)
        if member.issym():
            os.symlink(member.linkname, steps[-1], dir_fd=parent)
            return
    content: Any = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise SandboxFailed(f"neither file, link nor directory: `{member.name}`", again=False)
    with beneath.open_file(work, steps, CREATE) as fd:
        with os.fdopen(fd, "wb", closefd=False) as file:
            shutil.copyfileobj(content, file)
        os.fchmod(fd, member.mode & 0o777)
        os.utime(fd, (member.mtime, member.mtime))


def _put_directory(name: str, parent: int, mode: int) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            _discard(name, parent)
            os.mkdir(name, dir_fd=parent)
    os.chmod(name, (mode & 0o777) | 0o700, dir_fd=parent)  # what follows must be able to go into it


def _discard(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=parent)


def steps_of(path: str) -> list[str]:
    steps = path.split("/")
    if any(step in ("", ".", "..") for step in steps):
        raise SandboxFailed(f"not a path of a working directory: `{path[:300]}`", again=False)
    return steps
