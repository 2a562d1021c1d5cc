"""The planner: events in, commands out. It decides which attempt starts next and when a sample is closed.

Pure and O(open samples): it never waits, reads no clock and holds no finished instance. The same events give
the same commands. `policy.py` decides what follows from a verdict;
`run/conductor/scheduler.py` executes the commands.
"""

from __future__ import annotations

from .events import (
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
    PreemptRequested,
    PullSamples,
    RefuseAttempt,
    ReplaceMember,
    SampleOpened,
    SampleRetried,
    SampleWithdrawn,
    ScoreGroup,
    SetTimer,
    StartAttempt,
    SuiteExhausted,
    TimerFired,
    VerdictCommitted,
)
from .failures import CRASHED, DISK, MOST_OUTAGES, POISON, make_outage_failure
from .groups import ARRIVED_STATES, Group, MemberState, make_cut_failure, make_straggler_failure
from .planner_state import (
    STRAGGLER_CUT,
    WHOLE_GROUP,
    PlannerState,
    QueueKey,
    Sample,
    SampleQueues,
    make_outcome,
)
from .policy import NextTry, PlannerPolicy, TryCounts, VerdictSummary, decide
from .records import AttemptFailure, FailureOrigin, Outcome

# Seconds by which a timer may fire early; a timer that fires earlier belongs to another `SetTimer`.
TIMER_TOLERANCE = 0.05


