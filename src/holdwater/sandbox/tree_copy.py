"""Copies trees into and out of a directory that a sandbox may be changing; follows no link in it.

Content that comes out, of a container too, is an archive that is unpacked without trust: links that lead out
of the directory, devices and pipes are left out and reported. Names that lead out, and archives that are too
large, are refused.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

from ..core.errors import SandboxFailed
from ..core.masking import MaskedFile
from ..core.records import GiB, SkippedEntry
from ..ledger.durable_files import make_directory
from . import confined_paths
from .layout import MOST_LINKS
from .salvage_archive import ExactReader, forget_members, read_members

LARGEST = 1 * GiB  # bytes of all files together
MOST = 100_000  # members
MOST_LEFT_OUT = 10_000  # members
MODE = 0o755  # bits of a file's mode that are kept
LEADS_OUT = "a link that leads out"


def put(source: Path, root: str, steps: Sequence[str]) -> None:
    """Copy a file, or the content of a directory, to this path. Blocks."""
    if not source.is_dir():
        _put_file(source, root, steps)
        return
    with confined_paths.open_parent(root, [*steps, ""], make=True):
        pass  # creates an empty directory too
    for directory, names, files in os.walk(source):
        inner = [*steps, *Path(directory).relative_to(source).parts]
        for name in [*names, *files]:
            path = Path(directory, name)
            if path.is_symlink():
                _put_link(path.readlink(), root, [*inner, name])
            elif path.is_dir():
                with confined_paths.open_parent(root, [*inner, name, ""], make=True):
                    continue
            else:
                _put_file(path, root, [*inner, name])


def take(
    root: str, steps: Sequence[str], into: Path, exclude: Sequence[str] = (), origin: str = ""
) -> tuple[SkippedEntry, ...]:
    """Copy a file to `into`, or a directory's content into it; return the entries left out. Blocks.

    `origin`: the path of the directory inside the sandbox.
    """
    with tempfile.TemporaryFile() as spool:
        with tarfile.open(fileobj=spool, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            single = _pack(BoundedTar(tar), root, list(steps), exclude)
        spool.seek(0)
        if not single:
            return unpack(spool, into, origin=origin)
        unpack_file(spool, steps[-1], into)
        return ()


def _put_file(source: Path, root: str, steps: Sequence[str]) -> None:
    if not stat.S_ISREG(source.stat().st_mode):  # opening a pipe would wait for its other end
        raise SandboxFailed(f"neither file nor directory nor link: `{source}`", kind="path", again=False)
    with source.open("rb") as content, confined_paths.open_vacant(root, steps):
        confined_paths.write_stream(root, steps, content, stat.S_IMODE(source.stat().st_mode) & 0o777)


def _put_link(target: str | Path, root: str, steps: Sequence[str]) -> None:
    with confined_paths.open_vacant(root, steps) as parent:
        os.symlink(target, steps[-1], dir_fd=parent)


class BoundedTar:
    """An archive with the size limits of `unpack`: a file counts before any of it is read.

    The holes of a sparse file count too: they are written out.
    """

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._room = LARGEST
        self._members = 0

    def add(self, info: tarfile.TarInfo, content: RawIOBase | None = None) -> None:
        self._room -= info.size
        self._members += 1
        if self._room < 0 or self._members > MOST:
            raise make_size_error(info.name)
        self._tar.addfile(info, content)
        forget_members(self._tar)


def _pack(tar: BoundedTar, root: str, steps: list[str], exclude: Sequence[str]) -> bool:
    """Add the file or the directory's content; return whether it is a single file."""
    with confined_paths.open_parent(root, steps or [""]) as parent:
        kind = os.stat(steps[-1] if steps else ".", dir_fd=parent, follow_symlinks=False).st_mode
    if stat.S_ISREG(kind):
        _add(tar, root, steps, steps[-1])
        return True
    if not stat.S_ISDIR(kind):
        raise SandboxFailed(f"neither file nor directory: `{'/'.join(steps)}`", kind="path", again=False)
    for inner in _list_below(root, steps, exclude, len(steps)):
        _add(tar, root, inner, "/".join(inner[len(steps) :]))
    return False


