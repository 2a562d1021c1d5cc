"""The archive of an agent's work: a `.tar.zst` that either kind of sandbox writes and restores.

It holds `work/...` (changed and added paths), `deleted` and `left-out` (paths, NUL-terminated). `changes.py`
finds the changes of a process sandbox, `docker/container_work.py` those of a container.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

import zstandard

from ..core.errors import SandboxFailed
from ..core.failures import UNRESTORED
from ..core.masking import MaskedFile
from ..core.records import MiB, Salvage
from ..ledger.durable_files import make_directory, open_private

LARGEST = 512 * MiB  # bytes of content in one salvage
SPOOLED = 1 * MiB  # bytes; longer lists are spooled to disk
LEVEL = 3
LEFT_OUT = "left-out"


class SizeLimit:
    """Chooses the smallest files up to `LARGEST` bytes together, given the sizes of all."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._size = LARGEST + 1  # the first size that does not fit, at least not for all files that have it
        self._count = 0  # how many of these files fit
        ordered, total = sorted(sizes), 0
        for i, size in enumerate(ordered):
            total += size
            if total > LARGEST:
                self._size, self._count = size, i - ordered.index(size)
                break

    def admit(self, size: int) -> bool:
        """Return whether the next file fits; call it once for each file."""
        if size == self._size:
            self._count -= 1
            return self._count >= 0
        return size < self._size


class SalvageArchive:
    """A salvage archive that is being written."""

    def __init__(self, tar: tarfile.TarFile, deleted: IO[bytes], left_out: IO[bytes]) -> None:
        self.paths = 0  # in the archive
        self.missing = 0  # left out
        self._tar = tar
        self._deleted = deleted
        self._left_out = left_out

    def add(self, info: tarfile.TarInfo, content: Any = None) -> None:
        """Add a path below the working directory (`info.name`), with its content if it is a file."""
        info.name = f"work/{info.name}"
        masked: Any = None if content is None else MaskedFile(content, info.size)
        self._tar.addfile(info, masked)
        forget_members(self._tar)
        self.paths += 1

    def delete(self, path: bytes) -> None:
        self._deleted.write(path + b"\0")
        self.paths += 1

    def leave_out(self, path: bytes) -> None:
        self._left_out.write(path + b"\0")
        self.missing += 1

    def finish(self) -> None:
        for name, listed in (("deleted", self._deleted), (LEFT_OUT, self._left_out)):
            _add_list(self._tar, name, listed)

    def describe(self, path: Path) -> Salvage:
        """Return the record of the finished archive at `path`."""
        return Salvage(name=path.name, files=self.paths, bytes=path.stat().st_size, left_out=self.missing)


@contextmanager
def create_archive(into: Path) -> Iterator[SalvageArchive]:
    """Write a new archive; at the end it exists whole and durable, or not at all."""
    with (
        open_replacement(into) as file,
        _spool() as deleted,
        _spool() as left_out,
        zstandard.ZstdCompressor(LEVEL).stream_writer(file, closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        made = SalvageArchive(tar, deleted, left_out)
        yield made
        made.finish()


@contextmanager
def open_archive(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with (
            source.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as content,
            tarfile.open(fileobj=content, mode="r|") as tar,
        ):
            yield tar
    except (OSError, tarfile.TarError, zstandard.ZstdError) as e:
        raise SandboxFailed(f"cannot restore `{source}`: {e}") from e


def read_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while member := tar.next():
        forget_members(tar)
        yield member


def is_restored(member: tarfile.TarInfo) -> bool:
    """Whether a member is restored; compiled modules are not (see `changes.drop_bytecode`)."""
    return member.name.startswith("work/") and "__pycache__" not in member.name.split("/")


def check_whole(member: tarfile.TarInfo) -> None:
    """Refuse an archive that lists paths whose content it lacks."""
    if member.name == LEFT_OUT and member.size:
        raise SandboxFailed("the salvage is incomplete: some of the work was left out", kind=UNRESTORED)


def split_path(path: str) -> list[str]:
    steps = path.split("/")
    if any(step in ("", ".", "..") for step in steps):
        raise SandboxFailed(f"invalid path below the working directory: `{path[:300]}`", again=False)
    return steps


class ExactReader(RawIOBase):
    """Returns exactly as many bytes as requested: a file that shrinks meanwhile must not break an archive."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, size: int = -1) -> bytes:
        return os.read(self._fd, size).ljust(size, b"\0")


def _add_list(tar: tarfile.TarFile, name: str, listed: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = listed.tell()
    if info.size:
        listed.seek(0)
        tar.addfile(info, listed)


def _spool() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(SPOOLED)


@contextmanager
def open_replacement(into: Path) -> Iterator[IO[bytes]]:
    """Write a file that in the end exists whole and durable, or not at all."""
    make_directory(into.parent)
    partial = into.with_name(f".{into.name}.partial")
    try:
        with open(partial, "wb", opener=open_private) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(into)
        directory = os.open(into.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)  # without this the new name may be lost in a power failure
        finally:
            os.close(directory)
    finally:
        partial.unlink(missing_ok=True)


def forget_members(tar: tarfile.TarFile) -> None:
    """Clear tarfile's list of members, which grows with every member read or written."""
    tar.members.clear()  # type: ignore[attr-defined]
