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
from ..core.errors import ImageFailed
from ..core.records import Start, Verdict
from ..ledger.ledger import Ledger
from ..rollout.duty import Duty
from .config import Environment
from .dock import Dock, Levers
from .governor import Governor
from .notes import Notes
from .supply import Supply


class Provision:
    """One run's, opened around it; a `scheduler.Provider`."""

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
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def containers(self) -> Containers:
        return self._dock.containers

    async def need(self, starts: Sequence[Start]) -> int:
        return await self.supply.need(self._named(starts))

    async def hold(self, attempt: int, starts: Sequence[Start]) -> dict[str, str]:
        await self._dock.provide(starts)
        named = self._named(starts)
        found = await self.supply.hold(attempt, named)
        return {start.key: found[name.key] for start, name in zip(starts, named, strict=True)}

    def release(self, attempt: int) -> None:
        self.supply.release(attempt)

    def expect(self, starts: Sequence[Start]) -> None:
        self.supply.expect([start for start in starts if start.key or self._config.image])

    def settled(self, verdict: Verdict) -> None:
        self._dock.settled(verdict)

    def duties(self, levers: Levers, governor: Governor) -> Sequence[Duty]:
        return (*self._dock.duties(levers), *self.supply.duties(governor), self._note.duty())

    def _named(self, starts: Sequence[Start]) -> list[Start]:
        """The same, each with an image: the run's own where it names none."""
        default = self._config.image
        if default is None and not all(start.key for start in starts):
            raise ImageFailed(
                "the instance names no image", "`--image` gives one to all that name none", kind="none", again=False
            )
        return [start if start.key else msgspec.structs.replace(start, image=default) for start in starts]
