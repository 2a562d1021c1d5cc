"""The planner, played against a suite, a fleet, a clock, a governor and a ledger that are all models.

`RunSetup` is the machine; the scenes below it are the stories that a machine tells too seldom.
"""

from __future__ import annotations

import gc
from collections import Counter, deque

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.replayed_planner import ReplayedPlanner

from holdwater.core.config import CriticKind
from holdwater.core.events import (
    AbortRequested,
    AnyCommand,
    AnyEvent,
    CloseSample,
    DrainRequested,
    EndAttempt,
    FinishRun,
    InterruptAttempt,
    PauseEnded,
    PauseRequested,
    PolicyChanged,
    PreemptRequested,
    PullSamples,
    SampleOpened,
    SampleRetried,
    SamplesExpected,
    SampleWithdrawn,
    SetTimer,
    StartAttempt,
    SuiteExhausted,
    TimerFired,
    VerdictCommitted,
)
from holdwater.core.failures import (
    CRASHED,
    POISON,
    RULES,
    UNRESTORED,
    RetryRule,
    ScoreRule,
    make_disk_failure,
    make_interrupt_failure,
    make_loss_failure,
)
from holdwater.core.plan import RunPlanner
from holdwater.core.policy import LARGEST_SCALE, PlannerPolicy, VerdictSummary
from holdwater.core.records import Attempt, AttemptFailure, FailureOrigin, Outcome, Verdict

Key = tuple[int, int]
SHARED = 2  # workers that host many attempts
RETRIED = {where for where, rule_ in RULES.items() if rule_.again is RetryRule.RETRIES}
BLAMED = [
    where
    for where in FailureOrigin
    if where not in (FailureOrigin.WORKER, FailureOrigin.INTERRUPTED, FailureOrigin.RUN)
]
COSTLY = frozenset((FailureOrigin.RESOURCE, FailureOrigin.MODEL))


class Row(msgspec.Struct):
    """An attempt as the ledger has it."""

    attempt: Attempt
    result: VerdictSummary | None = None


def lost(attempt: Attempt) -> VerdictSummary:
    return VerdictSummary.of(
        Verdict(attempt=attempt.id, token=1, failure=make_loss_failure(attempt, "killed", own=True))
    )


def passed(attempt: Attempt) -> VerdictSummary:
    return VerdictSummary(attempt=attempt.id, passed=True, score=1.0)


def blameless(result: VerdictSummary) -> bool:
    free = result.where in (FailureOrigin.INTERRUPTED, FailureOrigin.RUN)
    return free or (result.where is FailureOrigin.WORKER and result.kind != POISON)


@st.composite
def policies(draw: st.DrawFn) -> PlannerPolicy:
    return PlannerPolicy(
        concurrency=draw(st.integers(1, 5)),
        attempts=draw(st.integers(1, 3)),
        retries=draw(st.integers(0, 3)),
        critic=draw(st.sampled_from([*CriticKind, "command:true"])),
        backoff=draw(st.sampled_from([0.0, 1.0, 7.0])),
        losses_before_alone=draw(st.integers(1, 2)),
        alone_at_once=draw(st.integers(1, 2)),
        preemptions=draw(st.integers(0, 2)),
    )


verdicts = st.builds(
    VerdictSummary,
    attempt=st.just(0),
    where=st.sampled_from([None, None, *BLAMED]),
    again=st.sampled_from([True, True, False]),
    after=st.sampled_from([0.0, 0.0, 100.0]),
    passed=st.sampled_from([True, False, None]),
    score=st.sampled_from([None, 0.25, 0.5]),
    patched=st.booleans(),
    critic_satisfied=st.sampled_from([None, True, False]),
    work=st.sampled_from([None, 1]),  # or an attempt: see `of`
)


def of(attempt: Attempt, result: VerdictSummary) -> VerdictSummary:
    """The result as the attempt's own: the work that it grades, or that it did."""
    work = (attempt.regrades or attempt.id) if result.work and result.passed is None else None
    return msgspec.structs.replace(result, attempt=attempt.id, work=work)


