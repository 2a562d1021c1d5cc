"""Accesses files below a directory that a sandbox may be changing; no path and no link leads out of it.

All code that writes, reads, measures or removes files in a sandbox's directories goes through this module. A
path is resolved first (`layout.py`) and then opened here without following a link. A directory that is
swapped for a link in between is therefore refused, not followed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import RunFailed, SandboxFailed
from ..core.masking import ReadableFile

FULL = (errno.ENOSPC, errno.EDQUOT)
LARGEST_READ = 256 * 1024 * 1024  # bytes; files are returned whole, and larger ones do not belong in memory
PIECE = 1024 * 1024  # bytes per read
LONGEST_PATH = 2000  # bytes of a path resolved per call; the kernel's limit is 4096
STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a pipe without a peer must not block us
OPENAT2 = 437  # number of the system call on every architecture that Python supports, except alpha
NO_SYMLINKS, BENEATH = 0x04, 0x08  # from `linux/openat2.h`
UNKNOWN = (errno.ENOSYS, errno.EPERM)  # an old kernel; a container's filter that does not know the call

DEEPEST = 32  # directories open at once


class OpenHow(ctypes.Structure):
    """The third argument of `openat2`."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def read_size(root: str, steps: Sequence[str]) -> int:
    with open_file(root, steps, os.O_RDONLY) as fd:
        return os.fstat(fd).st_size


def read(root: str, steps: Sequence[str]) -> bytes:
    with open_file(root, steps, os.O_RDONLY) as fd:
        pieces, length = [], 0
        while piece := os.read(fd, PIECE):  # one read of the largest size would allocate that much
            pieces.append(piece)
            length += len(piece)
            if length > LARGEST_READ:
                name = "/".join(steps)
                raise SandboxFailed(f"larger than {LARGEST_READ} bytes: `{name}`", kind="size", again=False)
    return b"".join(pieces)


