"""Finds the changes in a sandbox's directories, writes them to an archive, and restores them.

A manifest on disk records the state before. Manifest and directory are walked in the same order and merged,
so that neither is held in memory. Directories beside the working directory are saved when set-up is over and
restored before grading: an agent's files in its home or in `/tmp` must not be present then.
`salvage_archive.py` has the format of the archive.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core.errors import SandboxFailed
from ..core.records import MiB, Salvage
from ..ledger.durable_files import open_private
from . import confined_paths
from .confined_paths import remove_tree
from .salvage_archive import (
    SPOOLED,
    ExactReader,
    SalvageArchive,
    SizeLimit,
    check_whole,
    create_archive,
    is_restored,
    open_archive,
    read_members,
    split_path,
)

LENGTH = struct.Struct("<I")  # length of a path
FACTS = struct.Struct("<IQqqQ")  # mode, size, mtime and ctime in ns, inode
LONGEST = 4096  # bytes of the longest directory path that is listed: no program can name a longer one
MOST_HELD = 128 * MiB  # bytes of names waiting to be walked; about a million names
OVERHEAD = 48  # bytes of memory per name besides the name itself
LOCKED, TOO_DEEP, TOO_MANY = 1, 2, 3  # reasons, stored as the size of a directory that was not listed
KINDS = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK)
LATEST_TIME = 2**63 - 1  # ns: a file's date can be later

# Agents and their tools leave traces here that are not work: caches, settings, logs, mounts of a daemon.
TRACES = re.compile(
    r"/(tmp|run|proc|sys|dev|var/(tmp|run|log|cache)|logs/agent|(root|home/[^/]+)/\.(?!local/)[^/]+)(/|$)"
    r"|/etc/(hosts|hostname|resolv\.conf|mtab)$"
)
NO_MANIFEST = Path(os.devnull)  # no earlier state: everything counts as changed
BYTECODE = b"__pycache__"


class ManifestEntry(msgspec.Struct, frozen=True):
    """One path below the working directory, relative to it."""

    path: bytes
    mode: int
    size: int = 0
    mtime: int = 0
    ctime: int = 0  # no program can set this time: it reveals an edit that reset the others
    inode: int = 0

    @property
    def unlisted(self) -> bool:
        return stat.S_ISDIR(self.mode) and self.size > 0

    @property
    def order(self) -> list[bytes]:
        return self.path.split(b"/")


class PathChange(msgspec.Struct, frozen=True):
    old: ManifestEntry | None
    new: ManifestEntry | None


def write_manifest(work: str, manifest: Path) -> None:
    """Record the current state of `work` in `manifest`."""
    with open(manifest, "wb", opener=open_private) as file:
        for entry in _survey(os.fsencode(work)):
            facts = FACTS.pack(entry.mode, entry.size, entry.mtime, entry.ctime, entry.inode)
            file.write(LENGTH.pack(len(entry.path)) + entry.path + facts)


def salvage(work: str, manifest: Path, into: Path) -> Salvage | None:
    """Write the changes since `write_manifest` to the file `into`; return None if there are none."""
    sizes = array("q")
    count = 0
    for change in compare(work, manifest):
        count += 1
        if change.new and stat.S_ISREG(change.new.mode):
            sizes.append(change.new.size)
    if not count:
        return None
    with create_archive(into) as made:
        _add_changes(work, manifest, made, SizeLimit(sizes))
    return made.describe(into)


def restore(work: str, source: Path) -> None:
    """Restore salvaged work: delete the deleted paths, then write the changed and added ones."""
    with open_archive(source) as tar:
        for member in read_members(tar):
            check_whole(member)
            if member.name == "deleted":
                _delete(work, tar, member)
    with open_archive(source) as tar:
        for member in read_members(tar):
            if is_restored(member):
                _restore_member(work, tar, member)


def walk(root: bytes) -> Iterator[ManifestEntry]:
    """Yield directories, files and links: each directory before its entries, names in order.

    A directory that is locked or too deep has a nonzero size, and its entries are unknown. Raise if a
    directory has too many entries.
    """
    for entry in _survey(root):
        if entry.unlisted and entry.size == TOO_MANY:
            raise SandboxFailed(f"too many files in a directory: `{os.fsdecode(entry.path)[:300]}`")
        yield entry


def _survey(root: bytes) -> Iterator[ManifestEntry]:
    """Like `walk`, but mark an overfull directory by its size; if it is the top one, its path is empty."""
    _unlock(Path(os.fsdecode(root)))
    waiting, why = _list(root, b"", MOST_HELD)
    if why:
        yield ManifestEntry(b"", stat.S_IFDIR, why)
    path, held, levels = b"", _count_memory(waiting), [(0, waiting)]  # length of a path, its entries left
    while levels:
        length, waiting = levels[-1]
        if not waiting:
            levels.pop()
            continue
        line = waiting.pop()
        held -= _count_memory([line])
        name, facts = line[: -FACTS.size - 1], FACTS.unpack(line[-FACTS.size :])
        entry = ManifestEntry(path[:length] + name, *facts)
        if not stat.S_ISDIR(entry.mode):
            yield entry
            continue
        path = entry.path + b"/"
        inner, why = _list(root, path, MOST_HELD - held)
        held += _count_memory(inner)
        levels.append((len(path), inner))
        yield ManifestEntry(entry.path, entry.mode, why, ctime=entry.ctime if why else 0)


def _count_memory(lines: list[bytes]) -> int:
    return sum(map(len, lines)) + OVERHEAD * len(lines)


def _unlock(root: Path) -> None:
    """Make the top directory accessible: an agent must not escape grading by locking it."""
    with confined_paths.open_parent(str(root.parent), []) as above:
        mode = stat.S_IMODE(os.stat(root.name, dir_fd=above, follow_symlinks=False).st_mode)
        if mode & 0o700 != 0o700:
            confined_paths.change_mode(root.name, above, mode | 0o700)


def _list(root: bytes, prefix: bytes, room: int) -> tuple[list[bytes], int]:
    """Return name and facts of a directory's entries, last name first; or the reason why it is not listed."""
    if len(prefix) > LONGEST:
        return [], TOO_DEEP
    found: list[bytes] = []  # bound: `room`
    steps = os.fsdecode(prefix).split("/")[:-1]
    try:
        with confined_paths.open_directory(os.fsdecode(root), steps) as fd, os.scandir(fd) as entries:
            for entry in entries:
                seen = entry.stat(follow_symlinks=False)
                if stat.S_IFMT(seen.st_mode) not in KINDS:
                    continue
                times = (
                    max(-LATEST_TIME, min(time, LATEST_TIME)) for time in (seen.st_mtime_ns, seen.st_ctime_ns)
                )
                facts = FACTS.pack(seen.st_mode, seen.st_size, *times, seen.st_ino)
                found.append(os.fsencode(entry.name) + b"\0" + facts)  # NUL: "a" sorts before "a.b"
                room -= len(found[-1]) + OVERHEAD
                if room < 0:
                    return [], TOO_MANY
    except OSError:
        if not prefix:
            raise
        return [], LOCKED
    found.sort(reverse=True)
    return found, 0


