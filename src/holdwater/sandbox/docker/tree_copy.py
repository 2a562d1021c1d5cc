"""Copies trees into and out of a container: a thread packs or unpacks, joined to the daemon by a socket.

Memory use is bounded by the socket's buffer. Content that comes out is not trusted:
`sandbox/archive_extraction.py` unpacks it.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import socket
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from ...core.errors import SandboxFailed
from ...core.records import SkippedEntry
from ...docker.client import DockerError
from ..archive_extraction import unpack, unpack_file
from ..command import finish_anyway
from ..salvage_archive import ExactReader
from .files import ContainerFiles, FileOwner, make_member, make_parents

T = TypeVar("T")

MOVING = 3600.0  # seconds for a tree
PIECE = 256 * 1024  # bytes


async def put(files: ContainerFiles, source: Path, path: str, owner: FileOwner, threads: Executor) -> None:
    """Copy a file, or the content of a directory, from this machine to `path` in the container."""
    tree = source.is_dir()
    place, above = await _find_target(files, path, tree)

    def pack(into: IO[bytes]) -> None:
        with open_tar(into) as tar:
            for info, _ in make_parents(above if tree else above[:-1], owner):
                tar.addfile(info)
            for name, found in _list_tree(source, "/".join(above)):
                _add(tar, name, found, owner)

    await write_through(files, place, pack, threads)


async def take(
    files: ContainerFiles, path: str, into: Path, exclude: Sequence[str], threads: Executor
) -> tuple[SkippedEntry, ...]:
    """Copy a file to `into`, or a directory's content into it; return the entries left out."""
    found = await files.stat_existing(path)
    if not (found.is_directory or found.is_file):
        raise SandboxFailed(f"neither file nor directory: `{path}`", kind="path", again=False)

    def take_apart(stream: IO[bytes]) -> tuple[SkippedEntry, ...]:
        if found.is_directory:
            strip = 0 if found.path == "/" else 1
            return unpack(stream, into, exclude, strip=strip, origin=found.path)
        unpack_file(stream, posixpath.basename(found.path), into)
        return ()

    return await read_through(files, found.path, take_apart, threads)


async def write_through(
    files: ContainerFiles, place: str, pack: Callable[[IO[bytes]], None], threads: Executor
) -> None:
    """Unpack the archive that `pack` writes in the directory `place`."""
    async with _run_beside(pack, "wb", threads) as (here, working):
        try:
            await files.client.upload(files.archive, {"path": place}, _read_pieces(here), MOVING)
        except DockerError:
            here.close()
            await _raise_own_error(working)
            raise
        await working


async def read_through(
    files: ContainerFiles, path: str, work: Callable[[IO[bytes]], T], threads: Executor
) -> T:
    """Make `work` read the archive of `path`, whose first member is `path` itself."""
    async with _run_beside(work, "rb", threads) as (here, working):
        async with files.client.open_body("GET", files.archive, {"path": path}) as pieces:
            async for piece in pieces:
                if not await _feed(here, piece):
                    break
        here.shutdown(socket.SHUT_WR)
        return await working


@contextmanager
def open_tar(into: IO[bytes]) -> Iterator[tarfile.TarFile]:
    with tarfile.open(fileobj=into, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        yield tar


async def _find_target(files: ContainerFiles, path: str, tree: bool) -> tuple[str, list[str]]:
    """Return an existing directory, and the names from it to `path`."""
    found = await files.stat(path)
    if found is not None and found.is_directory:
        if tree:
            return found.path, []
        raise SandboxFailed(f"cannot replace a directory by a file: `{path}`", kind="path", again=False)
    place, above = await files.find_parent(path)
    return place, [*above, posixpath.basename(path)]


def _list_tree(source: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield all paths to pack with their names: a directory before its entries."""
    if not source.is_dir():
        yield name, source
        return
    for directory, names, leaves in os.walk(source):
        inner = [name] if name else []
        inner += Path(directory).relative_to(source).parts
        for one in sorted([*names, *leaves]):
            yield "/".join([*inner, one]), Path(directory, one)


def _add(tar: tarfile.TarFile, name: str, source: Path, owner: FileOwner) -> None:
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
    tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every member


@asynccontextmanager
async def _run_beside(
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


async def _raise_own_error(working: asyncio.Future[None]) -> None:
    """Raise the thread's error, which came first, unless it only lost its reader."""
    try:
        await working
    except (BrokenPipeError, ConnectionResetError):
        return


async def _wait_over(working: asyncio.Future[Any]) -> None:
    await asyncio.wait([working])
    if not working.cancelled():
        working.exception()


async def _read_pieces(here: socket.socket) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while piece := await loop.sock_recv(here, PIECE):
        yield piece


async def _feed(here: socket.socket, piece: bytes) -> bool:
    """Send a piece; return False if the thread has stopped reading."""
    try:
        await asyncio.get_running_loop().sock_sendall(here, piece)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
