"""Copies trees into and out of a directory that a sandbox may be changing: no link in it is followed.

What comes out goes through `unpack.py`, as it does from a container.
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
from ..core.records import LeftOut, MiB
from . import beneath
from .changes import Exactly
from .unpack import CREATE, LARGEST, MOST, excluded, too_much, unpack, unpack_file

SPOOLED = 1 * MiB


def put(source: Path, root: str, steps: Sequence[str]) -> None:
    """Copy a file, or what is in a directory, to this place. Blocks."""
    if not source.is_dir():
        _put_file(source, root, steps)
        return
    with beneath.open_parent(root, [*steps, ""], make=True):
        pass  # an empty directory is one too
    for directory, names, files in os.walk(source):
        inner = [*steps, *Path(directory).relative_to(source).parts]
        for name in [*names, *files]:
            path = Path(directory, name)
            if path.is_symlink():
                _put_link(path, root, [*inner, name])
            elif path.is_dir():
                with beneath.open_parent(root, [*inner, name, ""], make=True):
                    continue
            else:
                _put_file(path, root, [*inner, name])


def take(
    root: str, steps: Sequence[str], into: Path, exclude: Sequence[str] = (), origin: str = ""
) -> tuple[LeftOut, ...]:
    """Copy a file, as `into`, or what is in a directory, into it; the entries that were left out. Blocks.

    `origin`: the directory as the sandbox calls it.
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
    with beneath.open_parent(root, steps, make=True) as parent:
        beneath.discard_file(steps[-1], parent)
    with source.open("rb") as content, beneath.open_file(root, steps, CREATE) as fd:
        with os.fdopen(fd, "wb", closefd=False) as file:
            shutil.copyfileobj(content, file)
        os.fchmod(fd, stat.S_IMODE(source.stat().st_mode) & 0o777)


def _put_link(source: Path, root: str, steps: Sequence[str]) -> None:
    with beneath.open_parent(root, steps, make=True) as parent:
        beneath.discard_file(steps[-1], parent)
        os.symlink(source.readlink(), steps[-1], dir_fd=parent)


class BoundedTar:
    """An archive that takes no more than `unpack` does: a file counts before any of it is read.

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
            raise too_much(info.name)
        self._tar.addfile(info, content)
        self._tar.members.clear()  # type: ignore[attr-defined]  # it remembers every member


def _pack(tar: BoundedTar, root: str, steps: list[str], exclude: Sequence[str]) -> bool:
    """Add it all; whether it is a single file."""
    with beneath.open_parent(root, steps or [""]) as parent:
        kind = os.stat(steps[-1] if steps else ".", dir_fd=parent, follow_symlinks=False).st_mode
    if stat.S_ISREG(kind):
        _add(tar, root, steps, steps[-1])
        return True
    if not stat.S_ISDIR(kind):
        raise SandboxFailed(f"neither file nor directory: `{'/'.join(steps)}`", kind="path", again=False)
    for inner in _below(root, steps, exclude, len(steps)):
        _add(tar, root, inner, "/".join(inner[len(steps) :]))
    return False


def _below(root: str, steps: list[str], exclude: Sequence[str], depth: int) -> Iterator[list[str]]:
    waiting = [steps]
    while waiting:
        current = waiting.pop()
        with beneath.open_directory(root, current) as listed:
            names = sorted(os.listdir(listed), reverse=True)  # noqa: PTH208 - of a descriptor
            kinds = {name: os.stat(name, dir_fd=listed, follow_symlinks=False).st_mode for name in names}
        for name, kind in kinds.items():
            inner = [*current, name]
            if excluded(inner[depth:], exclude):
                continue
            yield inner
            if stat.S_ISDIR(kind):
                waiting.append(inner)


def _add(tar: BoundedTar, root: str, steps: list[str], name: str) -> None:
    with beneath.open_parent(root, steps) as parent:
        found = os.stat(steps[-1], dir_fd=parent, follow_symlinks=False)
        info = tarfile.TarInfo(name)
        info.mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(steps[-1], dir_fd=parent)
        elif stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
        elif not stat.S_ISREG(found.st_mode):
            info.type = tarfile.CHRTYPE  # it will be left out
    if info.type != tarfile.REGTYPE:
        tar.add(info)
        return
    with beneath.open_file(root, steps, os.O_RDONLY) as fd:
        info.size = os.fstat(fd).st_size
        tar.add(info, Exactly(fd))