def _read_manifest(manifest: Path) -> Iterator[ManifestEntry]:
    if not manifest.exists():
        return
    with manifest.open("rb") as file:
        while head := file.read(LENGTH.size):
            path = file.read(*LENGTH.unpack(head))
            yield ManifestEntry(path, *FACTS.unpack(file.read(FACTS.size)))


def compare(work: str, manifest: Path) -> Iterator[PathChange]:
    """Merge two walks in the same order; a directory that one of them could not list counts as changed."""
    before, after = _read_manifest(manifest), _survey(os.fsencode(work))
    old, new = next(before, None), next(after, None)
    unknown: bytes | None = None  # a directory that was not listed: its old entries do not count as deleted
    while old or new:
        if old and (new is None or old.order < new.order):
            if unknown is None or not old.path.startswith(unknown):
                yield PathChange(old, None if old.path else old)
            old = next(before, None)
            continue
        assert new is not None
        if new.unlisted:
            unknown = new.path and new.path + b"/"
        same = old if old and old.path == new.path else None
        if same != new or (new.unlisted and new.size != LOCKED):
            was_unlisted = same and same.unlisted and stat.S_ISDIR(new.mode)
            yield PathChange(same, same if was_unlisted else new)
        old, new = next(before, None) if same else old, next(after, None)


