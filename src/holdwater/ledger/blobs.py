"""Media by content: each is kept once in a run, under its blake3 hash.

Written to one side and renamed, so that a blob that exists is whole. Who refers to it is in `media.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import zstandard
from blake3 import blake3

from ..core.errors import LedgerCorrupt
from .compression import expand, reading, shrink
from .disk import cannot_write, sync_directory, sync_path, write_all
from .private import make_directory, open_private

WORTHWHILE = 0.95  # a blob is kept compressed when that is smaller than this part of it
HEX = frozenset("0123456789abcdef")
_numbers = itertools.count()


class Blobs:
    """The blobs of one run. Many processes may put at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, content: bytes) -> str:
        """Keep `content`; its hash. It survives kill -9 now, and power loss after `sync`."""
        name = blake3(content).hexdigest()
        if self._find(name) is None:
            squeezed = shrink(content)
            if squeezed is not None and len(squeezed) < WORTHWHILE * len(content):
                self._write(self._plain(name).with_suffix(".zst"), squeezed)
            else:
                self._write(self._plain(name), content)
        return name

    def get(self, name: str) -> bytes:
        """The content with this hash, checked."""
        path = self._find(name) if is_hash(name) else None
        if path is None:
            raise LedgerCorrupt(f"a blob is missing: {name[:64]!r}")
        try:
            content = path.read_bytes()
            content = expand(content) if path.suffix else content
        except (OSError, zstandard.ZstdError) as e:
            raise LedgerCorrupt(f"a blob cannot be read: `{path}`: {e}") from e
        if blake3(content).hexdigest() != name:
            raise LedgerCorrupt(f"a blob is not what was written: `{path}`")
        return content

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """The content with this hash, `size` bytes at a time; checked when the last piece is there."""
        path = self._find(name) if is_hash(name) else None
        if path is None:
            raise LedgerCorrupt(f"a blob is missing: {name[:64]!r}")
        seen = blake3()
        try:
            with path.open("rb") as file, reading(file, squeezed=bool(path.suffix)) as content:
                while piece := content.read(size):
                    seen.update(piece)
                    yield piece
        except (OSError, zstandard.ZstdError) as e:
            raise LedgerCorrupt(f"a blob cannot be read: `{path}`: {e}") from e
        if seen.hexdigest() != name:
            raise LedgerCorrupt(f"a blob is not what was written: `{path}`")

    def sync(self, names: Iterable[str]) -> None:
        """Make blobs survive power loss, whoever wrote them. A directory that they share is synced once."""
        above = {self.path}  # bound: 256 and this
        for name in names:
            path = self._find(name)
            if path is None:
                raise LedgerCorrupt(f"a blob is missing: {name!r}")
            _sync(path, sync_path)
            above.add(path.parent)
        for directory in above:
            _sync(directory, sync_directory)

    def paths(self) -> Iterator[Path]:
        """Every blob's file; its stem is the hash."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                if is_hash(name.removesuffix(".zst")):
                    yield Path(folder, name)

    def sweep(self) -> int:
        """Remove what killed writers left; how many files. Only while nobody writes."""
        left = list(self._aside.iterdir()) if self._aside.is_dir() else []
        for path in left:
            path.unlink()
        return len(left)

    def _find(self, name: str) -> Path | None:
        plain = self._plain(name)
        older = plain.parent / name[2:4] / name  # runs of before lie one directory deeper
        for path in (plain, plain.with_suffix(".zst"), older, older.with_suffix(".zst")):
            if path.exists():
                return path
        return None

    def _plain(self, name: str) -> Path:
        return self.path / name[:2] / name

    @property
    def _aside(self) -> Path:
        return self.path / "new"

    def _write(self, path: Path, content: bytes) -> None:
        new = self._aside / f"{os.getpid()}-{next(_numbers)}"
        try:
            make_directory(self._aside)
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
    """Names come from recorded requests: nothing but a hash may become a path."""
    return len(name) == 64 and HEX.issuperset(name)
