"""Takes an archive apart that came out of a sandbox: nothing in it is believed.

Names and links that lead out of the directory, devices and pipes are refused, and so is what is too much.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ..core.errors import SandboxFailed
from ..core.records import GiB
from . import beneath

LARGEST = 1 * GiB  # of all files together
MOST = 100_000  # members
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
MODE = 0o755  # what of a file's mode is taken over


def unpack(
    stream: IO[bytes], into: Path, exclude: Sequence[str] = (), largest: int = LARGEST, strip: int = 0
) -> None:
    """Write what a tar holds into the directory `into`, which is made if need be. Blocks.

    `exclude`: patterns as in a shell, over whole names and over each part of them. `strip`: how many leading
    parts of a name are left out.
    """
    into.mkdir(parents=True, exist_ok=True)
    room, count = largest, 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it remembers every member
                count, room = count + 1, room - member.size
                if count > MOST or room < 0:
                    raise _refused("more than can be taken out", member.name)
                steps = steps_of(member.name)[strip:]
                if steps and not excluded(steps, exclude):
                    _write(tar, member, str(into), steps)
    except tarfile.TarError as error:
        raise SandboxFailed(f"not an archive: {error}", kind="archive") from error


def steps_of(name: str) -> list[str]:
    """The parts of a member's name; SandboxFailed where they lead out."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _refused("leads out", name)
    return [part for part in parts if part not in ("", ".")]


def excluded(steps: Sequence[str], patterns: Sequence[str]) -> bool:
    names = ("/".join(steps), *steps)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, into: str, steps: list[str]) -> None:
    try:
        if member.isdir():
            with beneath.open_parent(into, [*steps, ""], make=True):
                return
        if member.issym():
            _link(member, into, steps)
            return
        if not member.isreg():
            raise _refused("neither file, directory nor symbolic link", member.name)
        with beneath.open_parent(into, steps, make=True) as parent:
            _discard(steps[-1], parent)
        content: Any = tar.extractfile(member)
        with beneath.open_file(into, steps, CREATE) as fd:
            with os.fdopen(fd, "wb", closefd=False) as file:
                shutil.copyfileobj(content, file)
            os.fchmod(fd, 0o600 | member.mode & MODE)
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise _refused(f"in the way of another ({error.strerror})", member.name) from error


def _link(member: tarfile.TarInfo, into: str, steps: list[str]) -> None:
    target = posixpath.normpath(posixpath.join(*steps[:-1], member.linkname))
    if member.linkname.startswith("/") or target == ".." or target.startswith("../"):
        raise _refused(f"a link that leads out, to `{member.linkname[:200]}`", member.name)
    with beneath.open_parent(into, steps, make=True) as parent:
        _discard(steps[-1], parent)
        os.symlink(member.linkname, steps[-1], dir_fd=parent)


def _discard(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def _refused(why: str, name: str) -> SandboxFailed:
    return SandboxFailed(
        f"refused, on its way out of the sandbox: `{name[:300]}`: {why}", kind="archive", again=False
    )
