"""Takes an archive apart that came out of a sandbox: nothing in it is believed.

Links that lead out of the directory, devices and pipes are left out and reported. Names that lead out, and an
archive that is too large, are refused.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ..core.errors import SandboxFailed
from ..core.masking import MaskedFile
from ..core.records import GiB, LeftOut
from ..ledger.private import make_directory
from . import beneath
from .places import MOST_LINKS

LARGEST = 1 * GiB  # of all files together
MOST = 100_000  # members
MOST_LEFT_OUT = 10_000  # members
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
MODE = 0o755  # what of a file's mode is taken over
LEADS_OUT = "a link that leads out"


def unpack(
    stream: IO[bytes],
    into: Path,
    exclude: Sequence[str] = (),
    largest: int = LARGEST,
    *,
    strip: int = 0,
    origin: str = "",
) -> tuple[LeftOut, ...]:
    """Write what a tar holds into the directory `into`, which is made if need be; what was left out. Blocks.

    `exclude`: patterns as in a shell, over whole names and over each part of them. `strip`: how many leading
    parts of a name are dropped. `origin`: the directory in the sandbox, for absolute links that stay inside.
    """
    make_directory(into)
    room, count = largest, 0
    left_out: list[LeftOut] = []  # bound: MOST_LEFT_OUT
    links: list[list[str]] = []  # bound: MOST
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it remembers every member
                count, room = count + 1, room - member.size
                if count > MOST or room < 0 or len(left_out) > MOST_LEFT_OUT:
                    raise too_much(member.name)
                steps = steps_of(member.name)[strip:]
                if not steps or excluded(steps, exclude):
                    continue
                if member.islnk():
                    member.linkname = "/".join(_steps_inside(member.linkname)[strip:])
                elif member.issym():
                    member.linkname = _without_origin(member.linkname, origin, len(steps) - 1)
                if reason := _write(tar, member, str(into), steps):
                    link, lost = member.linkname if member.issym() else None, member.isreg() or member.islnk()
                    left_out.append(LeftOut(path="/".join(steps), reason=reason, link=link, lost=lost))
                elif member.issym() or member.islnk():  # the latter may be another name of a symbolic link
                    links.append(steps)
    except tarfile.TarError as error:
        raise SandboxFailed(f"not an archive: {error}", kind="archive") from error
    finally:
        left_out += _remove_escaping(str(into), links)
    return tuple(left_out)


def unpack_file(stream: IO[bytes], name: str, into: Path) -> None:
    """Write the file `name` of a tar as `into`. Blocks.

    It goes to a directory of its own first: the agent chose `name`, and a file beside `into` may have it.
    """
    make_directory(into.parent)
    with tempfile.TemporaryDirectory(dir=into.parent) as fresh:
        unpack(stream, Path(fresh))
        Path(fresh, name).replace(into)


def _remove_escaping(root: str, links: Sequence[Sequence[str]]) -> list[LeftOut]:
    """Remove those of the links in `root` that lead out of it, by where they lead on disk; what these were.

    All are judged before one is removed: a link can lead out through another.
    """
    there = [(steps, Path(root, *steps)) for steps in dict.fromkeys(map(tuple, links))]
    escaping = [(steps, path) for steps, path in there if path.is_symlink() and _leads_out(root, steps)]
    left_out = []
    for steps, path in escaping:
        target = os.readlink(path)  # noqa: PTH115
        path.unlink()
        left_out.append(LeftOut("/".join(steps), f"{LEADS_OUT}, to `{target[:200]}`", link=target))
    return left_out


def _leads_out(root: str, link: Sequence[str]) -> bool:
    """Follow a link as the kernel does; what is not there, or no directory, must not be left by `..`."""
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


def too_much(name: str) -> SandboxFailed:
    """The entry of that name is more than can be taken out of a sandbox."""
    return _refused("more than can be taken out", name)


def steps_of(name: str) -> list[str]:
    """The parts of a member's name; SandboxFailed where they lead out."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _refused("leads out", name)
    return [part for part in parts if part not in ("", ".")]


def excluded(steps: Sequence[str], patterns: Sequence[str]) -> bool:
    names = ("/".join(steps), *steps)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, into: str, steps: list[str]) -> str:
    """Write one member; why it has to be left out, if it has."""
    try:
        if member.isdir():
            with beneath.open_parent(into, [*steps, ""], make=True):
                return ""
        if member.issym():
            return _link(member.linkname, into, steps)
        if member.islnk():
            return _link_hard(member.linkname, into, steps)
        if not member.isreg():
            return "neither file, directory nor link"
        with beneath.open_parent(into, steps, make=True) as parent:
            beneath.discard_file(steps[-1], parent)
        content: Any = tar.extractfile(member)
        with beneath.open_file(into, steps, CREATE) as fd:
            with os.fdopen(fd, "wb", closefd=False) as file:
                shutil.copyfileobj(MaskedFile(content, member.size), file)
            os.fchmod(fd, 0o600 | member.mode & MODE)
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        return f"another entry is in its place ({error.strerror})"
    return ""


def _link(target: str, into: str, steps: list[str]) -> str:
    """A relative link: where it leads is judged when all is in place, by `_remove_escaping`."""
    if target.startswith("/"):
        return f"{LEADS_OUT}, to `{target[:200]}`"
    with beneath.open_parent(into, steps, make=True) as parent:
        beneath.discard_file(steps[-1], parent)
        os.symlink(target, steps[-1], dir_fd=parent)
    return ""


def _link_hard(target: str, into: str, steps: list[str]) -> str:
    """Another name of a file that came before."""
    with beneath.open_parent(into, steps, make=True) as parent:
        beneath.discard_file(steps[-1], parent)
        try:
            first = target.split("/")
            with beneath.open_parent(into, first) as other:
                os.link(first[-1], steps[-1], src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            return f"a hard link to what did not come out, `{target[:200]}` ({error.strerror})"
    return ""


def _steps_inside(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".", "..")]


def _without_origin(target: str, origin: str, depth: int) -> str:
    """An absolute link to a place below `origin`, as a relative one."""
    inside = posixpath.normpath(target)
    if not origin or ".." in target.split("/") or not f"{inside}/".startswith(f"{origin.rstrip('/')}/"):
        return target
    below = inside[len(origin.rstrip("/")) :].strip("/")
    return "/".join([*[".."] * depth, *([below] if below else [])]) or "."


def _refused(why: str, name: str) -> SandboxFailed:
    return SandboxFailed(
        f"refused, on its way out of the sandbox: `{name[:300]}`: {why}", kind="archive", again=False
    )