class Conduct(RuleBasedStateMachine):
    """A run of up to 14 instances: what the planner commands is done, at moments that hypothesis chooses."""

    @initialize(
        policy=policies(),
        size=st.integers(0, 14),
        samples=st.integers(1, 2),
        culprits=st.sets(st.integers(0, 13), max_size=2),
    )
    def begin(self, policy: PlannerPolicy, size: int, samples: int, culprits: set[int]) -> None:
        self.policy = policy
        self.keys: list[Key] = [(i, s) for i in range(size) for s in range(samples)]
        self.culprits = {key for key in self.keys if key[0] in culprits}
        self.rows: dict[Key, list[Row]] = {}
        self.outcomes: dict[Key, Outcome] = {}
        self.ids: set[int] = set()
        self.now = 0.0
        self.conduct(self.keys)

    # The suite, the clock, the ledger.

    def conduct(self, keys: list[Key]) -> None:
        """A new conductor: `keys` are what its feed will give."""
        self.feed = deque(keys)
        self.asked = 0
        self.told_end = self.draining = self.finished = self.paused = False
        self.running: dict[int, Attempt] = {}
        self.wakes: list[float] = []
        self.interrupted: Counter[Key] = Counter()
        self.widest = 0
        self.fresh: list[Key] = []  # closed by the last event
        self.plan = ReplayedPlanner(self.policy, next_attempt=max(self.ids, default=0) + 1)
        self.take(TimerFired())

    def take(self, event: AnyEvent) -> list[AnyCommand]:
        twin = self.plan.build_twin()
        commands = self.plan.handle(event, self.now)
        assert twin.handle(event, self.now) == commands
        self.fresh = []
        for command in commands:
            self.do(command)
        return commands

    def do(self, command: AnyCommand) -> None:
        assert not self.finished, f"{command} after Finish"
        match command:
            case PullSamples(count=count):
                assert count > 0 and not (self.told_end or self.draining or self.paused)
                self.asked += count
            case StartAttempt(attempt=attempt):
                self.start(attempt)
            case InterruptAttempt(attempt=attempt):
                assert attempt in self.running
            case CloseSample(outcome=outcome):
                self.close(outcome)
            case SetTimer(at=at):
                assert at >= self.now and not self.draining
                self.wakes.append(at)
            case FinishRun():
                assert not self.running
                assert self.draining or (self.told_end and not self.feed and self.all_closed())
                self.finished = True

    def start(self, attempt: Attempt) -> None:
        key = (attempt.instance, attempt.sample)
        rows = self.rows.setdefault(key, [])
        assert not (self.draining or self.paused)
        assert key not in self.outcomes, "started after it was closed"
        assert key not in [(a.instance, a.sample) for a in self.running.values()], "two at once"
        assert attempt.id not in self.ids
        assert attempt.number == len(rows) + 1
        assert 1 <= attempt.round <= self.policy.attempts
        assert 1 <= attempt.scale <= LARGEST_SCALE
        grown = 2 ** sum(1 for row in rows if row.result and row.result.where is FailureOrigin.RESOURCE)
        assert attempt.scale <= grown
        losses = sum(1 for row in rows if row.result and row.result.where is FailureOrigin.WORKER)
        assert attempt.alone == (losses >= self.policy.losses_before_alone)
        assert attempt.regrades == work_left(rows, attempt.round)
        self.ids.add(attempt.id)
        self.running[attempt.id] = attempt
        rows.append(Row(attempt))

    def close(self, outcome: Outcome) -> None:
        key = (outcome.instance, outcome.sample)
        assert key not in self.outcomes, "a second outcome"
        assert key in self.keys
        assert key not in [(a.instance, a.sample) for a in self.running.values()]
        assert expected(self.rows[key], self.policy.retries) == (outcome.kind, outcome.score)
        of = next(row.result for row in self.rows[key] if row.attempt.id == outcome.attempt)
        assert of is not None and of.where == outcome.where
        poison = [row for row in self.rows[key] if row.result and row.result.kind == POISON]
        assert not poison or key in self.culprits
        self.outcomes[key] = outcome
        self.fresh.append(key)

    def settle(self, result: VerdictSummary) -> None:
        attempt = self.running.pop(result.attempt)
        key = (attempt.instance, attempt.sample)
        self.rows[key][-1].result = result
        if result.where is FailureOrigin.INTERRUPTED and not self.draining:
            self.interrupted[key] += 1
        if result.where is FailureOrigin.RUN:
            self.draining = True
        self.take(VerdictCommitted(result=result))

    def all_closed(self) -> bool:
        return set(self.outcomes) == set(self.keys)

    def innocent(self) -> list[Attempt]:
        return [a for a in self.running.values() if (a.instance, a.sample) not in self.culprits]

    def workers(self) -> dict[object, list[Attempt]]:
        """Who runs where: a suspect has its worker to itself."""
        found: dict[object, list[Attempt]] = {}
        for attempt in self.running.values():
            found.setdefault(("alone", attempt.id) if attempt.alone else attempt.id % SHARED, []).append(
                attempt
            )
        return found

    def losable(self) -> list[list[Attempt]]:
        """Workers that may die: shared ones of anything, one with a single tenant only of its tenant."""
        return [
            tenants
            for tenants in self.workers().values()
            if not tenants[0].alone or (tenants[0].instance, tenants[0].sample) in self.culprits
        ]

    # What can happen.

    @precondition(lambda self: self.asked and not self.told_end)
    @rule(count=st.integers(1, 8))
    def open_samples(self, count: int) -> None:
        for _ in range(min(count, self.asked)):
            if not self.feed:
                self.told_end, self.asked = True, 0
                self.take(SuiteExhausted())
                return
            self.asked -= 1
            self.take(self.opened(self.feed.popleft()))

    @precondition(lambda self: self.innocent())
    @rule(data=st.data(), result=verdicts)
    def end(self, data: st.DataObject, result: VerdictSummary) -> None:
        attempt = data.draw(st.sampled_from(self.innocent()))
        self.settle(of(attempt, result))

    @precondition(lambda self: self.losable())
    @rule(data=st.data())
    def lose_a_worker(self, data: st.DataObject) -> None:
        for attempt in data.draw(st.sampled_from(self.losable())):
            self.settle(lost(attempt))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), in_time=st.booleans())
    def preempt(self, data: st.DataObject, in_time: bool) -> None:
        attempt = data.draw(st.sampled_from(list(self.running.values())))
        commands = self.take(PreemptRequested(attempt=attempt.id))
        key = (attempt.instance, attempt.sample)
        spared = self.interrupted[key] >= self.policy.preemptions
        assert commands == ([] if spared else [InterruptAttempt(attempt=attempt.id)])
        if commands and in_time:
            self.settle(VerdictSummary(attempt=attempt.id, where=FailureOrigin.INTERRUPTED))

    @rule()
    def pause_or_go_on(self) -> None:
        self.paused = not self.paused
        self.take(PauseRequested() if self.paused else PauseEnded())

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        if self.paused:
            return  # the clock of the planner stands still
        until = self.now + seconds
        while self.wakes and min(self.wakes) <= until:
            self.now = min(self.wakes)
            self.wakes.remove(self.now)
            self.take(TimerFired())
        self.now = until

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def hear_twice(self, data: st.DataObject) -> None:
        """A verdict of an attempt that does not run changes nothing."""
        before = self.plan.open, self.plan.running
        commands = self.take(VerdictCommitted(result=VerdictSummary(attempt=max(self.ids) + 1, passed=True)))
        assert not [c for c in commands if not isinstance(c, PullSamples)]
        assert (self.plan.open, self.plan.running) == before

    @precondition(lambda self: not self.finished)
    @rule(how=st.sampled_from(["drain", "abort", "run failed", "crash", "crash", "crash"]), data=st.data())
    def stop_and_resume(self, how: str, data: st.DataObject) -> None:
        if how == "crash":
            self.crash(data)
        else:
            self.wind_down(how)
        self.conduct([key for key in self.keys if key not in self.outcomes])

    def wind_down(self, how: str) -> None:
        if self.paused:
            self.pause_or_go_on()
        if how == "run failed" and not self.innocent():
            how = "abort"
        if how == "run failed":
            self.settle(VerdictSummary(attempt=self.innocent()[0].id, where=FailureOrigin.RUN, again=False))
        else:
            self.draining = True
            commands = self.take(DrainRequested() if how == "drain" else AbortRequested())
            stopped = [c.attempt for c in commands if isinstance(c, InterruptAttempt)]
            assert stopped == ([] if how == "drain" else list(self.running))
        for attempt in list(self.running.values()):
            finishes = how == "drain" and attempt in self.innocent()
            self.settle(
                passed(attempt)
                if finishes
                else VerdictSummary(attempt=attempt.id, where=FailureOrigin.INTERRUPTED)
            )
        assert self.finished

    def crash(self, data: st.DataObject) -> None:
        """Whatever was not on disk is gone: the last attempts, the last outcomes; a verdict may be news."""
        for attempt in list(self.running.values()):
            key = (attempt.instance, attempt.sample)
            fate = data.draw(st.sampled_from(["unsettled", "not begun", "in the journal"]))
            if fate == "not begun":
                self.rows[key].pop()
                self.ids.discard(attempt.id)
            elif fate == "in the journal" and key not in self.culprits:
                self.rows[key][-1].result = of(attempt, data.draw(verdicts))
        if data.draw(st.booleans()):
            for key in self.fresh:
                del self.outcomes[key]

    def opened(self, key: Key) -> SampleOpened:
        """The sample as a ledger knows it."""
        rows = self.rows.get(key)
        if not rows:
            return SampleOpened(instance=key[0], sample=key[1])
        last = rows[-1]
        results = [row.result for row in rows if row.result is not None]
        blamed = [result for result in results if not blameless(result)]
        pending = blamed[-1] if blamed and blamed[-1].attempt == last.attempt.id else None
        followed = [
            r.result for r in rows if r.attempt.round == last.attempt.round and r.result is not pending
        ]
        return SampleOpened(
            instance=key[0],
            sample=key[1],
            number=len(rows),
            round=last.attempt.round,
            retries=sum(1 for result in followed if result and result.where in RETRIED),
            scale=last.attempt.scale,
            losses=sum(1 for r in results if r.where is FailureOrigin.WORKER and r.kind != POISON),
            crashes=sum(1 for r in results if r.where is FailureOrigin.WORKER and r.kind == CRASHED),
            best=max(blamed, key=worth, default=None),
            last=pending,
            regrades=(last.result.work if last.result else None) or last.attempt.regrades,
        )

    # What always holds.

    @invariant()
    def never_more_at_once_than_asked(self) -> None:
        assert self.plan.running == len(self.running) <= self.policy.concurrency
        assert sum(a.alone for a in self.running.values()) <= self.policy.alone_at_once

    @invariant()
    def no_slot_is_idle_while_a_sample_could_use_it(self) -> None:
        if self.draining or self.paused or self.plan.running == self.policy.concurrency:
            return
        assert "slot" not in self.plan.waiting
        if "a worker of its own" in self.plan.waiting:
            assert sum(a.alone for a in self.running.values()) == self.policy.alone_at_once

    @invariant()
    def every_open_sample_is_in_one_place(self) -> None:
        if not self.draining:
            assert self.plan.running + sum(self.plan.waiting.values()) == self.plan.open

    @invariant()
    def what_is_open_is_bounded(self) -> None:
        ahead = max(4, self.policy.concurrency)
        self.widest = max(self.widest, self.plan.waiting.get("back-off", 0))
        room = min(self.policy.concurrency + self.widest, 4 * self.policy.concurrency)
        assert self.plan.open <= room + ahead

    @invariant()
    def blame_is_bounded(self) -> None:
        for key, rows in self.rows.items():
            results = [row.result for row in rows if row.result is not None]
            deaths = sum(1 for r in results if r.where is FailureOrigin.WORKER)
            assert key not in self.culprits or deaths <= self.policy.losses_before_alone + 2
            rounds = Counter(row.attempt.round for row in rows if row.result and not blameless(row.result))
            assert all(count <= self.tries for count in rounds.values())
            assert self.interrupted[key] <= self.policy.preemptions

    @property
    def tries(self) -> int:
        """In a round: the first, the retries, and those by which an attempt grows to the largest."""
        grows = LARGEST_SCALE.bit_length() - 1 if self.policy.retries else 0
        return 1 + self.policy.retries + grows

    @invariant()
    def its_twin_is_equal(self) -> None:
        assert self.plan.build_twin().encode() == self.plan.encode()

    def teardown(self) -> None:
        """From wherever it stands, the run comes to its end within a bound."""
        if not hasattr(self, "plan"):
            return
        if self.paused:
            self.pause_or_go_on()
        for _ in range(20 * len(self.keys) + 20):
            if self.finished:
                break
            self.open_samples(count=8) if self.asked and not self.told_end else None
            self.pass_time(seconds=200.0)
            for tenants in list(self.workers().values()):
                if any((a.instance, a.sample) in self.culprits for a in tenants):
                    for attempt in tenants:
                        self.settle(lost(attempt))
                else:
                    self.settle(passed(tenants[0]))
        assert self.finished and self.all_closed()
        for key in self.keys:
            assert (self.outcomes[key].kind == "worker") == (key in self.culprits)


