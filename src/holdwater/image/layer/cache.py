"""A cache of layers on disk, bounded in bytes: one process builds the layer of a key while all others wait.

The builders decide the content of a layer. The kernel frees the locks of a killed process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import file_digest
from pathlib import Path

import msgspec

from ...core.environment import build_environment
from ...core.image import ImageLayer, Note
from ...core.records import Record
from ...ledger.durable_files import (
    hold_if_free,
    hold_lock,
    lock_file,
    make_directory,
    sync_directory,
    sync_path,
    wait_lock,
    write_private,
)
from .program import CancelCheck, run_in_thread, run_to_end

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

    def __init__(
        self, directory: Path, cap: int, note: Note = lambda kind, message: None, *, rebuild: bool = False
    ) -> None:
        self._layers = directory / "layers"
        self._locks = directory / "locks"
        self._scratch = directory / "scratch"
        self.directory = directory
        self._cap = cap
        self._note = note
        self._rebuild = rebuild  # layers of earlier builds are built again
        self._held: dict[str, int] = {}  # key -> lock; bound: the requested layers
        self._verified: set[str] = set()  # bound: the requested layers

    async def __aenter__(self) -> LayerCache:
        for directory in (self._layers, self._locks, self._scratch):
            make_directory(directory)
        await self._clean_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._held:
            os.close(self._held.popitem()[1])
        await self._clean_up()

    async def get(self, key: str, build: LayerBuilder) -> ImageLayer:
        """Return the layer of `key`: from the cache, or built now by the first process that requests it."""
        if key not in self._held:
            lock = await wait_lock(self._locks / f"{key}.use", shared=True)
            assert lock is not None, "there is no time limit"
            if self._held.setdefault(key, lock) != lock:
                os.close(lock)
        layer = await self._find_layer(key)
        if layer is not None:
            return layer
        async with hold_lock(self._locks / f"{key}.build"):
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
            lock = lock_file(_lock_path(place))
        try:
            place.mkdir()
            yield ScratchDirectory(place, lock)
        finally:
            try:
                await run_to_end(lambda: self._discard(place))
            finally:
                os.close(lock)

    async def _find_layer(self, key: str) -> ImageLayer | None:
        if self._rebuild and key not in self._verified:
            return None
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
        write_private(entry / RECORD, msgspec.json.encode(layer))
        sync_path(entry / RECORD)
        if (self._layers / key).exists():
            (self._layers / key).rename(scratch / "damaged")
        entry.rename(self._layers / key)
        sync_directory(self._layers)

    async def _clean_up(self) -> None:
        """Remove leftovers of dead processes and, beyond the cap, the least recently used idle layers."""
        async with hold_lock(self.directory / "lock"):
            await run_in_thread(self._sweep)

    def _sweep(self, check: CancelCheck) -> None:
        for name in {path.name.removesuffix(".lock") for path in self._scratch.iterdir()}:
            check()
            with hold_if_free(_lock_path(self._scratch / name)) as free:
                if free:
                    self._discard(self._scratch / name)
        for path in self._locks.iterdir():
            if path.suffix == ".use" and (self._layers / path.stem).exists():
                continue
            with hold_if_free(path) as free:
                if free:
                    path.unlink()
        self._evict()

    def _evict(self) -> None:
        entries = sorted(self._layers.iterdir(), key=_last_used)
        excess = _tree_size(self.directory) - self._cap
        for entry in entries:
            if excess <= 0:
                return
            with hold_if_free(self._locks / f"{entry.name}.use") as free:
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


def _lock_path(place: Path) -> Path:
    return place.with_name(place.name + ".lock")


def _digest_layer(layer: ImageLayer) -> str:
    with Path(layer.path).open("rb") as file:
        return f"sha256:{file_digest(file, 'sha256').hexdigest()}"


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
