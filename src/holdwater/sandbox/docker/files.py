"""Reads and writes files of a container through the archive API; links are followed in the container only.

Single files are read and written whole. A thread packs or unpacks trees, joined to the daemon by a socket,
whose buffer bounds memory use. Content that comes out is not trusted: `sandbox/tree_copy.py` unpacks it.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import os
import posixpath
import socket
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from ...core.errors import SandboxFailed
from ...core.records import SkippedEntry
from ...docker.client import DockerClient, DockerError
from ..confined_paths import LARGEST_READ
from ..layout import MOST_LINKS
from ..tree_copy import unpack, unpack_file
from ..tree_stream import (
    FileOwner,
    add_path,
    feed_piece,
    list_tree,
    make_member,
    open_tar,
    read_pieces,
    run_beside,
)
from .container import REQUEST_TIMEOUT

HEADER = "X-Docker-Container-Path-Stat"
MOVING = 600.0  # seconds for one file
OVERHEAD = 64 * 1024  # bytes of an archive besides the file's content
ERROR_NUMBERS = {
    "too many links": errno.ELOOP,
    "not a directory": errno.ENOTDIR,
    "file name too long": errno.ENAMETOOLONG,
}
GO_DIRECTORY, GO_LINK, GO_OTHER = 1 << 31, 1 << 27, 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19

T = TypeVar("T")

MOVING_TREE = 3600.0  # seconds for a tree


class PathStat(msgspec.Struct, frozen=True):
    """The metadata of a path in a container."""

    path: str  # with links followed
    size: int = 0
    mode: int = 0  # in Go's encoding
    mtime: str = ""
    link: str = ""

    @property
    def is_directory(self) -> bool:
        return bool(self.mode & GO_DIRECTORY)

    @property
    def is_file(self) -> bool:
        return not self.mode & (GO_DIRECTORY | GO_LINK | GO_OTHER)

    @property
    def kind(self) -> bytes:
        """The tar type."""
        kinds = {GO_DIRECTORY: tarfile.DIRTYPE, GO_LINK: tarfile.SYMTYPE, GO_OTHER: tarfile.FIFOTYPE}
        return next((kind for bits, kind in kinds.items() if self.mode & bits), tarfile.REGTYPE)


class ContainerFiles:
    """The files of one container."""

    def __init__(self, client: DockerClient, container: str) -> None:
        self.client = client
        self.archive = f"{container}/archive"

    async def lstat(self, path: str) -> PathStat | None:
        """Return the metadata of `path` without following links; None if it does not exist."""
        try:
            headers = await self.client.head(self.archive, {"path": path}, seconds=REQUEST_TIMEOUT)
        except DockerError as error:
            if error.status in (400, 404):
                return None  # `stat_existing` checks whether the container itself is gone
            await self._explain_refusal(path)
            return None
        told = msgspec.json.decode(base64.b64decode(headers[HEADER]))
        return PathStat(path, told["size"], told["mode"], told["mtime"], told["linkTarget"])

    async def _explain_refusal(self, path: str) -> None:
        """Repeat the request as a GET, which returns an error message, and raise it as an OSError."""
        try:
            async with self.client.open_body("GET", self.archive, {"path": path}, silence=REQUEST_TIMEOUT):
                return
        except DockerError as error:
            number = next((number for words, number in ERROR_NUMBERS.items() if words in error.message), None)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), path) from error

    async def stat(self, path: str) -> PathStat | None:
        """Return the metadata of `path` with all links followed; None if it does not exist."""
        for _ in range(MOST_LINKS):
            found = await self.lstat(path)
            if found is None or not found.mode & GO_LINK:
                return found
            path = found.link
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    async def stat_existing(self, path: str) -> PathStat:
        """Like `stat`, but raise FileNotFoundError if the path does not exist."""
        found = await self.stat(path)
        if found is None:
            told = await self.client.get(posixpath.dirname(self.archive) + "/json", seconds=REQUEST_TIMEOUT)
            if told["State"]["Status"] not in ("created", "running"):
                raise DockerError("the container is not running", status=409)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    async def read(self, path: str) -> bytes:
        found = await self.stat_existing(path)
        if not found.is_file:
            raise SandboxFailed(f"not a file: `{path}`", kind="path", again=False)
        if found.size > LARGEST_READ:
            raise SandboxFailed(f"larger than {LARGEST_READ} bytes: `{path}`", kind="size", again=False)
        info, content = await self.fetch(found.path)
        if not info.isreg():
            raise SandboxFailed(f"not a file: `{path}`", kind="path", again=False)
        return content

    async def fetch(self, path: str) -> tuple[tarfile.TarInfo, bytes]:
        """Return a file or a link without following it, and its content."""
        packed = bytearray()
        async with self.client.open_body("GET", self.archive, {"path": path}) as pieces:
            async for piece in pieces:
                packed += piece
                if len(packed) > LARGEST_READ + OVERHEAD:
                    raise SandboxFailed(
                        f"the file grew while it was read: `{path}`", kind="size", again=False
                    )
        return _read_first(packed)

    async def write(self, path: str, content: bytes, owner: FileOwner) -> None:
        """Create or replace a file; create the directories above it."""
        found = await self.stat(path)
        if found is not None and not found.is_file:
            raise SandboxFailed(f"not a file: `{path}`", kind="path", again=False)
        mode = found.mode & 0o777 if found else 0o644
        place, above = (posixpath.dirname(found.path), []) if found else await self.find_parent(path)
        info = make_member("/".join([*above, posixpath.basename(found.path if found else path)]), owner)
        info.size, info.mode = len(content), mode
        await self.put(place, [*make_parents(above, owner), (info, content)])

    async def find_parent(self, path: str) -> tuple[str, list[str]]:
        """Return the nearest existing directory above `path`, and the names of the missing ones below it."""
        missing: list[str] = []
        above = posixpath.dirname(path)
        while (found := await self.stat(above)) is None:
            if above == "/":
                await self.stat_existing(above)  # raises if the container is gone: even `/` is missing then
            above, name = posixpath.split(above)
            missing.insert(0, name)
        if not found.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return found.path, missing

    async def find_owner(self, user: str) -> FileOwner:
        """Return the ids of a user in docker's notation: `name` or `number`, optionally with `:group`."""
        name, _, group = user.partition(":")
        if name in ("", "root", "0") and group in ("", "root", "0"):
            return FileOwner()
        rows = [row.split(":") for row in (await self._read_text("/etc/passwd")).splitlines()]
        row = next((row for row in rows if len(row) > 3 and name in (row[0], row[2])), None)
        if row is None and not name.isdigit():
            raise SandboxFailed(f"no such user in the image: `{name}`", kind="user", again=False)
        uid, gid = (int(row[2]), int(row[3])) if row else (int(name), 0)
        if group and not group.isdigit():
            groups = [row.split(":") for row in (await self._read_text("/etc/group")).splitlines()]
            group = next((row[2] for row in groups if len(row) > 2 and row[0] == group), "")
            if not group:
                raise SandboxFailed(f"no such group in the image: `{user}`", kind="user", again=False)
        return FileOwner(uid, int(group) if group else gid)

    async def _read_text(self, path: str) -> str:
        try:
            return (await self.read(path)).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    async def put(self, place: str, members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> None:
        """Unpack a few members in the directory `place`."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for info, content in members:
                tar.addfile(info, io.BytesIO(content))
        await self.client.upload(self.archive, {"path": place}, packed.getvalue(), MOVING)


def make_parents(names: Sequence[str], owner: FileOwner) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Return `a`, `a/b`, ... as directory members."""
    made = []
    for depth in range(1, len(names) + 1):
        info = make_member("/".join(names[:depth]), owner, tarfile.DIRTYPE)
        info.mode = 0o755
        made.append((info, b""))
    return made


def _read_first(packed: bytearray) -> tuple[tarfile.TarInfo, bytes]:
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
            first = tar.next()
            if first is None:
                raise SandboxFailed("empty archive", kind="archive")
            content = tar.extractfile(first) if first.isreg() else None
            return first, content.read() if content else b""
    except tarfile.TarError as error:
        raise SandboxFailed(f"invalid archive: {error}", kind="archive") from error


async def put_tree(
    files: ContainerFiles, source: Path, path: str, owner: FileOwner, threads: Executor
) -> None:
    """Copy a file, or the content of a directory, from this machine to `path` in the container."""
    tree = source.is_dir()
    place, above = await _find_target(files, path, tree)

    def pack(into: IO[bytes]) -> None:
        with open_tar(into) as tar:
            for info, _ in make_parents(above if tree else above[:-1], owner):
                tar.addfile(info)
            for name, found in list_tree(source, "/".join(above)):
                add_path(tar, name, found, owner)

    await write_through(files, place, pack, threads)


async def take_tree(
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
    async with run_beside(pack, "wb", threads) as (here, working):
        try:
            await files.client.upload(files.archive, {"path": place}, read_pieces(here), MOVING_TREE)
        except DockerError:
            here.close()
            await _raise_own_error(working)
            raise
        await working


async def read_through(
    files: ContainerFiles, path: str, work: Callable[[IO[bytes]], T], threads: Executor
) -> T:
    """Make `work` read the archive of `path`, whose first member is `path` itself."""
    async with run_beside(work, "rb", threads) as (here, working):
        async with files.client.open_body("GET", files.archive, {"path": path}) as pieces:
            async for piece in pieces:
                if not await feed_piece(here, piece):
                    break
        here.shutdown(socket.SHUT_WR)
        return await working


async def _find_target(files: ContainerFiles, path: str, tree: bool) -> tuple[str, list[str]]:
    """Return an existing directory, and the names from it to `path`."""
    found = await files.stat(path)
    if found is not None and found.is_directory:
        if tree:
            return found.path, []
        raise SandboxFailed(f"cannot replace a directory by a file: `{path}`", kind="path", again=False)
    place, above = await files.find_parent(path)
    return place, [*above, posixpath.basename(path)]


async def _raise_own_error(working: asyncio.Future[None]) -> None:
    """Raise the thread's error, which came first, unless it only lost its reader."""
    try:
        await working
    except (BrokenPipeError, ConnectionResetError):
        return
