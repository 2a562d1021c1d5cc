"""Removes from a docker daemon what is ours, and nothing else: one janitor at a time on a machine.

Ours are tags in our own name space, what the run's journal lists as absent before us, and build-cache records
that `traces.py` recognises. Never a global prune, never by force: what a container uses or somebody else has
tagged stays. What stays for its shared layers is chosen in `warmth.py`.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ...core.errors import RunStopped
from ...core.image import Note
from ...core.records import Record
from ...docker.cache import BuildCache, DaemonCache, seconds
from ...docker.client import DockerClient, DockerError
from ...ledger.private import make_directory
from .disk import DaemonDisk, daemon_disk, reread
from .journal import (
    SUFFIX,
    Begun,
    Ended,
    Gone,
    Journal,
    Named,
    Pulled,
    Told,
    bequeath,
    bequeathed,
    opened,
    read,
    taken,
)
from .locks import PATIENCE, alone, held
from .pruning import Pruner
from .shelter import sheltered
from .traces import Trace, ours
from .warmth import Holding, chain_of, holders

SPACE = "holdwater.local"  # no registry has this name: what is tagged so is never pushed nor pulled
ENDING = 10.0  # seconds for the note of a build's end
CLOSING = 120.0  # seconds for the clean-up at the end of a run
WARM = "_warm" + SUFFIX  # no run is called so
QUIET = 10.0  # seconds to wait for builds that go on before the cache is read
LOCK = "janitor.lock"
BUILDS = "builds.lock"
WORK = ".work"


class Left(Record, frozen=True):
    """Something of ours on the daemon."""

    kind: str  # `tag`, `base`, `cache`
    name: str
    size: int = 0  # bytes, where it is known


class Janitor:
    """A run's janitor: opened before its first image, closed after its last."""

    def __init__(
        self,
        client: DockerClient,
        state: Path,
        run: str,
        cache: int,
        note: Note,
        records: BuildCache | None = None,
        quiet: float = QUIET,
    ) -> None:
        self.disk: DaemonDisk | None = None  # None: it cannot be seen
        self._client = client
        self._state = state
        self._warm = state / WARM
        self._run = run
        self._cap = cache
        self._note = note
        self._cache = Pruner(records or DaemonCache(client), state / BUILDS, note, quiet)
        self._journal: Journal | None = None
        self._busy: Counter[str] = Counter()  # bound: images that are being made
        self._planned: Counter[str] = Counter()  # bound: the layers of the plan's bases
        self._expected: set[str] = set()  # bound: the plan's bases
        self._spared = {WARM}  # journals that no sweep looks at
        self._builds = 0
        self._clean = False  # nothing of the run is left on the daemon but what stays warm

    async def __aenter__(self) -> Self:
        make_directory(self._state)
        await self.sweep()
        try:
            self.disk = await daemon_disk(self._client)
        except RunStopped as error:
            self._note("disk.unseen", error.message)
        self._journal = opened(self._state, self._run)
        await self._tried("warm bases", self._adopt)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await sheltered(self._close(), CLOSING, self._note, "the end of the run")
        finally:
            if self._journal is not None:
                self._journal.close(remove=self._clean)
                self._journal = None

    @property
    def name(self) -> str:
        return self._open.path.stem  # the run's, in our own name space

    @property
    def work(self) -> Path:
        """The run's own directory, gone with it: the build command's home and context."""
        return self._state / (self.name + WORK)

    def tag(self, word: str) -> str:
        return f"{SPACE}/{self.name}:{word}"

    def expect(self, base: str, diff_ids: Iterable[str]) -> None:
        """An image is planned on this base: its layers are worth keeping where another plans on them too."""
        if base not in self._expected:
            self._expected.add(base)
            self._planned.update(chain_of(diff_ids))

    def held(self, diff_ids: Sequence[str]) -> int:
        """How many of these layers, from the bottom, bases of ours have on the daemon."""
        links = {link for base in self._told.bases.values() if base.size for link in base.chain}
        return sum(link in links for link in chain_of(diff_ids))

    @asynccontextmanager
    async def using(self, reference: str, diff_ids: Iterable[str]) -> AsyncIterator[bool]:
        """Nobody evicts this base meanwhile. Whether it has to be pulled: from now on it is ours then."""
        self._busy[reference] += 1
        try:
            absent = await self._client.found(f"/images/{reference}/json") is None
            if absent:
                self._open.write(Pulled(Holding(reference=reference, chain=chain_of(diff_ids))))
            yield absent
        finally:
            self._busy[reference] -= 1
            self._busy += Counter()

    def pulled(self, reference: str, size: int) -> None:
        """It is there, with so many bytes."""
        if (base := self._told.bases.get(reference)) is not None:
            self._open.write(Pulled(msgspec.structs.replace(base, size=size, used=time.time())))

    @asynccontextmanager
    async def naming(self, reference: str) -> AsyncIterator[bool]:
        """A tag outside of our name space, while it is pushed. Whether it was absent, and is ours."""
        absent = await self._client.found(f"/images/{reference}/json") is None
        if absent:
            self._open.write(Named(reference))
        self._busy[reference] += 1
        try:
            yield absent
        finally:
            self._busy[reference] -= 1
            self._busy += Counter()

    @asynccontextmanager
    async def building(self, trace: Callable[[float], Trace]) -> AsyncIterator[None]:
        """A build goes on: what it leaves can be told by its trace, also by the next run."""
        self._builds += 1
        build, whole = self._builds, False
        async with AsyncExitStack() as stack:
            # Behind a janitor that waits for builds to end.
            async with held(self._state / LOCK, PATIENCE, shared=True):
                await stack.enter_async_context(held(self._state / BUILDS, PATIENCE, shared=True))
            self._open.write(Begun(build, trace(await self._now())))
            try:
                yield
                whole = True
            finally:
                await sheltered(self._end(build, whole), ENDING, self._note, "the end of a build")

    async def reset(self) -> None:
        """Remove the build cache that builds of ours left, but for what they are sent each time anew.

        While others of them go on that is put off until room is wanted, or the run ends: nobody has to wait.
        """
        await self._tried("build cache", self._trim_if_idle)

    async def untag(self, tags: Iterable[str]) -> None:
        for tag in tags:
            await self._tried(f"`{tag}`", partial(self._remove, tag))

    async def settle(self, tags: Sequence[str] = ()) -> None:
        """An image is done: remove its tags, idle bases that nobody shares layers with, and build cache."""
        await self.untag(tags)
        await self._tried("bases", lambda: self._remove_bases(self._kept()))
        await self.reset()

    async def make_room(self, wanted: int) -> int:
        """Bytes that are free after evicting what is ours and idle, in order, until so many are."""
        steps: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            ("tags", self._drop_names),
            ("bases", lambda: self._drop(self._kept())),
            ("build cache", lambda: self._trim(sources=True)),
            ("shared bases", lambda: self._drop(set())),
        ]
        for what, step in steps:
            if (free := self.free()) is None or free >= wanted:
                break
            await self._tried(what, step)
        return self.free() or 0

    def free(self) -> int | None:
        """Bytes on the daemon's disk now; None where it cannot be seen."""
        try:
            return None if self.disk is None else reread(self.disk.path).free
        except OSError:
            return None  # the daemon through which it was seen is gone

    async def sweep(self) -> None:
        """Remove what dead runs of this machine left."""
        for path in sorted(self._state.glob("*" + SUFFIX)):
            if path.name not in self._spared and (dead := taken(path)) is not None:
                try:
                    await self._tried(f"what run `{path.stem}` left", partial(self._bury, dead))
                finally:
                    dead.close(remove=False)

    async def left(self) -> list[Left]:
        """What is ours on the daemon, of whatever run of this machine."""
        found, traces = [Left(kind="tag", name=tag) for tag in await self._tags("")], list[Trace]()
        for path in sorted(self._state.glob("*" + SUFFIX)):
            told = read(path)
            bases = [base for base in told.bases.values() if not base.reference.startswith(f"{SPACE}/")]
            found += [Left(kind="base", name=base.reference, size=base.size) for base in bases]
            found += [Left(kind="tag", name=name) for name in told.names]
            traces += told.traces.values()
        records = ours(await self._cache.listed(), traces)
        return found + [Left(kind="cache", name=record.id, size=record.size) for record in records]

    async def clear(self) -> None:
        """Remove everything of ours that no living run needs, the warm bases too.

        Living runs are those with this state directory: one is meant for all runs on a daemon.
        """
        await self.sweep()
        await self._tried("what stayed warm", self._cool)
        await self._tried("tags", self._orphans)
        await self._tried("bases", lambda: self._drop(set()))
        await self._tried("build cache", lambda: self._trim(sources=True))

    @property
    def _open(self) -> Journal:
        assert self._journal is not None, "the janitor is used outside of its `async with`"
        return self._journal

    @property
    def _told(self) -> Told:
        return self._open.told

    async def _tried(self, what: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Do it while no other janitor works; a failure is noted."""
        try:
            async with alone(self._state / LOCK):
                await work()
        except Exception as error:  # boundary: a failed clean-up changes no outcome  # noqa: BLE001
            self._note("cleanup.failed", f"{what}: {type(error).__name__}: {error}")

    def _kept(self) -> set[str]:
        """References of idle bases that stay for now."""
        bases = self._told.bases.values()
        idle = [base for base in bases if not self._busy[base.reference]]
        busy = [base for base in bases if self._busy[base.reference] and base.size]
        return holders(idle, busy, self._planned, self._cap)

    async def _drop(self, kept: set[str]) -> None:
        """Remove idle bases but these, and the records that hold their layers."""
        if await self._remove_bases(kept):
            await self._trim(sources=False)

    async def _remove_bases(self, kept: set[str]) -> bool:
        """Idle ones, but these; whether there were any."""
        gone = [one for one in self._told.bases if one not in kept and not self._busy[one]]
        for reference in gone:
            if not self._busy[reference]:  # an image may have begun with it meanwhile
                await self._remove(reference)
        return bool(gone)

    async def _trim_if_idle(self) -> None:
        if await self._cache.idle():
            await self._trim(sources=False)

    async def _drop_names(self) -> None:
        for name in [one for one in self._told.names if not self._busy[one]]:
            await self._remove(name)

    async def _remove(self, reference: str) -> None:
        if await self._removed(reference) and (
            reference in self._told.bases or reference in self._told.names
        ):
            self._open.write(Gone(reference))

    async def _removed(self, reference: str) -> bool:
        """Whether the daemon does not have it any more under this name: what a container uses stays."""
        try:
            await self._client.delete(f"/images/{reference}", {"noprune": "true", "force": "false"})
        except DockerError as error:
            if error.status not in (404, 409):
                raise
            return error.status == 404
        return True

    async def _trim(self, *, sources: bool) -> None:
        before = dict(self._told.traces)
        left = await self._cache.prune(list(before.values()), sources=sources)
        # A build of which nothing is left needs no trace in memory. While another one goes on that cannot be
        # told: a record that it uses is listed under another id, with another time.
        if all(trace.ended is not None for trace in (*before.values(), *self._told.traces.values())):
            for build, trace in before.items():
                if not any(trace.covers(record) for record in left):
                    self._told.traces.pop(build, None)

    async def _end(self, build: int, whole: bool) -> None:
        self._open.write(Ended(build, await self._now(), whole))

    async def _now(self) -> float:
        """The time on the daemon's clock, which its records go by."""
        return seconds((await self._client.get("/info"))["SystemTime"])

    async def _tags(self, name: str) -> list[str]:
        """Tags in our own name space: of one run, or of all."""
        images = await self._client.get("/images/json")
        prefix = f"{SPACE}/{name}:" if name else f"{SPACE}/"
        return [tag for image in images for tag in image["RepoTags"] or () if tag.startswith(prefix)]

    async def _close(self) -> None:
        async with alone(self._state / LOCK):
            for tag in await self._tags(self.name):
                await self._remove(tag)
            await self._drop_names()
            kept = self._kept()
            await self._drop(kept)
            warm = [msgspec.structs.replace(self._told.bases[one], warm=True) for one in kept]
            await self._bequeath(warm, self._told.traces.values())
            for base in warm:
                self._open.write(Gone(base.reference))
            shutil.rmtree(self.work, ignore_errors=True)
            self._clean = await self._nothing_of(self._open)

    async def _bury(self, dead: Journal) -> None:
        """Remove what a dead run left; its journal goes when there is nothing more in it."""
        for tag in await self._tags(dead.path.stem):
            await self._removed(tag)
        for reference in [*dead.told.names, *dead.told.bases]:
            if await self._removed(reference):
                dead.write(Gone(reference))
        await self._bequeath([], dead.told.traces.values())
        shutil.rmtree(self._state / (dead.path.stem + WORK), ignore_errors=True)
        if await self._nothing_of(dead):
            dead.path.unlink(missing_ok=True)

    async def _nothing_of(self, journal: Journal) -> bool:
        """Whether a run has no names on the daemon any more: a container's image keeps its own."""
        return not (journal.told.names or journal.told.bases or await self._tags(journal.path.stem))

    async def _adopt(self) -> None:
        """What stayed warm is this run's from now on, as far as it is still there."""
        told = bequeathed(self._warm)
        for base in told.bases.values():
            if await self._client.found(f"/images/{base.reference}/json") is not None:
                self._open.write(Pulled(base))
        bequeath(self._warm, [], told.traces.values())

    async def _bequeath(self, warm: Iterable[Holding], traces: Iterable[Trace]) -> None:
        """Prune what these builds left and what others before could not; hand on what is needed still."""
        told = bequeathed(self._warm)
        left = await self._cache.prune_to_the_end([*traces, *told.traces.values()])
        bequeath(self._warm, [*warm, *told.bases.values()], left)

    async def _cool(self) -> None:
        told = bequeathed(self._warm)
        left = [base for base in told.bases.values() if not await self._removed(base.reference)]
        bequeath(self._warm, left, told.traces.values())
        await self._bequeath([], [])

    async def _orphans(self) -> None:
        """Tags of runs that have no journal any more, and of this one where they are idle."""
        await self._drop_names()
        living = {path.stem for path in self._state.glob("*" + SUFFIX)}
        for tag in await self._tags(""):
            if tag.removeprefix(f"{SPACE}/").partition(":")[0] not in living:
                await self._removed(tag)