class RunPlanner:
    """The planner of one run."""

    def __init__(self, policy: PlannerPolicy, next_attempt: int = 1) -> None:
        self._state = PlannerState(policy=policy, next_attempt=next_attempt)
        self._queues = SampleQueues(self._state)

    def handle(self, event: AnyEvent, at: float) -> list[AnyCommand]:
        """Process one event; return the resulting commands in order."""
        commands = self._react(event, at)
        self._advance(at, commands)
        return commands

    @property
    def running(self) -> int:
        return len(self._state.running)

    @property
    def waiting(self) -> dict[str, int]:
        """Count the samples that are not running, by the reason for their wait."""
        return self._queues.count_waiting()

    @property
    def open(self) -> int:
        return len(self._state.open)

    def limit_outages(self, attempt: int, failure: AttemptFailure) -> AttemptFailure:
        """Return the failure of an attempt that lost its sandbox: with one loss too many it counts."""
        key = self._state.running.get(attempt)
        if key is None:
            return failure
        count = self._state.open[key].outages + 1
        return failure if count < MOST_OUTAGES else make_outage_failure(failure, count)

    @property
    def draining(self) -> bool:
        return self._state.draining

    def find_sample(self, instance: int, sample: int) -> Sample | None:
        """Return an open sample."""
        return self._state.open.get((instance, sample))

    @property
    def finished(self) -> bool:
        """Whether the run ends now: no further sample is tried."""
        return self._state.finished

    @property
    def complete(self) -> bool:
        """Whether every sample of the run has been closed."""
        return self._state.exhausted and not self._state.open

    # The effect of each event on its sample.

    def _react(self, event: AnyEvent, at: float) -> list[AnyCommand]:
        state = self._state
        match event:
            case SampleOpened():
                return self._open_sample(event, at)
            case SuiteExhausted():
                state.exhausted, state.pulling = True, 0
            case VerdictCommitted(result=result):
                return self._settle_attempt(result, at)
            case SampleWithdrawn():
                return self._withdraw((event.instance, event.sample), event.failure)
            case SampleRetried():
                return self._retry((event.instance, event.sample), event.failure)
            case MemberArrived(attempt=attempt):
                return self._record_arrival(attempt, at)
            case PreemptRequested(attempt=attempt):
                return self._preempt(attempt)
            case TimerFired():
                if state.wake_at is not None and at >= state.wake_at - TIMER_TOLERANCE:
                    state.wake_at = None
            case DrainRequested():
                state.draining = True
            case AbortRequested():
                state.draining = state.aborted = True
                return [InterruptAttempt(attempt=attempt) for attempt in state.running]
            case _:
                state.change(event)
        return []

    def _open_sample(self, event: SampleOpened, at: float) -> list[AnyCommand]:
        state = self._state
        state.pulling = max(0, state.pulling - 1)
        key = (event.instance, event.sample)
        if key in state.open:
            return []
        sample = state.open[key] = Sample(
            instance=event.instance,
            sample=event.sample,
            number=event.number,
            spent=TryCounts(event.round, event.retries, event.scale, event.first),
            losses=event.losses,
            crashes=event.crashes,
            outages=event.outages,
            best=event.best,
            regrades=event.regrades,
        )
        if event.group is not None:
            sample.group = event.group.group
            group = state.groups.get(sample.group) or event.group.open_group(event.instance)
            state.groups[group.id] = group
            group.add_member(event.sample)
        if event.last is not None:
            return self._judge_verdict(key, sample, event.last, at)
        self._queues.add(key)
        return []

    def _settle_attempt(self, result: VerdictSummary, at: float) -> list[AnyCommand]:
        key = self._state.running.pop(result.attempt, None)
        if key is None:
            return []
        sample = self._state.open[key]
        sample.running = None
        if result.where is FailureOrigin.RUN:
            return self._react(AbortRequested(), at)
        if sample.anew and sample.withdrawn is None:
            return self._begin_round(key, sample, result)
        lost = result.where is FailureOrigin.WORKER and result.kind != POISON
        sample.losses += lost
        sample.crashes += lost and result.kind == CRASHED
        sample.outages += result.is_outage
        spared = (
            sample.losses < self._state.policy.most_losses
            if lost
            else result.where is FailureOrigin.INTERRUPTED
        )
        if not spared:
            return self._judge_verdict(key, sample, result, at)
        if (unwanted := self._state.find_withdrawal(sample)) is not None:
            return self._refuse(key, unwanted)
        # Neither of these is a preemption.
        sample.preemptions += not lost and not result.is_outage and result.kind != DISK
        sample.regrades = result.work or sample.regrades
        self._queues.add(key, first=True)
        return []

    def _judge_verdict(
        self, key: QueueKey, sample: Sample, result: VerdictSummary, at: float
    ) -> list[AnyCommand]:
        """Handle a verdict that counts: schedule another try, or close the sample."""
        last = self._state.find_withdrawal(sample) is not None
        following = None if last else decide(result, sample.spent, self._state.policy_for(sample))
        best = sample.compare_best(result)
        if following is not None:
            if not self._state.policy.regrading:
                sample.regrades = result.work if following.round == sample.spent.round else None
            self._schedule_retry(key, sample, following, at)
            return []
        del self._state.open[key]
        spent = sample.spent.retries >= self._state.policy.retries or self._state.policy.regrading
        outcome = make_outcome(sample, best, spent=spent)
        return [CloseSample(outcome=outcome), *self._leave_group(sample, outcome)]

    def _begin_round(self, key: QueueKey, sample: Sample, result: VerdictSummary) -> list[AnyCommand]:
        """Queue a sample for the round that was requested while its attempt ran."""
        if result.where is not FailureOrigin.INTERRUPTED:
            sample.compare_best(result)
        sample.begin_round()
        self._queues.add(key, first=True)
        return []

    def _retry(self, key: QueueKey, failure: AttemptFailure) -> list[AnyCommand]:
        sample = self._state.open.get(key)
        if sample is None or sample.withdrawn is not None or sample.anew:
            return []
        if sample.running is None:
            self._queues.hurry(key)
            return []
        sample.anew = True
        return [EndAttempt(attempt=sample.running.id, failure=failure)]

    def _schedule_retry(self, key: QueueKey, sample: Sample, following: NextTry, at: float) -> None:
        sample.spent = TryCounts(following.round, following.retries, following.scale, sample.spent.first)
        if sample.group is not None:
            self._state.groups[sample.group].mark_waiting(sample.sample)
        if following.delay:
            self._queues.delay(key, at + following.delay)
        else:
            self._queues.add(key)

    def _preempt(self, attempt: int) -> list[AnyCommand]:
        key = self._state.running.get(attempt)
        if key is None or self._state.open[key].preemptions >= self._state.policy.preemptions:
            return []
        group = self._state.group_of(key)
        if group is not None and group.members[key[1]] in ARRIVED_STATES:
            return []  # it is nearly done, and other members wait for it
        return [InterruptAttempt(attempt=attempt)]

    # Groups and withdrawn samples.

    def _withdraw(self, key: QueueKey, failure: AttemptFailure) -> list[AnyCommand]:
        sample = self._state.open.get(key)
        if sample is None or sample.withdrawn is not None:
            return []
        sample.withdrawn = failure
        if sample.running is not None:
            return [EndAttempt(attempt=sample.running.id, failure=failure)]
        self._queues.remove(key)
        group = self._state.group_of(key)
        if group is not None and not group.started:
            sample.group = None
            if not group.remove_member(key[1]):
                self._queues.remove((group.id, WHOLE_GROUP))
                del self._state.groups[group.id]
        return self._refuse(key, failure)

    def _refuse(self, key: QueueKey, failure: AttemptFailure) -> list[AnyCommand]:
        return [RefuseAttempt(attempt=self._state.make_attempt(key, alone=False), failure=failure)]

    def _record_arrival(self, attempt: int, at: float) -> list[AnyCommand]:
        key = self._state.running.get(attempt)
        group = self._state.group_of(key) if key is not None else None
        if key is None or group is None:
            return []
        group.members[key[1]] = MemberState.ARRIVED
        if group.reaches_quorum:
            group.cut_at = at + group.terms.patience
            self._queues.delay((group.id, STRAGGLER_CUT), group.cut_at)
        return self._score_if_due(group)

    def _leave_group(self, sample: Sample, outcome: Outcome) -> list[AnyCommand]:
        """Remove a closed member from its group: replace it, or continue without it."""
        group = self._state.groups.get(sample.group) if sample.group is not None else None
        if group is None:
            return []
        failed = outcome.kind not in ("passed", "failed") and sample.withdrawn is None
        replaced = failed and group.take_replacement()
        group.close(sample.sample, together=sample.best is not None and sample.best.group_scored)
        if replaced:
            return [ReplaceMember(group=group.id, instance=group.instance)]
        if group.over:
            del self._state.groups[group.id]
            return [GroupClosed(group=group.id)]
        self._queues.add_group(group)
        return self._score_if_due(group)

    def _score_if_due(self, group: Group) -> list[AnyCommand]:
        return [ScoreGroup(group=group.id, together=group.start_scoring())] if group.due else []

    def _cut_stragglers(self, group: Group) -> list[AnyCommand]:
        """Cut the remaining members.

        A running member is graded on its work so far; a waiting member is not tried again.
        """
        group.was_cut = True
        commands: list[AnyCommand] = []
        for sample, standing in list(group.members.items()):
            member = self._state.open.get((group.instance, sample))
            if standing is MemberState.RUNNING and member is not None and member.running is not None:
                commands.append(
                    EndAttempt(attempt=member.running.id, failure=make_straggler_failure(group.terms))
                )
            elif standing is MemberState.WAITING:
                commands += self._withdraw((group.instance, sample), make_cut_failure(group.terms))
        return commands

    # Starting, pulling and finishing.

    def _advance(self, at: float, commands: list[AnyCommand]) -> None:
        state = self._state
        while (due := self._queues.pop_due(at)) is not None:
            when, key = due
            if key[1] != STRAGGLER_CUT:
                self._queues.add(key)
            elif key[0] in state.groups and state.groups[key[0]].cut_at == when:
                commands += self._cut_stragglers(state.groups[key[0]])
        if not (state.aborted or state.paused):
            self._start_members(commands)
        if not (state.draining or state.paused):
            self._start_ready(commands)
            self._pull(commands)
        if not state.draining or self._state.unfinished_groups:
            self._set_timer(commands)
        if state.over and not state.running and not state.finished:
            state.finished = True
            commands.append(FinishRun())

    def _start_members(self, commands: list[AnyCommand]) -> None:
        """Start waiting members of started groups, which have slots already."""
        while self._queues.members:
            key = self._queues.members.popleft()
            group = self._state.group_of(key)
            alone = group is not None and self._state.is_suspect(group)
            commands.append(StartAttempt(attempt=self._state.make_attempt(key, alone)))

    def _start_ready(self, commands: list[AnyCommand]) -> None:
        while (entry := self._queues.pop_ready()) is not None:
            key, alone = entry
            if key[1] != WHOLE_GROUP:
                commands.append(StartAttempt(attempt=self._state.make_attempt(key, alone)))
                continue
            group = self._state.groups[key[0]]
            group.started = True
            for sample in [s for s, standing in group.members.items() if standing is MemberState.WAITING]:
                attempt = self._state.make_attempt((group.instance, sample), alone)
                commands.append(StartAttempt(attempt=attempt))

    def _pull(self, commands: list[AnyCommand]) -> None:
        state = self._state
        if state.exhausted or state.policy.ordered:
            return
        missing = self._state.window - len(state.open) - state.pulling
        starved = not self._queues.ready and not state.pulling
        if missing >= max(1, self._state.window // 8) or (missing > 0 and starved):
            state.pulling += missing
            commands.append(PullSamples(count=missing))

    def _set_timer(self, commands: list[AnyCommand]) -> None:
        state = self._state
        if state.delayed and (state.wake_at is None or state.delayed[0][0] < state.wake_at):
            state.wake_at = state.delayed[0][0]
            commands.append(SetTimer(at=state.wake_at))
