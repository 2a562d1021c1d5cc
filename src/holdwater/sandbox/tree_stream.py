"""Streams of trees: tar archives that a thread packs or unpacks, joined to the event loop by a socket.

The socket's buffer bounds the memory. Content that comes out of a sandbox is not trusted: `tree_copy.py`
unpacks it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from .command import finish_anyway
from .salvage_archive import ExactReader, forget_members

STREAM_PIECE = 256 * 1024  # bytes

T = TypeVar("T")


class FileOwner(msgspec.Struct, frozen=True):
    """The owner of files that are put into a container."""

    uid: int = 0
    gid: int = 0


def make_member(name: str, owner: FileOwner, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.uid, info.gid, info.mtime = kind, owner.uid, owner.gid, int(time.time())
    return info


@contextmanager
def open_tar(into: IO[bytes]) -> Iterator[tarfile.TarFile]:
    with tarfile.open(fileobj=into, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        yield tar


def list_tree(source: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield all paths to pack with their names: a directory before its entries."""
    if not source.is_dir():
        yield name, source
        return
    for directory, names, leaves in os.walk(source):
        inner = [name] if name else []
        inner += Path(directory).relative_to(source).parts
        for one in sorted([*names, *leaves]):
            yield "/".join([*inner, one]), Path(directory, one)


def add_path(tar: tarfile.TarFile, name: str, source: Path, owner: FileOwner) -> None:
    found = source.lstat()
    info = make_member(name, owner)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode) & 0o777, int(found.st_mtime)
    if stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(source)  # noqa: PTH115
    elif stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
        info.mode |= 0o700  # later members must be able to enter it
    elif not stat.S_ISREG(found.st_mode):
        return  # a socket or a pipe of this machine is useless in a container
    if info.type != tarfile.REGTYPE:
        tar.addfile(info)
    else:
        with source.open("rb") as content:
            info.size = os.fstat(content.fileno()).st_size
            tar.addfile(info, ExactReader(content.fileno()))
    forget_members(tar)


@asynccontextmanager
async def run_beside(
    work: Callable[[IO[bytes]], T], mode: Any, threads: Executor
) -> AsyncIterator[tuple[socket.socket, asyncio.Future[T]]]:
    """Run `work` in a thread on one end of a stream; yield the other end and the thread's future."""
    here, there = socket.socketpair()
    here.setblocking(False)

    def with_stream() -> T:
        with there, there.makefile(mode) as stream:
            return work(stream)

    working = asyncio.get_running_loop().run_in_executor(threads, with_stream)
    try:
        yield here, working
    finally:
        here.close()  # the thread sees the end of its stream, or a broken pipe
        await finish_anyway(_wait_over(working))


@asynccontextmanager
async def pack_tree(
    source: Path, name: str, threads: Executor
) -> AsyncIterator[tuple[AsyncIterator[bytes], asyncio.Future[None]]]:
    """Yield the pieces of a tar of a tree or a file here, and the future of the thread that packs it."""

    def pack(into: IO[bytes]) -> None:
        with open_tar(into) as tar:
            for member, found in list_tree(source, name):
                add_path(tar, member, found, FileOwner())

    async with run_beside(pack, "wb", threads) as (here, working):
        yield read_pieces(here), working


async def _wait_over(working: asyncio.Future[Any]) -> None:
    await asyncio.wait([working])
    if not working.cancelled():
        working.exception()


async def read_pieces(here: socket.socket) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while piece := await loop.sock_recv(here, STREAM_PIECE):
        yield piece


async def feed_piece(here: socket.socket, piece: bytes) -> bool:
    """Send a piece; return False if the thread has stopped reading."""
    try:
        await asyncio.get_running_loop().sock_sendall(here, piece)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
