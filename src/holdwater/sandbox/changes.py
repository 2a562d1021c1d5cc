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
from ..ledger.private import make_directory, open_private
from . import beneath

LARGEST = 512 * MiB  # of content in one salvage
SPOOLED = 1 * MiB  # lists above this go to disk
LENGTH = struct.Struct("<I")  # of a path
FACTS = struct.Struct("<IQqqQ")  # mode, size, mtime and ctime in ns, inode
LONGEST = 4096  # bytes of the path of a directory that is listed: no program can name a longer one
MOST_HELD = 128 * MiB  # of names that wait to be walked; about a million
OVERHEAD = 48  # bytes of memory that a name takes beside its own
LOCKED, TOO_DEEP, TOO_MANY = 1, 2, 3  # the size of a directory that was not listed says why
KINDS = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK)
FAR = 2**63 - 1  # ns: a file can be dated later
LEVEL = 3
LEFT_OUT = "left-out"
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Entry(msgspec.Struct, frozen=True):
    """One path below the working directory, relative to it."""

    path: bytes
    mode: int
    size: int = 0
    mtime: int = 0
    ctime: int = 0  # nobody can set this time: it tells of an edit that put the others back
    inode: int = 0

    @property
    def unlisted(self) -> bool:
        return stat.S_ISDIR(self.mode) and self.size > 0

    @property
    def order(self) -> list[bytes]:
        return self.path.split(b"/")


class Change(msgspec.Struct, frozen=True):
    old: Entry | None
    new: Entry | None


def mark(work: str, manifest: Path) -> None:
    """Write down what is there now."""
    with open(manifest, "wb", opener=open_private) as file:
        for entry in _survey(os.fsencode(work)):
            facts = FACTS.pack(entry.mode, entry.size, entry.mtime, entry.ctime, entry.inode)
            file.write(LENGTH.pack(len(entry.path)) + entry.path + facts)


def salvage(work: str, manifest: Path, into: Path) -> Salvage | None:
    """Keep what changed since `mark` in the file `into`; None when nothing did."""
    sizes = array("q")
    count = 0
    for change in compare(work, manifest):
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
            if is_restored(member):
                _put(work, tar, member)


def is_restored(member: tarfile.TarInfo) -> bool:
    """Whether a member is put back; compiled modules are not (`outside.drop_bytecode` says why)."""
    return member.name.startswith("work/") and "__pycache__" not in member.name.split("/")


def check_whole(member: tarfile.TarInfo) -> None:
    """Refuse an archive that names paths which it does not hold."""
    if member.name == LEFT_OUT and member.size:
        raise SandboxFailed("the salvage does not hold all of the work", kind=UNRESTORED)


def walk(root: bytes) -> Iterator[Entry]:
    """Directories, files and links, each directory before what is in it, names in order.

    A directory that is locked or too deep has a size: nothing is known of what is in it. Raise if one has
    too many entries.
    """
    for entry in _survey(root):
        if entry.unlisted and entry.size == TOO_MANY:
            raise SandboxFailed(f"too many files in a directory: `{os.fsdecode(entry.path)[:300]}`")
        yield entry


def _survey(root: bytes) -> Iterator[Entry]:
    """As `walk`, but too many entries are a size too; the top directory then has an empty path."""
    _unlock(Path(os.fsdecode(root)))
    waiting, why = _list(root, b"", MOST_HELD)
    if why:
        yield Entry(b"", stat.S_IFDIR, why)
    path, held, levels = b"", _memory(waiting), [(0, waiting)]  # length of a directory's path, its rest
    while levels:
        length, waiting = levels[-1]
        if not waiting:
            levels.pop()
            continue
        line = waiting.pop()
        held -= _memory([line])
        name, facts = line[: -FACTS.size - 1], FACTS.unpack(line[-FACTS.size :])
        entry = Entry(path[:length] + name, *facts)
        if not stat.S_ISDIR(entry.mode):
            yield entry
            continue
        path = entry.path + b"/"
        inner, why = _list(root, path, MOST_HELD - held)
        held += _memory(inner)
        levels.append((len(path), inner))
        yield Entry(entry.path, entry.mode, why, ctime=entry.ctime if why else 0)


