"""Trees into and out of a container: a thread packs or unpacks, with a socket between it and the daemon.

No more than that holds is in memory. What comes out is not believed: `sandbox/unpack.py`.
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
from ...core.records import LeftOut
from ...docker.client import DockerError
from ..changes import Exactly
from ..command import finish_anyway
from ..unpack import unpack, unpack_file
from .files import Files, Owner, directories, member

T = TypeVar("T")

MOVING = 3600.0  # seconds for a tree
PIECE = 256 * 1024  # bytes


async def put(files: Files, source: Path, path: str, owner: Owner, threads: Executor) -> None:
    """Copy a file, or what is in a directory, of this machine to `path`."""
    tree = source.is_dir()
    place, above = await _target(files, path, tree)

    def pack(into: IO[bytes]) -> None:
        with packing(into) as tar:
            for info, _ in directories(above if tree else above[:-1], owner):
                tar.addfile(info)
            for name, found in _listed(source, "/".join(above)):
                _add(tar, name, found, owner)

    await write_through(files, place, pack, threads)


async def take(
    files: Files, path: str, into: Path, exclude: Sequence[str], threads: Executor
) -> tuple[LeftOut, ...]:
    """Copy a file, as `into`, or what is in a directory, into it; the entries that were left out."""
    found = await files.known(path)
    if not (found.is_directory or found.is_file):
        raise SandboxFailed(f"neither file nor directory: `{path}`", kind="path", again=False)

    def take_apart(stream: IO[bytes]) -> tuple[LeftOut, ...]:
        if found.is_directory:
            strip = 0 if found.path == "/" else 1
            return unpack(stream, into, exclude, strip=strip, origin=found.path)
        unpack_file(stream, posixpath.basename(found.path), into)
        return ()

    return await read_through(files, found.path, take_apart, threads)


async def write_through(
    files: Files, place: str, pack: Callable[[IO[bytes]], None], threads: Executor
) -> None:
    """Unpack in the directory `place` what `pack` writes."""
    async with _beside(pack, "wb", threads) as (here, working):
        try:
            await files.client.upload(files.archive, {"path": place}, _pieces(here), MOVING)
        except DockerError:
            here.close()
            await _own_error(working)
            raise
        await working


async def read_through(files: Files, path: str, work: Callable[[IO[bytes]], T], threads: Executor) -> T:
    """Have `work` read the archive of `path`, in which that itself comes first."""
    async with _beside(work, "rb", threads) as (here, working):
        async with files.client.reading("GET", files.archive, {"path": path}) as pieces:
            async for piece in pieces:
                if not await _fed(here, piece):
                    break
        here.shutdown(socket.SHUT_WR)
        return await working


@contextmanager
def packing(into: IO[bytes]) -> Iterator[tarfile.TarFile]:
    with tarfile.open(fileobj=into, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        yield tar


async def _target(files: Files, path: str, tree: bool) -> tuple[str, list[str]]:
    """A directory that is there, and the names from it to `path`."""
    found = await files.find(path)
    if found is not None and found.is_directory:
        if tree:
            return found.path, []
        raise SandboxFailed(f"a directory is in the place of a file: `{path}`", kind="path", again=False)
    place, above = await files.place(path)
    return place, [*above, posixpath.basename(path)]


def _listed(source: Path, name: str) -> Iterator[tuple[str, Path]]:
    """All that is to be packed, and as what: a directory before what is in it."""
    if not source.is_dir():
        yield name, source
        return
    for directory, names, leaves in os.walk(source):
        inner = [name] if name else []
        inner += Path(directory).relative_to(source).parts
        for one in sorted([*names, *leaves]):
            yield "/".join([*inner, one]), Path(directory, one)


def _add(tar: tarfile.TarFile, name: str, source: Path, owner: Owner) -> None:
    found = source.lstat()
    info = member(name, owner)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode) & 0o777, int(found.st_mtime)
    if stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(source)  # noqa: PTH115
    elif stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
        info.mode |= 0o700  # what follows must be able to go into it
    elif not stat.S_ISREG(found.st_mode):
        return  # a socket or a pipe of this machine means nothing there
    if info.type != tarfile.REGTYPE:
        tar.addfile(info)
    else:
        with source.open("rb") as content:
            info.size = os.fstat(content.fileno()).st_size
            tar.addfile(info, Exactly(content.fileno()))
    tar.members.clear()  # type: ignore[attr-defined]  # it remembers every member


@asynccontextmanager
async def _beside(
    work: Callable[[IO[bytes]], T], mode: Any, threads: Executor
) -> AsyncIterator[tuple[socket.socket, asyncio.Future[T]]]:
    """`work` in a thread, on a stream; the other end of it, and what becomes of the thread."""
    here, there = socket.socketpair()
    here.setblocking(False)

    def with_stream() -> T:
        with there, there.makefile(mode) as stream:
            return work(stream)

    working = asyncio.get_running_loop().run_in_executor(threads, with_stream)
    try:
        yield here, working
    finally:
        here.close()  # the thread finds its stream ended, or broken
        await finish_anyway(_over(working))


async def _own_error(working: asyncio.Future[None]) -> None:
    """Raise what failed in the thread: it comes first, unless it failed for want of a reader."""
    try:
        await working
    except (BrokenPipeError, ConnectionResetError):
        return


async def _over(working: asyncio.Future[Any]) -> None:
    await asyncio.wait([working])
    if not working.cancelled():
        working.exception()


async def _pieces(here: socket.socket) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while piece := await loop.sock_recv(here, PIECE):
        yield piece


async def _fed(here: socket.socket, piece: bytes) -> bool:
    """Whether there is still someone who reads it."""
    try:
        await asyncio.get_running_loop().sock_sendall(here, piece)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
