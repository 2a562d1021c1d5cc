"""Lists the workers and the attempts they host. It only answers queries; `local.py` acts on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...core.config import RunConfig
from ...core.records import Attempt
from ...governor.resource_reading import FleetCensus
from .interface import sum_usage
from .process import WorkerProcess


class WorkerRoster:
    """Workers from exec to clean-up, oldest first."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._workers: dict[int, WorkerProcess] = {}  # bound: 2 x workers, and suspects' workers
        self._assembled = False  # all workers have been ready at once

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(tuple(self._workers.values()))

    def add(self, worker: WorkerProcess) -> None:
        self._workers[worker.number] = worker

    def remove(self, worker: WorkerProcess) -> None:
        del self._workers[worker.number]

    @property
    def share(self) -> int:
        """The number of attempts that each worker takes."""
        return -(-self._config.slots // max(1, self._config.workers))

    def host_of(self, attempt: int) -> WorkerProcess | None:
        return next((w for w in self if attempt in w.attempts), None)

    def place_for(self, attempt: Attempt) -> WorkerProcess | None:
        """Return the worker of its group, however loaded; else the freest worker, if any has a free slot."""
        return self.home_of(attempt.group) or self._freest()

    def home_of(self, group: int | None) -> WorkerProcess | None:
        """Return the group's worker: even a draining one takes its members, until it is emptied."""
        if group is None:
            return None
        return next((w for w in self if group in w.groups and w.open and not w.emptied), None)

    def alone_with(self, group: int | None) -> WorkerProcess | None:
        """Return the worker that was started for this group of suspects."""
        if group is None:
            return None
        return next(
            (w for w in self if w.solo and w.suspect_group == group and w.open and not w.draining), None
        )

    def _freest(self) -> WorkerProcess | None:
        shared = self.taking
        # No worker takes more than its share, or the first one to start would get everything; but while one
        # is replaced, the others take over its attempts. A server starts more workers instead.
        self._assembled = self._assembled or len(shared) >= self._config.workers
        fixed = self._config.serving is not None or not self._assembled
        hosts = self._config.workers if fixed else len(shared)
        free = (w for w in shared if len(w.attempts) * hosts < self._config.slots)
        return min(free, key=lambda w: len(w.attempts), default=None)

    @property
    def taking(self) -> list[WorkerProcess]:
        """Workers that take new attempts."""
        return [w for w in self if w.ready and w.open and not (w.draining or w.solo)]

    @property
    def starting(self) -> list[WorkerProcess]:
        return [w for w in self if not (w.ready or w.draining or w.solo)]

    @property
    def outgoing(self) -> list[WorkerProcess]:
        """Workers that drain as soon as their replacements are ready."""
        return [w for w in self if w.outgoing and not w.draining]

    @property
    def places(self) -> list[WorkerProcess]:
        """Workers that count towards the wanted number, so that no other is started in their place."""
        return [w for w in self if not w.solo and not (w.replaced if w.draining else w.outgoing)]

    def spare(self, wanted: int) -> list[WorkerProcess]:
        """Return the workers beyond the wanted number: first draining, then starting, then least loaded."""
        places = sorted(self.places, key=lambda w: (not w.draining, w.ready, len(w.attempts)))
        return places[: max(0, len(places) - wanted)]

    @property
    def ready_places(self) -> int:
        """The number of `places` whose workers are ready."""
        return sum(1 for w in self.places if w.ready and w.open and not w.draining)

    def take_census(self) -> FleetCensus:
        workers = [w for w in self if not w.gone]
        phases = Counter(str(living.phase) for w in workers for living in w.living)
        unsettled = (one for w in workers for one in w.living if one.attempt in w.attempts)
        return FleetCensus(
            workers=len(workers),
            draining=sum(1 for w in workers if w.draining),
            pids=tuple(w.pid for w in workers),
            lag=max((w.lag for w in workers), default=0.0),
            phases=dict(phases),
            usage=sum_usage(unsettled),
            uses={attempt: use for w in workers for attempt, use in w.uses().items()},
        )
