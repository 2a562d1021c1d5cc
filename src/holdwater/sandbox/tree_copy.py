"""Copies trees into and out of a directory that a sandbox may be changing; follows no link in it.

Content that comes out goes through `archive_extraction.py`, as from a container.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from io import RawIOBase
from pathlib import Path

from ..core.errors import SandboxFailed
from ..core.records import SkippedEntry
from . import confined_paths
from .archive_extraction import CREATE, LARGEST, MOST, is_excluded, make_size_error, unpack, unpack_file
from .salvage_archive import ExactReader


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
                _put_link(path, root, [*inner, name])
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
    with confined_paths.open_parent(root, steps, make=True) as parent:
        confined_paths.discard_file(steps[-1], parent)
    with source.open("rb") as content, confined_paths.open_file(root, steps, CREATE) as fd:
        with os.fdopen(fd, "wb", closefd=False) as file:
            shutil.copyfileobj(content, file)
        os.fchmod(fd, stat.S_IMODE(source.stat().st_mode) & 0o777)


def _put_link(source: Path, root: str, steps: Sequence[str]) -> None:
    with confined_paths.open_parent(root, steps, make=True) as parent:
        confined_paths.discard_file(steps[-1], parent)
        os.symlink(source.readlink(), steps[-1], dir_fd=parent)


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
        self._tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every member


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
