"""Remove holdwater's own objects from a docker daemon, and nothing else; one janitor at a time on a machine.

Own objects are tags in holdwater's namespace, images that were absent before the run by its journal, and
build-cache records that `ownership.py` recognises. The janitor never prunes globally and never forces a
removal: images that a container uses or that have a foreign tag stay. `ownership.py` also chooses the bases
that stay for their shared layers.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from ...core.errors import RunStopped
from ...core.image import Note
from ...docker.build import BuildCache, DaemonCache, read_daemon_time
from ...docker.client import DockerClient
from ...ledger.durable_files import hold_lock, make_directory
from ...shielded_wait import run_uncancellable
from .daemon import (
    NAMESPACE,
    CachePruner,
    DaemonDisk,
    DaemonLeftover,
    delete_image,
    find_daemon_disk,
    has_image,
    list_tags,
    measure_disk,
)
from .journal import (
    SUFFIX,
    BasePulled,
    BuildBegun,
    BuildEnded,
    DaemonJournal,
    JournalContents,
    ReferenceGone,
    TagCreated,
    lock_journal,
    open_journal,
    read_journal,
    read_retained,
    write_retained,
)
from .ownership import BuildTrace, OwnedBase, chain_of, choose_kept_bases, find_own_records

BUILD_END_SECONDS = 10.0  # time limit to record a build's end
CLOSE_SECONDS = 120.0  # time limit of the clean-up at the end of a run
RETAINED_JOURNAL = "_warm" + SUFFIX  # no run has this name
QUIET_SECONDS = 10.0  # time to wait for running builds before the cache is read
LOCK = "janitor.lock"
LOCK_SECONDS = 120.0  # time limit to wait for another janitor
BUILDS_LOCK = "builds.lock"
WORK_SUFFIX = ".work"


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
        quiet: float = QUIET_SECONDS,
    ) -> None:
        self._disk: DaemonDisk | None = None  # None: not accessible
        self._client = client
        self._state = state
        self._retained = state / RETAINED_JOURNAL
        self._run = run
        self._cap = cache
        self._note = note
        self._cache = CachePruner(records or DaemonCache(client), state / BUILDS_LOCK, note, quiet)
        self._journal: DaemonJournal | None = None
        self._busy: Counter[str] = Counter()  # bound: images that are being made
        self._planned: Counter[str] = Counter()  # bound: the layers of the plan's bases
        self._expected: set[str] = set()  # bound: the plan's bases
        self._spared = {RETAINED_JOURNAL}  # journals that sweeps skip
        self._builds = 0
        self._clean = False  # only retained bases of the run are left on the daemon

    def change_disk(self, disk: DaemonDisk) -> None:
        """Measure this disk from now on: it is read through the daemon's process, which has restarted."""
        self._disk = disk

    async def __aenter__(self) -> Self:
        make_directory(self._state)
        await self.sweep()
        try:
            self._disk = await find_daemon_disk(self._client)
        except RunStopped as error:
            self._note("disk.unseen", error.message)
        self._journal = open_journal(self._state, self._run)
        await self._run_locked("retained bases of earlier runs", self._adopt_bases)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await run_uncancellable(self._clean_up(), CLOSE_SECONDS, self._note, "the end of the run")
        finally:
            if self._journal is not None:
                self._journal.close(remove=self._clean)
                self._journal = None

    @property
    def name(self) -> str:
        return self._open_journal.path.stem  # the run's name in holdwater's namespace

    @property
    def work(self) -> Path:
        """The run's temporary directory, removed at its end: home and context of the build command."""
        return self._state / (self.name + WORK_SUFFIX)

    def tag(self, word: str) -> str:
        return f"{NAMESPACE}/{self.name}:{word}"

    def expect_base(self, base: str, diff_ids: Iterable[str]) -> None:
        """Register a base of the plan; its layers are worth keeping if another planned base shares them."""
        if base not in self._expected:
            self._expected.add(base)
            self._planned.update(chain_of(diff_ids))

    def count_layers(self, diff_ids: Sequence[str]) -> int:
        """Return how many of these layers, from the bottom, the own bases on the daemon have."""
        links = {link for base in self._contents.bases.values() if base.size for link in base.chain}
        return sum(link in links for link in chain_of(diff_ids))

    @contextmanager
    def hold_images(self, *names: str) -> Iterator[None]:
        """Protect the images with these names from eviction; they need not exist yet."""
        self._busy.update(names)
        try:
            yield
        finally:
            self._busy -= Counter(names)

    @asynccontextmanager
    async def use_base(self, reference: str, diff_ids: Iterable[str]) -> AsyncIterator[bool]:
        """Protect a base from eviction; yield whether it must be pulled, in which case it counts as own."""
        with self.hold_images(reference):
            absent = not await has_image(self._client, reference)
            if absent:
                self._open_journal.write(BasePulled(OwnedBase(reference=reference, chain=chain_of(diff_ids))))
            yield absent

    def record_pulled(self, reference: str, size: int) -> None:
        """Record the size of a base that is on the daemon now."""
        if (base := self._contents.bases.get(reference)) is not None:
            self._open_journal.write(BasePulled(msgspec.structs.replace(base, size=size, used=time.time())))

    @asynccontextmanager
    async def claim_tag(self, reference: str) -> AsyncIterator[bool]:
        """Protect a tag outside of holdwater's namespace during its push; yield whether it was absent.

        An absent tag counts as own.
        """
        with self.hold_images(reference):
            absent = not await has_image(self._client, reference)
            if absent:
                self._open_journal.write(TagCreated(reference))
            yield absent

    @asynccontextmanager
    async def track_build(self, trace: Callable[[float], BuildTrace]) -> AsyncIterator[None]:
        """Journal a build with its trace, so that this run and the next one can identify its records."""
        self._builds += 1
        build, whole = self._builds, False
        async with AsyncExitStack() as stack:
            # Queue behind a janitor that waits for builds to end.
            async with hold_lock(self._state / LOCK, LOCK_SECONDS, shared=True):
                await stack.enter_async_context(
                    hold_lock(self._state / BUILDS_LOCK, LOCK_SECONDS, shared=True)
                )
            self._open_journal.write(BuildBegun(build, trace(await read_daemon_time(self._client))))
            try:
                yield
                whole = True
            finally:
                await run_uncancellable(
                    self._record_end(build, whole), BUILD_END_SECONDS, self._note, "the end of a build"
                )

    async def reset(self) -> None:
        """Remove the build-cache records of own builds, except the sources that the next builds reuse.

        While other own builds run, the removal is postponed until space is needed or the run ends, so that
        no build waits for it.
        """
        await self._run_locked("build cache", self._trim_if_idle)

    async def untag(self, tags: Iterable[str]) -> None:
        for tag in tags:
            await self._run_locked(f"`{tag}`", partial(self._remove, tag))

    async def settle(self, tags: Sequence[str] = ()) -> None:
        """Clean up after an image: remove its tags, idle bases without shared layers, and build cache."""
        await self.untag(tags)
        await self._run_locked("bases", lambda: self._remove_bases(self._choose_kept()))
        await self.reset()

    async def make_room(self, wanted: int) -> int:
        """Evict own idle objects, step by step, until `wanted` bytes are free; return the free bytes."""
        steps: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = [
            ("tags", self._drop_names),
            ("bases", lambda: self._drop_bases(self._choose_kept())),
            ("build cache", lambda: self._trim(sources=True)),
            ("shared bases", lambda: self._drop_bases(set())),
        ]
        for what, step in steps:
            if (free := self.free_bytes()) is None or free >= wanted:
                break
            await self._run_locked(what, step)
        return self.free_bytes() or 0

    def free_bytes(self) -> int | None:
        """Return the free bytes on the daemon's disk; None if the disk is not accessible."""
        try:
            return None if self._disk is None else measure_disk(self._disk.path).free
        except OSError:
            return None  # the daemon process that gave access is gone

    async def sweep(self) -> None:
        """Remove the leftovers of dead runs of this machine."""
        for path in sorted(self._state.glob("*" + SUFFIX)):
            if path.name not in self._spared and (dead := lock_journal(path)) is not None:
                try:
                    await self._run_locked(
                        f"leftovers of run `{path.stem}`", partial(self._remove_dead_run, dead)
                    )
                finally:
                    dead.close(remove=False)

    async def list_leftovers(self) -> list[DaemonLeftover]:
        """Return the own objects on the daemon, of all runs of this machine."""
        found = [DaemonLeftover(kind="tag", name=tag) for tag in await list_tags(self._client)]
        traces: list[BuildTrace] = []
        for path in sorted(self._state.glob("*" + SUFFIX)):
            told = read_journal(path)
            bases = [base for base in told.bases.values() if not base.reference.startswith(f"{NAMESPACE}/")]
            found += [DaemonLeftover(kind="base", name=base.reference, size=base.size) for base in bases]
            found += [DaemonLeftover(kind="tag", name=name) for name in told.names]
            traces += told.traces.values()
        records = find_own_records(await self._cache.list_records(), traces)
        return found + [DaemonLeftover(kind="cache", name=record.id, size=record.size) for record in records]

    async def clear(self) -> None:
        """Remove all own objects that no live run needs, including the retained bases.

        Only runs with this state directory are known: all runs on a daemon should share one directory.
        """
        await self.sweep()
        await self._run_locked("retained bases", self._drop_retained)
        await self._run_locked("tags", self._remove_orphans)
        await self._run_locked("bases", lambda: self._drop_bases(set()))
        await self._run_locked("build cache", lambda: self._trim(sources=True))

    @property
    def _open_journal(self) -> DaemonJournal:
        assert self._journal is not None, "the janitor is used outside of its `async with`"
        return self._journal

    @property
    def _contents(self) -> JournalContents:
        return self._open_journal.contents

    @asynccontextmanager
    async def _hold_lock(self) -> AsyncIterator[None]:
        async with hold_lock(self._state / LOCK, LOCK_SECONDS) as acquired:
            if not acquired:
                raise TimeoutError(f"another janitor has held the lock for {LOCK_SECONDS:g} s")
            yield

    async def _run_locked(self, what: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run `work` under the janitors' lock; report a failure with `note` and do not raise it."""
        try:
            async with self._hold_lock():
                await work()
        except Exception as error:  # boundary: a failed clean-up changes no outcome  # noqa: BLE001
            self._note("cleanup.failed", f"{what}: {type(error).__name__}: {error}")

    def _choose_kept(self) -> set[str]:
        """Return the references of the idle bases that stay for now."""
        bases = self._contents.bases.values()
        idle = [base for base in bases if not self._busy[base.reference]]
        busy = [base for base in bases if self._busy[base.reference] and base.size]
        return choose_kept_bases(idle, busy, self._planned, self._cap)

    async def _drop_bases(self, kept: set[str]) -> None:
        """Remove all idle bases except `kept`, and the build-cache records that hold their layers."""
        if await self._remove_bases(kept):
            await self._trim(sources=False)

    async def _remove_bases(self, kept: set[str]) -> bool:
        """Remove all idle bases except `kept`; return whether there were any."""
        gone = [one for one in self._contents.bases if one not in kept and not self._busy[one]]
        for reference in gone:
            if not self._busy[reference]:  # an image may have started to use it meanwhile
                await self._remove(reference)
        return bool(gone)

    async def _trim_if_idle(self) -> None:
        if await self._cache.is_idle():
            await self._trim(sources=False)

    async def _drop_names(self) -> None:
        for name in [one for one in self._contents.names if not self._busy[one]]:
            await self._remove(name)

    async def _remove(self, reference: str) -> None:
        if await delete_image(self._client, reference) and (
            reference in self._contents.bases or reference in self._contents.names
        ):
            self._open_journal.write(ReferenceGone(reference))

    async def _trim(self, *, sources: bool) -> None:
        before = dict(self._contents.traces)
        left = await self._cache.prune(list(before.values()), sources=sources)
        # A build without records needs no trace in memory. While another build runs, the list of records is
        # not reliable: a record in use appears under another id, with another time.
        if all(trace.ended is not None for trace in (*before.values(), *self._contents.traces.values())):
            for build, trace in before.items():
                if not any(trace.covers(record) for record in left):
                    self._contents.traces.pop(build, None)

    async def _record_end(self, build: int, whole: bool) -> None:
        self._open_journal.write(BuildEnded(build, await read_daemon_time(self._client), whole))

    async def _clean_up(self) -> None:
        async with self._hold_lock():
            for tag in await list_tags(self._client, self.name):
                await self._remove(tag)
            await self._drop_names()
            kept = self._choose_kept()
            await self._drop_bases(kept)
            warm = [msgspec.structs.replace(self._contents.bases[one], warm=True) for one in kept]
            await self._hand_on(warm, self._contents.traces.values())
            for base in warm:
                self._open_journal.write(ReferenceGone(base.reference))
            shutil.rmtree(self.work, ignore_errors=True)
            self._clean = await self._has_nothing(self._open_journal)

    async def _remove_dead_run(self, dead: DaemonJournal) -> None:
        """Remove the leftovers of a dead run, and its journal once the journal lists nothing."""
        for tag in await list_tags(self._client, dead.path.stem):
            await delete_image(self._client, tag)
        for reference in [*dead.contents.names, *dead.contents.bases]:
            if await delete_image(self._client, reference):
                dead.write(ReferenceGone(reference))
        await self._hand_on([], dead.contents.traces.values())
        shutil.rmtree(self._state / (dead.path.stem + WORK_SUFFIX), ignore_errors=True)
        if await self._has_nothing(dead):
            dead.path.unlink(missing_ok=True)

    async def _has_nothing(self, journal: DaemonJournal) -> bool:
        """Return whether a run has no names left on the daemon; the image of a container keeps its name."""
        left = journal.contents.names or journal.contents.bases
        return not (left or await list_tags(self._client, journal.path.stem))

    async def _adopt_bases(self) -> None:
        """Move the retained bases that still exist into this run's journal."""
        told = read_retained(self._retained)
        for base in told.bases.values():
            if await has_image(self._client, base.reference):
                self._open_journal.write(BasePulled(base))
        write_retained(self._retained, [], told.traces.values())

    async def _hand_on(self, warm: Iterable[OwnedBase], traces: Iterable[BuildTrace]) -> None:
        """Prune the records of these and earlier builds; retain the traces whose records are still needed."""
        told = read_retained(self._retained)
        left = await self._cache.prune_all([*traces, *told.traces.values()])
        write_retained(self._retained, [*warm, *told.bases.values()], left)

    async def _drop_retained(self) -> None:
        told = read_retained(self._retained)
        left = [base for base in told.bases.values() if not await delete_image(self._client, base.reference)]
        write_retained(self._retained, left, told.traces.values())
        await self._hand_on([], [])

    async def _remove_orphans(self) -> None:
        """Remove the tags of runs without a journal, and the idle tags of this run."""
        await self._drop_names()
        living = {path.stem for path in self._state.glob("*" + SUFFIX)}
        for tag in await list_tags(self._client):
            if tag.removeprefix(f"{NAMESPACE}/").partition(":")[0] not in living:
                await delete_image(self._client, tag)
