"""What attempts in containers need before a worker can have them: the networks and images of their starts.

Networks and orphans are `dock.py`'s, images `supply.py`'s: this puts them together for one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import msgspec

from ..core.config import RunConfig
from ..core.containers import Containers
from ..core.errors import AttemptError, ImageFailed
from ..core.failures import DAEMON
from ..core.records import Failure, Where
from ..docker.client import DockerError
from ..ledger.ledger import Ledger
from ..rollout.duty import Duty
from .config import Environment
from .dock import Dock, Levers
from .governor import Governor
from .notes import Notes
from .scheduler import Scheduler
from .supply import Supply
from .wanted import Wanted


class Provision:
    """One run's, opened around it; a `wanted.Supplies`."""

    def __init__(self, config: RunConfig, environment: Environment, ledger: Ledger, logs: Path) -> None:
        self._config = config
        self._environment = environment
        self._logs = logs
        self._note = Notes(ledger)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Provision:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._note.write)
            self._dock = await stack.enter_async_context(Dock(self._config, self._environment, self._note))
            supply = Supply(self._config, self._environment, self._dock.client, self._note, self._logs)
            self.supply = await stack.enter_async_context(supply)
            stack.push_async_callback(self._dock.empty)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def containers(self) -> Containers:
        return self._dock.containers

    async def need(self, wanted: Wanted) -> int:
        return await self.supply.need(self._named(wanted))

    async def hold(self, attempt: int, wanted: Wanted) -> dict[str, str]:
        """The images of an attempt, once its networks are there; a daemon that dies is waited for."""
        named = self._named(wanted)
        starts = [start for start in (wanted.start, wanted.grader) if start is not None]
        while True:
            died = self._dock.watch.since()
            try:
                await self._dock.provide(starts)
                found = await self.supply.hold(attempt, named)
            except (AttemptError, DockerError):
                if not died():
                    raise
                await self._dock.returned()
                continue
            return {**found, wanted.start.key: found[named.start.key]}

    def release(self, attempt: int, failure: Failure | None = None) -> None:
        self.supply.release(attempt)
        if failure is not None and failure.where is Where.INTERRUPTED and failure.kind == DAEMON:
            self._dock.suspect()

    def expect(self, wanted: Wanted) -> None:
        if wanted.start.key or self._config.image:
            self.supply.expect(self._named(wanted))

    def stop(self) -> None:
        self.supply.stop()

    def duties(self, run: Scheduler, governor: Governor) -> Sequence[Duty]:
        levers = Levers(governor.hold, governor.release, run.stop, run.living)
        return (*self._dock.duties(levers), *self.supply.duties(governor), self._note.duty())

    def _named(self, wanted: Wanted) -> Wanted:
        """The same with an image: the run's own where it names none."""
        if wanted.start.key:
            return wanted
        if self._config.image is None:
            hint = "`--image` gives one to all that name none"
            raise ImageFailed("the instance names no image", hint, kind="none", again=False)
        start = msgspec.structs.replace(wanted.start, image=self._config.image)
        return msgspec.structs.replace(wanted, start=start)