def _list_below(root: str, steps: list[str], exclude: Sequence[str], depth: int) -> Iterator[list[str]]:
    waiting = [steps]
    while waiting:
        current = waiting.pop()
        with confined_paths.open_directory(root, current) as listed:
            names = sorted(os.listdir(listed), reverse=True)  # noqa: PTH208 - of a descriptor
            kinds = {name: os.stat(name, dir_fd=listed, follow_symlinks=False).st_mode for name in names}
        for name, kind in kinds.items():
            inner = [*current, name]
            if is_excluded(inner[depth:], exclude):
                continue
            yield inner
            if stat.S_ISDIR(kind):
                waiting.append(inner)


def _add(tar: BoundedTar, root: str, steps: list[str], name: str) -> None:
    with confined_paths.open_parent(root, steps) as parent:
        found = os.stat(steps[-1], dir_fd=parent, follow_symlinks=False)
        info = tarfile.TarInfo(name)
        info.mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(steps[-1], dir_fd=parent)
        elif stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
        elif not stat.S_ISREG(found.st_mode):
            info.type = tarfile.CHRTYPE  # `unpack` leaves it out
    if info.type != tarfile.REGTYPE:
        tar.add(info)
        return
    with confined_paths.open_file(root, steps, os.O_RDONLY) as fd:
        info.size = os.fstat(fd).st_size
        tar.add(info, ExactReader(fd))


def unpack(
    stream: IO[bytes],
    into: Path,
    exclude: Sequence[str] = (),
    largest: int = LARGEST,
    *,
    strip: int = 0,
    origin: str = "",
    outward: bool = False,
) -> tuple[SkippedEntry, ...]:
    """Unpack a tar into the directory `into`, made if missing; return the entries left out. Blocks.

    `exclude`: shell patterns, matched against whole names and against each part of them. `strip`: how many
    leading parts of a name are dropped. `origin`: the directory in the sandbox, for absolute links that stay
    inside. `outward`: links that lead out are kept, for a tree whose links nothing follows.
    """
    make_directory(into)
    room, count = largest, 0
    left_out: list[SkippedEntry] = []  # bound: MOST_LEFT_OUT
    links: list[list[str]] = []  # bound: MOST
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in read_members(tar):
                count, room = count + 1, room - member.size
                if count > MOST or room < 0 or len(left_out) > MOST_LEFT_OUT:
                    raise make_size_error(member.name)
                steps = split_name(member.name)[strip:]
                if not steps or is_excluded(steps, exclude):
                    continue
                if member.islnk():
                    member.linkname = "/".join(_split_inside(member.linkname)[strip:])
                elif member.issym():
                    member.linkname = _make_relative(member.linkname, origin, len(steps) - 1)
                if outward and member.issym():
                    _put_link(member.linkname, str(into), steps)
                elif reason := _write(tar, member, str(into), steps):
                    link, lost = member.linkname if member.issym() else None, member.isreg() or member.islnk()
                    left_out.append(SkippedEntry(path="/".join(steps), reason=reason, link=link, lost=lost))
                elif member.issym() or member.islnk():  # a hard link may be another name of a symbolic link
                    links.append(steps)
    except tarfile.TarError as error:
        raise SandboxFailed(f"invalid archive: {error}", kind="archive") from error
    finally:
        left_out += _remove_escaping(str(into), links)
    return tuple(left_out)


def unpack_file(stream: IO[bytes], name: str, into: Path) -> None:
    """Write the file `name` of a tar as `into`. Blocks.

    The file goes to a fresh directory first: the agent chose `name`, and a file beside `into` may have that
    name.
    """
    make_directory(into.parent)
    with tempfile.TemporaryDirectory(dir=into.parent) as fresh:
        unpack(stream, Path(fresh))
        Path(fresh, name).replace(into)


