"""Carries out the planner's decisions: pull, begin, start, settle and close, in that order on disk.

It holds O(open samples) in memory. `core/plan.py` decides what to do next; a `Fleet` hosts the attempts and
reports to the inbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from ...core.config import KeepRule, RunConfig
from ...core.errors import HoldwaterError, RunInterrupted, RunStopped, find_first_error
from ...core.events import (
    AbortRequested,
    AnyCommand,
    AnyEvent,
    CloseSample,
    DrainRequested,
    EndAttempt,
    FinishRun,
    GroupClosed,
    InterruptAttempt,
    MemberArrived,
    PolicyChanged,
    PreemptRequested,
    PullSamples,
    RefuseAttempt,
    ReplaceMember,
    SampleOpened,
    ScoreGroup,
    SetTimer,
    StartAttempt,
    SuiteExhausted,
    TimerFired,
    VerdictCommitted,
)
from ...core.failures import is_outage, make_interrupt_failure, make_loss_failure
from ...core.plan import RunPlanner
from ...core.policy import PlannerPolicy, VerdictSummary
from ...core.records import Attempt, AttemptFailure, FailureOrigin, Outcome, Verdict
from ...ledger.ledger import Ledger
from ...rollout.periodic_task import PeriodicTask
from ...rollout.process_health import PausableClock
from ...rollout.worker_protocol import (
    AttemptDone,
    AttemptProgress,
    CallHeld,
    CallReleased,
    EventNoted,
    HeldCallContent,
    MemberWaiting,
    WorkerBroken,
    WorkerUnfit,
)
from ..fleet.interface import Fleet, FleetUpdate, WorkerGone
from ..orders.order_book import OrderBook, confine_failure
from ..resources.budget import AttemptDeadlines
from ..resources.disk_space import DiskSpace
from .admission import AttemptAdmission
from .feed import SampleFeed
from .observers import VerdictObservers
from .run_tasks import RunInbox, RunTasks, make_interruption

WATCH_SECONDS = 1.0
APART = "group.apart"  # an event: a member of a group is not scored with the others
SANDBOX_LOST = "sandbox.lost"  # an event: the machine of the sandbox was lost, or took it back
ABORT_SECONDS = 20.0  # for interrupted attempts to settle, before the run ends without them


class RunParts(NamedTuple):
    """The parts of a run that its scheduler directs."""

    feed: SampleFeed
    admission: AttemptAdmission
    fleet: Fleet
    inbox: RunInbox  # where the fleet and the others report
    space: DiskSpace
    observers: VerdictObservers
    orders: OrderBook | None = None  # of a server
    clock: PausableClock | None = None  # None: the run is never paused


class AttemptScheduler:
    """One conductor's pass over a run."""

    def __init__(self, config: RunConfig, ledger: Ledger, next_attempt: int, parts: RunParts) -> None:
        self._config = config
        self._ledger = ledger
        self._feed = parts.feed
        self._admission = parts.admission
        self._fleet = parts.fleet
        self._inbox = parts.inbox
        self._space = parts.space
        self._observers = parts.observers
        self._orders = parts.orders
        self.clock = parts.clock or PausableClock()
        self._plan = RunPlanner(PlannerPolicy.of(config, regrading=ledger.regrade is not None), next_attempt)
        self._loop = asyncio.get_running_loop()
        self._tasks = RunTasks()
        self.started = asyncio.Event()  # samples can be opened
        self._finished = asyncio.Event()
        self._pulling = asyncio.Lock()  # one pull at a time: a suite yields in one order
        self._attempts: dict[int, Attempt] = {}  # bound: the run's concurrency
        self._unstarted: set[int] = set()  # bound: the run's concurrency
        self._deadlines = AttemptDeadlines(config, self.clock)
        self._early: set[tuple[int, int]] = set()  # samples opened before the feed; bound: requests of users
        # Ended before they were started; bound: the run's concurrency.
        self._ended_early: dict[int, AttemptFailure] = {}
        self._error: HoldwaterError | None = None
        self._reason = "the run is being stopped"

    @property
    def plan(self) -> RunPlanner:
        return self._plan

    def list_unsettled(self) -> Collection[int]:
        """Return the attempts that are not settled."""
        return self._attempts.keys()

    @property
    def running(self) -> int:
        """The number of attempts that have their lease and images."""
        return self._plan.running - sum(self._admission.waiting.values())

    @property
    def waiting(self) -> dict[str, int]:
        """The number of waiting attempts, by reason."""
        waiting = {**self._plan.waiting, **self._admission.waiting}
        return {why: count for why, count in waiting.items() if count}

    def preempt(self, attempt: int) -> bool:
        """Preempt an attempt for its memory; return whether it was, to be retried later without blame."""
        commands = self._plan.handle(PreemptRequested(attempt=attempt), self.clock.time())
        reason, self._reason = self._reason, "memory was short"
        for command in commands:
            self._carry_out(command)
        self._reason = reason
        return InterruptAttempt(attempt=attempt) in commands

    def open_samples(self, opened: Sequence[SampleOpened], *, early: bool = False) -> None:
        """Open samples that are in the ledger, once `started`; `early`: the feed may yield them later."""
        self._early.update((event.instance, event.sample) for event in opened if early)
        new = [event.instance for event in opened if event.last is None]
        self._tasks.spawn_cancellable(self._admission.expect(new))
        for event in opened:
            self.handle(event)

    def change(self, config: RunConfig) -> None:
        """Schedule by this configuration from now on."""
        self._deadlines.change(config)
        policy = PlannerPolicy.of(config, regrading=self._ledger.regrade is not None)
        self.handle(PolicyChanged(policy=policy))

    @property
    def draining(self) -> bool:
        return self._plan.draining

    def finish(self) -> None:
        """Start nothing more; the run ends well when the running attempts are over."""
        self.handle(DrainRequested())

    async def run(self, duties: Sequence[PeriodicTask] = ()) -> None:
        """Run until everything is settled, or raise the error that stopped the run."""
        try:
            async with self._tasks:
                watch = PeriodicTask("watch", WATCH_SECONDS, self._watch)
                for duty in (watch, *duties):
                    self._tasks.spawn_cancellable(duty.perform(self._inbox.note))
                self._tasks.spawn_cancellable(self._read_inbox())
                self.handle(TimerFired())
                self.started.set()
                await self._finished.wait()
                self._tasks.cancel()
                self._handle_updates()
        except* HoldwaterError as group:
            raise find_first_error(group) from None
        finally:
            self._inbox.close()
            self._feed.close()
        done_anyway = isinstance(self._error, RunInterrupted) and self._plan.complete
        if self._error is not None and not done_anyway:
            raise self._error

    def drain(self) -> None:
        """Handle the first signal: start nothing more; interrupt running attempts after the grace period."""
        self._error = self._error or make_interruption()
        self._reason = "interrupted by a signal"
        grace = f"{self.running} running attempts get {self._config.grace:g} s"
        self._inbox.say(f"draining: {grace}, a second signal exits at once\n")
        self._loop.call_later(self._config.grace, self.abort)
        self.handle(DrainRequested())
        self._admission.cancel_all(self._reason)

    def abort(self) -> None:
        """Interrupt running attempts; end the run when they have settled, or after `ABORT_SECONDS`."""
        self._space.stop_waiting()
        self._admission.expect_nothing()
        if not self._finished.is_set():
            self._loop.call_later(ABORT_SECONDS, self._finished.set)
            self.handle(AbortRequested())

    def stop(self, error: HoldwaterError) -> None:
        """End the run early with an error that would hit every instance."""
        self._error = self._error or error
        self._reason = f"the run was stopped: {error.message}"
        self.abort()

    def leave(self) -> None:
        """Handle the second signal: end now. The next conductor finds the running attempts unsettled."""
        self._space.stop_waiting()
        self._finished.set()

    # Reports.

    async def _read_inbox(self) -> None:
        while True:
            await self._inbox.wait()
            self._handle_updates()

    def _handle_updates(self) -> None:
        for update in self._inbox.take():
            self._handle_update(update)

    def _handle_update(self, update: FleetUpdate) -> None:
        match update:
            case AttemptDone(verdict=verdict):
                self._tasks.spawn(self._settle(verdict))
            case EventNoted(kind=kind, message=message, attempt=attempt):
                self._tasks.spawn(self._ledger.note(kind, message, attempt))
            case WorkerGone(worker=worker):
                self._tasks.spawn(self._ledger.forget_journal(worker))
            case MemberWaiting(attempt=attempt):
                self._deadlines.pause(attempt)
                self.handle(MemberArrived(attempt=attempt))
            case AttemptProgress() | CallHeld() | CallReleased() | HeldCallContent():
                if self._orders is not None:
                    self._orders.on_update(update)
            case WorkerBroken(message=message):
                self.stop(RunStopped(message, "make space, then `holdwater resume`"))
            case WorkerUnfit(message=message, hint=hint, exit_status=status):
                error = RunStopped(message, hint)
                error.exit_status = status
                self.stop(error)

    # Carrying out commands.

    def handle(self, event: AnyEvent) -> None:
        """Let the planner decide on an event, and carry out its commands; once the scheduler `started`."""
        for command in self._plan.handle(event, self.clock.time()):
            self._carry_out(command)

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case PullSamples(count=count):
                self._tasks.spawn_cancellable(self._pull(count))
            case StartAttempt(attempt=attempt):
                self._attempts[attempt.id] = attempt
                self._unstarted.add(attempt.id)
                self._admission.announce(attempt)
                self._tasks.spawn_cancellable(self._start(attempt))
            case RefuseAttempt(attempt=attempt, failure=failure):
                self._attempts[attempt.id] = attempt
                self._tasks.spawn(self._write_off(attempt, failure))
            case EndAttempt(attempt=attempt_id, failure=failure):
                self._end(attempt_id, failure)
            case ScoreGroup(group=group, together=together):
                self._score_group(group, together)
            case ReplaceMember(group=group, instance=instance) if self._orders is not None:
                self._orders.expect_replacement(group)
                self._tasks.spawn(self._replace_member(self._orders, group, instance))
            case GroupClosed(group=group):
                self._admission.on_group_closed(group)
            case InterruptAttempt(attempt=attempt_id):
                self._end(attempt_id, make_interrupt_failure(self._reason))
            case CloseSample(outcome=outcome):
                self._tasks.spawn(self._close(outcome))
            case SetTimer(at=at):
                self._loop.call_later(at - self.clock.time(), self.handle, TimerFired())
            case FinishRun():
                self._finished.set()

    async def _pull(self, count: int) -> None:
        async with self._pulling:
            while count > 0 and (opened := await self._feed.take(count)):
                count -= len(opened)
                await self._admission.expect([event.instance for event in opened if event.last is None])
                for event in opened:
                    if (event.instance, event.sample) not in self._early:
                        self.handle(event)
        if count > 0:
            self._error = self._error or self._feed.error
            self.handle(SuiteExhausted())

    async def _start(self, attempt: Attempt) -> None:
        """Start an attempt; its time begins when a worker has it."""
        ready = await self._admission.admit(attempt)
        self._unstarted.discard(attempt.id)
        ended = self._ended_early.pop(attempt.id, None)
        if isinstance(ready, AttemptFailure) and ready.where is FailureOrigin.INTERRUPTED:
            self._forget(attempt.id, ready)
        elif isinstance(ready, AttemptFailure):
            self._settle_as(attempt, ready)
        elif ended is not None:
            self._settle_as(attempt, ended)
        elif attempt.id in self._attempts:
            await self._fleet.start(ready.job)
            self._deadlines.begin(attempt, ready.asks)
            if self._orders is not None:
                self._orders.on_started(attempt)

    def _settle_as(self, attempt: Attempt, failure: AttemptFailure) -> None:
        """Settle an attempt that no worker settles, so that it has a verdict."""
        self._unstarted.discard(attempt.id)
        verdict = Verdict(attempt=attempt.id, token=self._ledger.token, failure=failure)
        self._tasks.spawn(self._settle(verdict))

    async def _write_off(self, attempt: Attempt, failure: AttemptFailure) -> None:
        """Record and settle an attempt that was cancelled before it began, so that it has a verdict."""
        await self._ledger.begin_attempt(attempt)
        self._settle_as(attempt, failure)

    def _end(self, attempt: int, failure: AttemptFailure) -> None:
        """End an attempt in any phase."""
        if self._admission.cancel_wait(attempt, failure.message):
            return
        if attempt in self._unstarted:  # it is being written, and settles when that is done
            self._ended_early.setdefault(attempt, failure)
        else:
            self._fleet.interrupt(attempt, failure)

    def _score_group(self, group: int, together: bool) -> None:
        self._fleet.score_group(group, together)
        for attempt in self._attempts.values():
            if attempt.group == group:
                self._deadlines.begin_scoring(attempt.id)
                if not together:
                    message = "the attempt keeps its own grade: it is not scored with its group"
                    self._tasks.spawn(self._ledger.note(APART, message, attempt.id))

    async def _replace_member(self, orders: OrderBook, group: int, instance: int) -> None:
        """Open another sample in place of a member that failed for good."""
        self.open_samples([await orders.replace_member(group, instance)])

    async def _close(self, outcome: Outcome) -> None:
        """Commit the outcome, then tell its order. An ordered sample's files are kept until delivery."""
        keep = self._config.keep if self._orders is None else KeepRule.ALL
        await self._ledger.close_sample(outcome, keep)
        if self._orders is not None:
            self._orders.on_closed(outcome)
            if self._orders.over:
                self.finish()

    def _forget(self, attempt: int, failure: AttemptFailure) -> None:
        """Drop an attempt that was cancelled while it waited for memory or images, without a record."""
        self._unstarted.discard(attempt)
        self._attempts.pop(attempt, None)
        self._admission.on_settled(Verdict(attempt=attempt, token=self._ledger.token, failure=failure))
        self.handle(VerdictCommitted(result=VerdictSummary(attempt=attempt, where=FailureOrigin.INTERRUPTED)))

    async def _settle(self, verdict: Verdict) -> None:
        """Commit the verdict, then notify the observers and the planner, in that order."""
        self._deadlines.end(verdict.attempt)  # it has ended, however long a full disk delays the commit
        verdict = self._count_outage(verdict)
        if self._orders is not None:
            verdict = confine_failure(verdict)
            self._orders.on_settled(verdict)
        committed = await self._ledger.settle(verdict)
        self._space.on_settled(verdict)
        self._admission.on_settled(verdict)
        self._attempts.pop(verdict.attempt, None)
        if not committed:
            return
        self._observers.tell(verdict)
        if verdict.failure is not None and verdict.failure.where is FailureOrigin.RUN:
            self.stop(RunStopped(verdict.failure.message, verdict.failure.hint))
        self.handle(VerdictCommitted(result=VerdictSummary.of(verdict)))

    def _count_outage(self, verdict: Verdict) -> Verdict:
        """Note the loss of a sandbox; return the verdict with the failure that it is after so many losses."""
        failure = verdict.failure
        if failure is None or not is_outage(failure.where, failure.kind):
            return verdict
        self._tasks.spawn(self._ledger.note(SANDBOX_LOST, failure.message, verdict.attempt))
        limited = self._plan.limit_outages(verdict.attempt, failure)
        return msgspec.structs.replace(verdict, failure=limited)

    # Watching.

    async def _watch(self) -> None:
        """End each attempt that overran all its limits and settle it as lost; the run goes on."""
        for attempt_id in self._deadlines.take_overdue():
            where = self._fleet.give_up(attempt_id)
            self._inbox.note("attempt.hung", f"attempt {attempt_id} hangs {where}")
            attempt = self._attempts[attempt_id]
            self._settle_as(attempt, make_loss_failure(attempt, f"it hung {where}", own=True))