def work_left(rows: list[Row], round_: int) -> int | None:
    """The attempt whose work a further try in this round grades."""
    if not rows or rows[-1].attempt.round != round_:
        return None
    result, regrades = rows[-1].result, rows[-1].attempt.regrades
    if result is None or blameless(result):
        return (result.work if result else None) or regrades
    return result.work


def worth(result: VerdictSummary) -> tuple[bool, bool, float, int]:
    """Which of a sample's verdicts is kept: written apart from `policy.rank`, to be held against it."""
    scored = result.rule.scored if result.rule else ScoreRule.YES
    counts = scored is ScoreRule.YES
    passes = bool(result.passed) and scored is not ScoreRule.NO
    return passes, passes or counts, result.score or 0.0, result.attempt


def expected(rows: list[Row], retries: int) -> tuple[str, float | None]:
    blamed = [row for row in rows if row.result and not blameless(row.result)]
    best = max((row.result for row in blamed if row.result), key=worth)
    passes, counts, score, _ = worth(best)
    tries = sum(1 for row in blamed if row.attempt.round == blamed[-1].attempt.round)
    if best.where is FailureOrigin.RESOURCE and tries > retries:
        counts = True  # all retries are spent: only now it is a zero
    if not counts:
        return str(best.where), None
    return ("passed" if passes else "failed"), score


