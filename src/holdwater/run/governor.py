"""Ties the governor to a run: five times a second it measures, grants, extends and, in need, reclaims.

What is decided is decided in `governor/`; this carries it out on the fleet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ..core.config import RunConfig
from ..core.failures import interrupted
from ..core.records import Ask, Attempt, Failure, MiB, Verdict, Where
from ..governor.gate import Gate, Lease
from ..governor.meter import Meter
from ..governor.peaks import sandbox_disk, sandbox_memory, worker_memory
from ..governor.reading import Bound
from ..governor.reclaim import Action, Reclaim
from ..rollout.duty import Duty
from .crowd import Crowd
from .fleet import Census, Governed, Use
from .footprint import Footprint

LOOK_SECONDS = 0.1  # when the use of memory has changed
TENSE_SECONDS = 0.2  # when someone waits, or memory is short
CALM_SECONDS = 1.0  # otherwise
FRESH = 0.05  # seconds: a lease is granted by a reading that is no older
NEARLY = 0.8  # of a sandbox's limit: from here on it is extended, if there is room
GROWTH = 1.3
WORTH_EXTENDING = 4 * MiB
WORTH_RECYCLING = 48 * MiB  # by which a worker must have grown for its end to help those who wait
FLOOR = 32 * MiB  # a sandbox is never held to less: a shell and its children start in it
LARGE = 0.12  # of the limit: a worker that has grown by this much is replaced before anyone has to wait
NEW_WORKER = 96 * MiB  # room for one beside the one that it replaces
GROWING = 1 * MiB  # from one look to the next
PATIENCE = 5  # looks through which an attempt grows without room before another has to make it
QUARTER = 4  # of the free disk is the most that is leased where nobody said how much is needed


class Held(msgspec.Struct):
    """What an attempt was granted, and the most that it was seen to use."""

    declared: int | None  # the limit of its sandbox's memory, where that does not grow with the lease
    allowed: int = 0  # what its sandbox is held to now
    peak: Use = Use()
    before: int = 0  # bytes that it used at the last look
    short: int = 0  # looks through which it grew and had no room to


class Governor:
    """One run's. With `--ungoverned` it measures and leaves it at that."""

    def __init__(
        self,
        config: RunConfig,
        meter: Meter,
        disk: Callable[[], Bound],
        preempt: Callable[[int], bool],
        note: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._preempt = preempt
        self._meter = meter
        self._disk = disk
        self._note = note
        self._gate = Gate()
        self._held: dict[int, Held] = {}  # attempt -> what it has; bound: the run's concurrency
        self._reclaim = Reclaim()
        self._read_at = self._looked = time.monotonic()
        self._news = 0
        self._loans = 0  # the last that was lent: below the numbers of attempts
        self._pause = 0  # looks until someone may be preempted again
        self._last: tuple[str, int] | None = None  # the step taken last, and the use before it
        self.census = Census(workers=0)
        self._lag = 0.0
        self._footprint = Footprint()
        self.own = self._footprint.read(self.census)
        self.reading = meter.read(self.own)
        self._gate.memory.measured(self.reading.holding, {})
        self._sandboxes = sandbox_memory(self._gate.memory.most)
        self._workers, self._disks = worker_memory(), sandbox_disk()
        self._crowd = Crowd(config.slots) if config.concurrency is None and not config.ungoverned else None
        self._gate.most = self._crowd.most if self._crowd else None

    # What the scheduler asks for.

    async def lease(self, attempt: Attempt, asks: Ask, images: int = 0) -> Lease | Failure:
        """Wait for what an attempt needs: its lease (nothing, if ungoverned), or why it cannot be had.

        `images`: bytes of disk that come before its sandbox is there; `taken` ends their lease.
        """
        return await self.lease_all((attempt,), asks, images)

    async def lease_all(self, attempts: Sequence[Attempt], asks: Ask, images: int = 0) -> Lease | Failure:
        """The same for attempts that run together or not at all: what each of them has."""
        first, count = attempts[0], len(attempts)
        if self._config.ungoverned:
            return await self._gate.take(first.id, Lease(0)) or Lease(0)
        self._refresh()
        if images:
            self._measure_disk()
            if failure := self._gate.beyond(images):
                return failure
        memory = (asks.memory or self._config.limits.memory or 0) * first.scale or None
        disk = (asks.disk or self._config.limits.disk or 0) * first.scale or None
        each = disk or min(self._disks.need, max(0, self._gate.disk.all_of_it) // QUARTER // count)
        need = Lease(
            memory=self._memory(memory, first.scale, count),
            disk=images + each * count,
            firm=memory is not None or disk is not None,
        )
        for attempt in attempts:
            self._held[attempt.id] = Held(memory)
        failure = await self._gate.take(first.id, need)
        if failure is not None:
            for attempt in attempts:
                self._held.pop(attempt.id, None)
            return failure
        if count == 1:
            return need
        self._gate.divide(first.id, [attempt.id for attempt in attempts])
        return Lease(need.memory // count, need.disk // count, need.firm)

    def hand_over(self, attempt: int, to: Attempt, asks: Ask) -> Lease:
        """An attempt that is over leaves its lease to another, which may ask for more: if there is room."""
        if self._config.ungoverned:
            return Lease(0)
        memory = (asks.memory or self._config.limits.memory or 0) * to.scale or None
        self._gate.hand_over(attempt, to.id)
        self._held[to.id] = Held(memory)
        self._gate.extend(to.id, self._memory(memory, to.scale))
        return Lease(self._gate.memory.leases[to.id], self._gate.disk.leases[to.id], memory is not None)

    def part(self, verdict: Verdict) -> None:
        """The attempt is over, and its lease stays: for `hand_over`, or `give`."""
        self._learn(verdict, self._held.pop(verdict.attempt, None))

    def limits(self, attempt: int, lease: Lease) -> tuple[int, int]:
        """What follows for the sandbox: bytes of memory, and of disk where that has a budget and no limit."""
        if attempt not in self._held:
            return 0, 0
        held = self._held[attempt]
        held.allowed = held.declared or max(FLOOR, lease.memory + self._bonus)
        return held.allowed, self._config.disk or 0

    @property
    def _bonus(self) -> int:
        """What is free is lent in equal parts, beyond the leases, until someone leases it."""
        return max(0, self._gate.memory.room) // (len(self._gate.memory.leases) + 1)

    def taken(self, attempt: int, disk: int) -> None:
        """So many bytes of its lease are on the disk now, and stay when it ends: they are measured there."""
        if disk:
            self._measure_disk()
            self._gate.shrink(attempt, disk)

    def lend(self, disk: int) -> int | None:
        """Disk that no attempt waits for, at once or not at all: the number that `repay` takes."""
        self._measure_disk()
        self._loans -= 1
        return self._loans if self._gate.lend(self._loans, disk) else None

    def repay(self, loan: int) -> None:
        self._measure_disk()
        self._gate.give(loan)

    def drop(self, attempt: int, reason: str) -> bool:
        """Let an attempt that waits go; whether it did wait."""
        return self._gate.drop(attempt, interrupted(reason))

    def settled(self, verdict: Verdict) -> None:
        """Its lease returns; what it used is learned from."""
        self._learn(verdict, self.give(verdict.attempt))

    def _learn(self, verdict: Verdict, held: Held | None) -> None:
        where = verdict.failure.where if verdict.failure else None
        if held is None or where in (Where.INTERRUPTED, Where.CANCELLED, Where.BUDGET, Where.WORKER):
            return
        self._sandboxes.add(max(held.peak.sandbox, verdict.peak_memory))
        self._workers.add(held.peak.worker)
        self._disks.add(held.peak.disk)

    def give(self, attempt: int) -> Held | None:
        """Its lease returns; what it had."""
        self._gate.give(attempt)
        return self._held.pop(attempt, None)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that have a slot and no lease yet."""
        return self._gate.waiting

    @property
    def binds(self) -> str:
        """Which resource keeps attempts waiting, if one does."""
        return self._gate.binds

    @property
    def lacking(self) -> int:
        """Bytes of disk that the first of those who wait lacks."""
        return self._gate.lacking

    @property
    def leased(self) -> int:
        return sum(self._gate.memory.leases.values())

    @property
    def room(self) -> int:
        """Bytes of memory that can still be leased."""
        return self._gate.memory.room

    def take_lag(self) -> float:
        """The longest lag of a worker since this was last asked, in seconds."""
        lag, self._lag = self._lag, 0.0
        return lag

    def hold(self, why: str) -> None:
        """Admit nobody until `release`."""
        self._gate.hold(why)

    def release(self, why: str) -> None:
        self._gate.release(why)

    def duty(self, fleet: Governed) -> Duty:
        """Its looks, again and again."""

        async def look() -> None:
            age = time.monotonic() - self._looked
            tense = bool(self._gate.waiting or self._reclaim.holding)
            if fleet.news != self._news or age >= (TENSE_SECONDS if tense else CALM_SECONDS):
                self._news = fleet.news
                self.look(fleet)

        return Duty("governor", LOOK_SECONDS, look)

    # Each look.

    def look(self, fleet: Governed) -> None:
        """Measure everything; what follows from it is done."""
        self._looked = time.monotonic()
        self.census = census = fleet.census()
        self.own = self._footprint.read(census) + self._in_memory(census)
        self.reading = reading = self._meter.read(self.own)
        self._read_at = time.monotonic()
        self._lag = max(self._lag, census.lag)
        for attempt, use in census.uses.items():
            if held := self._held.get(attempt):
                held.peak = _larger(held.peak, use)
        if self._config.ungoverned:
            return
        self._gate.memory.measured(reading.holding, {a: use.memory for a, use in census.uses.items()})
        self._measure_disk()
        self._extend(fleet, census.uses)
        self._relieve(fleet, reading.bound)
        self._spare_cpu(census)
        self._gate.measured()
        self._allow(fleet)
        fleet.permit(self._gate.memory.leases, max(0, self._gate.memory.room))

    def _spare_cpu(self, census: Census) -> None:
        """Fewer at once when they keep each other from the CPU, more when there is some to spare."""
        if self._crowd is None:
            return
        running, waiting = len(self._gate.memory.leases), self._gate.binds == "cpu"
        if told := self._crowd.look(census, running, waiting):
            self._gate.most = self._crowd.most
            self._note("governor.cpu", told)

    def _refresh(self) -> None:
        """What set-up or a neighbour has taken since the last look must not be granted."""
        if time.monotonic() - self._read_at < FRESH:
            return
        self._read_at = time.monotonic()
        self.reading = self._meter.read(self.own)
        used = {attempt: use.memory for attempt, use in self.census.uses.items()}
        self._gate.memory.measured(self.reading.holding, used)

    def _measure_disk(self) -> None:
        if not self._config.ungoverned:
            uses = self.census.uses.items()
            self._gate.disk.measured((self._disk(),), {attempt: use.disk for attempt, use in uses})

    def _in_memory(self, census: Census) -> int:
        """Bytes that sandboxes have written to a file system that is memory in truth."""
        if not self.reading.disk("scratch").memory:
            return 0
        return sum(use.disk for use in census.uses.values())

    def _memory(self, declared: int | None, scale: int, count: int = 1) -> int:
        """What attempts need: what is declared or learned, and more after it was too little."""
        if declared is not None:
            return (declared + self._workers.need) * count
        sandbox = self._sandboxes.need if scale == 1 else self._sandboxes.more
        # A guess is never more than could be had beside our own processes: what it is held to then decides.
        most = max(FLOOR, self._gate.memory.most - self._footprint.base)
        return min((sandbox + self._workers.need) * scale * count, most)

    def _extend(self, fleet: Governed, uses: Mapping[int, Use]) -> None:
        """Limits that are nearly reached are raised; who cannot grow costs the youngest its place."""
        for attempt, held in self._held.items():
            used = uses[attempt].memory if attempt in uses else 0
            grows, held.before = used > held.before + GROWING, used
            near = used > NEARLY * self._gate.memory.leases.get(attempt, 0)
            if not near or self._raised(attempt):
                held.short = 0
            elif held.declared is None:
                held.short = held.short + 1 if grows else max(0, held.short - 1)
        short = [attempt for attempt, held in self._held.items() if held.short]
        (self.hold if short else self.release)("memory")
        self._pause = max(0, self._pause - 1)
        if short and not self._pause and max(self._held[a].short for a in short) >= PATIENCE:
            self._make_room(short, uses)

    def _allow(self, fleet: Governed) -> None:
        """Sandboxes are held to their leases, and to their parts of what is free."""
        bonus = self._bonus
        for attempt, held in self._held.items():
            lease = self._gate.memory.leases.get(attempt)
            if lease is None or held.declared is not None or not held.allowed:
                continue
            allowed = max(FLOOR, lease + bonus, int(held.peak.sandbox / NEARLY))
            if abs(allowed - held.allowed) > max(WORTH_EXTENDING, held.allowed // 8):
                held.allowed = allowed
                fleet.allow(attempt, allowed)

    def _raised(self, attempt: int) -> bool:
        lease = self._gate.memory.leases.get(attempt, 0)
        more = min(max(WORTH_EXTENDING, int(lease * (GROWTH - 1))), self._gate.memory.room)
        return more >= WORTH_EXTENDING and self._gate.extend(attempt, lease + more)

    def _make_room(self, short: list[int], uses: Mapping[int, Use]) -> None:
        """Preempt the youngest that began after the oldest of those that cannot grow."""
        oldest = min(short)
        youngest = self._preempted(attempt for attempt in uses if attempt > oldest)
        if youngest is not None:
            self._pause = PATIENCE
            text = f"attempt {youngest} ({uses[youngest].memory >> 20} MiB) is tried again later"
            self._note("governor.preempt", f"{text}: attempt {oldest} grows")

    def _relieve(self, fleet: Governed, bound: Bound) -> None:
        """What ended attempts left behind makes room; and when more is used than was leased, step by step."""
        if self._gate.memory.room > NEW_WORKER:
            large = max(WORTH_RECYCLING, int(bound.limit * LARGE))
            self._told("recycle", bound, fleet.recycle(large, at_once=True))
        else:  # whether anyone waits or not: what leaks is in no lease, and comes when an attempt has ended
            self._told("recycle", bound, fleet.recycle(WORTH_RECYCLING, at_once=False))
        action = self._reclaim.next(bound.used, bound.limit)
        (self.hold if self._reclaim.holding else self.release)("memory short")
        self._tell_effect(bound)
        if action is not None and self._told(action, bound, self._take_step(action, fleet)):
            self._last = action, bound.used

    def _take_step(self, action: Action, fleet: Governed) -> str:
        match action:
            case Action.TRIM:
                return fleet.trim()
            case Action.RECYCLE:
                return fleet.recycle(WORTH_RECYCLING // 2, at_once=False)
            case Action.PREEMPT:
                youngest = self._preempted(self.census.uses)
                return "" if youngest is None else f"attempt {youngest} is tried again later"

    def _preempted(self, attempts: Iterable[int]) -> int | None:
        """The youngest of them that may be; those that have been often enough are left to finish."""
        return next((a for a in sorted(attempts, reverse=True) if self._preempt(a)), None)

    def _told(self, action: str, bound: Bound, done: str) -> bool:
        if done:
            use = f"{bound.used >> 20} of {bound.limit >> 20} MiB ({bound.name})"
            self._note(f"governor.{action}", f"{use}: {done}")
        return bool(done)

    def _tell_effect(self, bound: Bound) -> None:
        """What the last step has brought, when it is over."""
        if self._last is not None and not self._reclaim.holding:
            action, before = self._last
            self._last = None
            freed = (before - bound.used) / MiB
            self._note("governor.relieved", f"{freed:.0f} MiB less than before the last step, {action}")


def _larger(a: Use, b: Use) -> Use:
    return Use(sandbox=max(a.sandbox, b.sandbox), worker=max(a.worker, b.worker), disk=max(a.disk, b.disk))