def _add_changes(work: str, manifest: Path, made: SalvageArchive, limit: SizeLimit) -> None:
    """Write all changes to the archive."""
    for change in compare(work, manifest):
        new = change.new
        if new is None:
            assert change.old is not None
            made.delete(change.old.path)
            continue
        if stat.S_ISREG(new.mode) and not limit.admit(new.size):
            made.leave_out(new.path)
        else:
            _add(work, made, new)


def _add(work: str, made: SalvageArchive, entry: ManifestEntry) -> None:
    """Add one path; leave it out if it cannot be read."""
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
            info.linkname = confined_paths.read_link(work, steps)
            made.add(info)
        else:
            with confined_paths.open_file(work, steps, os.O_RDONLY) as fd:
                info.size = entry.size
                made.add(info, ExactReader(fd))
    except (PermissionError, FileNotFoundError, NotADirectoryError, SandboxFailed):
        made.leave_out(entry.path)


def _delete(work: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    listed: Any = tar.extractfile(member)
    held = b""
    while chunk := listed.read(SPOOLED):
        *paths, held = (held + chunk).split(b"\0")
        for path in paths:
            steps = split_path(os.fsdecode(path))
            try:
                with confined_paths.open_parent(work, steps) as parent:
                    confined_paths.discard(steps[-1], parent)
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed with its directory


def _restore_member(work: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Write one member. Links are created as they were and never followed; other kinds are refused."""
    steps = split_path(member.name.removeprefix("work/"))
    with confined_paths.open_parent(work, steps, make=True) as parent:
        if member.isdir():
            _restore_directory(steps[-1], parent, member.mode)
            return
        confined_paths.discard(steps[-1], parent)
        if member.issym():
            os.symlink(member.linkname, steps[-1], dir_fd=parent)
            return
    content: Any = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise SandboxFailed(f"neither file, link nor directory: `{member.name}`", again=False)
    confined_paths.write_stream(work, steps, content, member.mode & 0o777, member.mtime, new=True)


def _restore_directory(name: str, parent: int, mode: int) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            confined_paths.discard(name, parent)
            os.mkdir(name, dir_fd=parent)
    confined_paths.change_mode(name, parent, (mode & 0o777) | 0o700)  # later members must be able to enter it


def save_places(directory: Path, places: Sequence[str]) -> None:
    """Write the content of `places` to archives in `directory`; empty ones get none."""
    for place in places:
        salvage(place, NO_MANIFEST, _archive_path(directory, place))


def find_empty_places(directory: Path, places: Sequence[str]) -> dict[str, int]:
    """Return the ctimes of the places without an archive, which were empty when the others were saved."""
    return {
        place: Path(place).stat().st_ctime_ns
        for place in places
        if not _archive_path(directory, place).exists()
    }


def restore_places(directory: Path, places: Sequence[str], empty: Mapping[str, int]) -> bool:
    """Recreate `places` with their saved content; return False if that is incomplete or a removal fails."""
    for place in places:
        if empty.get(place) == os.lstat(place).st_ctime_ns and not any(Path(place).iterdir()):
            continue  # no program can set ctime; on some disks it is coarse and alone not sufficient
        if remove_tree(Path(place)):
            return False
        Path(place).mkdir()
        kept = _archive_path(directory, place)
        if kept.exists():
            try:
                restore(place, kept)
            except SandboxFailed:
                return False
    return True


def write_manifests(directory: Path, own: Mapping[str, str]) -> None:
    """Record the content of the directories that an instance requests (path inside -> path on the host)."""
    for place in own.values():
        write_manifest(place, _manifest_path(directory, place))


def count_changes(directory: Path, own: Mapping[str, str]) -> int:
    """Return how many paths in these directories changed since `write_manifests`; no salvage keeps them."""
    places = [place for inside, place in own.items() if not TRACES.match(inside)]
    return sum(1 for place in places for _ in compare(place, _manifest_path(directory, place)))


def drop_bytecode(work: str) -> None:
    """Remove compiled modules: Python can run one in place of any source, even of a test's."""
    root = os.fsencode(work)
    for path in [entry.path for entry in walk(root) if entry.path.split(b"/")[-1] == BYTECODE]:
        remove_tree(Path(os.fsdecode(root + b"/" + path)))


def _archive_path(directory: Path, place: str) -> Path:
    return directory / f"{Path(place).name}.tar.zst"


def _manifest_path(directory: Path, place: str) -> Path:
    return directory / f"manifest-{Path(place).name}"
