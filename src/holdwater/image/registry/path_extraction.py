"""Extract a path of an image to a local directory; layers are streamed and never stored.

Whiteouts and opaque directories remove files of lower layers. No member can leave the directory, neither by
its name nor through a link.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import socket
import stat
import tarfile
import zlib
from concurrent.futures import Executor, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import zstandard

from ...core.errors import BadInput, ImageFailed
from ...core.image import ImagePlatform
from ...core.records import MiB
from .blob_stream import BlobStream
from .client import RegistryClients
from .lookup import resolve_base
from .reference import parse_reference
from .refusal import sanitize_line, unsupported_error

PathParts = tuple[str, ...]

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_OTHER = ".wh..wh."  # internal files of a file system
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_NO_TAR = (  # the last two: names, times and owners that no file can have
    tarfile.TarError,
    EOFError,
    zlib.error,
    gzip.BadGzipFile,
    zstandard.ZstdError,
    ValueError,
    OverflowError,
)


async def extract_path(
    registries: RegistryClients, image: str, path: str, into: Path, platform: ImagePlatform | None = None
) -> str:
    """Write the content of `path` in `image` into the empty directory `into`; return the manifest's digest.

    A path that is a file becomes a file in `into`.
    """
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise BadInput(f"the directory is not empty: {into}")
    reference = parse_reference(image)
    client = registries.client_for(reference.registry)
    base = await resolve_base(client, reference, (platform or ImagePlatform(),))
    manifest = base.images[0]
    if manifest.depth != len(manifest.layers):
        raise unsupported_error(f"`{reference}` cannot be read", "it has layers that no registry stores")

    async def operation() -> None:
        shutil.rmtree(into)  # remove the leftovers of an earlier attempt
        into.mkdir()
        tree = UnpackedTree(str(reference), path, into)
        with ThreadPoolExecutor(1) as thread:
            for blob in manifest.layers:
                async with client.open_blob(reference.repository, blob.digest, blob.size) as flow:
                    await _apply_layer(tree, flow, thread)
        tree.finish()

    await client.host.retry(operation)
    return base.digest


async def _apply_layer(tree: UnpackedTree, flow: BlobStream, thread: Executor) -> None:
    """Send a layer through a socket pair to a thread that unpacks it; the socket limits the pace."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    unpacking = asyncio.get_running_loop().run_in_executor(thread, tree.apply, theirs)
    try:
        await _feed_socket(flow, ours)
    finally:
        ours.close()  # the thread reads the end of the stream, and ends
        await asyncio.wait([unpacking])
        failure = unpacking.exception()  # retrieve it; if the download failed, that error is raised instead
    if failure is not None:
        raise failure


