"""Files below a directory that someone else may be changing: no path, and no link in it, leads out.

A path is resolved first (`places.py`), and then opened here step by step without following links, so that a
directory which is swapped for a link in between is refused, not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..core.errors import RunFailed, SandboxFailed
from .remove import FULL

LARGEST_READ = 256 * 1024 * 1024  # a file is handed over whole: what is larger does not belong into memory
PIECE = 1024 * 1024  # bytes that are read at once
STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a pipe without a partner must not hold us


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


@contextmanager
def open_file(root: str, steps: Sequence[str], flags: int, mode: int = 0o666) -> Iterator[int]:
    """A regular file; the directories above it are made where `flags` may create it."""
    if not steps:
        raise SandboxFailed("not below the working directory, but that itself", kind="path", again=False)
    with open_parent(root, steps, make=bool(flags & os.O_CREAT)) as parent:
        fd = os.open(steps[-1], flags | FILE, mode, dir_fd=parent)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SandboxFailed(f"not a file: `{'/'.join(steps)}`", kind="path", again=False)
            yield fd
        finally:
            os.close(fd)


@contextmanager
def open_parent(root: str, steps: Sequence[str], make: bool = False) -> Iterator[int]:
    """The directory that holds the last of `steps`."""
    fd = os.open(root, STEP)
    try:
        for step in steps[:-1]:
            inner = _open_step(step, fd, make)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _open_step(step: str, parent: int, make: bool) -> int:
    try:
        return os.open(step, STEP, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(step, dir_fd=parent)
        return os.open(step, STEP, dir_fd=parent)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """File errors name the path that the caller gave, not the step at which it went wrong."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise RunFailed(f"the disk is full: `{path}`", kind="disk") from e
        raise OSError(e.errno, e.strerror, path) from e
