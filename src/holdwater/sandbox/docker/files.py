"""Files of a container from outside, by the archive API: links are followed in the container, never here.

Single files are read and written whole; trees go through a pipe to or from a thread (`trees.py`).
"""

from __future__ import annotations

import base64
import errno
import io
import os
import posixpath
import tarfile
import time
from collections.abc import Sequence

import msgspec

from ...core.errors import SandboxFailed
from ...docker.client import DockerClient, DockerError
from ..beneath import LARGEST_READ
from ..places import MOST_LINKS
from .container import ASKING

HEADER = "X-Docker-Container-Path-Stat"
MOVING = 600.0  # seconds for one file
OVERHEAD = 64 * 1024  # bytes of an archive beside its file's content
WRONG = {
    "too many links": errno.ELOOP,
    "not a directory": errno.ENOTDIR,
    "file name too long": errno.ENAMETOOLONG,
}
GO_DIRECTORY, GO_LINK, GO_OTHER = 1 << 31, 1 << 27, 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19


class Owner(msgspec.Struct, frozen=True):
    """Whom files that are put in belong to."""

    uid: int = 0
    gid: int = 0


class Found(msgspec.Struct, frozen=True):
    """What there is at a path of a container."""

    path: str  # links followed
    size: int = 0
    mode: int = 0  # as Go has it
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
        """As in a tar."""
        kinds = {GO_DIRECTORY: tarfile.DIRTYPE, GO_LINK: tarfile.SYMTYPE, GO_OTHER: tarfile.FIFOTYPE}
        return next((kind for bits, kind in kinds.items() if self.mode & bits), tarfile.REGTYPE)


class Files:
    """The files of one container."""

    def __init__(self, client: DockerClient, container: str) -> None:
        self.client = client
        self.archive = f"{container}/archive"

    async def look(self, path: str) -> Found | None:
        """What is at `path` itself; None: nothing."""
        try:
            headers = await self.client.head(self.archive, {"path": path}, seconds=ASKING)
        except DockerError as error:
            if error.status in (400, 404):
                return None  # whether it is the container that is gone is asked in `known`
            await self._refused(path)
            return None
        told = msgspec.json.decode(base64.b64decode(headers[HEADER]))
        return Found(path, told["size"], told["mode"], told["mtime"], told["linkTarget"])

    async def _refused(self, path: str) -> None:
        """Ask again, in a way that is answered with words."""
        try:
            async with self.client.reading("GET", self.archive, {"path": path}, silence=ASKING):
                return
        except DockerError as error:
            number = next((number for words, number in WRONG.items() if words in error.message), None)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), path) from error

    async def find(self, path: str) -> Found | None:
        """The same, at the end of all links."""
        for _ in range(MOST_LINKS):
            found = await self.look(path)
            if found is None or not found.mode & GO_LINK:
                return found
            path = found.link
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    async def known(self, path: str) -> Found:
        """The same, or FileNotFoundError."""
        found = await self.find(path)
        if found is None:
            told = await self.client.get(posixpath.dirname(self.archive) + "/json", seconds=ASKING)
            if told["State"]["Status"] not in ("created", "running"):
                raise DockerError("the container is not running", status=409)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    async def read(self, path: str) -> bytes:
        found = await self.known(path)
        if not found.is_file:
            raise SandboxFailed(f"not a file: `{path}`", kind="path", again=False)
        if found.size > LARGEST_READ:
            raise SandboxFailed(f"larger than {LARGEST_READ} bytes: `{path}`", kind="size", again=False)
        info, content = await self.fetch(found.path)
        if not info.isreg():
            raise SandboxFailed(f"not a file: `{path}`", kind="path", again=False)
        return content

    async def fetch(self, path: str) -> tuple[tarfile.TarInfo, bytes]:
        """A file or a link as it is, and what is in it."""
        packed = bytearray()
        async with self.client.reading("GET", self.archive, {"path": path}) as pieces:
            async for piece in pieces:
                packed += piece
                if len(packed) > LARGEST_READ + OVERHEAD:
                    raise SandboxFailed(f"it grew while it was read: `{path}`", kind="size", again=False)
        return _first(packed)

    async def write(self, path: str, content: bytes, owner: Owner) -> None:
        """Create or replace a file, and the directories above it."""
        found = await self.find(path)
        if found is not None and not found.is_file:
            raise SandboxFailed(f"not a file: `{path}`", kind="path", again=False)
        mode = found.mode & 0o777 if found else 0o644
        place, above = (posixpath.dirname(found.path), []) if found else await self.place(path)
        info = member("/".join([*above, posixpath.basename(found.path if found else path)]), owner)
        info.size, info.mode = len(content), mode
        await self.put(place, [*directories(above, owner), (info, content)])

    async def place(self, path: str) -> tuple[str, list[str]]:
        """The nearest directory above `path` that is there, and the names of those that are not."""
        missing: list[str] = []
        above = posixpath.dirname(path)
        while (found := await self.find(above)) is None:
            if above == "/":
                await self.known(above)  # which is not known of a container that is gone
            above, name = posixpath.split(above)
            missing.insert(0, name)
        if not found.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return found.path, missing

    async def owner(self, user: str) -> Owner:
        """The numbers of a user as docker knows it: `name`, `number`, either with `:group`."""
        name, _, group = user.partition(":")
        if name in ("", "root", "0") and group in ("", "root", "0"):
            return Owner()
        rows = [row.split(":") for row in (await self._text("/etc/passwd")).splitlines()]
        row = next((row for row in rows if len(row) > 3 and name in (row[0], row[2])), None)
        if row is None and not name.isdigit():
            raise SandboxFailed(f"no such user in the image: `{name}`", kind="user", again=False)
        uid, gid = (int(row[2]), int(row[3])) if row else (int(name), 0)
        if group and not group.isdigit():
            groups = [row.split(":") for row in (await self._text("/etc/group")).splitlines()]
            group = next((row[2] for row in groups if len(row) > 2 and row[0] == group), "")
            if not group:
                raise SandboxFailed(f"no such group in the image: `{user}`", kind="user", again=False)
        return Owner(uid, int(group) if group else gid)

    async def _text(self, path: str) -> str:
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


def member(name: str, owner: Owner, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.uid, info.gid, info.mtime = kind, owner.uid, owner.gid, int(time.time())
    return info


def directories(names: Sequence[str], owner: Owner) -> list[tuple[tarfile.TarInfo, bytes]]:
    """`a`, `a/b`, ... as members."""
    made = []
    for depth in range(1, len(names) + 1):
        info = member("/".join(names[:depth]), owner, tarfile.DIRTYPE)
        info.mode = 0o755
        made.append((info, b""))
    return made


def _first(packed: bytearray) -> tuple[tarfile.TarInfo, bytes]:
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
            first = tar.next()
            if first is None:
                raise SandboxFailed("an archive of nothing", kind="archive")
            content = tar.extractfile(first) if first.isreg() else None
            return first, content.read() if content else b""
    except tarfile.TarError as error:
        raise SandboxFailed(f"not an archive: {error}", kind="archive") from error
