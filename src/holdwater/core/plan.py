"""The planner: events in, commands out. It decides what runs next and when a sample is closed.

Pure and O(open samples): nothing here waits, reads a clock or holds a finished instance. It can be rebuilt
from its own bounded log (`Plan.replayed`). `policy.py` says what follows from a verdict; `run/scheduler.py`
carries the commands out.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from .failures import DISK, POISON
from .policy import Next, Policy, Result, Spent, decide, outcome_kind, rank
from .records import Attempt, Outcome, Record, Where

LOG_BOUND = 4096
EARLY = 0.05  # seconds before its time that a timer may fire; earlier, it belongs to another `Wake`


class Event(Record, frozen=True, tag=True):
    """Something that happened, at a time on the scheduler's clock."""


class Opened(Event, frozen=True):
    """A sample was written to the ledger and can be tried. The rest is what an earlier conductor left.

    `last` is a verdict that nothing had followed on; the counts are those before it.
    """

    instance: int
    sample: int
    number: int = 0
    round: int = 1
    retries: int = 0
    scale: int = 1
    losses: int = 0
    best: Result | None = None
    last: Result | None = None
    regrades: int | None = None


class Exhausted(Event, frozen=True):
    """The suite has no more instances."""


class Settled(Event, frozen=True):
    """A verdict was committed."""

    result: Result


class Preempt(Event, frozen=True):
    """The governor wants the attempt's resources back."""

    attempt: int


class Woke(Event, frozen=True):
    """The time of a `Wake` has come."""


class Drain(Event, frozen=True):
    """Start nothing more."""


class Abort(Event, frozen=True):
    """Start nothing more and interrupt what runs."""


AnyEvent = Opened | Exhausted | Settled | Preempt | Woke | Drain | Abort


class Command(Record, frozen=True, tag=True):
    """Something that the scheduler has to do."""


class Pull(Command, frozen=True):
    """Get `count` more samples."""

    count: int


class Start(Command, frozen=True):
    attempt: Attempt


class Interrupt(Command, frozen=True):
    """End the attempt with the verdict `interrupted`."""

    attempt: int


class Close(Command, frozen=True):
    """The sample is done."""

    outcome: Outcome


class Wake(Command, frozen=True):
    """Send `Woke` at this time."""

    at: float


class Finish(Command, frozen=True):
    """There is nothing left to do, or nothing left that may be done."""


AnyCommand = Pull | Start | Interrupt | Close | Wake | Finish


class Sample(msgspec.Struct):
    """An open sample: pulled, not closed."""

    instance: int
    sample: int
    number: int
    spent: Spent
    losses: int = 0
    preemptions: int = 0
    running: Attempt | None = None
    best: Result | None = None
    regrades: int | None = None


Key = tuple[int, int]  # instance, sample


class State(msgspec.Struct):
    """Everything that the planner knows."""

    policy: Policy
    next_attempt: int
    open: dict[Key, Sample] = {}  # bound: `_window` samples
    ready: list[Key] = []
    alone: list[Key] = []  # ready, but in a worker of their own
    delayed: list[tuple[float, Key]] = []  # a heap
    running: dict[int, Key] = {}  # bound: `policy.concurrency`
    pulling: int = 0
    exhausted: bool = False
    draining: bool = False
    finished: bool = False
    wake_at: float | None = None


class Plan:
    """One run's planner."""

    def __init__(self, policy: Policy, next_attempt: int = 1) -> None:
        self._restore(State(policy=policy, next_attempt=next_attempt))
        self._checkpoint = self._snapshot()

    def handle(self, event: AnyEvent, at: float) -> list[AnyCommand]:
        """Take in one event; the commands that follow from it, in order."""
        if len(self._log) >= LOG_BOUND:
            self._checkpoint = self._snapshot()
            self._log.clear()
        self._log.append((at, event))
        commands = self._react(event, at)
        self._advance(at, commands)
        return commands

    def replayed(self) -> Plan:
        """The same planner, rebuilt from its last checkpoint and the events since."""
        twin = Plan.__new__(Plan)
        twin._restore(msgspec.msgpack.decode(self._checkpoint, type=State))
        twin._checkpoint = self._checkpoint
        for at, event in self._log:
            twin.handle(event, at)
        return twin

    @property
    def running(self) -> int:
        return len(self._state.running)

    @property
    def waiting(self) -> dict[str, int]:
        """Why the samples that do not run are waiting."""
        counts = {
            "slot": len(self._ready),
            "a worker of its own": len(self._alone),
            "back-off": len(self._state.delayed),
        }
        return {why: count for why, count in counts.items() if count}

    @property
    def open(self) -> int:
        return len(self._state.open)

    @property
    def complete(self) -> bool:
        """Whether every sample there is has been closed."""
        return self._state.exhausted and not self._state.open

    # What each event does to the sample that it names.

    def _react(self, event: AnyEvent, at: float) -> list[AnyCommand]:
        state = self._state
        match event:
            case Opened():
                return self._opened(event, at)
            case Exhausted():
                state.exhausted, state.pulling = True, 0
            case Settled(result=result):
                return self._settled(result, at)
            case Preempt(attempt=attempt):
                return self._preempt(attempt)
            case Woke():
                if state.wake_at is not None and at >= state.wake_at - EARLY:
                    state.wake_at = None
            case Drain():
                state.draining = True
            case Abort():
                state.draining = True
                return [Interrupt(attempt=attempt) for attempt in state.running]
        return []

    def _opened(self, event: Opened, at: float) -> list[AnyCommand]:
        state = self._state
        state.pulling = max(0, state.pulling - 1)
        key = (event.instance, event.sample)
        if key in state.open:
            return []
        sample = state.open[key] = Sample(
            instance=event.instance,
            sample=event.sample,
            number=event.number,
            spent=Spent(event.round, event.retries, event.scale),
            losses=event.losses,
            best=event.best,
            regrades=event.regrades,
        )
        if event.last is not None:
            return self._judged(key, sample, event.last, at)
        self._queue(key, first=False)
        return []

    def _settled(self, result: Result, at: float) -> list[AnyCommand]:
        key = self._state.running.pop(result.attempt, None)
        if key is None:
            return []
        sample = self._state.open[key]
        sample.running = None
        if result.where is Where.RUN:
            return self._react(Abort(), at)
        if result.where is Where.INTERRUPTED:
            sample.preemptions += result.kind != DISK  # for want of disk nobody is preempted
            self._queue(key, first=True)
            return []
        if result.where is Where.WORKER and result.kind != POISON:
            sample.losses += 1
            self._queue(key, first=True)
            return []
        return self._judged(key, sample, result, at)

    def _judged(self, key: Key, sample: Sample, result: Result, at: float) -> list[AnyCommand]:
        """A verdict with blame: another try, or the end of the sample."""
        following = decide(result, sample.spent, self._state.policy) if sample.regrades is None else None
        if sample.best is None or rank(result) >= rank(sample.best):
            sample.best = result
        if following is None:
            del self._state.open[key]
            spent = sample.spent.retries >= self._state.policy.retries or sample.regrades is not None
            return [Close(outcome=_outcome(sample, sample.best, spent=spent))]
        self._again(key, sample, following, at)
        return []

    def _again(self, key: Key, sample: Sample, following: Next, at: float) -> None:
        sample.spent = Spent(following.round, following.retries, following.scale)
        if following.delay:
            heapq.heappush(self._state.delayed, (at + following.delay, key))
        else:
            self._queue(key, first=False)

    def _preempt(self, attempt: int) -> list[AnyCommand]:
        key = self._state.running.get(attempt)
        if key is None or self._state.open[key].preemptions >= self._state.policy.preemptions:
            return []
        return [Interrupt(attempt=attempt)]

    # What can be started, pulled or finished now.

    def _advance(self, at: float, commands: list[AnyCommand]) -> None:
        state = self._state
        while state.delayed and state.delayed[0][0] <= at:
            self._queue(heapq.heappop(state.delayed)[1], first=False)
        if not state.draining:
            self._start(commands)
            self._pull(commands)
            self._wake(commands)
        over = state.draining or (state.exhausted and not state.open)
        if over and not state.running and not state.finished:
            state.finished = True
            commands.append(Finish())

    def _start(self, commands: list[AnyCommand]) -> None:
        policy = self._state.policy
        while len(self._state.running) < policy.concurrency:
            if self._alone and self._running_alone < policy.alone_at_once:
                key, alone = self._alone.popleft(), True
            elif self._ready:
                key, alone = self._ready.popleft(), False
            else:
                return
            commands.append(Start(attempt=self._attempt(key, alone)))

    def _attempt(self, key: Key, alone: bool) -> Attempt:
        state = self._state
        sample = state.open[key]
        sample.number += 1
        attempt = Attempt(
            id=state.next_attempt,
            instance=sample.instance,
            sample=sample.sample,
            number=sample.number,
            round=sample.spent.round,
            scale=sample.spent.scale,
            alone=alone,
            regrades=sample.regrades,
        )
        state.next_attempt += 1
        state.running[attempt.id] = key
        sample.running = attempt
        return attempt

    def _pull(self, commands: list[AnyCommand]) -> None:
        state = self._state
        if state.exhausted:
            return
        missing = self._window - len(state.open) - state.pulling
        starved = not self._ready and not state.pulling
        if missing >= max(1, self._window // 8) or (missing > 0 and starved):
            state.pulling += missing
            commands.append(Pull(count=missing))

    def _wake(self, commands: list[AnyCommand]) -> None:
        state = self._state
        if state.delayed and (state.wake_at is None or state.delayed[0][0] < state.wake_at):
            state.wake_at = state.delayed[0][0]
            commands.append(Wake(at=state.wake_at))

    @property
    def _window(self) -> int:
        """How many samples may be open: enough that a free slot never waits for the suite, and no more.

        Samples in back-off make room for others, up to four times the concurrency.
        """
        concurrency = self._state.policy.concurrency
        ahead = max(4, concurrency)
        return min(concurrency + ahead + len(self._state.delayed), 4 * concurrency + ahead)

    @property
    def _running_alone(self) -> int:
        samples = (self._state.open[key] for key in self._state.running.values())
        return sum(1 for sample in samples if sample.running is not None and sample.running.alone)

    def _queue(self, key: Key, *, first: bool) -> None:
        sample = self._state.open[key]
        queue = self._alone if sample.losses >= self._state.policy.losses_before_alone else self._ready
        if first:
            queue.appendleft(key)
        else:
            queue.append(key)

    # The log.

    def _snapshot(self) -> bytes:
        self._state.ready, self._state.alone = list(self._ready), list(self._alone)
        return msgspec.msgpack.encode(self._state)

    def _restore(self, state: State) -> None:
        self._state = state
        self._ready = deque(state.ready)  # bound: as `State.open`
        self._alone = deque(state.alone)  # bound: as `State.open`
        self._log: deque[tuple[float, AnyEvent]] = deque(maxlen=LOG_BOUND)


def _outcome(sample: Sample, best: Result, *, spent: bool) -> Outcome:
    kind = outcome_kind(best, spent=spent)
    scored = kind in ("passed", "failed")
    return Outcome(
        instance=sample.instance,
        sample=sample.sample,
        attempt=best.attempt,
        kind=kind,
        score=(best.score or 0.0) if scored else None,
        where=best.where,
    )
