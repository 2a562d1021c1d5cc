"""The fleet without processes: attempts live in the conductor itself. For notebooks and tests.

A hung thread cannot be killed here: it is left behind, and the process does not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from types import TracebackType

from ..core.authoring import Agent, Enclose, Suite
from ..rollout.host import Host
from ..rollout.logs import routed
from ..rollout.wire import Done, Job, Noted, Said, ToConductor, Welcome
from .fleet import Census, Emit


class InlineFleet:
    """One host, on the conductor's own loop."""

    def __init__(
        self, welcome: Welcome, emit: Emit, suite: Suite, agent: Agent, enclose: Enclose | None = None
    ) -> None:
        self._emit = emit
        self._host = Host(welcome, self._hear, suite, agent, enclose)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> InlineFleet:
        self._stack.enter_context(routed(lambda line: self._emit(Said(line=line))))
        await self._stack.enter_async_context(self._host.opened())
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for living in self._host.living():
            self._host.interrupt(living.attempt, "the run is over")
        await self._stack.aclose()

    async def start(self, job: Job) -> None:
        self._host.start(job, self._group)

    def interrupt(self, attempt: int, reason: str) -> None:
        self._host.interrupt(attempt, reason)

    def give_up(self, attempt: int) -> str:
        for living in self._host.living():
            if living.attempt == attempt:
                return f"in {living.phase} for {living.seconds:.0f} s"
        return "nowhere to be found"

    def census(self) -> Census:
        return Census(workers=0, phases=dict(Counter(str(living.phase) for living in self._host.living())))

    def _hear(self, message: ToConductor) -> None:
        if isinstance(message, Done) and message.tainted:
            note = "a thread of the attempt could not be ended and stays until the process exits"
            self._emit(Noted(kind="thread.left", message=note, attempt=message.verdict.attempt))
        self._emit(message)  # type: ignore[arg-type]
