"""Files below a directory that a sandbox may be changing: no path, and no link in it, leads out.

All that holdwater writes, reads, measures and removes in a sandbox's directories goes through this module. A
path is resolved first (`places.py`) and then opened here without following a link, so that a directory which
is swapped for a link in between is refused, not followed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..core.errors import RunFailed, SandboxFailed

FULL = (errno.ENOSPC, errno.EDQUOT)
LARGEST_READ = 256 * 1024 * 1024  # a file is handed over whole: what is larger does not belong into memory
PIECE = 1024 * 1024  # bytes that are read at once
LONGEST_PATH = 2000  # bytes of a path that are resolved at once; the kernel takes 4096
STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a pipe without a partner must not hold us
OPENAT2 = 437  # the number of the system call on every architecture that Python runs on but alpha
NO_SYMLINKS, BENEATH = 0x04, 0x08  # of `linux/openat2.h`
UNKNOWN = (errno.ENOSYS, errno.EPERM)  # an old kernel; a container's filter that does not know the call


class OpenHow(ctypes.Structure):
    """The third argument of `openat2`."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def size(root: str, steps: Sequence[str]) -> int:
    with open_file(root, steps, os.O_RDONLY) as fd:
        return os.fstat(fd).st_size


def read(root: str, steps: Sequence[str]) -> bytes:
    with open_file(root, steps, os.O_RDONLY) as fd:
        pieces, length = [], 0
        while piece := os.read(fd, PIECE):  # a read of the most that it could be would take that much at once
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
    """Write a new file in the place of whatever is there, be it a link."""
    with open_parent(root, steps, make=True) as parent:
        discard(steps[-1], parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open_file(root, steps, flags) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        file.write(content)


def read_link(root: str, steps: Sequence[str]) -> str:
    with open_parent(root, steps) as parent:
        return os.readlink(steps[-1], dir_fd=parent)


def is_program(root: str, steps: Sequence[str]) -> bool:
    """Whether it is a file that this user may execute; a link is none."""
    with open_parent(root, steps) as parent:
        fd = os.open(steps[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.access(f"/proc/self/fd/{fd}", os.X_OK)
    finally:
        os.close(fd)


def discard_file(name: str, parent: int) -> None:
    """Remove a file or link of this name from the open directory `parent`; a directory is an error."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def discard(name: str, parent: int) -> None:
    """Remove what has this name in the open directory `parent`, whatever it is."""
    try:
        discard_file(name, parent)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=parent)  # it follows no link either


def change_mode(name: str, parent: int, mode: int) -> None:
    """Set the mode of a directory in the open directory `parent`."""
    fd = os.open(name, STEP, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{fd}", mode)  # noqa: PTH101 - a descriptor that may not be readable
    finally:
        os.close(fd)


@contextmanager
def open_file(root: str, steps: Sequence[str], flags: int, mode: int = 0o666) -> Iterator[int]:
    """A regular file; the directories above it are made where `flags` may create it."""
    if not steps:
        raise SandboxFailed("not below the working directory, but that itself", kind="path", again=False)
    with open_parent(root, steps, make=bool(flags & os.O_CREAT)) as parent:
        fd = os.open(_checked(steps[-1]), flags | FILE, mode, dir_fd=parent)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SandboxFailed(f"not a file: `{'/'.join(steps)}`", kind="path", again=False)
            yield fd
        finally:
            os.close(fd)


@contextmanager
def open_directory(root: str, steps: Sequence[str]) -> Iterator[int]:
    """A directory whose entries can be listed."""
    with open_parent(root, [*steps, ""]) as parent:
        fd = os.open(".", LIST, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_parent(root: str, steps: Sequence[str], make: bool = False) -> Iterator[int]:
    """The directory that holds the last of `steps`."""
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
    """A directory below an open one, opened with `flags`; `make`: it and the ones above it, if need be."""
    for step in steps:
        _checked(step)
    if not steps:
        return os.open(".", flags, dir_fd=directory)
    try:
        return _open_all(directory, steps, flags)
    except FileNotFoundError:
        if not make:
            raise
    return _make_all(directory, steps, flags)


def _open_all(directory: int, steps: Sequence[str], flags: int) -> int:
    """Piece by piece: a path may be longer than the kernel takes at once."""
    fd, rest = os.dup(directory), list(steps)
    while rest:
        count = _fitting(rest)
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


def _fitting(steps: Sequence[str]) -> int:
    """How many of these steps are resolved at once."""
    length = 0
    for number, step in enumerate(steps):
        length += len(os.fsencode(step)) + 1
        if length > LONGEST_PATH and number:
            return number
    return len(steps)


def _resolve(directory: int, steps: Sequence[str], flags: int) -> int:
    """With `openat2` in one call, and step by step on a kernel that does not have it."""
    if len(steps) > 1:
        how = OpenHow(flags=flags, resolve=BENEATH | NO_SYMLINKS)
        path = os.fsencode("/".join(steps))
        fd: int = _library().syscall(OPENAT2, directory, path, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number == errno.ELOOP:
            number = errno.ENOTDIR  # as a single step that is a link: no directory
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


def _checked(step: str) -> str:
    if step in ("", ".", "..") or "/" in step:
        raise SandboxFailed(
            f"not a path below a sandbox's directory: `{step[:300]}`", kind="path", again=False
        )
    return step


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """File errors name the path that the caller gave, not the step at which it went wrong."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise RunFailed(f"the disk is full: `{path}`", kind="disk") from e
        raise OSError(e.errno, e.strerror, path) from e
