"""Controls the memory of running attempts: looks up to ten times a second, extends leases and reclaims.

`ReclaimSteps` chooses the next step when memory runs short: trim a quiet worker, drain the largest one,
preempt the youngest attempt. Each has time to take effect; admission resumes well below the level at which it
stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Protocol

from ..core.config import RunConfig
from ..core.records import MiB
from .cpu import CpuWatch
from .leases import FLOOR, AttemptLeases
from .resource_reading import AttemptUse, FleetCensus, ResourceBound
from .run_usage import RunUsage

LOOK_SECONDS = 0.1  # when the use of memory has changed
TENSE_SECONDS = 0.2  # when an attempt waits, or memory is short
CALM_SECONDS = 1.0  # otherwise
NEW_WORKER = 96 * MiB  # room for a new worker beside the one that it replaces
NEAR_LIMIT = 0.8  # of a sandbox's limit: from here on it is extended, if there is room
GROWTH = 1.3
WORTH_EXTENDING = 4 * MiB
WORTH_RECYCLING = 48 * MiB  # least growth of a worker whose end helps waiting attempts
# Of the limit: a worker that has grown by this much is replaced before any attempt has to wait.
LARGE_GROWTH = 0.12
GROWING = 1 * MiB  # from one look to the next
PATIENCE = 5  # looks through which an attempt grows without room before another is preempted for it

HIGH = 0.94  # share of the limit, the most that is ever leased: admission stops here
LOW = 0.90  # admission resumes below this
CRITICAL = 0.97  # steps follow each other fast above this
STEP_READINGS = 8  # readings that a step has to take effect
HASTY_READINGS = 3  # the same above `CRITICAL`


class ReclaimAction(StrEnum):
    """A step; the steps are tried in this order."""

    TRIM = "trim"
    RECYCLE = "recycle"
    PREEMPT = "preempt"


STEPS = (ReclaimAction.TRIM, ReclaimAction.RECYCLE, ReclaimAction.PREEMPT)


class ReclaimSteps:
    """Tracks the last step and the readings since."""

    def __init__(self) -> None:
        self.holding = False
        self._step = 0
        self._since = 0

    def next(self, used: int, limit: int) -> ReclaimAction | None:
        """Return the step to take now, given a reading of the tightest bound; None: wait."""
        share = used / limit if limit else 1.0
        if share < LOW:
            self.holding, self._step, self._since = False, 0, 0
            return None
        if share < HIGH:
            return None  # between the thresholds the state stays the same
        begins = not self.holding
        self.holding = True
        self._since += 1
        if not begins and self._since < (HASTY_READINGS if share >= CRITICAL else STEP_READINGS):
            return None
        action = STEPS[min(self._step, len(STEPS) - 1)]
        self._step, self._since = self._step + 1, 0
        return action


class CountedWorkers(Protocol):
    def take_census(self) -> FleetCensus: ...


class GovernedWorkers(CountedWorkers, Protocol):
    """The workers that a `MemoryControl` acts on. `trim` and `recycle` return what they did, or nothing."""

    @property
    def memory_version(self) -> int:
        """A number that changes with the use of memory."""

    def allow_memory(self, attempt: int, memory: int) -> None:
        """Set the memory limit of the attempt's sandbox."""

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        """Let workers grow by their attempts' leases, and by a share of the free memory."""

    def trim(self) -> str:
        """Make workers without attempts return memory."""

    def recycle(self, least: int, *, at_once: bool) -> str:
        """Drain the worker that grew most, if by `least` bytes; replace it before (`at_once`) or after."""


