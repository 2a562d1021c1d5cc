"""The lifecycle of workers, played against processes, attempts and a clock that are all models.

`FleetMachine` is the machine; the scenes below it are the stories that a machine tells too seldom.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdwater.core.config import RunConfig, ServingConfig
from holdwater.core.failures import make_interrupt_failure
from holdwater.core.records import Attempt, AttemptFailure, FailureOrigin, MiB
from holdwater.core.worker_events import (
    AnyFleetCommand,
    AnyFleetEvent,
    AttemptGivenUp,
    AttemptOffered,
    AttemptReported,
    AttemptStopped,
    AttemptWithdrawn,
    DemandChanged,
    DismissWorker,
    FleetClosed,
    FleetOpened,
    HostAttempt,
    KillWorker,
    NoteEvent,
    RecoverWorker,
    ReplacementRequested,
    ReturnAttempt,
    StartFailed,
    StartWorker,
    StopAttempt,
    StopRun,
    SuccessorStart,
    WorkerDied,
    WorkerDisconnected,
    WorkerMeasure,
    WorkerOpened,
    WorkerRecovered,
    WorkerRefused,
    WorkersMeasured,
)
from holdwater.core.worker_roster import NEXT_STATES, RETIRED_STATES, WorkerState
from holdwater.core.workers import WorkerPlanner

COST = 100 * MiB
SILENCE = 20.0
STARTING_SECONDS = 60.0


def make_config(
    workers: int = 2, concurrency: int = 4, serving: ServingConfig | None = None, recycle_after: int = 5000
) -> RunConfig:
    return RunConfig(
        id="run",
        suite="suite",
        agent="agent",
        created=0.0,
        version="0",
        workers=workers,
        concurrency=concurrency,
        serving=serving,
        recycle_after=recycle_after,
        silence=SILENCE,
    )


class ModelProcess(msgspec.Struct):
    """A worker process as the machine models it."""

    ready: bool = False
    connected: bool = True
    dismissed: bool = False
    killed: bool = False
    attempts: dict[int, Attempt] = msgspec.field(default_factory=dict)  # sent, and without a verdict yet
    stopped: set[int] = msgspec.field(default_factory=set)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    workers = draw(st.integers(1, 3))
    server = st.builds(
        ServingConfig,
        least_workers=st.integers(1, workers),
        quiet=st.just(5.0),
        starting=st.just(STARTING_SECONDS),
    )
    return make_config(
        workers=workers,
        concurrency=draw(st.integers(1, 8)),
        serving=draw(st.none() | server),
        recycle_after=draw(st.sampled_from([2, 5, 5000])),
    )


class FleetMachine(RuleBasedStateMachine):
    """A fleet whose commands are carried out at once, on processes that behave as hypothesis chooses."""

    @initialize(config=configs())
    def begin(self, config: RunConfig) -> None:
        self.config = config
        self.plan = WorkerPlanner(config)
        self.now = 0.0
        self.processes: dict[int, ModelProcess] = {}
        self.dead: dict[int, ModelProcess] = {}  # not recovered yet
        self.offered: dict[int, Attempt] = {}
        self.waiting: set[int] = set()
        self.ended: Counter[int] = Counter()  # attempt -> verdicts; withdrawn and given up ones count as well
        self.retired: set[int] = set()  # workers that were not needed any more at some time
        self.stopped_run = self.closed = False
        self.take(FleetOpened())

    # The fleet that carries commands out.

    def take(self, event: AnyFleetEvent) -> list[AnyFleetCommand]:
        commands = self.plan.handle(event, self.now)
        for command in commands:
            self.do(command)
        return commands

    def do(self, command: AnyFleetCommand) -> None:
        match command:
            case StartWorker(worker=number):
                assert not self.closed and not self.stopped_run, "a start after the end"
                assert number not in self.processes and number not in self.dead
                self.processes[number] = ModelProcess()
            case HostAttempt(worker=number, attempt=attempt):
                self.host(number, self.offered[attempt])
            case StopAttempt(worker=number, attempt=attempt):
                assert attempt in self.processes[number].attempts, "stopped where it is not"
                self.processes[number].stopped.add(attempt)
            case ReturnAttempt(attempt=attempt):
                assert attempt in self.waiting or any(attempt in dead.attempts for dead in self.dead.values())
                self.waiting.discard(attempt)
                self.ended[attempt] += 1
            case DismissWorker(worker=number):
                assert all(self.ended[a] for a in self.processes[number].attempts), "dismissed with attempts"
                assert not self.processes[number].dismissed, "dismissed twice"
                self.processes[number].dismissed = True
            case KillWorker(worker=number):
                self.processes[number].killed = True
            case RecoverWorker(worker=number, attempts=attempts):
                assert set(attempts) == {a for a in self.dead[number].attempts if not self.ended[a]}
            case StopRun():
                self.stopped_run = True
            case NoteEvent(kind="worker.retired", message=message):
                self.retired.add(int(message.removeprefix("worker ").partition(":")[0]))

    def host(self, number: int, attempt: Attempt) -> None:
        process, entry = self.processes[number], self.plan.workers[number]
        assert attempt.id in self.waiting, "hosted, but it does not wait"
        assert process.ready and process.connected and not process.dismissed
        others = [a for a in process.attempts.values() if not self.ended[a.id]]
        joins = attempt.group is not None and any(a.group == attempt.group for a in others)
        assert entry.state in (WorkerState.READY, WorkerState.OUTGOING) or joins, (
            "a draining worker got an attempt"
        )
        assert entry.state is not WorkerState.EMPTIED
        if entry.solo:
            assert joins or not others, "a solo worker hosts one attempt, or one group"
        if attempt.alone and not joins:
            assert entry.solo, "a suspect shares a worker"
        elif not joins:
            hosts = max(1, len(self.plan.workers.taking))
            assert len(others) < self.config.slots / min(hosts, self.config.workers) + 1
        self.waiting.remove(attempt.id)
        process.attempts[attempt.id] = attempt

    def settle(self, attempt: int) -> None:
        self.ended[attempt] += 1

    def running(self) -> list[tuple[int, int]]:
        """Attempts that a process hosts, by worker; also abandoned ones, which the fleet has forgotten."""
        return [
            (n, a) for n, process in self.processes.items() if process.connected for a in process.attempts
        ]

    def talking(self, ready: bool) -> list[int]:
        return [n for n, process in self.processes.items() if process.connected and process.ready == ready]

    # What can happen.

    @precondition(lambda self: len(self.waiting) < 8 and not self.closed)
    @rule(group=st.sampled_from([None, None, 1, 2]), alone=st.sampled_from([False, False, True]))
    def offer_attempt(self, group: int | None, alone: bool) -> None:
        number = len(self.offered) + 1
        attempt = Attempt(id=number, instance=1, sample=number, number=1, group=group, alone=alone)
        self.offered[number] = attempt
        self.waiting.add(number)
        self.take(AttemptOffered(attempt=attempt, lease=MiB))

    @precondition(lambda self: self.talking(ready=False))
    @rule(data=st.data())
    def open_worker(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.talking(ready=False)))
        self.processes[number].ready = True
        self.take(WorkerOpened(worker=number))

    @precondition(lambda self: self.talking(ready=False))
    @rule(data=st.data(), how=st.sampled_from(["refuses", "cannot be started", "dies"]))
    def fail_start(self, data: st.DataObject, how: str) -> None:
        if self.config.serving is None and self.plan._backoff.failed == 2 and self.now < 20:
            return  # three failures end a run, and with it the machine: seldom
        number = data.draw(st.sampled_from(self.talking(ready=False)))
        if how == "refuses":
            if self.plan.ever_ready and self.config.serving is not None:  # else it ends the run at once
                self.take(WorkerRefused(worker=number, message="no licence"))
        elif how == "cannot be started":
            if self.plan.workers[number].state is not WorkerState.LEAVING:  # it fails before anything else
                del self.processes[number]
                self.take(StartFailed(worker=number, reason="no processes left"))
        else:
            self.lose_worker(number)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tainted=st.sampled_from([False, False, False, True]))
    def report_attempt(self, data: st.DataObject, tainted: bool) -> None:
        number, attempt = data.draw(st.sampled_from(self.running()))
        del self.processes[number].attempts[attempt]
        if attempt in self.plan.workers[number].attempts:
            self.settle(attempt)
        self.take(AttemptReported(worker=number, attempt=attempt, tainted=tainted))

    @precondition(lambda self: self.offered)
    @rule(data=st.data(), what=st.sampled_from(["stop", "withdraw"]))
    def end_attempt(self, data: st.DataObject, what: str) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.offered)))
        waits = attempt in self.waiting
        if what == "stop":
            commands = self.take(AttemptStopped(attempt=attempt, failure=make_interrupt_failure("a signal")))
            assert any(isinstance(c, ReturnAttempt) for c in commands) == waits
        elif waits:
            self.waiting.remove(attempt)
            self.settle(attempt)
            self.take(AttemptWithdrawn(attempt=attempt))

    @precondition(lambda self: self.open_hosted())
    @rule(data=st.data())
    def give_up_attempt(self, data: st.DataObject) -> None:
        """Its code still runs in the worker: only the fleet forgets it."""
        attempt = data.draw(st.sampled_from(self.open_hosted()))
        self.settle(attempt)
        self.take(AttemptGivenUp(attempt=attempt))

    def open_hosted(self) -> list[int]:
        everywhere = [*self.processes.values(), *self.dead.values()]
        return [a for process in everywhere for a in process.attempts if not self.ended[a]]

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def disconnect_worker(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.processes)))
        if self.processes[number].connected:
            self.processes[number].connected = False
            self.take(WorkerDisconnected(worker=number))

    @precondition(
        lambda self: any(p.dismissed or p.killed or not p.connected for p in self.processes.values())
    )
    @rule(data=st.data())
    def end_process(self, data: st.DataObject) -> None:
        ending = [n for n, p in self.processes.items() if p.dismissed or p.killed or not p.connected]
        self.lose_worker(data.draw(st.sampled_from(ending)))

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), own=st.booleans())
    def kill_worker(self, data: st.DataObject, own: bool) -> None:
        self.lose_worker(data.draw(st.sampled_from(sorted(self.processes))), own=own)

    def lose_worker(self, number: int, own: bool = True) -> None:
        process = self.processes[number]
        if process.connected:
            process.connected = False
            self.take(WorkerDisconnected(worker=number))
        self.dead[number] = self.processes.pop(number)
        commands = self.take(WorkerDied(worker=number, reason="killed", own=own))
        if not any(isinstance(command, RecoverWorker) for command in commands):
            assert self.closed or self.stopped_run
            del self.dead[number]

    @precondition(lambda self: self.dead)
    @rule(data=st.data(), verdicts=st.booleans())
    def recover_worker(self, data: st.DataObject, verdicts: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.dead)))
        unsettled = [a for a in self.dead[number].attempts if not self.ended[a]]
        settled = tuple(unsettled[::2]) if verdicts else ()
        for attempt in settled:
            self.settle(attempt)
        commands = self.take(WorkerRecovered(worker=number, settled=settled))
        returned = [c.attempt for c in commands if isinstance(c, ReturnAttempt)]
        assert returned == [a for a in unsettled if a not in settled]
        del self.dead[number]

    @precondition(lambda self: self.processes)
    @rule(
        data=st.data(),
        rss=st.sampled_from([0, 0, 2 << 30]),
        silence=st.sampled_from([0.0, 0.0, SILENCE + 1, SILENCE * 10]),
        age=st.sampled_from([1.0, STARTING_SECONDS + 1]),
    )
    def patrol(self, data: st.DataObject, rss: int, silence: float, age: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.processes)))
        measure = WorkerMeasure(worker=number, rss=rss, age=age, silence=silence, idle=silence)
        quiet = tuple(WorkerMeasure(worker=n) for n in self.processes if n != number)
        self.take(WorkersMeasured(measures=(measure, *quiet)))

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), successor=st.sampled_from(SuccessorStart), residual=st.integers(0, 200))
    def replace_grown(self, data: st.DataObject, successor: SuccessorStart, residual: int) -> None:
        grown = data.draw(st.sampled_from(sorted(self.processes)))
        found = self.plan.workers.find_grown({grown: residual}, 100, successor)
        if found is not None:
            assert found.number == grown and residual >= 100
            self.take(ReplacementRequested(worker=grown, reason="is large", successor=successor))

    @precondition(lambda self: self.plan.workers.taking)
    @rule(data=st.data(), successor=st.sampled_from(SuccessorStart))
    def replace_worker(self, data: st.DataObject, successor: SuccessorStart) -> None:
        number = data.draw(st.sampled_from([w.number for w in self.plan.workers.taking]))
        self.take(ReplacementRequested(worker=number, reason="a test says so", successor=successor))

    @rule(running=st.integers(0, 20), waiting=st.integers(0, 20), room=st.integers(-1, 4))
    def change_demand(self, running: int, waiting: int, room: int) -> None:
        if self.config.serving is not None and not self.closed:
            self.take(DemandChanged(running=running, waiting=waiting, room=room * COST, start_cost=COST))

    @rule(seconds=st.sampled_from([0.5, 6.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(WorkersMeasured(measures=tuple(WorkerMeasure(worker=number) for number in self.processes)))

    # What is always true.

    @invariant()
    def each_attempt_is_in_one_place(self) -> None:
        for attempt in self.offered:
            hosts = [n for n, p in {**self.processes, **self.dead}.items() if attempt in p.attempts]
            assert len(hosts) <= 1
            if self.ended[attempt]:
                assert self.ended[attempt] == 1, "two verdicts"
                assert attempt not in self.waiting
                assert self.plan.workers.find_host(attempt) is None
            elif not self.stopped_run and not self.closed:
                assert (attempt in self.waiting) + len(hosts) == 1, "lost, or in two places"

    @invariant()
    def the_number_of_workers_is_bounded(self) -> None:
        workers = self.plan.workers
        if self.stopped_run or self.closed:
            return
        assert self.plan.wanted <= self.config.workers
        assert len(workers.places) <= self.plan.wanted
        shared = [w for w in workers.living if not w.solo and w.state not in RETIRED_STATES]
        assert len(shared) <= self.plan.wanted + len(workers.outgoing), "one successor for each outgoing one"
        crowded = [w for w in workers.living if w.state is WorkerState.DRAINING and not w.solo]
        assert len(crowded) <= max(1, self.config.workers)

    @invariant()
    def solo_workers_have_a_purpose(self) -> None:
        if self.stopped_run or self.closed:
            return
        awaited = {waiting.worker for waiting in self.plan._waiting.values()}
        for worker in self.plan.workers.living:
            if worker.solo and worker.state not in RETIRED_STATES:
                assert worker.attempts or worker.number in awaited, "a solo worker without a suspect"
                assert (
                    worker.state is not WorkerState.READY
                    or worker.number not in awaited
                    or not worker.connected
                )
            if worker.solo:
                assert len(worker.attempts) <= 1 or len(worker.groups) == 1

    @invariant()
    def states_are_what_the_processes_are_in(self) -> None:
        assert {w.number for w in self.plan.workers.living} == self.processes.keys()
        for worker in self.plan.workers.living:
            process = self.processes[worker.number]
            assert (worker.state is WorkerState.LEAVING) == process.dismissed
            assert worker.state not in (WorkerState.DRAINING, WorkerState.EMPTIED) or worker.attempts
            if worker.state is WorkerState.EMPTIED:
                assert worker.attempts.keys() <= process.stopped, "an attempt that nobody stops"

    @invariant()
    def waiting_attempts_have_a_reason(self) -> None:
        """No shared attempt waits while a worker has a free slot."""
        if self.stopped_run or self.closed or self.dead:  # the next event after a death places attempts
            return
        plain = [a for a in self.waiting if not self.offered[a].alone]
        assert not plain or self.plan.workers.find_freest() is None

    def teardown(self) -> None:
        if not hasattr(self, "plan"):
            return
        if not self.stopped_run:
            self.finish_work()
        self.closed = True
        self.take(FleetClosed())
        for number, process in list(self.processes.items()):
            assert process.dismissed or process.killed, "a worker that never ends"
            self.lose_worker(number)
        for number in list(self.dead):
            self.take(WorkerRecovered(worker=number))
        assert self.plan.workers.living == []

    def finish_work(self) -> None:
        """From every state, all attempts end and all retired workers go, if workers start and none hangs."""
        for _ in range(200):
            workers = self.plan.workers
            leaving = workers.draining or workers.outgoing
            if not (self.waiting or self.open_hosted() or leaving or self.dead):
                break
            self.now += 40.0
            for number in list(self.dead):
                self.dead.pop(number)
                for attempt in list(self.plan.workers[number].attempts):
                    self.settle(attempt)
                self.take(WorkerRecovered(worker=number, settled=tuple(self.plan.workers[number].attempts)))
            for number, process in list(self.processes.items()):
                if process.dismissed or process.killed or not process.connected:
                    self.lose_worker(number)
                elif not process.ready:
                    process.ready = True
                    self.take(WorkerOpened(worker=number))
            for number, attempt in self.running():
                del self.processes[number].attempts[attempt]
                if attempt in self.plan.workers[number].attempts:
                    self.settle(attempt)
                self.take(AttemptReported(worker=number, attempt=attempt))
            self.take(WorkersMeasured(measures=()))
            if self.stopped_run:
                return
        assert not self.waiting, "an attempt that no worker ever takes"
        assert not self.plan.workers.draining and not self.plan.workers.outgoing, (
            "a retired worker that never ends"
        )
        assert not self.retired & {w.number for w in self.plan.workers.living}
        assert all(self.ended[attempt] == 1 for attempt in self.offered)


def test_workers_and_attempts_end_however_the_fleet_is_disturbed() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        FleetMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_every_state_has_a_way_out() -> None:
    assert NEXT_STATES.keys() == set(WorkerState)
    for state in WorkerState:
        reached, found = {state}, {state}
        while found:
            found = {following for one in found for following in NEXT_STATES[one]} - reached
            reached |= found
        assert WorkerState.GONE in reached
    assert [state for state, following in NEXT_STATES.items() if not following] == [WorkerState.GONE]


class Fleet:
    """A planner whose commands a scene reads."""

    def __init__(self, config: RunConfig) -> None:
        self.plan = WorkerPlanner(config)
        self.commands = self.plan.handle(FleetOpened(), 0.0)
        self.attempts = 0

    def take(self, event: AnyFleetEvent, at: float = 0.0) -> list[AnyFleetCommand]:
        self.commands = self.plan.handle(event, at)
        return self.commands

    def open(self, *workers: int) -> None:
        for worker in workers:
            self.take(WorkerOpened(worker=worker))

    def offer(self, group: int | None = None, alone: bool = False) -> list[AnyFleetCommand]:
        self.attempts += 1
        attempt = Attempt(
            id=self.attempts, instance=1, sample=self.attempts, number=1, group=group, alone=alone
        )
        return self.take(AttemptOffered(attempt=attempt))

    def state(self, worker: int) -> WorkerState:
        return self.plan.workers[worker].state


def test_a_run_starts_a_worker_for_each_of_its_first_attempts() -> None:
    fleet = Fleet(make_config(workers=3, concurrency=9))
    assert fleet.commands == [StartWorker(worker=1)]
    assert fleet.offer() == []
    assert fleet.offer() == [StartWorker(worker=2)]
    assert fleet.offer(alone=True) == [StartWorker(worker=3)], "a suspect needs no shared worker"

    fleet.open(1, 2)
    assert fleet.offer() == [StartWorker(worker=4), HostAttempt(worker=2, attempt=4)]
    assert fleet.offer() == [HostAttempt(worker=2, attempt=5)], "never more than the run may have"


def test_a_worker_that_hosted_enough_goes_on_until_its_successor_is_ready() -> None:
    fleet = Fleet(make_config(workers=1, recycle_after=1))
    fleet.open(1)
    fleet.offer()
    fleet.take(AttemptReported(worker=1, attempt=1))

    assert fleet.take(WorkersMeasured(measures=(WorkerMeasure(worker=1),))) == [StartWorker(worker=2)]
    assert fleet.offer() == [HostAttempt(worker=1, attempt=2)]
    fleet.open(2)

    assert fleet.state(1) is WorkerState.DRAINING
    assert fleet.offer() == [HostAttempt(worker=2, attempt=3)]
    assert fleet.take(AttemptReported(worker=1, attempt=2)) == [DismissWorker(worker=1)]


def test_without_memory_for_both_the_successor_starts_when_the_worker_is_gone() -> None:
    fleet = Fleet(make_config(workers=1))
    fleet.open(1)
    fleet.offer()

    after = ReplacementRequested(worker=1, reason="is large", successor=SuccessorStart.AFTER)
    assert not any(isinstance(command, StartWorker) for command in fleet.take(after))
    fleet.take(AttemptReported(worker=1, attempt=1))

    fleet.take(WorkerDied(worker=1, reason="exited", own=True))
    assert StartWorker(worker=2) in fleet.take(WorkerRecovered(worker=1))


def test_attempts_of_a_lost_worker_are_returned_unless_its_journal_settles_them() -> None:
    fleet = Fleet(make_config(workers=1))
    fleet.open(1)
    fleet.offer()
    fleet.offer()

    commands = fleet.take(WorkerDied(worker=1, reason="killed by SIGKILL", own=False))
    assert RecoverWorker(worker=1, attempts=(1, 2)) in commands
    returned, started = fleet.take(WorkerRecovered(worker=1, settled=(1,)))

    assert started == StartWorker(worker=2)
    assert isinstance(returned, ReturnAttempt) and returned.attempt == 2
    assert (returned.failure.where, returned.failure.kind) == (FailureOrigin.WORKER, "lost")
    assert fleet.plan.lost == 1


def test_a_suspect_gets_a_worker_of_its_own_which_ends_with_it() -> None:
    fleet = Fleet(make_config(workers=1))
    fleet.open(1)

    assert fleet.offer(alone=True) == [StartWorker(worker=2)]
    assert fleet.offer() == [HostAttempt(worker=1, attempt=2)]
    assert fleet.take(WorkerOpened(worker=2)) == [HostAttempt(worker=2, attempt=1)]
    assert DismissWorker(worker=2) in fleet.take(AttemptReported(worker=2, attempt=1))


def test_the_worker_of_a_suspect_that_was_stopped_in_time_leaves() -> None:
    fleet = Fleet(make_config(workers=1))
    fleet.offer(alone=True)
    failure = AttemptFailure(where=FailureOrigin.INTERRUPTED, kind="interrupted", message="a signal")

    commands = fleet.take(AttemptStopped(attempt=1, failure=failure))

    assert DismissWorker(worker=2) in commands and ReturnAttempt(attempt=1, failure=failure) in commands
    assert fleet.plan.recycled == 0


def test_a_busy_worker_is_silent_for_longer_than_an_idle_one() -> None:
    fleet = Fleet(make_config(workers=1))
    fleet.open(1)
    busy = WorkerMeasure(worker=1, silence=SILENCE * 8, idle=0.0)

    assert fleet.take(WorkersMeasured(measures=(busy,))) == []
    idle = msgspec.structs.replace(busy, idle=SILENCE + 1)
    (killed,) = fleet.take(WorkersMeasured(measures=(idle,)))
    assert isinstance(killed, KillWorker) and killed.hung


def test_three_workers_that_cannot_start_stop_the_run() -> None:
    fleet = Fleet(make_config(workers=1))
    for worker in (1, 2):
        fleet.take(WorkerDied(worker=worker, reason="exited with 1", own=True))
        assert fleet.take(WorkerRecovered(worker=worker)) == [StartWorker(worker=worker + 1)]

    commands = fleet.take(WorkerDied(worker=3, reason="exited with 1", own=True, hint="see the log"))

    stop = StopRun(message="workers die at start-up: exited with 1", hint="see the log", exit_status=4)
    assert stop in commands
    assert fleet.take(WorkerRecovered(worker=3)) == []


def test_a_worker_that_refuses_to_start_stops_the_run_unless_others_serve() -> None:
    refusal = WorkerRefused(worker=1, message="no suite", hint="look", exit_status=2)
    assert Fleet(make_config()).take(refusal) == [StopRun(message="no suite", hint="look", exit_status=2)]

    fleet = Fleet(make_config(serving=ServingConfig(least_workers=2)))
    fleet.open(2)
    assert fleet.take(refusal) == [KillWorker(worker=1, reason="no suite; look")]