def write(root: str, steps: Sequence[str], content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open_file(root, steps, flags) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        file.write(content)


def replace(root: str, steps: Sequence[str], content: bytes) -> None:
    """Write a new file in place of any entry at this path, also of a link."""
    with open_parent(root, steps, make=True) as parent:
        discard(steps[-1], parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open_file(root, steps, flags) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        file.write(content)


@contextmanager
def open_vacant(root: str, steps: Sequence[str]) -> Iterator[int]:
    """Open the directory that holds the last of `steps`, made if missing; remove a file or link there."""
    with open_parent(root, steps, make=True) as parent:
        discard_file(steps[-1], parent)
        yield parent


def write_stream(
    root: str,
    steps: Sequence[str],
    content: ReadableFile,
    mode: int,
    modified: float | None = None,
    *,
    new: bool = False,
) -> None:
    """Write a file with this mode and, if known, time of change; `new`: fail if an entry is there already."""
    with open_file(root, steps, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC)) as fd:
        with os.fdopen(fd, "wb", closefd=False) as file:
            shutil.copyfileobj(content, file)
        os.fchmod(fd, mode)
        if modified is not None:
            os.utime(fd, (modified, modified))


def read_link(root: str, steps: Sequence[str]) -> str:
    with open_parent(root, steps) as parent:
        return os.readlink(steps[-1], dir_fd=parent)


def is_program(root: str, steps: Sequence[str]) -> bool:
    """Whether the path is a file that this user may execute; a link is not."""
    with open_parent(root, steps) as parent:
        fd = os.open(steps[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.access(f"/proc/self/fd/{fd}", os.X_OK)
    finally:
        os.close(fd)


def discard_file(name: str, parent: int) -> None:
    """Remove a file or link from the open directory `parent`; raise if it is a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def discard(name: str, parent: int) -> None:
    """Remove an entry of any kind from the open directory `parent`."""
    try:
        discard_file(name, parent)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=parent)  # follows no link either


def change_mode(name: str, parent: int, mode: int) -> None:
    """Set the mode of a directory in the open directory `parent`."""
    fd = os.open(name, STEP, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{fd}", mode)  # noqa: PTH101 - the descriptor may not be readable
    finally:
        os.close(fd)


@contextmanager
def open_file(root: str, steps: Sequence[str], flags: int, mode: int = 0o666) -> Iterator[int]:
    """Open a regular file; create the directories above it if `flags` may create the file."""
    if not steps:
        raise SandboxFailed(
            "not below the working directory: the path is the directory itself", kind="path", again=False
        )
    with open_parent(root, steps, make=bool(flags & os.O_CREAT)) as parent:
        fd = os.open(_check_step(steps[-1]), flags | FILE, mode, dir_fd=parent)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SandboxFailed(f"not a file: `{'/'.join(steps)}`", kind="path", again=False)
            yield fd
        finally:
            os.close(fd)


@contextmanager
def open_directory(root: str, steps: Sequence[str]) -> Iterator[int]:
    """Open a directory for listing its entries."""
    with open_parent(root, [*steps, ""]) as parent:
        fd = os.open(".", LIST, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_parent(root: str, steps: Sequence[str], make: bool = False) -> Iterator[int]:
    """Open the directory that holds the last of `steps`."""
    fd = os.open(root, STEP)
    try:
        if len(steps) > 1:
            inner = open_beneath(fd, steps[:-1], STEP, make)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def open_beneath(directory: int, steps: Sequence[str], flags: int, make: bool = False) -> int:
    """Open a directory below an open one with `flags`; `make`: create it and its parents if missing."""
    for step in steps:
        _check_step(step)
    if not steps:
        return os.open(".", flags, dir_fd=directory)
    try:
        return _open_all(directory, steps, flags)
    except FileNotFoundError:
        if not make:
            raise
    return _make_all(directory, steps, flags)


def _open_all(directory: int, steps: Sequence[str], flags: int) -> int:
    """Open a path piece by piece: it may be longer than the kernel's limit for one call."""
    fd, rest = os.dup(directory), list(steps)
    while rest:
        count = _count_fitting(rest)
        piece, rest = rest[:count], rest[count:]
        try:
            inner = _resolve(fd, piece, STEP if rest else flags)
        finally:
            os.close(fd)
        fd = inner
    return fd


def _make_all(directory: int, steps: Sequence[str], flags: int) -> int:
    fd = os.dup(directory)
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        try:
            try:
                os.mkdir(step, dir_fd=fd)
            except FileExistsError:
                pass
            inner = os.open(step, flags if last else STEP, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


def _count_fitting(steps: Sequence[str]) -> int:
    """Return how many of these steps are resolved in one call."""
    length = 0
    for number, step in enumerate(steps):
        length += len(os.fsencode(step)) + 1
        if length > LONGEST_PATH and number:
            return number
    return len(steps)


def _resolve(directory: int, steps: Sequence[str], flags: int) -> int:
    """Resolve with one `openat2` call, or step by step on a kernel without it."""
    if len(steps) > 1:
        how = OpenHow(flags=flags, resolve=BENEATH | NO_SYMLINKS)
        path = os.fsencode("/".join(steps))
        fd: int = _load_library().syscall(OPENAT2, directory, path, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number == errno.ELOOP:
            number = errno.ENOTDIR  # same error as for a single step that is a link
        if number not in UNKNOWN:
            raise OSError(number, os.strerror(number), "/".join(steps))
    return _resolve_steps(directory, steps, flags)


def _resolve_steps(directory: int, steps: Sequence[str], flags: int) -> int:
    fd = os.dup(directory)
    for number, step in enumerate(steps):
        try:
            inner = os.open(step, flags if number == len(steps) - 1 else STEP, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


def _check_step(step: str) -> str:
    if step in ("", ".", "..") or "/" in step:
        raise SandboxFailed(
            f"invalid path below a sandbox's directory: `{step[:300]}`", kind="path", again=False
        )
    return step


@functools.cache
def _load_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@contextmanager
def name_in_errors(path: str) -> Iterator[None]:
    """Make file errors name the caller's path, not the step that failed."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise RunFailed(f"the disk is full: `{path}`", kind="disk") from e
        raise OSError(e.errno, e.strerror, path) from e


def remove_tree(directory: Path) -> str:
    """Remove the tree, however deep or locked it is; return its path if it is still there. Blocks."""
    for _ in range(2):  # a dying process may still write
        try:
            if directory.is_symlink() or directory.is_file():
                directory.unlink()
            else:
                _empty(directory)
                directory.rmdir()
        except FileNotFoundError:
            return ""
        except OSError:
            continue
        return ""
    return str(directory)


def _empty(directory: Path) -> None:
    """Remove all entries; directories that are too deep are moved to the top first."""
    above = os.open(directory.parent, LIST)
    try:
        top = _open_unlocked(directory.name, above)
    finally:
        os.close(above)
    stuck: set[str] = set()  # bound: entries that cannot be removed; a handful
    try:
        while found := [entry for entry in _list_entries(top) if entry[0] not in stuck]:
            for name, is_directory in found:
                try:
                    _remove(name, is_directory, top, top, 0)
                except OSError:
                    stuck.add(name)
    finally:
        os.close(top)


def _list_entries(directory: int) -> list[tuple[str, bool]]:
    """Return the names in an open directory, each with whether it is a directory."""
    with os.scandir(directory) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _remove(name: str, is_directory: bool, parent: int, top: int, depth: int) -> None:
    if not is_directory:
        discard_file(name, parent)
        return
    fd = _open_unlocked(name, parent)
    try:
        if depth >= DEEPEST:
            os.rename(name, f".{secrets.token_hex(8)}", src_dir_fd=parent, dst_dir_fd=top)
            return
        for inner, also_directory in _list_entries(fd):
            _remove(inner, also_directory, fd, top, depth + 1)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def _open_unlocked(name: str, parent: int) -> int:
    """Open a directory so that its entries can be listed and removed."""
    try:
        fd = os.open(name, LIST, dir_fd=parent)
    except PermissionError:
        change_mode(name, parent, 0o700)
        fd = os.open(name, LIST, dir_fd=parent)
    if os.fstat(fd).st_mode & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd
