"""Carries out what the planner decides: pulls, begins, starts, settles, closes, in that order on disk.

It holds O(open samples). What to do next is decided in `core/plan.py`; who hosts attempts is a `Fleet`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from ..core.config import Keep, RunConfig
from ..core.errors import HoldwaterError, Interrupted, RunStopped, first
from ..core.events import (
    Abort,
    AnyCommand,
    AnyEvent,
    Close,
    Disband,
    Drain,
    End,
    Exhausted,
    Finish,
    Interrupt,
    Joined,
    Opened,
    Preempt,
    Pull,
    Rally,
    Refuse,
    Replace,
    Settled,
    Start,
    Wake,
    Withdrawn,
    Woke,
)
from ..core.failures import interrupted, worker_lost
from ..core.plan import Plan
from ..core.policy import Policy, Result
from ..core.records import Attempt, Failure, Outcome, Verdict, Where
from ..ledger.ledger import Ledger
from ..rollout.duty import Duty
from ..rollout.wire import (
    Arrived,
    Asked,
    Broken,
    Done,
    Held,
    Noted,
    Progress,
    Said,
    Unfit,
    Unheld,
)
from .admission import Admission
from .customers import Customers, own_fault
from .deadlines import Deadlines
from .dispatch import Dispatch
from .feed import Feed
from .fleet import Fleet, Gone, News
from .governor import Governor
from .observers import Observers
from .replay import Earlier
from .space import Space
from .wanted import Supplies

WATCH_SECONDS = 1.0
ABORT_SECONDS = 20.0  # what interrupted attempts get to settle before the run ends without them


class Scheduler:
    """One conductor's pass over a run."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        feed: Feed,
        observers: Observers,
        earlier: Earlier,
        next_attempt: int,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self.ledger = self._ledger = ledger
        self._feed = feed
        self._observers = observers
        self._earlier = earlier
        self._say = say
        self._plan = Plan(Policy.of(config, regrading=ledger.regrade is not None), next_attempt)
        self._loop = asyncio.get_running_loop()
        self.started = asyncio.Event()  # samples can be opened
        self._finished = asyncio.Event()
        self._pulling = asyncio.Lock()  # one pull at a time: a suite yields in one order
        self._attempts: dict[int, Attempt] = {}  # bound: the run's concurrency
        self._unstarted: set[int] = set()  # bound: the run's concurrency
        self._deadlines = Deadlines(config)
        self._ended: dict[int, Failure] = {}  # before they were started; bound: the run's concurrency
        self._begun: set[asyncio.Task[None]] = set()  # bound: the run's concurrency, and one pull
        self._customers: Customers | None = None
        self._error: HoldwaterError | None = None
        self._reason = "the run is being stopped"
        self._over = False

    @property
    def plan(self) -> Plan:
        return self._plan

    def living(self) -> Collection[int]:
        """Attempts that are not settled."""
        return self._attempts.keys()

    @property
    def running(self) -> int:
        """Attempts that have what they need."""
        return self._plan.running - len(self._admission.waiting)

    @property
    def waiting(self) -> dict[str, int]:
        """Why the others wait."""
        waiting = {**self._plan.waiting, self._governor.binds: len(self._governor.waiting)}
        waiting["image"] = len(self._admission.waiting) - len(self._governor.waiting)
        return {why: count for why, count in waiting.items() if count}

    @property
    def binds(self) -> str:
        """What keeps more from running at once."""
        if self._governor.waiting:
            return self._governor.binds
        uses = self._governor.census.uses.values()
        if uses and 2 * sum(use.throttled for use in uses) >= len(uses):
            return "rate"
        return "slots" if self._plan.waiting.get("slot") else "nothing left to do"

    def preempt(self, attempt: int) -> bool:
        """The governor wants its memory back: whether it is to be tried again later, without blame."""
        commands = self._plan.handle(Preempt(attempt=attempt), self._loop.time())
        reason, self._reason = self._reason, "memory was short"
        for command in commands:
            self._do(command)
        self._reason = reason
        return Interrupt(attempt=attempt) in commands

    def govern(self, governor: Governor, space: Space, supply: Supplies | None = None) -> None:
        """Who grants memory, who watches the disk, and who brings images; before `run`."""
        self._governor = governor
        self._space = space
        self._admission = Admission(governor, supply)
        self._dispatch = Dispatch(self._ledger, self._admission, governor, self._earlier)

    def serve(self, customers: Customers) -> None:
        """Samples are ordered; before `run`."""
        self._customers = customers
        self._dispatch.offer = customers.offer

    def open(self, opened: Sequence[Opened]) -> None:
        """Samples that are in the ledger and can be tried; once it has `started`."""
        self._begin(self._expect([event for event in opened if event.last is None]))
        for event in opened:
            self._take(event)

    def withdraw(self, instance: int, sample: int, failure: Failure) -> None:
        """Nobody wants the sample any more."""
        self._take(Withdrawn(instance=instance, sample=sample, failure=failure))

    @property
    def draining(self) -> bool:
        return self._plan.draining

    def finish(self) -> None:
        """Start nothing more; the run has ended well when what runs is over."""
        self._take(Drain())

    async def run(self, fleet: Fleet, duties: Sequence[Duty] = ()) -> None:
        """Run until everything is settled, or raise what stopped it."""
        self._fleet = fleet
        try:
            async with asyncio.TaskGroup() as self._group:
                watch = Duty("watch", WATCH_SECONDS, self._watch)
                perpetual = [self._group.create_task(duty.perform(self.note)) for duty in (watch, *duties)]
                self._take(Woke())
                self.started.set()
                await self._finished.wait()
                for task in (*perpetual, *self._begun):
                    task.cancel()
        except* HoldwaterError as group:
            raise first(group) from None
        finally:
            self._over = True
            self._feed.close()
        done_anyway = isinstance(self._error, Interrupted) and self._plan.complete
        if self._error is not None and not done_anyway:
            raise self._error

    def hear(self, news: News) -> None:
        """What the fleet reports. After the end it is left to the journals, where it is found again."""
        if self._over and not isinstance(news, Said):
            return
        match news:
            case Done(verdict=verdict):
                self._spawn(self._settle(verdict))
            case Noted(kind=kind, message=message, attempt=attempt):
                self._spawn(self._ledger.note(kind, message, attempt))
            case Said(line=line):
                self._say(line)
            case Gone(worker=worker):
                self._spawn(self._ledger.forget_journal(worker))
            case Arrived(attempt=attempt):
                self._deadlines.wait(attempt)
                self._take(Joined(attempt=attempt))
            case Progress() | Held() | Unheld() | Asked():
                if self._customers is not None:
                    self._customers.underway(news)
            case Broken(message=message):
                self.stop(RunStopped(message, "make space, then `holdwater resume`"))
            case Unfit(message=message, hint=hint, exit_status=status):
                error = RunStopped(message, hint)
                error.exit_status = status
                self.stop(error)

    def note(self, kind: str, message: str) -> None:
        """Write down that something happened; from any thread."""
        self._loop.call_soon_threadsafe(self.hear, Noted(kind=kind, message=message))

    def drain(self) -> None:
        """The first signal: start nothing more, and interrupt what still runs after the grace period."""
        self._error = self._error or interruption()
        self._reason = "interrupted by a signal"
        grace = f"{self.running} running attempts get {self._config.grace:g} s"
        self._say(f"draining: {grace}, a second signal leaves at once\n")
        self._loop.call_later(self._config.grace, self.abort)
        self._take(Drain())
        for attempt in self._admission.waiting:
            self._admission.let_go(attempt, self._reason)
        self._admission.expect_nothing()

    def abort(self) -> None:
        """Interrupt what runs, and end when it has settled, or a little later."""
        self._space.hurry()
        self._admission.expect_nothing()
        if not self._finished.is_set():
            self._loop.call_later(ABORT_SECONDS, self._finished.set)
            self._take(Abort())

    def stop(self, error: HoldwaterError) -> None:
        """Something that will hit every instance: end early, and say why."""
        self._error = self._error or error
        self._reason = f"the run was stopped: {error.message}"
        self.abort()

    def leave(self) -> None:
        """The second signal: end now. What runs is found unsettled by the next conductor."""
        self._space.hurry()
        self._finished.set()

    # Carrying out commands.

    def _take(self, event: AnyEvent) -> None:
        for command in self._plan.handle(event, self._loop.time()):
            self._do(command)

    def _do(self, command: AnyCommand) -> None:
        match command:
            case Pull(count=count):
                self._begin(self._pull(count))
            case Start(attempt=attempt):
                self._attempts[attempt.id] = attempt
                self._unstarted.add(attempt.id)
                self._admission.coming(attempt)
                self._begin(self._start(attempt))
            case Refuse(attempt=attempt, failure=failure):
                self._attempts[attempt.id] = attempt
                self._spawn(self._write_off(attempt, failure))
            case End(attempt=attempt_id, failure=failure):
                self._end(attempt_id, failure)
            case Rally(group=group, together=together):
                self._rally(group, together)
            case Replace(group=group, instance=instance) if self._customers is not None:
                self._customers.lack(group)
                self._spawn(self._customers.replace(group, instance))
            case Disband(group=group):
                self._admission.disbanded(group)
            case Interrupt(attempt=attempt_id):
                self._end(attempt_id, interrupted(self._reason))
            case Close(outcome=outcome):
                self._spawn(self._close(outcome))
            case Wake(at=at):
                self._loop.call_at(at, self._take, Woke())
            case Finish():
                self._finished.set()

    async def _pull(self, count: int) -> None:
        async with self._pulling:
            while count > 0 and (opened := await self._feed.take(count)):
                count -= len(opened)
                await self._expect([event for event in opened if event.last is None])
                for event in opened:
                    self._take(event)
        if count > 0:
            self._error = self._error or self._feed.error
            self._take(Exhausted())

    async def _start(self, attempt: Attempt) -> None:
        """Its time begins when a worker has it."""
        made = await self._dispatch.made(attempt)
        self._unstarted.discard(attempt.id)
        ended = self._ended.pop(attempt.id, None)
        if isinstance(made, Failure) and made.where is Where.INTERRUPTED:
            self._forget(attempt.id, made)
        elif isinstance(made, Failure):
            self._refuse(attempt, made)
        elif ended is not None:
            self._refuse(attempt, ended)
        elif attempt.id in self._attempts:
            await self._fleet.start(made.job)
            self._deadlines.begin(attempt, made.asks)
            if self._customers is not None:
                self._customers.started(attempt)

    async def _expect(self, opened: Sequence[Opened]) -> None:
        """Samples that were opened ahead: their images can come while others run."""
        if self._admission.supplied:
            for event in opened:
                self._admission.expect(await self._ledger.payload(event.instance))

    def _refuse(self, attempt: Attempt, failure: Failure) -> None:
        """An attempt that cannot be started has its verdict all the same."""
        self._unstarted.discard(attempt.id)
        self.hear(Done(verdict=Verdict(attempt=attempt.id, token=self._ledger.token, failure=failure)))

    async def _write_off(self, attempt: Attempt, failure: Failure) -> None:
        """What is not wanted before it began has its verdict all the same."""
        await self._ledger.begin(attempt)
        self._refuse(attempt, failure)

    def _end(self, attempt: int, failure: Failure) -> None:
        """End an attempt, however far it has come."""
        if self._admission.let_go(attempt, failure.message):
            return
        if attempt in self._unstarted:  # it is being written, and settles when that is done
            self._ended.setdefault(attempt, failure)
        else:
            self._fleet.interrupt(attempt, failure)

    def _rally(self, group: int, together: bool) -> None:
        if self._customers is not None:
            self._customers.rally(group, together)
        for attempt in self._attempts.values():
            if attempt.group == group:
                self._deadlines.score(attempt.id)

    async def _close(self, outcome: Outcome) -> None:
        """Written, then told. What is ordered is kept until it has been delivered."""
        keep = self._config.keep if self._customers is None else Keep.ALL
        await self._ledger.close_sample(outcome, keep)
        if self._customers is not None:
            self._customers.closed(outcome)

    def _forget(self, attempt: int, failure: Failure) -> None:
        """An attempt that waited for its memory or its images and is let go: nothing is written of it."""
        self._unstarted.discard(attempt)
        self._attempts.pop(attempt, None)
        self._admission.settled(Verdict(attempt=attempt, token=self._ledger.token, failure=failure))
        self._take(Settled(result=Result(attempt=attempt, where=Where.INTERRUPTED)))

    async def _settle(self, verdict: Verdict) -> None:
        """Commit, then tell the planner and the observers, in that order."""
        self._deadlines.end(verdict.attempt)  # it ended, however long a full disk puts off the commit
        if self._customers is not None:
            verdict = own_fault(verdict)
            self._customers.settled(verdict)
        committed = await self._ledger.settle(verdict)
        self._space.settled(verdict)
        self._admission.settled(verdict)
        self._attempts.pop(verdict.attempt, None)
        if not committed:
            return
        self._observers.tell(verdict)
        if verdict.failure is not None and verdict.failure.where is Where.RUN:
            self.stop(RunStopped(verdict.failure.message, verdict.failure.hint))
        self._take(Settled(result=Result.of(verdict)))

    # Watching.

    async def _watch(self) -> None:
        """An attempt that overran all its limits is named, ended and handed back; the run goes on."""
        for attempt_id in self._deadlines.overdue():
            where = self._fleet.give_up(attempt_id)
            self.note("attempt.hung", f"attempt {attempt_id} hangs {where}")
            failure = worker_lost(self._attempts[attempt_id], f"it hung {where}", own=True)
            self.hear(Done(verdict=Verdict(attempt=attempt_id, token=self._ledger.token, failure=failure)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Something that is done before the run ends; an end by an error leaves it to the journals."""
        try:
            return self._group.create_task(work)
        except RuntimeError:  # the group is on its way out
            work.close()
            return None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that the end of the run cuts short."""
        task = self._spawn(work)
        if task is not None:
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)


def interruption() -> Interrupted:
    return Interrupted("interrupted", "`holdwater resume` continues the run")
