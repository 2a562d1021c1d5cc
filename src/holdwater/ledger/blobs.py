"""Stores media by content, each blob once per run under its blake3 hash, and resolves references to them.

A blob is written to a temporary file and renamed, so that an existing blob is complete. In recorded
exchanges `"holdwater-blob:<hash>:<mime>"` stands for a base64 data URL, `"holdwater-base64:<hash>"` for bare
base64, and `"holdwater-json:<hash>"` for any JSON value, such as tools. The gateway inserts references and
ensures that no text looks like one; they are resolved in raw, undecoded JSON.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import zstandard
from blake3 import blake3

from ..core.errors import LedgerCorrupt
from ..dialect.message import REFERENCE
from .durable_files import cannot_write, make_directory, open_private, sync_path, write_all
from .record_encoding import expand, open_expanded, shrink

PIECE_SIZE = 3 << 15  # bytes; a multiple of 3, so that pieces of base64 join
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
        path = self._require(name)
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
        path = self._require(name)
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
            path = self._require(name)
            _sync(path)
            above.add(path.parent)
        for directory in above:
            _sync(directory)

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

    def _require(self, name: str) -> Path:
        path = self._find(name) if is_hash(name) else None
        if path is None:
            raise LedgerCorrupt(f"a blob is missing: {name[:64]!r}")
        return path

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


def _sync(path: Path) -> None:
    try:
        sync_path(path)
    except OSError as e:
        raise cannot_write(path, e) from e


def is_hash(name: str) -> bool:
    """Return whether a name is a hash. Names come from recorded requests: nothing else may become a path."""
    return len(name) == 64 and HEX.issuperset(name)


def resolve_references(
    message: bytes, blobs: BlobStore, read_constant: Callable[[str], bytes] | None = None
) -> bytes:
    """Return the message with its references replaced by the media and constants."""
    if b'"holdwater-' not in message:
        return message
    read = read_constant or blobs.get
    return REFERENCE.sub(lambda match: _resolve_match(match, blobs, read), message)


def write_resolved(message: bytes, blobs: BlobStore) -> Iterator[bytes]:
    """Yield the message with its references replaced by the media and constants, in pieces."""
    done = 0
    for match in REFERENCE.finditer(message) if b'"holdwater-' in message else ():
        yield message[done : match.start()]
        done = match.end()
        pieces = blobs.read_pieces(match[2].decode(), PIECE_SIZE)
        if match[1] == b"json":
            yield from pieces
            continue
        yield b'"data:%s;base64,' % (match[3] or b"") if match[1] == b"blob" else b'"'
        yield from map(base64.b64encode, pieces)
        yield b'"'
    yield message[done:]


def find_references(content: bytes) -> Iterator[str]:
    """Yield the hashes of the blobs that raw JSON refers to."""
    if b'"holdwater-' in content:
        for match in REFERENCE.finditer(content):
            yield match[2].decode()


def _resolve_match(match: re.Match[bytes], blobs: BlobStore, read_constant: Callable[[str], bytes]) -> bytes:
    if match[1] == b"json":
        return read_constant(match[2].decode())
    content = blobs.get(match[2].decode())
    data = base64.b64encode(content)
    return b'"%s"' % data if match[1] == b"base64" else b'"data:%s;base64,%s"' % (match[3] or b"", data)
