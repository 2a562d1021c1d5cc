"""Connects the governor to a run: up to ten times a second it measures, grants, extends and reclaims.

`governor/` makes the decisions; this module carries them out on the fleet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ...core.config import RunConfig
from ...core.failures import make_interrupt_failure
from ...core.records import Attempt, AttemptFailure, FailureOrigin, LimitOverrides, MiB, Verdict
from ...governor.gate import Gate, Lease
from ...governor.meter import ResourceMeter
from ...governor.peaks import sandbox_disk, sandbox_memory, worker_memory
from ...governor.reclaim import ReclaimAction, ReclaimSteps
from ...governor.resource_reading import ResourceBound
from ...rollout.periodic_task import PeriodicTask
from ..fleet.interface import NEW_WORKER, AttemptUse, FleetCensus, GovernedFleet
from .cpu_watch import CpuWatch
from .footprint import MemoryFootprint

LOOK_SECONDS = 0.1  # when the use of memory has changed
TENSE_SECONDS = 0.2  # when an attempt waits, or memory is short
CALM_SECONDS = 1.0  # otherwise
FRESH = 0.05  # seconds: the greatest age of a reading that a lease is granted by
NEAR_LIMIT = 0.8  # of a sandbox's limit: from here on it is extended, if there is room
GROWTH = 1.3
WORTH_EXTENDING = 4 * MiB
WORTH_RECYCLING = 48 * MiB  # least growth of a worker whose end helps waiting attempts
FLOOR = 32 * MiB  # the lowest limit of a sandbox: a shell and its children start in it
# Of the limit: a worker that has grown by this much is replaced before any attempt has to wait.
LARGE_GROWTH = 0.12
GROWING = 1 * MiB  # from one look to the next
PATIENCE = 5  # looks through which an attempt grows without room before another is preempted for it
QUARTER = 4  # part of the free disk (1/4) that leases without a declared need take at most


class AttemptGrant(msgspec.Struct):
    """The grant of an attempt, and its highest observed use."""

    declared: int | None  # the memory limit of its sandbox, where that does not grow with the lease
    allowed: int = 0  # the current limit of its sandbox
    peak: AttemptUse = AttemptUse()
    before: int = 0  # bytes that it used at the last look
    short: int = 0  # looks through which it grew and had no room to


class Governor:
    """The governor of one run. With `--ungoverned` it only measures."""

    def __init__(
        self,
        config: RunConfig,
        meter: ResourceMeter,
        disk: Callable[[], ResourceBound],
        preempt: Callable[[int], bool],
        note: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._preempt = preempt
        self._meter = meter
        self._disk = disk
        self._note = note
        self._gate = Gate()
        self._grants: dict[int, AttemptGrant] = {}  # attempt -> its grant; bound: the run's concurrency
        self._reclaim = ReclaimSteps()
        self._read_at = self._looked = time.monotonic()
        self._news = 0
        self._loans = 0  # the number of the last loan: below the numbers of attempts
        self._pause = 0  # looks until an attempt may be preempted again
        self._last: tuple[str, int] | None = None  # the last step, and the use before it
        self.census = FleetCensus(workers=0)
        self._lag = 0.0
        self._footprint = MemoryFootprint()
        self.own_memory = self._footprint.read(self.census)
        self.reading = meter.read(self.own_memory)
        self._gate.memory.set_usage(self.reading.holding, {})
        self._sandboxes = sandbox_memory(self._gate.memory.largest_lease)
        self._workers, self._disks = worker_memory(), sandbox_disk()
        self._cpu_watch = (
            CpuWatch(config.slots) if config.concurrency is None and not config.ungoverned else None
        )
        self._gate.most_attempts = self._cpu_watch.most if self._cpu_watch else None

    # Called by the scheduler.

    async def lease(self, attempt: Attempt, asks: LimitOverrides, images: int = 0) -> Lease | AttemptFailure:
        """Wait for the lease of an attempt (an empty one, if ungoverned); return it, or why it cannot be had.

        `images`: bytes of disk for images, needed before the sandbox exists, until `end_image_lease`.
        """
        return await self.lease_all((attempt,), asks, images)

    async def lease_all(
        self, attempts: Sequence[Attempt], asks: LimitOverrides, images: int = 0
    ) -> Lease | AttemptFailure:
        """Do the same for attempts that run together or not at all; return the lease of each."""
        first, count = attempts[0], len(attempts)
        if self._config.ungoverned:
            return await self._gate.take(first.id, Lease(0)) or Lease(0)
        self._refresh()
        if images:
            self._measure_disk()
            if failure := self._gate.find_disk_refusal(images):
                return failure
        memory = (asks.memory or self._config.limits.memory or 0) * first.scale or None
        disk = (asks.disk or self._config.limits.disk or 0) * first.scale or None
        each = disk or min(self._disks.need, max(0, self._gate.disk.leasable_total) // QUARTER // count)
        need = Lease(
            memory=self._estimate_memory(memory, first.scale, count),
            disk=images + each * count,
            firm=memory is not None or disk is not None,
        )
        for attempt in attempts:
            self._grants[attempt.id] = AttemptGrant(memory)
        failure = await self._gate.take(first.id, need)
        if failure is not None:
            for attempt in attempts:
                self._grants.pop(attempt.id, None)
            return failure
        if count == 1:
            return need
        self._gate.divide(first.id, [attempt.id for attempt in attempts])
        return Lease(need.memory // count, need.disk // count, need.firm)

    def hand_over(self, attempt: int, to: Attempt, asks: LimitOverrides) -> Lease:
        """Hand an ended attempt's lease to another, and extend it on request if there is room."""
        if self._config.ungoverned:
            return Lease(0)
        memory = (asks.memory or self._config.limits.memory or 0) * to.scale or None
        self._gate.hand_over(attempt, to.id)
        self._grants[to.id] = AttemptGrant(memory)
        self._gate.extend(to.id, self._estimate_memory(memory, to.scale))
        return Lease(self._gate.memory.leases[to.id], self._gate.disk.leases[to.id], memory is not None)

    def retain_lease(self, verdict: Verdict) -> None:
        """Keep the lease of an ended attempt, for `hand_over` or `return_lease`."""
        self._learn(verdict, self._grants.pop(verdict.attempt, None))

    def derive_limits(self, attempt: int, lease: Lease) -> tuple[int, int]:
        """Return the sandbox's limits: bytes of memory, and of disk if that has a budget and no limit."""
        if attempt not in self._grants:
            return 0, 0
        held = self._grants[attempt]
        held.allowed = held.declared or max(FLOOR, lease.memory + self._bonus)
        return held.allowed, self._config.disk or 0

    @property
    def _bonus(self) -> int:
        """The part of free memory that each attempt may use beyond its lease, until it is leased."""
        return max(0, self._gate.memory.room) // (len(self._gate.memory.leases) + 1)

    def end_image_lease(self, attempt: int, disk: int) -> None:
        """End the lease of images now on the disk: they are measured there and outlive the attempt."""
        if disk:
            self._measure_disk()
            self._gate.shrink(attempt, disk)

    def lend(self, disk: int) -> int | None:
        """Lend disk that no attempt waits for, at once or not at all; return the number for `repay`."""
        self._measure_disk()
        self._loans -= 1
        return self._loans if self._gate.lend(self._loans, disk) else None

    def repay(self, loan: int) -> None:
        self._measure_disk()
        self._gate.give_back(loan)

    def drop(self, attempt: int, reason: str) -> bool:
        """Drop a waiting attempt; return whether it did wait."""
        return self._gate.drop(attempt, make_interrupt_failure(reason))

    def on_settled(self, verdict: Verdict) -> None:
        """Take the lease back, and learn from the attempt's use."""
        self._learn(verdict, self.return_lease(verdict.attempt))

    def _learn(self, verdict: Verdict, held: AttemptGrant | None) -> None:
        where = verdict.failure.where if verdict.failure else None
        if held is None or where in (
            FailureOrigin.INTERRUPTED,
            FailureOrigin.CANCELLED,
            FailureOrigin.BUDGET,
            FailureOrigin.WORKER,
        ):
            return
        self._sandboxes.add(max(held.peak.sandbox, verdict.peak_memory))
        self._workers.add(held.peak.worker)
        self._disks.add(held.peak.disk)

    def return_lease(self, attempt: int) -> AttemptGrant | None:
        """Take the lease back; return the grant."""
        self._gate.give_back(attempt)
        return self._grants.pop(attempt, None)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that have a slot and no lease yet."""
        return self._gate.waiting

    @property
    def binds(self) -> str:
        """The resource that keeps attempts waiting, if one does."""
        return self._gate.binds

    @property
    def lacking(self) -> int:
        """Bytes of disk that the first waiting attempt lacks."""
        return self._gate.missing_disk

    @property
    def leased(self) -> int:
        return sum(self._gate.memory.leases.values())

    @property
    def room(self) -> int:
        """Bytes of memory that can still be leased."""
        return self._gate.memory.room

    def take_lag(self) -> float:
        """Return the longest lag of a worker since the last call, in seconds."""
        lag, self._lag = self._lag, 0.0
        return lag

    def hold(self, why: str) -> None:
        """Admit no attempt until `release`."""
        self._gate.hold(why)

    def release(self, why: str) -> None:
        self._gate.release(why)

    def periodic_task(self, fleet: GovernedFleet) -> PeriodicTask:
        """Return the task that looks again and again."""

        async def look() -> None:
            age = time.monotonic() - self._looked
            tense = bool(self._gate.waiting or self._reclaim.holding)
            if fleet.memory_version != self._news or age >= (TENSE_SECONDS if tense else CALM_SECONDS):
                self._news = fleet.memory_version
                self.look(fleet)

        return PeriodicTask("governor", LOOK_SECONDS, look)

    # Each look.

    def look(self, fleet: GovernedFleet) -> None:
        """Measure everything, and act on it."""
        self._looked = time.monotonic()
        self.census = census = fleet.take_census()
        self.own_memory = self._footprint.read(census) + self._measure_tmpfs(census)
        self.reading = reading = self._meter.read(self.own_memory)
        self._read_at = time.monotonic()
        self._lag = max(self._lag, census.lag)
        for attempt, use in census.uses.items():
            if held := self._grants.get(attempt):
                held.peak = _combine_peaks(held.peak, use)
        if self._config.ungoverned:
            return
        self._gate.memory.set_usage(reading.holding, {a: use.memory for a, use in census.uses.items()})
        self._measure_disk()
        self._extend(fleet, census.uses)
        self._relieve(fleet, reading.bound)
        self._adjust_cpu_limit(census)
        self._gate.on_measured()
        self._set_allowances(fleet)
        fleet.permit_growth(self._gate.memory.leases, max(0, self._gate.memory.room))

    def _adjust_cpu_limit(self, census: FleetCensus) -> None:
        """Run fewer attempts when they compete for the CPU, more when there is CPU to spare."""
        if self._cpu_watch is None:
            return
        running, waiting = len(self._gate.memory.leases), self._gate.binds == "cpu"
        if told := self._cpu_watch.look(census, running, waiting):
            self._gate.most_attempts = self._cpu_watch.most
            self._note("governor.cpu", told)

    def _refresh(self) -> None:
        """Read memory again: set-up or a neighbour may have taken some since the last look."""
        if time.monotonic() - self._read_at < FRESH:
            return
        self._read_at = time.monotonic()
        self.reading = self._meter.read(self.own_memory)
        used = {attempt: use.memory for attempt, use in self.census.uses.items()}
        self._gate.memory.set_usage(self.reading.holding, used)

    def _measure_disk(self) -> None:
        if not self._config.ungoverned:
            uses = self.census.uses.items()
            self._gate.disk.set_usage((self._disk(),), {attempt: use.disk for attempt, use in uses})

    def _measure_tmpfs(self, census: FleetCensus) -> int:
        """Return the bytes that sandboxes have written to a scratch file system in memory."""
        if not self.reading.disk("scratch").memory:
            return 0
        return sum(use.disk for use in census.uses.values())

    def _estimate_memory(self, declared: int | None, scale: int, count: int = 1) -> int:
        """Return the memory that attempts need: declared or learned, and more after a shortage."""
        if declared is not None:
            return (declared + self._workers.need) * count
        sandbox = self._sandboxes.need if scale == 1 else self._sandboxes.retry_need
        # A guess never exceeds the memory beside the run's own processes: the sandbox's limit decides then.
        most = max(FLOOR, self._gate.memory.largest_lease - self._footprint.base)
        return min((sandbox + self._workers.need) * scale * count, most)

    def _extend(self, fleet: GovernedFleet, uses: Mapping[int, AttemptUse]) -> None:
        """Raise leases that are nearly used up; if an attempt cannot grow, preempt the youngest."""
        for attempt, held in self._grants.items():
            used = uses[attempt].memory if attempt in uses else 0
            grows, held.before = used > held.before + GROWING, used
            near = used > NEAR_LIMIT * self._gate.memory.leases.get(attempt, 0)
            if not near or self._raise_lease(attempt):
                held.short = 0
            elif held.declared is None:
                held.short = held.short + 1 if grows else max(0, held.short - 1)
        short = [attempt for attempt, held in self._grants.items() if held.short]
        (self.hold if short else self.release)("memory")
        self._pause = max(0, self._pause - 1)
        if short and not self._pause and max(self._grants[a].short for a in short) >= PATIENCE:
            self._make_room(short, uses)

    def _set_allowances(self, fleet: GovernedFleet) -> None:
        """Limit sandboxes to their leases and their parts of the free memory."""
        bonus = self._bonus
        for attempt, held in self._grants.items():
            lease = self._gate.memory.leases.get(attempt)
            if lease is None or held.declared is not None or not held.allowed:
                continue
            allowed = max(FLOOR, lease + bonus, int(held.peak.sandbox / NEAR_LIMIT))
            if abs(allowed - held.allowed) > max(WORTH_EXTENDING, held.allowed // 8):
                held.allowed = allowed
                fleet.allow_memory(attempt, allowed)

    def _raise_lease(self, attempt: int) -> bool:
        lease = self._gate.memory.leases.get(attempt, 0)
        more = min(max(WORTH_EXTENDING, int(lease * (GROWTH - 1))), self._gate.memory.room)
        return more >= WORTH_EXTENDING and self._gate.extend(attempt, lease + more)

    def _make_room(self, short: list[int], uses: Mapping[int, AttemptUse]) -> None:
        """Preempt the youngest attempt that began after the oldest one that cannot grow."""
        oldest = min(short)
        youngest = self._preempt_youngest(attempt for attempt in uses if attempt > oldest)
        if youngest is not None:
            self._pause = PATIENCE
            text = f"attempt {youngest} ({uses[youngest].memory >> 20} MiB) is tried again later"
            self._note("governor.preempt", f"{text}: attempt {oldest} grows")

    def _relieve(self, fleet: GovernedFleet, bound: ResourceBound) -> None:
        """Recycle workers with memory of ended attempts; reclaim step by step if more is used than leased."""
        if self._gate.memory.room > NEW_WORKER:
            large = max(WORTH_RECYCLING, int(bound.limit * LARGE_GROWTH))
            self._note_action("recycle", bound, fleet.recycle(large, at_once=True))
        else:  # whether an attempt waits or not: leaked memory is in no lease, and shows when an attempt ends
            self._note_action("recycle", bound, fleet.recycle(WORTH_RECYCLING, at_once=False))
        action = self._reclaim.next(bound.used, bound.limit)
        (self.hold if self._reclaim.holding else self.release)("memory short")
        self._tell_effect(bound)
        if action is not None and self._note_action(action, bound, self._take_step(action, fleet)):
            self._last = action, bound.used

    def _take_step(self, action: ReclaimAction, fleet: GovernedFleet) -> str:
        match action:
            case ReclaimAction.TRIM:
                return fleet.trim()
            case ReclaimAction.RECYCLE:
                return fleet.recycle(WORTH_RECYCLING // 2, at_once=False)
            case ReclaimAction.PREEMPT:
                youngest = self._preempt_youngest(self.census.uses)
                return "" if youngest is None else f"attempt {youngest} is tried again later"

    def _preempt_youngest(self, attempts: Iterable[int]) -> int | None:
        """Preempt the youngest attempt that may be; one preempted often enough is left to finish."""
        return next((a for a in sorted(attempts, reverse=True) if self._preempt(a)), None)

    def _note_action(self, action: str, bound: ResourceBound, done: str) -> bool:
        if done:
            use = f"{bound.used >> 20} of {bound.limit >> 20} MiB ({bound.name})"
            self._note(f"governor.{action}", f"{use}: {done}")
        return bool(done)

    def _tell_effect(self, bound: ResourceBound) -> None:
        """Note the effect of the last step, when it is over."""
        if self._last is not None and not self._reclaim.holding:
            action, before = self._last
            self._last = None
            freed = (before - bound.used) / MiB
            self._note("governor.relieved", f"{freed:.0f} MiB less than before the last step, {action}")


def _combine_peaks(a: AttemptUse, b: AttemptUse) -> AttemptUse:
    return AttemptUse(
        sandbox=max(a.sandbox, b.sandbox), worker=max(a.worker, b.worker), disk=max(a.disk, b.disk)
    )
