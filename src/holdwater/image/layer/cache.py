"""Layers on disk, each built once for its key: by one process while all others wait, bounded in bytes.

What is in a layer is the builder's part. Locks are the kernel's: whoever is killed has let go of them.
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

from ...core.helper_environment import build_environment
from ...core.image import Layer, Note
from ...core.records import Record
from ...ledger.private import make_directory
from .thread import Check, in_thread, to_the_end

POLL = 0.05  # seconds between two tries at a lock: a thread that waits in the kernel could not be cancelled
REMOVING = 600.0  # seconds
LAYER = "layer.tar.gz"
RECORD = "layer.json"


class Scratch(Record, frozen=True):
    """A directory for one piece of work. Whoever has its lock open keeps it from being swept."""

    path: Path
    lock: int  # a file descriptor, for programs that write to it to inherit


Build = Callable[[Scratch], Awaitable[Layer]]  # leaves the layer's file in the scratch directory


class LayerCache:
    """A directory of layers, used with `async with`. What `get` gave stays there until it is closed."""

    def __init__(self, directory: Path, cap: int, note: Note = lambda kind, message: None) -> None:
        self._layers = directory / "layers"
        self._locks = directory / "locks"
        self._scratch = directory / "scratch"
        self.directory = directory
        self._cap = cap
        self._note = note
        self._held: dict[str, int] = {}  # key -> lock; bound: the layers that were asked for
        self._verified: set[str] = set()  # bound: the same

    async def __aenter__(self) -> LayerCache:
        for directory in (self._layers, self._locks, self._scratch):
            make_directory(directory)
        await self._tidy()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._held:
            os.close(self._held.popitem()[1])
        await self._tidy()

    async def get(self, key: str, build: Build) -> Layer:
        """The layer of `key`: as it is here, or built now, by whichever process comes first."""
        if key not in self._held:
            lock = await _lock(self._locks / f"{key}.use", fcntl.LOCK_SH)
            if self._held.setdefault(key, lock) != lock:
                os.close(lock)
        layer = await self._present(key)
        if layer is not None:
            return layer
        async with _alone(self._locks / f"{key}.build"):
            layer = await self._present(key)
            if layer is None:
                layer = await self._build(key, build)
        await self._tidy()
        return layer

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Scratch]:
        """A directory that is gone afterwards, whatever happens; if we are killed, by whoever comes next."""
        lock, place = None, self._scratch
        while lock is None:
            place = self._scratch / secrets.token_hex(8)
            lock = _try_lock(_beside(place), fcntl.LOCK_EX)
        try:
            place.mkdir()
            yield Scratch(place, lock)
        finally:
            try:
                await to_the_end(lambda: self._discard(place))
            finally:
                os.close(lock)

    async def _present(self, key: str) -> Layer | None:
        entry = self._layers / key
        try:
            layer = msgspec.json.decode((entry / RECORD).read_bytes(), type=Layer)
            layer = msgspec.structs.replace(layer, path=str(entry / LAYER))
            if Path(layer.path).stat().st_size != layer.size:
                return None
            if key not in self._verified and await in_thread(lambda check: _digest(layer)) != layer.digest:
                return None
            os.utime(entry / RECORD)  # when it was used last
        except (OSError, msgspec.DecodeError, ValueError):
            return None  # not there, or damaged
        self._verified.add(key)
        return layer

    async def _build(self, key: str, build: Build) -> Layer:
        async with self.scratch() as scratch:
            built = await build(scratch)
            layer = msgspec.structs.replace(built, path=str(self._layers / key / LAYER))
            await to_the_end(lambda: self._place(key, layer, Path(built.path), scratch.path))
        self._verified.add(key)
        return layer

    def _place(self, key: str, layer: Layer, file: Path, scratch: Path) -> None:
        """Whole or not at all, also when the power fails."""
        entry = scratch / "entry"
        entry.mkdir()
        file.rename(entry / LAYER)
        _write(entry / RECORD, msgspec.json.encode(layer))
        if (self._layers / key).exists():
            (self._layers / key).rename(scratch / "damaged")
        entry.rename(self._layers / key)
        _sync(self._layers)

    async def _tidy(self) -> None:
        """Remove what the dead left, and beyond the cap what was used least recently and by nobody now."""
        async with _alone(self.directory / "lock"):
            await in_thread(self._sweep)

    def _sweep(self, check: Check) -> None:
        for name in {path.name.removesuffix(".lock") for path in self._scratch.iterdir()}:
            check()
            with _Tried(_beside(self._scratch / name)) as free:
                if free:
                    self._discard(self._scratch / name)
        for path in self._locks.iterdir():
            if path.suffix == ".use" and (self._layers / path.stem).exists():
                continue
            with _Tried(path) as free:
                if free:
                    path.unlink()
        self._evict()

    def _evict(self) -> None:
        entries = sorted(self._layers.iterdir(), key=_used)
        excess = _size(self.directory) - self._cap
        for entry in entries:
            if excess <= 0:
                return
            with _Tried(self._locks / f"{entry.name}.use") as free:
                if free:
                    excess -= _size(entry)
                    self._remove(entry)
                    (self._locks / f"{entry.name}.use").unlink()

    def _discard(self, place: Path) -> None:
        if self._remove(place):
            _beside(place).unlink(missing_ok=True)

    def _remove(self, directory: Path) -> bool:
        left = _remove_tree(directory)
        if left:
            self._note("cleanup.failed", f"`{directory}` is left: {left}")
        return not left


class _Tried:
    """Somebody else's lock for a moment, if nobody has it."""

    def __init__(self, path: Path) -> None:
        self._lock = _try_lock(path, fcntl.LOCK_EX)

    def __enter__(self) -> bool:
        return self._lock is not None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._lock is not None:
            os.close(self._lock)


@asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    lock = await _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


async def _lock(path: Path, how: int) -> int:
    while True:
        lock = _try_lock(path, how)
        if lock is not None:
            return lock
        await asyncio.sleep(POLL)


def _try_lock(path: Path, how: int) -> int | None:
    """The lock, held until it is closed; None while another is in its way."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            if _is(fd, path):
                return fd
        except OSError as e:
            os.close(fd)
            if isinstance(e, BlockingIOError):
                return None
            raise
        os.close(fd)  # it was removed before we had it


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _beside(place: Path) -> Path:
    return place.with_name(place.name + ".lock")


def _digest(layer: Layer) -> str:
    with Path(layer.path).open("rb") as file:
        return f"sha256:{file_digest(file, 'sha256').hexdigest()}"


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _used(entry: Path) -> int:
    try:
        return (entry / RECORD).stat().st_mtime_ns
    except OSError:
        return 0  # damaged: the first to go


def _size(directory: Path) -> int:
    total = 0
    for above, _, files in os.walk(directory):
        for name in files:
            try:
                total += (Path(above) / name).lstat().st_size
            except OSError:
                pass  # another process has removed it
    return total


def _remove_tree(directory: Path) -> str:
    """Remove it, however deep and however locked; what went wrong, or nothing."""
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
                timeout=REMOVING,
                env=build_environment(),
            )
        return f"{e}" if directory.exists() else ""
    return ""