class MemoryControl:
    """Controls the memory of one run. With `--ungoverned` it only measures."""

    def __init__(
        self,
        config: RunConfig,
        usage: RunUsage,
        leases: AttemptLeases,
        workers: GovernedWorkers,
        preempt: Callable[[int], bool],
        note: Callable[[str, str], None],
    ) -> None:
        self._ungoverned = config.ungoverned
        self._usage = usage
        self._leases = leases
        self._gate = leases.gate
        self._workers = workers
        self._preempt = preempt
        self._note = note
        self._reclaim = ReclaimSteps()
        self._looked = time.monotonic()
        self._seen_version = 0
        self._pause = 0  # looks until an attempt may be preempted again
        self._last: tuple[str, int] | None = None  # the last step, and the use before it
        self._cpu_watch: CpuWatch | None = None
        self.change(config)

    def change(self, config: RunConfig) -> None:
        """Control by this configuration from now on."""
        automatic = config.concurrency is None and not config.ungoverned
        if automatic != (self._cpu_watch is not None):
            self._cpu_watch = CpuWatch(config.slots) if automatic else None
            self._gate.limit_attempts(self._cpu_watch.most if self._cpu_watch else None)

    async def look_if_due(self) -> None:
        """Look, if the use of memory has changed or the last look is old. To be called often."""
        age = time.monotonic() - self._looked
        tense = bool(self._gate.waiting or self._reclaim.holding)
        version = self._workers.memory_version
        if version != self._seen_version or age >= (TENSE_SECONDS if tense else CALM_SECONDS):
            self._seen_version = version
            self.look()

    def look(self) -> None:
        """Measure everything, and act on it."""
        self._looked = time.monotonic()
        self._usage.measure(self._workers.take_census())
        census, bound = self._usage.census, self._usage.reading.bound
        for attempt, use in census.uses.items():
            if grant := self._leases.grants.get(attempt):
                grant.peak = _combine_peaks(grant.peak, use)
        if self._ungoverned:
            return
        self._leases.measure_memory()
        self._leases.measure_disk()
        self._extend(census.uses)
        self._relieve(bound)
        self._adjust_cpu_limit(census)
        self._gate.on_measured()
        self._set_allowances()
        self._workers.permit_growth(self._gate.memory.leases, max(0, self._gate.memory.room))

    def _adjust_cpu_limit(self, census: FleetCensus) -> None:
        """Run fewer attempts when they compete for the CPU, more when there is CPU to spare."""
        if self._cpu_watch is None:
            return
        running, waiting = len(self._gate.memory.leases), self._gate.binds == "cpu"
        if change := self._cpu_watch.look(census, running, waiting):
            self._gate.limit_attempts(self._cpu_watch.most)
            self._note("governor.cpu", change)

    def _extend(self, uses: Mapping[int, AttemptUse]) -> None:
        """Raise leases that are nearly used up; if an attempt cannot grow, preempt the youngest."""
        for attempt, grant in self._leases.grants.items():
            used = uses[attempt].memory if attempt in uses else 0
            grows, grant.before = used > grant.before + GROWING, used
            near = used > NEAR_LIMIT * self._gate.memory.leases.get(attempt, 0)
            if not near or self._raise_lease(attempt):
                grant.short = 0
            elif grant.declared is None:
                grant.short = grant.short + 1 if grows else max(0, grant.short - 1)
        short = [attempt for attempt, grant in self._leases.grants.items() if grant.short]
        (self._gate.hold if short else self._gate.release)("memory")
        self._pause = max(0, self._pause - 1)
        if short and not self._pause and max(self._leases.grants[a].short for a in short) >= PATIENCE:
            self._make_room(short, uses)

    def _set_allowances(self) -> None:
        """Limit sandboxes to their leases and their parts of the free memory."""
        bonus = self._leases.bonus
        for attempt, grant in self._leases.grants.items():
            lease = self._gate.memory.leases.get(attempt)
            if lease is None or grant.declared is not None or not grant.allowed:
                continue
            allowed = max(FLOOR, lease + bonus, int(grant.peak.sandbox / NEAR_LIMIT))
            if abs(allowed - grant.allowed) > max(WORTH_EXTENDING, grant.allowed // 8):
                grant.allowed = allowed
                self._workers.allow_memory(attempt, allowed)

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

    def _relieve(self, bound: ResourceBound) -> None:
        """Recycle workers with memory of ended attempts; reclaim step by step if more is used than leased."""
        if self._gate.memory.room > NEW_WORKER:
            large = max(WORTH_RECYCLING, int(bound.limit * LARGE_GROWTH))
            self._note_action("recycle", bound, self._workers.recycle(large, at_once=True))
        else:  # whether an attempt waits or not: leaked memory is in no lease, and shows when an attempt ends
            self._note_action("recycle", bound, self._workers.recycle(WORTH_RECYCLING, at_once=False))
        action = self._reclaim.next(bound.used, bound.limit)
        (self._gate.hold if self._reclaim.holding else self._gate.release)("memory short")
        self._tell_effect(bound)
        if action is not None and self._note_action(action, bound, self._take_step(action)):
            self._last = action, bound.used

    def _take_step(self, action: ReclaimAction) -> str:
        match action:
            case ReclaimAction.TRIM:
                return self._workers.trim()
            case ReclaimAction.RECYCLE:
                return self._workers.recycle(WORTH_RECYCLING // 2, at_once=False)
            case ReclaimAction.PREEMPT:
                youngest = self._preempt_youngest(self._usage.census.uses)
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