def _memory(lines: list[bytes]) -> int:
    return sum(map(len, lines)) + OVERHEAD * len(lines)


def _unlock(root: Path) -> None:
    """Let us into the top directory: an agent that locks its own must not escape its grade."""
    with beneath.open_parent(str(root.parent), []) as above:
        mode = stat.S_IMODE(os.stat(root.name, dir_fd=above, follow_symlinks=False).st_mode)
        if mode & 0o700 != 0o700:
            beneath.change_mode(root.name, above, mode | 0o700)


def _list(root: bytes, prefix: bytes, room: int) -> tuple[list[bytes], int]:
    """Names and facts of what is in a directory, last name first; or why it is not listed."""
    if len(prefix) > LONGEST:
        return [], TOO_DEEP
    found: list[bytes] = []  # bound: `room`
    steps = os.fsdecode(prefix).split("/")[:-1]
    try:
        with beneath.open_directory(os.fsdecode(root), steps) as fd, os.scandir(fd) as entries:
            for entry in entries:
                seen = entry.stat(follow_symlinks=False)
                if stat.S_IFMT(seen.st_mode) not in KINDS:
                    continue
                times = (max(-FAR, min(time, FAR)) for time in (seen.st_mtime_ns, seen.st_ctime_ns))
                facts = FACTS.pack(seen.st_mode, seen.st_size, *times, seen.st_ino)
                found.append(os.fsencode(entry.name) + b"\0" + facts)  # NUL: "a" comes before "a.b"
                room -= len(found[-1]) + OVERHEAD
                if room < 0:
                    return [], TOO_MANY
    except OSError:
        if not prefix:
            raise
        return [], LOCKED
    found.sort(reverse=True)
    return found, 0


def _recorded(manifest: Path) -> Iterator[Entry]:
    if not manifest.exists():
        return
    with manifest.open("rb") as file:
        while head := file.read(LENGTH.size):
            path = file.read(*LENGTH.unpack(head))
            yield Entry(path, *FACTS.unpack(file.read(FACTS.size)))


def compare(work: str, manifest: Path) -> Iterator[Change]:
    """The merge of two walks in the same order; a directory that one of them did not list has changed."""
    before, after = _recorded(manifest), _survey(os.fsencode(work))
    old, new = next(before, None), next(after, None)
    unknown: bytes | None = None  # the directory that was not listed: what was in it is not deleted
    while old or new:
        if old and (new is None or old.order < new.order):
            if unknown is None or not old.path.startswith(unknown):
                yield Change(old, None if old.path else old)
            old = next(before, None)
            continue
        assert new is not None
        if new.unlisted:
            unknown = new.path and new.path + b"/"
        same = old if old and old.path == new.path else None
        if same != new or (new.unlisted and new.size != LOCKED):
            was_unlisted = same and same.unlisted and stat.S_ISDIR(new.mode)
            yield Change(same, same if was_unlisted else new)
        old, new = next(before, None) if same else old, next(after, None)


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
    for change in compare(work, manifest):
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
            if entry.path:
                made.add(info)
            if entry.unlisted:
                made.leave_out(entry.path)
        elif stat.S_ISLNK(entry.mode):
            info.type = tarfile.SYMTYPE
            info.linkname = beneath.read_link(work, steps)
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
    make_directory(into.parent)
    partial = into.with_name(f".{into.name}.partial")
    try:
        with open(partial, "wb", opener=open_private) as file:
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
                    beneath.discard(steps[-1], parent)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it went with its directory


def _put(work: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Write one member; links are made as they were and never followed, other kinds are refused."""
    steps = steps_of(member.name.removeprefix("work/"))
    with beneath.open_parent(work, steps, make=True) as parent:
        if member.isdir():
            _put_directory(steps[-1], parent, member.mode)
            return
        beneath.discard(steps[-1], parent)
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
            beneath.discard(name, parent)
            os.mkdir(name, dir_fd=parent)
    beneath.change_mode(name, parent, (mode & 0o777) | 0o700)  # what follows must be able to go into it


def steps_of(path: str) -> list[str]:
    steps = path.split("/")
    if any(step in ("", ".", "..") for step in steps):
        raise SandboxFailed(f"not a path of a working directory: `{path[:300]}`", again=False)
    return steps
