"""Stores media by content: each blob once per run, under its blake3 hash.

A blob is written to a temporary file and renamed, so that an existing blob is complete. References to blobs
are in `blob_references.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import zstandard
from blake3 import blake3

from ..core.errors import LedgerCorrupt
from .compression import expand, open_expanded, shrink
from .durable_files import cannot_write, sync_directory, sync_path, write_all
from .private_files import make_directory, open_private

WORTHWHILE_RATIO = 0.95  # a blob is stored compressed if that is smaller than this fraction of its size
HEX = frozenset("0123456789abcdef")
_numbers = itertools.count()


class BlobStore:
    """The blobs of one run. Several processes may call `put` concurrently."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, content: bytes) -> str:
        """Store `content`; return its hash. It survives kill -9 now, and power loss after `sync`."""
        name = blake3(content).hexdigest()
        if self._find(name) is None:
            squeezed = shrink(content)
            if squeezed is not None and len(squeezed) < WORTHWHILE_RATIO * len(content):
                self._write(self._plain_path(name).with_suffix(".zst"), squeezed)
            else:
                self._write(self._plain_path(name), content)
        return name

    def get(self, name: str) -> bytes:
        """Return the content with this hash, verified."""
        path = self._find(name) if is_hash(name) else None
        if path is None:
            raise LedgerCorrupt(f"a blob is missing: {name[:64]!r}")
        try:
            content = path.read_bytes()
            content = expand(content) if path.suffix else content
        except (OSError, zstandard.ZstdError) as e:
            raise LedgerCorrupt(f"a blob cannot be read: `{path}`: {e}") from e
        if blake3(content).hexdigest() != name:
            raise LedgerCorrupt(f"a blob does not match its hash: `{path}`")
        return content

    def read_pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the content with this hash, `size` bytes at a time; verify it after the last piece."""
        path = self._find(name) if is_hash(name) else None
        if path is None:
            raise LedgerCorrupt(f"a blob is missing: {name[:64]!r}")
        seen = blake3()
        try:
            with path.open("rb") as file, open_expanded(file, squeezed=bool(path.suffix)) as content:
                while piece := content.read(size):
                    seen.update(piece)
                    yield piece
        except (OSError, zstandard.ZstdError) as e:
            raise LedgerCorrupt(f"a blob cannot be read: `{path}`: {e}") from e
        if seen.hexdigest() != name:
            raise LedgerCorrupt(f"a blob does not match its hash: `{path}`")

    def sync(self, names: Iterable[str]) -> None:
        """Make blobs of any writer survive power loss. A directory that blobs share is synced once."""
        above = {self.path}  # bound: 256 subdirectories and this one
        for name in names:
            path = self._find(name)
            if path is None:
                raise LedgerCorrupt(f"a blob is missing: {name!r}")
            _sync(path, sync_path)
            above.add(path.parent)
        for directory in above:
            _sync(directory, sync_directory)

    def paths(self) -> Iterator[Path]:
        """Yield the file of every blob; its stem is the hash."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                if is_hash(name.removesuffix(".zst")):
                    yield Path(folder, name)

    def sweep(self) -> int:
        """Remove temporary files of killed writers; return their number. No process may write meanwhile."""
        left = list(self._temporary_folder.iterdir()) if self._temporary_folder.is_dir() else []
        for path in left:
            path.unlink()
        return len(left)

    def _find(self, name: str) -> Path | None:
        plain = self._plain_path(name)
        older = plain.parent / name[2:4] / name  # older runs have one more directory level
        for path in (plain, plain.with_suffix(".zst"), older, older.with_suffix(".zst")):
            if path.exists():
                return path
        return None

    def _plain_path(self, name: str) -> Path:
        return self.path / name[:2] / name

    @property
    def _temporary_folder(self) -> Path:
        return self.path / "new"

    def _write(self, path: Path, content: bytes) -> None:
        new = self._temporary_folder / f"{os.getpid()}-{next(_numbers)}"
        try:
            make_directory(self._temporary_folder)
            make_directory(path.parent)
            try:
                fd = open_private(str(new), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                try:
                    write_all(fd, content)
                finally:
                    os.close(fd)
                new.rename(path)
            except OSError:
                new.unlink(missing_ok=True)
                raise
        except OSError as e:
            raise cannot_write(path, e) from e


def _sync(path: Path, sync: Callable[[Path], None]) -> None:
    try:
        sync(path)
    except OSError as e:
        raise cannot_write(path, e) from e


def is_hash(name: str) -> bool:
    """Return whether a name is a hash. Names come from recorded requests: nothing else may become a path."""
    return len(name) == 64 and HEX.issuperset(name)
