"""The state of a running attempt, the time limits of its phases, and the verdict made from it.

`attempt.py` runs the attempt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import msgspec

from ..core.authoring import ChildResult, ManagedSandbox, SessionStatus
from ..core.errors import AttemptError, LimitReached, as_failure, drop_tracebacks
from ..core.failures import DISK, RULES, ScoreRule
from ..core.policy import find_kept_work
from ..core.records import (
    NO_USAGE,
    AttemptFailure,
    AttemptPhase,
    ChildAttempt,
    FailureOrigin,
    Grade,
    Instance,
    KeptWork,
    MemorySeries,
    ModelUsage,
    PhaseTimes,
    Salvage,
    Verdict,
)
from ..governor.disks import DiskFaults
from .scope import Note, Scope
from .user_calls import UserCalls
from .worker_protocol import AttemptJob

MOST_KEPT = 256  # children that a verdict lists
LOOK_SECONDS = 0.05  # at least, between two looks at a limit that has moved
MOST_VALUES = 120  # of a sandbox's memory over time


class ChildTracker:
    """The children of an attempt, including children of children."""

    def __init__(self) -> None:
        self.living = 0
        self.started = 0
        self.ended: deque[ChildAttempt] = deque(maxlen=MOST_KEPT)

    def begin(self) -> int:
        """Count a new child and return its number: 1, 2, 3, ..."""
        self.living += 1
        self.started += 1
        return self.started

    def end(self, name: str, result: ChildResult, exchanges: int, seconds: float) -> None:
        self.living -= 1
        failure, usage = result.failure, result.usage
        child = ChildAttempt(name=name, failure=failure, usage=usage, exchanges=exchanges, seconds=seconds)
        self.ended.append(child)

    @property
    def dropped(self) -> int:
        """The number of ended children that the verdict does not list."""
        return self.started - self.living - len(self.ended)


class MemoryRecorder:
    """The memory of a sandbox over time, in steps that double when there are too many."""

    def __init__(self) -> None:
        self._step = 1.0  # seconds
        self._values: list[int] = []  # KiB, the maximum of each step; bound: MOST_VALUES

    def add(self, seconds: float, memory: int) -> None:
        """Count a reading, `seconds` after the start."""
        while (place := int(seconds / self._step)) >= MOST_VALUES:
            values, self._step = [*self._values, 0], 2 * self._step
            self._values = [max(pair) for pair in zip(values[::2], values[1::2], strict=False)]
        if place >= len(self._values):
            last = self._values[-1] if self._values else 0
            self._values += [last] * (place - len(self._values)) + [0]
        self._values[place] = max(self._values[place], memory >> 10)

    def build(self) -> MemorySeries | None:
        """Return the series; None if the attempt was shorter than two steps."""
        return MemorySeries(self._step, tuple(self._values)) if len(self._values) > 1 else None


class PhaseLimit:
    """Like `asyncio.timeout`, but the allowed time may grow while it runs.

    `suspended` returns for how many seconds the process did not run or the run was paused: they do not count.
    It is a class because a nested function that arms itself again would be a reference cycle, which would
    keep the attempt alive.
    """

    def __init__(
        self, allowed: Callable[[], float], phase: AttemptPhase, suspended: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._allowed = allowed
        self._phase = phase
        self._loop = asyncio.get_running_loop()
        self._suspended = suspended
        self._start = self._loop.time() - suspended()
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._handle = self._loop.call_at(self._end, self._check)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise LimitReached(f"{self._phase} took longer than {self._allowed():g} s") from late

    @property
    def _end(self) -> float:
        return self._start + self._suspended() + self._allowed()

    def _check(self) -> None:
        now = self._loop.time()
        if now >= self._end:
            self._timeout.reschedule(now)
        else:  # while the run is paused, the end moves with the clock
            self._handle = self._loop.call_at(max(self._end, now + LOOK_SECONDS), self._check)


class AttemptState:
    """The state of a running attempt."""

    def __init__(
        self, job: AttemptJob, note: Note, closing: float, suspended: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.job = job
        self.instance = msgspec.msgpack.decode(job.payload, type=Instance)
        self.phase = AttemptPhase.SETUP
        self.since = self._begun = asyncio.get_running_loop().time()
        self.calls = UserCalls(f"attempt-{job.attempt.id}")
        self.scope = Scope(note, closing)
        self.note = note
        self._suspended = suspended  # returns the seconds that count against no limit
        self.ready = False  # set-up is over: there is something to grade
        self.failure: AttemptFailure | None = None
        self.grade: Grade | None = None
        self.answer: Any = None
        work = job.work  # an attempt that grades kept work reports that work as its own
        self.answer_json: str | None = work.answer if work else None
        self.salvage: Salvage | None = work.salvage if work else None
        self.patch: int | None = work.patch if work else None  # bytes
        self.kept: KeptWork | None = find_kept_work(work) if work else None
        self.critic_satisfied: bool | None = None
        self.session: SessionStatus | None = None
        self.sandbox: ManagedSandbox | None = None
        self.seconds: dict[AttemptPhase, float] = {}
        self.disk_faults = DiskFaults()
        self._memory = MemoryRecorder()
        self.child_tracker = ChildTracker()
        self.group_scored = False  # its grade comes from scoring its group
        # The calls of its group's scoring, if it was the last member to leave it.
        self.scoring_calls: UserCalls | None = None
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._ending: AttemptFailure | None = None

    @property
    def tainted(self) -> bool:
        """Whether code of the attempt still runs in this process."""
        alive = self.calls.alive + (self.scoring_calls.alive if self.scoring_calls is not None else 0)
        return alive > 0 or self.scope.stuck > 0

    @property
    def usage(self) -> ModelUsage:
        """The usage of its model calls so far."""
        return self.session.usage if self.session else ModelUsage()

    @property
    def agent_usage(self) -> ModelUsage:
        """The usage of the agent, even if it did the work in an earlier attempt."""
        return self.usage if self.job.work is None else self.job.work.usage

    @property
    def acting_attempt(self) -> int:
        """The attempt in which the agent acted."""
        return self.job.attempt.regrades or self.job.attempt.id

    @property
    def found_full(self) -> bool:
        """Whether a write of the attempt failed on a full disk: its own result is then not valid."""
        failures = (self.failure, self.session.failure if self.session else None)
        record_failed = any(
            f is not None and f.where is FailureOrigin.RUN and f.kind == DISK for f in failures
        )
        return record_failed or self.disk_faults.occurred

    def sample_memory(self) -> None:
        """Record the memory that the sandbox uses now."""
        if self.sandbox is not None:
            self._memory.add(asyncio.get_running_loop().time() - self._begun, self.sandbox.memory)

    def interrupt(self, failure: AttemptFailure) -> None:
        """End the attempt soon with this failure. A scored failure ends only the acting: grading follows."""
        acting = self.job.work is None and self.phase in (AttemptPhase.SETUP, AttemptPhase.ACTING)
        if RULES[failure.where].scored is ScoreRule.YES and not acting:
            return
        if self._ending is None and self._task is not None and self.phase is not AttemptPhase.CLOSING:
            self._ending = failure
            self._task.cancel()

    def limit(self, allowed: Callable[[], float], phase: AttemptPhase) -> PhaseLimit:
        """Return a time limit for a part of this attempt."""
        return PhaseLimit(allowed, phase, self._suspended)

    async def run_phase(
        self,
        phase: AttemptPhase,
        allowed: Callable[[], float] | None,
        otherwise: type[AttemptError],
        work: Callable[[], Awaitable[None]],
    ) -> AttemptFailure | None:
        """Run `work` as `phase` within `allowed` seconds (None: no limit); return its failure, or None."""
        loop = asyncio.get_running_loop()
        self.phase, self.since = phase, loop.time()
        stopped = self._suspended()
        try:
            async with self.limit(allowed, phase) if allowed is not None else nullcontext():
                await work()
        except asyncio.CancelledError as error:
            if self._ending is None:
                raise
            if self._task is not None:
                self._task.uncancel()
            drop_tracebacks(error)
            ending = self._ending
            if RULES[ending.where].scored is ScoreRule.YES:
                self._ending = None  # grading follows, which can be interrupted again
            return ending
        except Exception as error:  # boundary: a bad attempt is data  # noqa: BLE001
            failure = as_failure(error, otherwise, phase)
            drop_tracebacks(error)
            # Only in acting does the limit bind the agent: in other phases it must never become a zero.
            late = failure.where is FailureOrigin.LIMIT and phase is not AttemptPhase.ACTING
            return msgspec.structs.replace(failure, where=otherwise.where) if late else failure
        finally:
            took = loop.time() - self.since - (self._suspended() - stopped)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, took)
        return None

    def make_verdict(self, token: int, session: SessionStatus | None, exchanges: int, peak: int) -> Verdict:
        return Verdict(
            attempt=self.job.attempt.id,
            token=token,
            failure=self.failure,
            grade=self.grade,
            answer=self.answer_json,
            usage=session.usage if session else ModelUsage(),
            times=PhaseTimes(
                setup=self.seconds.get(AttemptPhase.SETUP, 0.0),
                acting=self.seconds.get(AttemptPhase.ACTING, 0.0),
                grading=self.seconds.get(AttemptPhase.GRADING, 0.0),
                waited=session.waited if session else 0.0,
            ),
            salvage=self.salvage,
            exchanges=exchanges,
            peak_memory=peak,
            replayed_usage=session.replayed_usage if session else NO_USAGE,
            patch=self.patch,
            critic_satisfied=self.critic_satisfied,
            children=tuple(self.child_tracker.ended),
            group_scored=self.group_scored,
            kept=self.kept,
            version=session.version if session else "",
            memory=self._memory.build(),
        )
