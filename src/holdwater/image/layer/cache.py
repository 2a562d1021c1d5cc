"""A cache of layers on disk, bounded in bytes: one process builds the layer of a key while all others wait.

The builders decide the content of a layer. The kernel frees the locks of a killed process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import file_digest
from pathlib import Path
from types import TracebackType

import msgspec

from ...core.environment import build_environment
from ...core.image import ImageLayer, Note
from ...core.records import Record
from ...ledger.durable_files import make_directory
from .thread import CancelCheck, run_in_thread, run_to_end

# Seconds between two attempts to get a lock: a thread that waits in the kernel could not be cancelled.
POLL_SECONDS = 0.05
REMOVE_SECONDS = 600.0  # seconds
LAYER = "layer.tar.gz"
RECORD = "layer.json"


class ScratchDirectory(Record, frozen=True):
    """A temporary directory. It is not swept while a process has its lock open."""

    path: Path
    lock: int  # a file descriptor; programs that write to the directory inherit it


# Leaves the layer's file in the scratch directory.
LayerBuilder = Callable[[ScratchDirectory], Awaitable[ImageLayer]]


class LayerCache:
    """A directory of layers, used with `async with`. Layers from `get` stay until the cache is closed."""

    def __init__(self, directory: Path, cap: int, note: Note = lambda kind, message: None) -> None:
        self._layers = directory / "layers"
        self._locks = directory / "locks"
        self._scratch = directory / "scratch"
        self.directory = directory
        self._cap = cap
        self._note = note
        self._held: dict[str, int] = {}  # key -> lock; bound: the requested layers
        self._verified: set[str] = set()  # bound: the requested layers

    async def __aenter__(self) -> LayerCache:
        for directory in (self._layers, self._locks, self._scratch):
            make_directory(directory)
        await self._clean_up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._held:
            os.close(self._held.popitem()[1])
        await self._clean_up()

    async def get(self, key: str, build: LayerBuilder) -> ImageLayer:
        """Return the layer of `key`: from the cache, or built now by the first process that requests it."""
        if key not in self._held:
            lock = await _wait_lock(self._locks / f"{key}.use", fcntl.LOCK_SH)
            if self._held.setdefault(key, lock) != lock:
                os.close(lock)
        layer = await self._find_layer(key)
        if layer is not None:
            return layer
        async with _hold_exclusive(self._locks / f"{key}.build"):
            layer = await self._find_layer(key)
            if layer is None:
                layer = await self._build(key, build)
        await self._clean_up()
        return layer

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[ScratchDirectory]:
        """Yield a directory that is removed afterwards; if this process dies, the next sweep removes it."""
        lock, place = None, self._scratch
        while lock is None:
            place = self._scratch / secrets.token_hex(8)
            lock = _try_lock(_lock_path(place), fcntl.LOCK_EX)
        try:
            place.mkdir()
            yield ScratchDirectory(place, lock)
        finally:
            try:
                await run_to_end(lambda: self._discard(place))
            finally:
                os.close(lock)

    async def _find_layer(self, key: str) -> ImageLayer | None:
        entry = self._layers / key
        try:
            layer = msgspec.json.decode((entry / RECORD).read_bytes(), type=ImageLayer)
            layer = msgspec.structs.replace(layer, path=str(entry / LAYER))
            if Path(layer.path).stat().st_size != layer.size:
                return None
            if (
                key not in self._verified
                and await run_in_thread(lambda check: _digest_layer(layer)) != layer.digest
            ):
                return None
            os.utime(entry / RECORD)  # record the time of the last use
        except (OSError, msgspec.DecodeError, ValueError):
            return None  # absent or damaged
        self._verified.add(key)
        return layer

    async def _build(self, key: str, build: LayerBuilder) -> ImageLayer:
        async with self.scratch() as scratch:
            built = await build(scratch)
            layer = msgspec.structs.replace(built, path=str(self._layers / key / LAYER))
            await run_to_end(lambda: self._store_layer(key, layer, Path(built.path), scratch.path))
        self._verified.add(key)
        return layer

    def _store_layer(self, key: str, layer: ImageLayer, file: Path, scratch: Path) -> None:
        """Store the layer atomically, also across a power failure."""
        entry = scratch / "entry"
        entry.mkdir()
        file.rename(entry / LAYER)
        _write_synced(entry / RECORD, msgspec.json.encode(layer))
        if (self._layers / key).exists():
            (self._layers / key).rename(scratch / "damaged")
        entry.rename(self._layers / key)
        _sync_directory(self._layers)

    async def _clean_up(self) -> None:
        """Remove leftovers of dead processes and, beyond the cap, the least recently used idle layers."""
        async with _hold_exclusive(self.directory / "lock"):
            await run_in_thread(self._sweep)

    def _sweep(self, check: CancelCheck) -> None:
        for name in {path.name.removesuffix(".lock") for path in self._scratch.iterdir()}:
            check()
            with _BriefLock(_lock_path(self._scratch / name)) as free:
                if free:
                    self._discard(self._scratch / name)
        for path in self._locks.iterdir():
            if path.suffix == ".use" and (self._layers / path.stem).exists():
                continue
            with _BriefLock(path) as free:
                if free:
                    path.unlink()
        self._evict()

    def _evict(self) -> None:
        entries = sorted(self._layers.iterdir(), key=_last_used)
        excess = _tree_size(self.directory) - self._cap
        for entry in entries:
            if excess <= 0:
                return
            with _BriefLock(self._locks / f"{entry.name}.use") as free:
                if free:
                    excess -= _tree_size(entry)
                    self._remove(entry)
                    (self._locks / f"{entry.name}.use").unlink()

    def _discard(self, place: Path) -> None:
        if self._remove(place):
            _lock_path(place).unlink(missing_ok=True)

    def _remove(self, directory: Path) -> bool:
        left = _remove_tree(directory)
        if left:
            self._note("cleanup.failed", f"`{directory}` is left: {left}")
        return not left


class _BriefLock:
    """Tries to hold the lock of a directory or layer for a moment; yields whether it was free."""

    def __init__(self, path: Path) -> None:
        self._lock = _try_lock(path, fcntl.LOCK_EX)

    def __enter__(self) -> bool:
        return self._lock is not None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._lock is not None:
            os.close(self._lock)


@asynccontextmanager
async def _hold_exclusive(path: Path) -> AsyncIterator[None]:
    lock = await _wait_lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


async def _wait_lock(path: Path, how: int) -> int:
    while True:
        lock = _try_lock(path, how)
        if lock is not None:
            return lock
        await asyncio.sleep(POLL_SECONDS)


def _try_lock(path: Path, how: int) -> int | None:
    """Return the lock's file descriptor, held until it is closed; None if another process holds it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            if _is_same_file(fd, path):
                return fd
        except OSError as e:
            os.close(fd)
            if isinstance(e, BlockingIOError):
                return None
            raise
        os.close(fd)  # the file was removed before it was locked


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock_path(place: Path) -> Path:
    return place.with_name(place.name + ".lock")


def _digest_layer(layer: ImageLayer) -> str:
    with Path(layer.path).open("rb") as file:
        return f"sha256:{file_digest(file, 'sha256').hexdigest()}"


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _last_used(entry: Path) -> int:
    try:
        return (entry / RECORD).stat().st_mtime_ns
    except OSError:
        return 0  # damaged: evicted first


def _tree_size(directory: Path) -> int:
    total = 0
    for above, _, files in os.walk(directory):
        for name in files:
            try:
                total += (Path(above) / name).lstat().st_size
            except OSError:
                pass  # another process has removed it
    return total


def _remove_tree(directory: Path) -> str:
    """Remove a tree of any depth and with any permissions; return the error, or an empty text."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return ""
    except (OSError, RecursionError) as e:
        silent = subprocess.DEVNULL
        for argv in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--one-file-system", "--"]):
            subprocess.run(
                [*argv, directory],
                stdin=silent,
                stdout=silent,
                stderr=silent,
                timeout=REMOVE_SECONDS,
                env=build_environment(),
            )
        return f"{e}" if directory.exists() else ""
    return ""