def test_every_sample_ends_in_exactly_one_outcome_whatever_happens():
    run_state_machine_as_test(
        Conduct,
        settings=settings(
            max_examples=120,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def opened(count: int) -> list[SampleOpened]:
    return [SampleOpened(instance=instance, sample=0) for instance in range(count)]


def started(commands: list[AnyCommand]) -> list[Attempt]:
    return [command.attempt for command in commands if isinstance(command, StartAttempt)]


def closes(commands: list[AnyCommand]) -> list[CloseSample]:
    return [command for command in commands if isinstance(command, CloseSample)]


@settings(deadline=None, max_examples=60)
@given(culprit=st.integers(0, 11), concurrency=st.integers(2, 6), hosts=st.integers(1, 3))
def test_a_culprit_is_poison_and_its_neighbours_pass(culprit, concurrency, hosts):
    """Given one that kills every worker it is in, when all others pass, then it alone is blamed."""
    plan = RunPlanner(PlannerPolicy(concurrency=concurrency))
    pending = [a for event in (*opened(12), SuiteExhausted()) for a in started(plan.handle(event, 0.0))]
    closed: list[Outcome] = []
    deaths = 0
    while pending:
        host = pending[0].id % hosts
        tenants = [a for a in pending if not a.alone and a.id % hosts == host]
        tenants = [pending[0]] if pending[0].alone else tenants
        dies = any(attempt.instance == culprit for attempt in tenants)
        deaths += dies
        for attempt in tenants:
            pending.remove(attempt)
            result = lost(attempt) if dies else passed(attempt)
            commands = plan.handle(VerdictCommitted(result=result), 0.0)
            pending += started(commands)
            closed += [command.outcome for command in commands if isinstance(command, CloseSample)]

    assert plan.complete and deaths == 4
    assert {outcome.instance: outcome.kind for outcome in closed} == {
        instance: "worker" if instance == culprit else "passed" for instance in range(12)
    }
    assert len(closed) == 12


def test_kills_from_outside_never_poison_and_end_at_a_bound():
    """Given a sample whose worker is killed whenever it runs, then it is closed unscored, not as poison."""
    plan = RunPlanner(PlannerPolicy(concurrency=1, most_losses=10))
    (attempt,) = [a for event in (*opened(1), SuiteExhausted()) for a in started(plan.handle(event, 0.0))]
    for losses in range(1, 11):
        failure = make_loss_failure(attempt, "killed by SIGKILL", own=False)
        assert failure.kind == "lost" and attempt.alone == (losses > 2)
        result = VerdictSummary.of(Verdict(attempt=attempt.id, token=1, failure=failure))
        commands = plan.handle(VerdictCommitted(result=result), 0.0)
        if losses < 10:
            (attempt,) = started(commands)

    [outcome] = [command.outcome for command in commands if isinstance(command, CloseSample)]
    assert (outcome.kind, outcome.score, plan.complete) == ("worker", None, True)


def test_a_preempted_sample_goes_first_and_is_spared_in_the_end():
    plan = RunPlanner(PlannerPolicy(concurrency=1, preemptions=2))
    (attempt,) = [a for event in opened(5) for a in started(plan.handle(event, 0.0))]
    for _ in range(2):
        assert plan.handle(PreemptRequested(attempt=attempt.id), 0.0) == [
            InterruptAttempt(attempt=attempt.id)
        ]
        result = VerdictSummary(attempt=attempt.id, where=FailureOrigin.INTERRUPTED)
        (attempt,) = started(plan.handle(VerdictCommitted(result=result), 0.0))
        assert attempt.instance == 0

    assert plan.handle(PreemptRequested(attempt=attempt.id), 0.0) == []


def test_a_sample_interrupted_by_a_full_disk_is_not_spared_for_it():
    plan = RunPlanner(PlannerPolicy(concurrency=1, preemptions=1))
    (attempt,) = [a for event in opened(2) for a in started(plan.handle(event, 0.0))]
    for _ in range(3):
        result = VerdictSummary.of(Verdict(attempt=attempt.id, token=1, failure=make_disk_failure()))
        (attempt,) = started(plan.handle(VerdictCommitted(result=result), 0.0))
        assert (attempt.instance, attempt.round, attempt.scale) == (0, 1, 1)

    assert plan.handle(PreemptRequested(attempt=attempt.id), 0.0) == [InterruptAttempt(attempt=attempt.id)]


def test_wakes_do_not_pile_up_while_something_is_always_in_back_off():
    """Given one sample put off for a minute and one for seconds, when time passes, few timers are set."""
    plan = RunPlanner(PlannerPolicy(concurrency=2, retries=10**6, backoff=0.0))
    wakes: list[float] = []
    now, most = 0.0, 0
    running = [a for event in opened(2) for a in started(plan.handle(event, now))]
    while now < 1200:
        for attempt in running:
            after = 60.0 if attempt.instance else 2.0
            result = VerdictSummary(attempt=attempt.id, where=FailureOrigin.MODEL, after=after)
            commands = plan.handle(VerdictCommitted(result=result), now)
            wakes += [command.at for command in commands if isinstance(command, SetTimer)]
        now = min(wakes)
        wakes.remove(now)
        commands = plan.handle(TimerFired(), now)
        wakes += [command.at for command in commands if isinstance(command, SetTimer)]
        running = started(commands)
        most = max(most, len(wakes))

    assert most < 50


def test_a_timer_that_fires_a_little_early_is_set_again():
    plan = RunPlanner(PlannerPolicy(concurrency=1, retries=1))
    (attempt,) = started(plan.handle(opened(1)[0], 0.0))
    commands = plan.handle(
        VerdictCommitted(result=VerdictSummary(attempt=attempt.id, where=FailureOrigin.MODEL, after=9.0)), 0.0
    )
    (wake,) = [command for command in commands if isinstance(command, SetTimer)]

    early = plan.handle(TimerFired(), wake.at - 0.001)

    assert started(early) == []
    assert SetTimer(at=wake.at) in early
    assert started(plan.handle(TimerFired(), wake.at)) != []


def test_a_sample_that_is_opened_twice_is_tried_once():
    plan = RunPlanner(PlannerPolicy(concurrency=4))
    plan.handle(opened(1)[0], 0.0)

    assert started(plan.handle(opened(1)[0], 0.0)) == []
    assert plan.open == 1


def test_a_resumed_sample_has_used_up_what_it_had_used_up():
    """Given a sample in its last round with one retry left, when it fails twice more, then it is closed."""
    plan = RunPlanner(PlannerPolicy(concurrency=1, attempts=2, retries=2, backoff=0.0), next_attempt=40)
    killed = VerdictSummary(attempt=39, where=FailureOrigin.RESOURCE, passed=False, score=0.0)
    best = VerdictSummary(attempt=20, passed=False, score=0.5)
    left = SampleOpened(
        instance=1, sample=0, number=5, round=2, retries=1, scale=4, losses=1, best=best, last=killed
    )

    (again,) = started(plan.handle(left, 0.0))
    (alone,) = started(plan.handle(VerdictCommitted(result=lost(again)), 0.0))
    end = plan.handle(VerdictCommitted(result=msgspec.structs.replace(killed, attempt=alone.id)), 0.0)

    assert (again.id, again.number, again.round, again.scale, again.alone) == (40, 6, 2, 8, False)
    assert (alone.number, alone.alone) == (7, True)
    assert [c.outcome for c in end if isinstance(c, CloseSample)] == [
        Outcome(instance=1, sample=0, attempt=20, kind="failed", score=0.5)
    ]


def test_a_regrade_retries_its_own_failures_and_grades_the_same_work():
    plan = RunPlanner(PlannerPolicy(concurrency=1, attempts=3, retries=1, regrading=True), next_attempt=50)
    (first,) = started(plan.handle(SampleOpened(instance=7, sample=1, number=4, regrades=31), 0.0))

    plan.handle(VerdictCommitted(result=VerdictSummary(attempt=50, where=FailureOrigin.GRADE)), 0.0)
    (again,) = started(plan.handle(TimerFired(), 60.0))
    (close,) = closes(
        plan.handle(VerdictCommitted(result=VerdictSummary(attempt=51, passed=False, score=0.5)), 60.0)
    )

    assert (first.id, first.number, first.regrades) == (50, 5, 31)
    assert (again.id, again.regrades) == (51, 31)
    assert (close.outcome.kind, close.outcome.attempt, close.outcome.score) == ("failed", 51, 0.5)


@pytest.mark.parametrize(
    "result",
    [
        VerdictSummary(attempt=50, where=FailureOrigin.AGENT, passed=False, score=0.0),
        VerdictSummary(attempt=50, where=FailureOrigin.RESOURCE, passed=False, score=0.0),
        VerdictSummary(attempt=50, where=FailureOrigin.SANDBOX, kind=UNRESTORED),
    ],
)
def test_a_regrade_ends_with_a_grade_or_with_work_that_is_gone(result):
    plan = RunPlanner(PlannerPolicy(concurrency=1, attempts=3, retries=3, regrading=True), next_attempt=50)
    plan.handle(SampleOpened(instance=7, sample=1, number=4, regrades=31), 0.0)

    assert len(closes(plan.handle(VerdictCommitted(result=result), 0.0))) == 1


def test_after_a_failed_grading_the_next_try_grades_the_kept_work():
    plan = RunPlanner(PlannerPolicy(concurrency=1, attempts=2, retries=2, backoff=0.0))
    (acting,) = started(plan.handle(SampleOpened(instance=1, sample=0), 0.0))

    (grading,) = started(
        plan.handle(
            VerdictCommitted(result=VerdictSummary(attempt=1, where=FailureOrigin.GRADE, work=1)), 0.0
        )
    )
    gone = VerdictSummary(attempt=2, where=FailureOrigin.SANDBOX, kind=UNRESTORED)
    (again,) = started(plan.handle(VerdictCommitted(result=gone), 0.0))
    (anew,) = started(
        plan.handle(
            VerdictCommitted(result=VerdictSummary(attempt=3, where=FailureOrigin.GRADE, work=3)), 0.0
        )
    )

    assert [a.regrades for a in (acting, grading, again, anew)] == [None, 1, None, None]
    assert [a.round for a in (acting, grading, again, anew)] == [1, 1, 1, 2]


def test_a_grading_that_is_interrupted_is_not_followed_by_acting():
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    plan.handle(SampleOpened(instance=1, sample=0), 0.0)

    (grading,) = started(
        plan.handle(
            VerdictCommitted(result=VerdictSummary(attempt=1, where=FailureOrigin.INTERRUPTED, work=1)), 0.0
        )
    )
    (again,) = started(plan.handle(VerdictCommitted(result=lost(grading)), 0.0))

    assert (grading.regrades, again.regrades) == (1, 1)


def test_what_waits_is_counted_by_its_reason():
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    for event in opened(2):
        plan.handle(event, 3.0)

    assert plan.waiting == {"slot": 1}


def test_a_planner_keeps_no_event_of_samples_that_are_closed():
    def count_events() -> int:
        gc.collect()
        return sum(isinstance(found, SampleOpened | VerdictCommitted) for found in gc.get_objects())

    before = count_events()
    plan = RunPlanner(PlannerPolicy(concurrency=4, ordered=True))
    for instance in range(20):
        [attempt] = started(plan.handle(SampleOpened(instance=instance, sample=0), 0.0))
        result = VerdictSummary(attempt=attempt.id, passed=True)
        assert closes(plan.handle(VerdictCommitted(result=result), 0.0))
    del attempt, result

    assert count_events() == before


ASKED = make_interrupt_failure("asked")


def test_a_retried_sample_gets_another_round_however_its_attempt_ends():
    """Given an attempt that passes just when a retry is asked, then it runs again and keeps its pass."""
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    (attempt,) = [a for event in (*opened(1), SuiteExhausted()) for a in started(plan.handle(event, 0.0))]

    asked = plan.handle(SampleRetried(instance=0, sample=0, failure=ASKED), 0.0)
    twice = plan.handle(SampleRetried(instance=0, sample=0, failure=ASKED), 0.0)
    (again,) = started(plan.handle(VerdictCommitted(result=passed(attempt)), 0.0))
    failed = VerdictSummary(attempt=again.id, passed=False, score=0.0)
    (close,) = closes(plan.handle(VerdictCommitted(result=failed), 0.0))

    assert asked == [EndAttempt(attempt=attempt.id, failure=ASKED)]
    assert twice == []
    assert (again.round, again.number, again.regrades) == (2, 2, None)
    assert (close.outcome.kind, close.outcome.attempt) == ("passed", attempt.id)


def test_a_cancellation_outweighs_a_retry():
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    (attempt,) = started(plan.handle(opened(1)[0], 0.0))
    plan.handle(SampleRetried(instance=0, sample=0, failure=ASKED), 0.0)
    gone = AttemptFailure(where=FailureOrigin.CANCELLED, kind="asked", message="gone", again=False)

    plan.handle(SampleWithdrawn(instance=0, sample=0, failure=gone), 0.0)
    ended = VerdictSummary(attempt=attempt.id, where=FailureOrigin.CANCELLED, kind="asked", again=False)
    (close,) = closes(plan.handle(VerdictCommitted(result=ended), 0.0))

    assert close.outcome.kind == "cancelled"


def test_a_retry_ends_a_back_off():
    plan = RunPlanner(PlannerPolicy(concurrency=1, backoff=100.0))
    (attempt,) = started(plan.handle(opened(1)[0], 0.0))
    plan.handle(VerdictCommitted(result=VerdictSummary(attempt=attempt.id, where=FailureOrigin.MODEL)), 0.0)

    commands = plan.handle(SampleRetried(instance=0, sample=0, failure=ASKED), 1.0)

    assert [(a.number, a.round) for a in started(commands)] == [(2, 1)]


def test_a_run_waits_for_samples_that_are_opened_again():
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    (attempt,) = [a for event in (*opened(1), SuiteExhausted()) for a in started(plan.handle(event, 0.0))]
    plan.handle(SamplesExpected(count=1), 0.0)

    closing = plan.handle(VerdictCommitted(result=passed(attempt)), 0.0)
    ended = plan.handle(SamplesExpected(count=-1), 0.0)

    assert FinishRun() not in closing
    assert FinishRun() in ended


def test_a_larger_concurrency_starts_more_at_once():
    plan = RunPlanner(PlannerPolicy(concurrency=1))
    for event in opened(4):
        plan.handle(event, 0.0)

    commands = plan.handle(PolicyChanged(policy=PlannerPolicy(concurrency=3)), 0.0)

    assert [attempt.instance for attempt in started(commands)] == [1, 2]


def test_back_off_stands_still_in_a_pause():
    """Given a retry that is due, when the clock stood still meanwhile, then its timer is set again."""
    plan = RunPlanner(PlannerPolicy(concurrency=1, backoff=100.0))
    (attempt,) = started(plan.handle(opened(1)[0], 0.0))
    result = VerdictSummary(attempt=attempt.id, where=FailureOrigin.MODEL)
    [timer] = [c for c in plan.handle(VerdictCommitted(result=result), 0.0) if isinstance(c, SetTimer)]

    plan.handle(PauseRequested(), 10.0)
    early = plan.handle(TimerFired(), 10.0)
    again = plan.handle(PauseEnded(), 10.0)

    assert early == []
    assert timer in again
    assert [a.number for a in started(plan.handle(TimerFired(), timer.at))] == [2]
