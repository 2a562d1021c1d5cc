"""The workers of a fleet and their states. It only answers queries; `workers.py` decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from .config import RunConfig
from .records import Attempt
from .worker_events import SuccessorStart, WorkerDied


class WorkerState(StrEnum):
    """The state of a worker. A worker can die in each state."""

    STARTING = "starting"
    READY = "ready"  # takes attempts
    OUTGOING = "outgoing"  # takes attempts until its successor is ready
    DRAINING = "draining"  # takes only further members of its groups
    EMPTIED = "emptied"  # its attempts have been interrupted
    LEAVING = "leaving"  # has no attempts, and was asked to exit
    GONE = "gone"  # dead; its journal is being read


NEXT_STATES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset((WorkerState.READY, WorkerState.LEAVING, WorkerState.GONE)),
    WorkerState.READY: frozenset(
        (WorkerState.OUTGOING, WorkerState.DRAINING, WorkerState.LEAVING, WorkerState.GONE)
    ),
    WorkerState.OUTGOING: frozenset((WorkerState.DRAINING, WorkerState.LEAVING, WorkerState.GONE)),
    WorkerState.DRAINING: frozenset((WorkerState.EMPTIED, WorkerState.LEAVING, WorkerState.GONE)),
    WorkerState.EMPTIED: frozenset((WorkerState.LEAVING, WorkerState.GONE)),
    WorkerState.LEAVING: frozenset((WorkerState.GONE,)),
    WorkerState.GONE: frozenset(),
}
TAKING_STATES = frozenset((WorkerState.READY, WorkerState.OUTGOING))
RETIRED_STATES = frozenset((WorkerState.DRAINING, WorkerState.EMPTIED, WorkerState.LEAVING))


class WorkerEntry(msgspec.Struct):
    """A worker, from the command to start it until its journal has been read."""

    number: int
    solo: bool = False  # for a suspect attempt alone, or for the suspects of one group
    suspects: int | None = None  # the group that a solo worker was started for
    state: WorkerState = WorkerState.STARTING
    connected: bool = True  # it can receive messages
    keeps_place: bool = False  # while it is retired: its successor starts when it is gone
    reason: str = ""  # why it is outgoing
    hosted: int = 0  # attempts that it has reported
    attempts: dict[int, Attempt] = msgspec.field(default_factory=dict)  # bound: the run's concurrency
    groups: Counter[int] = msgspec.field(default_factory=Counter)  # group -> attempts; bound: the same
    death: WorkerDied | None = None

    def enter(self, state: WorkerState) -> None:
        assert state in NEXT_STATES[self.state], f"worker {self.number}: {self.state} -> {state}"
        self.state = state

    def add(self, attempt: Attempt) -> None:
        self.attempts[attempt.id] = attempt
        if attempt.group is not None:
            self.groups[attempt.group] += 1

    def remove(self, attempt: int) -> None:
        known = self.attempts.pop(attempt, None)
        if known is not None and known.group is not None:
            self.groups -= Counter((known.group,))  # entries at zero are dropped


class WorkerRoster:
    """The workers of one fleet, oldest first."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._workers: dict[int, WorkerEntry] = {}  # bound: 3 x workers, and solo ones
        self._numbers = 0
        self._assembled = False  # all workers have been ready at once

    def change(self, config: RunConfig) -> None:
        self._config = config

    def add(self, *, solo: bool) -> WorkerEntry:
        self._numbers += 1
        worker = self._workers[self._numbers] = WorkerEntry(self._numbers, solo)
        return worker

    def remove(self, worker: int) -> WorkerEntry:
        return self._workers.pop(worker)

    def __getitem__(self, worker: int) -> WorkerEntry:
        return self._workers[worker]

    @property
    def living(self) -> list[WorkerEntry]:
        return [w for w in self._workers.values() if w.state is not WorkerState.GONE]

    @property
    def hosted(self) -> int:
        """The number of attempts that living workers host."""
        return sum(len(worker.attempts) for worker in self.living)

    @property
    def opened(self) -> list[WorkerEntry]:
        """Living workers that are past their start."""
        return [w for w in self.living if w.state is not WorkerState.STARTING]

    @property
    def taking(self) -> list[WorkerEntry]:
        """Workers that take new attempts."""
        return [w for w in self.living if w.state in TAKING_STATES and w.connected and not w.solo]

    @property
    def starting(self) -> list[WorkerEntry]:
        return [w for w in self.living if w.state is WorkerState.STARTING and not w.solo]

    @property
    def outgoing(self) -> list[WorkerEntry]:
        """Workers that drain as soon as their successors are ready."""
        return [w for w in self.living if w.state is WorkerState.OUTGOING]

    @property
    def draining(self) -> list[WorkerEntry]:
        """Workers that take nothing new and exit when they are empty."""
        return [w for w in self.living if w.state in RETIRED_STATES]

    @property
    def places(self) -> list[WorkerEntry]:
        """Workers that count towards the wanted number, so that no other is started in their place."""
        counted = (WorkerState.STARTING, WorkerState.READY)
        return [w for w in self.living if not w.solo and (w.keeps_place or w.state in counted)]

    def list_spare(self, wanted: int) -> list[WorkerEntry]:
        """Return the workers beyond the wanted number: first draining, then starting, then least loaded."""
        places = sorted(
            self.places,
            key=lambda w: (not w.keeps_place, w.state is WorkerState.READY, len(w.attempts)),
        )
        return places[: max(0, len(places) - wanted)]

    def find_host(self, attempt: int) -> WorkerEntry | None:
        """Return the worker that hosts the attempt; it may be dead and not yet recovered."""
        return next((w for w in self._workers.values() if attempt in w.attempts), None)

    def find_home(self, group: int | None) -> WorkerEntry | None:
        """Return the group's worker: even a draining one takes its members, until it is emptied."""
        if group is None:
            return None
        homes = (w for w in self.living if group in w.groups and w.connected)
        return next((w for w in homes if w.state is not WorkerState.EMPTIED), None)

    def find_solo(self, group: int | None) -> WorkerEntry | None:
        """Return the worker that was started for this group of suspects."""
        if group is None:
            return None
        solo = (w for w in self.living if w.solo and w.suspects == group and w.connected)
        return next((w for w in solo if w.state not in RETIRED_STATES), None)

    def find_freest(self) -> WorkerEntry | None:
        """Return the worker with the fewest attempts, if any has a free slot."""
        shared = self.taking
        # No worker takes more than its share, or the first one to start would get everything; but while one
        # is replaced, the others take over its attempts. A server starts more workers instead.
        self._assembled = self._assembled or len(shared) >= self._config.workers
        fixed = self._config.serving is not None or not self._assembled
        hosts = self._config.workers if fixed else len(shared)
        free = (w for w in shared if len(w.attempts) * hosts < self._config.slots)
        return min(free, key=lambda w: len(w.attempts), default=None)

    def find_grown(
        self, residual: Mapping[int, int], least: int, successor: SuccessorStart
    ) -> WorkerEntry | None:
        """Return the worker with most memory of ended attempts, if replacing it now is worthwhile.

        `residual` has these bytes by worker: living attempts would use theirs on any worker.
        """
        busy = self.draining or (successor is SuccessorStart.FIRST and self.outgoing)
        grown = [w for w in self.living if w.state in TAKING_STATES and residual.get(w.number, 0) >= least]
        return None if busy else max(grown, key=lambda w: residual[w.number], default=None)
