"""The lifecycle of workers: events in, commands out. It decides which worker starts, hosts, drains and ends.

Pure: it never waits and reads no clock. `worker_scaling.py` decides the number of workers;
`run/fleet/local.py` carries the commands out on one machine.
"""

from __future__ import annotations

import msgspec

from .config import RunConfig
from .failures import make_interrupt_failure, make_loss_failure
from .records import Attempt, AttemptFailure
from .worker_events import (
    AnyFleetCommand,
    AnyFleetEvent,
    AnyWorkerEvent,
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
from .worker_roster import RETIRED_STATES, TAKING_STATES, WorkerEntry, WorkerRoster, WorkerState
from .worker_scaling import StartBackoff, WorkerScaling

LONGEST_SILENCE = 9  # times the silence allowed to an idle worker: the bound for a busy one
MOST_START_FAILURES = 3  # consecutive failures of workers to start that stop the run


class WaitingAttempt(msgspec.Struct):
    """An attempt that waits for a worker."""

    attempt: Attempt
    lease: int
    worker: int | None = None  # the starting worker that a suspect waits for
    failed: bool = False  # such a worker could not start


class WorkerPlanner:
    """The workers of one fleet, and the attempts that they host or that wait for them."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._scaling = WorkerScaling.of(config)
        self._backoff = StartBackoff(patient=config.serving is not None)
        self.workers = WorkerRoster(config)
        self._waiting: dict[int, WaitingAttempt] = {}  # oldest first; bound: the run's concurrency
        self._commands: list[AnyFleetCommand] = []  # of the current event
        self._closing = True  # no worker is started: the fleet is not open, or the run ends
        self.lost = self.recycled = 0

    def change(self, config: RunConfig) -> None:
        """Place attempts by this configuration from now on; the number of workers stays."""
        self._config = config
        self.workers.change(config)

    def handle(self, event: AnyFleetEvent, at: float) -> list[AnyFleetCommand]:
        """Process one event; return the resulting commands in order."""
        self._commands = []
        self._react(event, at)
        # The attempts of a dead worker are returned (`WorkerRecovered`) before another one starts.
        if not self._closing and not isinstance(event, WorkerDied):
            self._reconcile(at)
            self._place_waiting(at)
        return self._commands

    @property
    def wanted(self) -> int:
        return self._scaling.wanted

    @property
    def unfit(self) -> str:
        """Why a worker could not start, until one can."""
        return self._backoff.unfit

    @property
    def ever_ready(self) -> bool:
        return self._backoff.ever_ready

    # The effect of each event.

    def _react(self, event: AnyFleetEvent, at: float) -> None:
        match event:
            case FleetOpened():
                self._closing = False
            case FleetClosed():
                self._close()
            case DemandChanged():
                # Attempts that wait for a worker cannot use their leases. Starting workers will grow.
                room = event.room + sum(waiting.lease for waiting in self._waiting.values())
                room -= event.start_cost * len(self.workers.starting)
                self._scaling.update(at, event.running, event.waiting, room, event.start_cost)
            case AttemptOffered(attempt=attempt, lease=lease):
                self._waiting[attempt.id] = WaitingAttempt(attempt, lease)
                if self._config.serving is None and not attempt.alone:
                    self._scaling.admit(len(self._waiting) + self.workers.hosted)
            case AttemptWithdrawn(attempt=number):
                self._stop_waiting(number)
            case AttemptStopped():
                self._stop_attempt(event)
            case AttemptGivenUp(attempt=number):
                self._give_up(number)
            case AttemptReported():
                self._on_reported(event)
            case _:
                self._react_to_worker(event, at)

    def _react_to_worker(self, event: AnyWorkerEvent, at: float) -> None:
        match event:
            case WorkerOpened(worker=number):
                self._backoff.succeed()
                if (worker := self.workers[number]).state is WorkerState.STARTING:
                    worker.enter(WorkerState.READY)
            case WorkerRefused():
                self._on_refused(event)
            case StartFailed(worker=number, reason=reason):
                self._stop_awaiting(number)
                self.workers.remove(number)
                self._fail_start(at, f"cannot be started: {reason}")
            case WorkerDisconnected(worker=number):
                self.workers[number].connected = False
            case WorkerDied():
                self._on_died(event, at)
            case WorkerRecovered():
                self._on_recovered(event)
            case WorkersMeasured(measures=measures):
                for measure in measures:
                    self._check(self.workers[measure.worker], measure)
            case ReplacementRequested(worker=number, reason=reason, successor=successor):
                self._replace(self.workers[number], reason, successor)

    def _close(self) -> None:
        self._closing = True
        for worker in self.workers.living:
            if worker.attempts or worker.state is WorkerState.STARTING:
                self._commands.append(KillWorker(worker=worker.number))
            else:
                self._dismiss(worker)

    def _stop_attempt(self, event: AttemptStopped) -> None:
        if event.attempt in self._waiting:
            self._stop_waiting(event.attempt)
            self._commands.append(ReturnAttempt(attempt=event.attempt, failure=event.failure))
            return
        worker = self.workers.find_host(event.attempt)
        if worker is not None and worker.state is not WorkerState.GONE:
            self._stop_hosted(worker, event.attempt, event.failure)

    def _stop_waiting(self, attempt: int) -> None:
        """Drop a waiting attempt, and the worker that was started for it alone."""
        waiting = self._waiting.pop(attempt, None)
        if waiting is None or waiting.worker is None:
            return
        if all(other.worker != waiting.worker for other in self._waiting.values()):
            self._retire(self.workers[waiting.worker], "its suspect attempt was ended")

    def _give_up(self, attempt: int) -> None:
        if (worker := self.workers.find_host(attempt)) is not None:
            worker.remove(attempt)
            if worker.state is not WorkerState.GONE:
                self._retire(worker, f"attempt {attempt} hangs in it")

    def _on_reported(self, event: AttemptReported) -> None:
        worker = self.workers[event.worker]
        worker.remove(event.attempt)
        worker.hosted += 1
        if event.tainted:
            self._retire(worker, f"attempt {event.attempt} left something running in it")
        elif worker.solo and not worker.attempts:
            self._retire(worker, "its suspect attempt is done")
        elif worker.state in RETIRED_STATES and not worker.attempts:
            self._dismiss(worker)

    def _on_refused(self, event: WorkerRefused) -> None:
        """Handle a worker that cannot start: no other could either, unless one did before."""
        if self._backoff.ever_ready and self._config.serving is not None:
            reason = f"{event.message}; {event.hint}" if event.hint else event.message
            self._commands.append(KillWorker(worker=event.worker, reason=reason))
        else:
            self._stop_run(StopRun(message=event.message, hint=event.hint, exit_status=event.exit_status))

    def _on_died(self, event: WorkerDied, at: float) -> None:
        worker = self.workers[event.worker]
        self._stop_awaiting(event.worker)
        if self._closing:
            self.workers.remove(event.worker)
            return
        if worker.state is WorkerState.STARTING:
            self._fail_start(at, event.reason, event.hint)
        elif worker.attempts or worker.state in TAKING_STATES:
            self.lost += 1
            self._note("worker.lost", f"worker {worker.number}: {event.reason}")
        worker.enter(WorkerState.GONE)
        worker.death = event
        self._commands.append(RecoverWorker(worker=worker.number, attempts=tuple(worker.attempts)))

    def _on_recovered(self, event: WorkerRecovered) -> None:
        """Hand back the attempts without a verdict."""
        worker = self.workers.remove(event.worker)
        assert worker.death is not None
        for attempt in worker.attempts.values():
            if attempt.id not in event.settled:
                failure = make_loss_failure(attempt, worker.death.reason, own=worker.death.own)
                self._commands.append(ReturnAttempt(attempt=attempt.id, failure=failure))

    def _check(self, worker: WorkerEntry, measure: WorkerMeasure) -> None:
        """Kill a worker that hangs or does not start; replace one that is large or hosted enough."""
        config, starting = self._config, worker.state is WorkerState.STARTING
        hung = measure.silence > config.silence * LONGEST_SILENCE
        if hung or (not starting and measure.idle > config.silence):
            reason = f"hung: no sign of life for {measure.silence:.0f} s {measure.load}"
            self._commands.append(KillWorker(worker=worker.number, reason=reason, hung=True))
        elif starting and config.serving is not None and measure.age > config.serving.starting:
            reason = f"not ready after {measure.age:.0f} s"
            self._commands.append(KillWorker(worker=worker.number, reason=reason))
        elif worker.state is not WorkerState.READY or worker.solo:
            return
        elif measure.rss > config.worker_memory and worker.hosted:  # else it would never host any
            self._replace(worker, f"uses {measure.rss >> 20} MiB", SuccessorStart.FIRST)
        elif worker.hosted >= config.recycle_after:
            self._replace(worker, f"hosted {worker.hosted} attempts", SuccessorStart.FIRST)

    # The end of a worker.

    def _replace(self, worker: WorkerEntry, reason: str, successor: SuccessorStart) -> None:
        if successor is not SuccessorStart.FIRST:
            after = successor is SuccessorStart.AFTER and worker.state is not WorkerState.OUTGOING
            self._retire(worker, reason, keeps_place=after)
        elif worker.state is WorkerState.READY:
            worker.enter(WorkerState.OUTGOING)
            worker.reason = reason

    def _retire(self, worker: WorkerEntry, reason: str, keeps_place: bool = False) -> None:
        if worker.state not in RETIRED_STATES and not worker.solo:
            self.recycled += 1
        self._drain(worker, reason, keeps_place)

    def _drain(self, worker: WorkerEntry, reason: str, keeps_place: bool = False) -> None:
        """Give the worker nothing new; it exits when it is empty."""
        if worker.state not in RETIRED_STATES:
            worker.keeps_place = keeps_place
            self._note("worker.retired", f"worker {worker.number}: {reason}")
            if worker.attempts:
                worker.enter(WorkerState.DRAINING)
        if not worker.attempts:
            self._dismiss(worker)
            return
        draining = [w for w in self.workers.living if w.state is WorkerState.DRAINING and not w.solo]
        if len(draining) > max(1, self._config.workers):
            self._empty(draining[0])

    def _empty(self, worker: WorkerEntry) -> None:
        """Interrupt the worker's attempts because too many workers drain; they continue on other workers."""
        worker.enter(WorkerState.EMPTIED)
        failure = make_interrupt_failure("its worker is being replaced")
        for attempt in worker.attempts:
            self._stop_hosted(worker, attempt, failure)

    def _stop_hosted(self, worker: WorkerEntry, attempt: int, failure: AttemptFailure) -> None:
        self._commands.append(StopAttempt(worker=worker.number, attempt=attempt, failure=failure))

    def _dismiss(self, worker: WorkerEntry) -> None:
        if worker.state is not WorkerState.LEAVING:
            worker.enter(WorkerState.LEAVING)
            self._commands.append(DismissWorker(worker=worker.number))

    # The number of workers.

    def _reconcile(self, at: float) -> None:
        """Have as many workers as wanted: replace leaving workers, drain spare ones."""
        for worker in self.workers.list_spare(self.wanted):
            self._drain(worker, "fewer workers are needed")
            worker.keeps_place = False
        while len(self.workers.places) < self.wanted and self._may_start(at):
            self._start(solo=False)
        ready = sum(w.state is WorkerState.READY and w.connected for w in self.workers.places)
        if ready >= self.wanted:
            for worker in self.workers.outgoing:
                self._retire(worker, worker.reason)

    def _may_start(self, at: float) -> bool:
        """While workers fail to start, try one at a time."""
        return (not self._backoff.unfit or not self.workers.starting) and self._backoff.due(at)

    def _start(self, *, solo: bool) -> WorkerEntry:
        worker = self.workers.add(solo=solo)
        self._commands.append(StartWorker(worker=worker.number))
        return worker

    def _fail_start(self, at: float, why: str, hint: str = "") -> None:
        """Record that a worker could not start. If that is not temporary, end the run with the reason."""
        self._backoff.fail(at, why)
        if self._backoff.failed == 1:
            self._note("worker.unfit", why)
        if self._backoff.hopeless(MOST_START_FAILURES):
            self._stop_run(StopRun(message=f"workers die at start-up: {why}", hint=hint))

    def _stop_run(self, command: StopRun) -> None:
        self._closing = True
        self._commands.append(command)

    def _note(self, kind: str, message: str) -> None:
        self._commands.append(NoteEvent(kind=kind, message=message))

    # Where attempts run.

    def _place_waiting(self, at: float) -> None:
        """Give workers to the waiting attempts, oldest first."""
        again = True
        while again:  # the first member of a group that has a worker brings the others
            again = False
            for waiting in list(self._waiting.values()):
                find = self._find_alone if waiting.attempt.alone else self._find_shared
                if (worker := find(waiting, at)) is not None:
                    del self._waiting[waiting.attempt.id]
                    worker.add(waiting.attempt)
                    self._commands.append(HostAttempt(worker=worker.number, attempt=waiting.attempt.id))
                    again = again or waiting.attempt.group is not None

    def _find_shared(self, waiting: WaitingAttempt, at: float) -> WorkerEntry | None:
        """Return the worker of its group, however loaded; else the freest worker, if any has a free slot."""
        return self.workers.find_home(waiting.attempt.group) or self.workers.find_freest()

    def _find_alone(self, waiting: WaitingAttempt, at: float) -> WorkerEntry | None:
        """Return a worker for a suspect attempt alone; the suspects of a group share one."""
        if waiting.worker is None:
            group = waiting.attempt.group
            if (home := self.workers.find_home(group)) is not None:
                return home
            if waiting.failed and not self._backoff.due(at):
                return None
            worker = self.workers.find_solo(group) or self._start(solo=True)
            worker.suspects = group
            waiting.worker = worker.number
        worker = self.workers[waiting.worker]
        return worker if worker.state is WorkerState.READY and worker.connected else None

    def _stop_awaiting(self, worker: int) -> None:
        """Let the suspects that wait for this worker start another one, when that is due."""
        for waiting in self._waiting.values():
            if waiting.worker == worker:
                waiting.worker, waiting.failed = None, True