async def _feed_socket(flow: BlobStream, into: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        async for piece in flow:
            await loop.sock_sendall(into, piece)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the thread has failed; its own error is raised


class EntryMetadata(NamedTuple):
    """The metadata of an entry; a directory gets it after its content is complete."""

    mode: int
    mtime: float
    owner: tuple[int, int]


class UnpackedTree:
    """A tree that grows layer by layer: call `apply` from the lowest layer up, then `finish`.

    Only one thread at a time may use it.
    """

    def __init__(self, image: str, path: str, into: Path) -> None:
        self._what = f"`{path}` of `{image}` cannot be extracted"
        self._prefix = self._split_path(path)
        self._into = into
        self._found = False
        self._single = False  # the path is a file
        # links or files that replace directories of the path; bound: the path's parts
        self._hidden: dict[PathParts, str] = {}
        self._directories: dict[PathParts, EntryMetadata] = {}  # bound: the directories below the path
        # entries of this layer and their parents; bound: the layer's members
        self._fresh: set[PathParts] = set()
        self._is_root = os.geteuid() == 0

    def apply(self, source: socket.socket) -> None:
        """Unpack one layer from a stream, and read the stream to its end."""
        self._fresh.clear()
        with source, source.makefile("rb") as raw:
            try:
                with tarfile.open(fileobj=_open_tar(raw), mode="r|") as archive:
                    for member in archive:
                        self._apply_member(archive, member)
                        archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all
                while raw.read(MiB):
                    pass
            except _NO_TAR as error:
                raise unsupported_error(
                    self._what, f"a layer is not a tar archive: {sanitize_line(str(error))}"
                ) from None
            except OSError as error:
                raise ImageFailed(f"{self._what}: {error}", kind="disk") from None

    def finish(self) -> None:
        """Set the metadata of directories, which come last because their modes could prevent writes."""
        if not self._found:
            raise self._missing_error()
        for parts, meta in sorted(self._directories.items(), key=lambda one: len(one[0]), reverse=True):
            place = self._into.joinpath(*parts)
            if place.is_dir() and not place.is_symlink():
                self._set_metadata(place, meta)

    def _apply_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = self._split_path(member.name)
        name = parts[-1] if parts else ""
        if name == _OPAQUE:
            self._clear(parts[:-1])
        elif name.startswith(_OTHER):
            pass
        elif name.startswith(_WHITEOUT):
            self._remove((*parts[:-1], *self._split_path(name[len(_WHITEOUT) :])))
        elif parts == self._prefix[: len(parts)] and parts != self._prefix:
            self._apply_above(parts, member)
        elif parts[: len(self._prefix)] == self._prefix:
            self._apply_below(archive, member, parts[len(self._prefix) :])

    def _apply_above(self, parts: PathParts, member: tarfile.TarInfo) -> None:
        """Apply a member above the path: a directory, or an entry that replaces one."""
        if member.isdir():
            self._hidden.pop(parts, None)
            return
        self._hidden[parts] = member.linkname if member.issym() else ""
        self._sweep(())
        self._found = False

    def _apply_below(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: PathParts) -> None:
        if not parts:
            self._hidden.pop(self._prefix, None)
        if self._hidden:
            raise self._escape_error(member.name, "through a link or a file")
        if not parts and member.issym():
            self._apply_above(self._prefix, member)
            return
        single = not parts and not member.isdir()
        if single or self._single:
            self._sweep(())
        if single:
            parts = self._prefix[-1:]
        self._found, self._single = True, single
        self._make_entry(archive, member, parts)
        self._fresh.update(parts[:depth] for depth in range(len(parts) + 1))

    def _make_entry(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: PathParts) -> None:
        place = self._make_parents(parts)
        metadata = EntryMetadata(member.mode & 0o7777, member.mtime, (member.uid, member.gid))
        if member.isdir():
            if place.is_symlink() or not place.is_dir():
                self._unlink(place)
                place.mkdir()
            self._directories[parts] = metadata
            return
        self._unlink(place)
        if member.issym():
            place.symlink_to(member.linkname)
        elif member.islnk():
            self._link(member, place)
            return
        elif member.isfile():
            self._write(archive, member, place)
        else:
            self._make_special(member, place)
        self._set_metadata(place, metadata)

    def _make_parents(self, parts: PathParts) -> Path:
        """Create the directories above a member; return the member's place. Links are refused."""
        place = self._into
        for part in parts[:-1]:
            place = place / part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise self._escape_error("/".join(parts), "through a link or a file")
            place.mkdir(exist_ok=True)
        return place / parts[-1] if parts else place

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
        content = archive.extractfile(member)
        assert content is not None
        with content, place.open("xb") as file:
            shutil.copyfileobj(content, file, MiB)

    def _link(self, member: tarfile.TarInfo, place: Path) -> None:
        parts = self._split_path(member.linkname)
        inside = parts[len(self._prefix) :]
        if parts[: len(self._prefix)] != self._prefix or not inside:
            raise self._entry_error(member.name, "is a hard link to a file outside of the path")
        other = self._make_parents(inside)
        if not os.path.lexists(other):
            raise self._entry_error(member.name, "is a hard link to a file that does not exist")
        os.link(other, place, follow_symlinks=False)

    def _make_special(self, member: tarfile.TarInfo, place: Path) -> None:
        if member.isfifo():
            os.mkfifo(place)
        elif (member.ischr() or member.isblk()) and self._is_root:
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            os.mknod(place, kind | 0o600, os.makedev(member.devmajor, member.devminor))
        else:
            raise self._entry_error(member.name, "is a device, or of an unknown kind")

    def _set_metadata(self, place: Path, metadata: EntryMetadata) -> None:
        if self._is_root:
            os.lchown(place, *metadata.owner)
        if not place.is_symlink():
            place.chmod(metadata.mode)
        os.utime(place, (metadata.mtime, metadata.mtime), follow_symlinks=False)

    def _remove(self, parts: PathParts) -> None:
        """Apply a whiteout: remove the entry of lower layers."""
        if parts == self._prefix[: len(parts)]:
            self._sweep(())
            self._hidden.pop(parts, None)
            self._found, self._single = bool(self._fresh), self._single and bool(self._fresh)
        elif parts[: len(self._prefix)] == self._prefix:
            self._sweep(parts[len(self._prefix) :], itself=True)

    def _clear(self, parts: PathParts) -> None:
        """Apply an opaque directory: remove the content of lower layers."""
        if parts == self._prefix[: len(parts)]:
            self._sweep(())
        elif parts[: len(self._prefix)] == self._prefix:
            self._sweep(parts[len(self._prefix) :])

    def _sweep(self, parts: PathParts, itself: bool = False) -> None:
        """Remove the content of an entry, with `itself` the entry too, except the entries of this layer."""
        place = self._find_place(parts)
        if place is None:
            return
        if place.is_dir() and not place.is_symlink():
            for child in list(place.iterdir()):
                self._sweep((*parts, child.name), itself=True)
        if itself and parts not in self._fresh:
            self._directories.pop(parts, None)
            self._unlink(place)

    def _find_place(self, parts: PathParts) -> Path | None:
        place = self._into
        for part in parts:
            if place.is_symlink():
                return None
            place = place / part
        return place if os.path.lexists(place) else None

    def _unlink(self, place: Path) -> None:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        elif os.path.lexists(place):
            place.unlink()

    def _split_path(self, name: str) -> PathParts:
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in parts:
            raise self._escape_error(name, "by `..`")
        return parts

    def _escape_error(self, name: str, how: str) -> ImageFailed:
        return self._entry_error(name, f"would leave the directory {how}")

    def _entry_error(self, name: str, why: str, hint: str = "") -> ImageFailed:
        return unsupported_error(self._what, f"`{sanitize_line(name)}` {why}", hint)

    def _missing_error(self) -> ImageFailed:
        for parts, link in self._hidden.items():
            if link:
                target = f"`{sanitize_line(link)}`"
                return self._entry_error(f"/{'/'.join(parts)}", f"is a link to {target}", "use its target")
        return ImageFailed(f"{self._what}: there is no such path", kind="missing", again=False)


def _open_tar(raw: BufferedReader) -> BinaryIO:
    """Return the decompressed tar of a layer; the first bytes decide, since media types can be wrong."""
    head = raw.peek(4)
    if head.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head.startswith(_ZSTD):
        return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return cast(BinaryIO, raw)