def _remove_escaping(root: str, links: Sequence[Sequence[str]]) -> list[SkippedEntry]:
    """Remove the links in `root` that lead out of it on disk; return the removed ones.

    All links are checked before the first is removed: a link can lead out through another.
    """
    there = [(steps, Path(root, *steps)) for steps in dict.fromkeys(map(tuple, links))]
    escaping = [(steps, path) for steps, path in there if path.is_symlink() and _leads_out(root, steps)]
    left_out = []
    for steps, path in escaping:
        target = os.readlink(path)  # noqa: PTH115
        path.unlink()
        left_out.append(SkippedEntry("/".join(steps), f"{LEADS_OUT}, to `{target[:200]}`", link=target))
    return left_out


def _leads_out(root: str, link: Sequence[str]) -> bool:
    """Follow a link as the kernel does; `..` after a missing path or a non-directory leads out as well."""
    place, waiting, links = list(link[:-1]), [link[-1]], 0  # no step of `place` is a link
    while waiting:
        step = waiting.pop()
        if step == "..":
            if not place:
                return True
            place.pop()
        elif step not in ("", "."):
            path = Path(root, *place, step)
            if not path.is_symlink():
                if not path.is_dir():
                    return ".." in waiting
                place.append(step)
                continue
            target, links = os.readlink(path), links + 1  # noqa: PTH115
            if target.startswith("/") or links > MOST_LINKS:
                return True
            waiting += target.split("/")[::-1]
    return False


def make_size_error(name: str) -> SandboxFailed:
    """Return the error for an entry that exceeds the size that may leave a sandbox."""
    return _make_refusal("too many files or bytes", name)


def split_name(name: str) -> list[str]:
    """Return the parts of a member's name; raise SandboxFailed if they lead out."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _make_refusal("the name leads out of the directory", name)
    return [part for part in parts if part not in ("", ".")]


def is_excluded(steps: Sequence[str], patterns: Sequence[str]) -> bool:
    names = ("/".join(steps), *steps)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, into: str, steps: list[str]) -> str:
    """Write one member; return why it is left out, or an empty string."""
    try:
        if member.isdir():
            with confined_paths.open_parent(into, [*steps, ""], make=True):
                return ""
        if member.issym():
            return _write_link(member.linkname, into, steps)
        if member.islnk():
            return _write_hard_link(member.linkname, into, steps)
        if not member.isreg():
            return "neither file, directory nor link"
        content: Any = tar.extractfile(member)
        with confined_paths.open_vacant(into, steps):
            masked = MaskedFile(content, member.size)
            confined_paths.write_stream(into, steps, masked, 0o600 | member.mode & MODE)
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        return f"another entry is in its place ({error.strerror})"
    return ""


def _write_link(target: str, into: str, steps: list[str]) -> str:
    """Write a relative link. `_remove_escaping` checks where it leads once all entries are in place."""
    if target.startswith("/"):
        return f"{LEADS_OUT}, to `{target[:200]}`"
    _put_link(target, into, steps)
    return ""


def _write_hard_link(target: str, into: str, steps: list[str]) -> str:
    """Write another name of a file that came earlier in the archive."""
    with confined_paths.open_vacant(into, steps) as parent:
        try:
            first = target.split("/")
            with confined_paths.open_parent(into, first) as other:
                os.link(first[-1], steps[-1], src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            return f"a hard link to a missing entry, `{target[:200]}` ({error.strerror})"
    return ""


def _split_inside(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".", "..")]


def _make_relative(target: str, origin: str, depth: int) -> str:
    """Return an absolute link to a path below `origin` as a relative one; return other links unchanged."""
    inside = posixpath.normpath(target)
    if not origin or ".." in target.split("/") or not f"{inside}/".startswith(f"{origin.rstrip('/')}/"):
        return target
    below = inside[len(origin.rstrip("/")) :].strip("/")
    return "/".join([*[".."] * depth, *([below] if below else [])]) or "."


def _make_refusal(why: str, name: str) -> SandboxFailed:
    return SandboxFailed(
        f"cannot take out of the sandbox: `{name[:300]}`: {why}", kind="archive", again=False
    )
