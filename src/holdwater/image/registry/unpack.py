"""Layers of an image put on top of each other in a local directory, as far as they lie below one path.

Whiteouts and opaque directories take away what lower layers brought. A member never leads out of the
directory: neither by its name, nor through a link.
"""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import stat
import tarfile
import zlib
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import zstandard

from ...core.errors import ImageFailed
from ...core.records import MiB
from .refusal import shown, unsupported

Parts = tuple[str, ...]

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_OTHER = ".wh..wh."  # what one file system keeps for itself
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_NO_TAR = (  # the last two: of names, times and owners that no file can have
    tarfile.TarError,
    EOFError,
    zlib.error,
    gzip.BadGzipFile,
    zstandard.ZstdError,
    ValueError,
    OverflowError,
)


class Meta(NamedTuple):
    """What a directory gets when everything is in it."""

    mode: int
    mtime: float
    owner: tuple[int, int]


class Tree:
    """Used from one thread at a time: `apply` for each layer from the lowest up, then `finish`."""

    def __init__(self, image: str, path: str, into: Path) -> None:
        self._what = f"`{path}` of `{image}` cannot be taken"
        self._prefix = self._parts(path)
        self._into = into
        self._found = False
        self._single = False  # the path is a file
        self._hidden: dict[
            Parts, str
        ] = {}  # links in the place of directories above; bound: the path's parts
        self._directories: dict[Parts, Meta] = {}  # bound: the directories below the path
        self._fresh: set[Parts] = set()  # what this layer brought, and what leads there; bound: its members
        self._root = os.geteuid() == 0

    def apply(self, source: socket.socket) -> None:
        """One layer, from a stream that is read to its end."""
        self._fresh.clear()
        with source, source.makefile("rb") as raw:
            try:
                with tarfile.open(fileobj=_unpacked(raw), mode="r|") as archive:
                    for member in archive:
                        self._member(archive, member)
                        archive.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
                while raw.read(MiB):
                    pass
            except _NO_TAR as error:
                raise unsupported(self._what, f"a layer is not a tar archive: {shown(str(error))}") from None
            except OSError as error:
                raise ImageFailed(f"{self._what}: {error}", kind="disk") from None

    def finish(self) -> None:
        """Directories get their modes last: until now things had to be put into them."""
        if not self._found:
            raise self._absent()
        for parts, meta in sorted(self._directories.items(), key=lambda one: len(one[0]), reverse=True):
            place = self._place(parts)
            if place.is_dir() and not place.is_symlink():
                self._finish_one(place, meta)

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = self._parts(member.name)
        name = parts[-1] if parts else ""
        if name == _OPAQUE:
            self._clear(parts[:-1])
        elif name.startswith(_OTHER):
            pass
        elif name.startswith(_WHITEOUT):
            self._remove((*parts[:-1], *self._parts(name[len(_WHITEOUT) :])))
        elif parts == self._prefix[: len(parts)] and parts != self._prefix:
            self._above(parts, member)
        elif parts[: len(self._prefix)] == self._prefix:
            self._below(archive, member, parts[len(self._prefix) :])

    def _above(self, parts: Parts, member: tarfile.TarInfo) -> None:
        """A directory that leads to the path, or what was put in its place."""
        if member.isdir():
            self._hidden.pop(parts, None)
            return
        self._hidden[parts] = member.linkname if member.issym() else ""
        self._sweep(())
        self._found = False

    def _below(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: Parts) -> None:
        if not parts:
            self._hidden.pop(self._prefix, None)
        if self._hidden:
            raise self._leaves(member.name, "through a link or a file")
        if not parts and member.issym():
            self._above(self._prefix, member)
            return
        single = not parts and not member.isdir()
        if single or self._single:
            self._sweep(())
        if single:
            parts = self._prefix[-1:]
        self._found, self._single = True, single
        self._make(archive, member, parts)
        self._fresh.update(parts[:depth] for depth in range(len(parts) + 1))

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: Parts) -> None:
        place = self._opened(parts)
        if member.isdir():
            self._directory(place)
            owner = member.uid, member.gid
            self._directories[parts] = Meta(member.mode & 0o7777, member.mtime, owner)
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
            self._special(member, place)
        self._dress(place, member)

    def _opened(self, parts: Parts) -> Path:
        """Where a member goes, with real directories above it."""
        place = self._into
        for part in parts[:-1]:
            place = place / part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise self._leaves("/".join(parts), "through a link or a file")
            place.mkdir(exist_ok=True)
        return place / parts[-1] if parts else place

    def _directory(self, place: Path) -> None:
        if place.is_symlink() or not place.is_dir():
            self._unlink(place)
            place.mkdir()

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
        content = archive.extractfile(member)
        assert content is not None
        with content, place.open("xb") as file:
            shutil.copyfileobj(content, file, MiB)

    def _link(self, member: tarfile.TarInfo, place: Path) -> None:
        parts = self._parts(member.linkname)
        inside = parts[len(self._prefix) :]
        if parts[: len(self._prefix)] != self._prefix or not inside:
            raise unsupported(
                self._what, f"{_quoted(member.name)} is a hard link to a file that lies elsewhere"
            )
        other = self._opened(inside)
        if not os.path.lexists(other):
            raise unsupported(
                self._what, f"{_quoted(member.name)} is a hard link to a file that is not there"
            )
        os.link(other, place, follow_symlinks=False)

    def _special(self, member: tarfile.TarInfo, place: Path) -> None:
        if member.isfifo():
            os.mkfifo(place)
        elif (member.ischr() or member.isblk()) and self._root:
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            os.mknod(place, kind | 0o600, os.makedev(member.devmajor, member.devminor))
        else:
            raise unsupported(self._what, f"{_quoted(member.name)} is a device, or of an unknown kind")

    def _dress(self, place: Path, member: tarfile.TarInfo) -> None:
        if self._root:
            os.lchown(place, member.uid, member.gid)
        if not member.issym():
            place.chmod(member.mode & 0o7777)
        os.utime(place, (member.mtime, member.mtime), follow_symlinks=False)

    def _finish_one(self, place: Path, meta: Meta) -> None:
        if self._root:
            os.lchown(place, *meta.owner)
        place.chmod(meta.mode)
        os.utime(place, (meta.mtime, meta.mtime))

    def _remove(self, parts: Parts) -> None:
        """A whiteout: what lower layers have there is gone."""
        if parts == self._prefix[: len(parts)]:
            self._sweep(())
            self._hidden.pop(parts, None)
            self._found, self._single = bool(self._fresh), self._single and bool(self._fresh)
        elif parts[: len(self._prefix)] == self._prefix:
            self._sweep(parts[len(self._prefix) :], itself=True)

    def _clear(self, parts: Parts) -> None:
        """An opaque directory: what lower layers have in it is gone."""
        if parts == self._prefix[: len(parts)]:
            self._sweep(())
        elif parts[: len(self._prefix)] == self._prefix:
            self._sweep(parts[len(self._prefix) :])

    def _sweep(self, parts: Parts, itself: bool = False) -> None:
        """Remove what is below, or it itself, but for what this layer has brought."""
        place = self._opened_or_none(parts)
        if place is None:
            return
        if place.is_dir() and not place.is_symlink():
            for child in list(place.iterdir()):
                self._sweep((*parts, child.name), itself=True)
        if itself and parts not in self._fresh:
            self._directories.pop(parts, None)
            self._unlink(place)

    def _opened_or_none(self, parts: Parts) -> Path | None:
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

    def _place(self, parts: Parts) -> Path:
        return self._into.joinpath(*parts)

    def _parts(self, name: str) -> Parts:
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in parts:
            raise self._leaves(name, "by `..`")
        return parts

    def _leaves(self, name: str, how: str) -> ImageFailed:
        return unsupported(self._what, f"{_quoted(name)} would leave the directory {how}")

    def _absent(self) -> ImageFailed:
        for parts, link in self._hidden.items():
            if link:
                name = "/" + "/".join(parts)
                return unsupported(
                    self._what, f"{_quoted(name)} is a link to {_quoted(link)}", "name its target"
                )
        return ImageFailed(f"{self._what}: there is no such path", kind="missing", again=False)


def _unpacked(raw: BufferedReader) -> BinaryIO:
    """The tar in a layer, by its first bytes: what a manifest calls it is not always so."""
    head = raw.peek(4)
    if head.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head.startswith(_ZSTD):
        return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return cast(BinaryIO, raw)


def _quoted(name: str) -> str:
    return f"`{shown(name)}`"
