"""Limits the time of a phase of an attempt. `attempt.py` handles the failure when the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from ..core.errors import LimitReached
from ..core.records import AttemptPhase


class PhaseLimit:
    """Like `asyncio.timeout`, but the allowed time may grow while it runs.

    `suspended` returns for how many seconds the process did not run: they do not count.
    It is a class because a nested function that arms itself again would be a reference cycle, which would
    keep the attempt alive.
    """

    def __init__(
        self, allowed: Callable[[], float], phase: AttemptPhase, suspended: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._allowed = allowed
        self._phase = phase
        self._loop = asyncio.get_running_loop()
        self._suspended = suspended
        self._start = self._loop.time() - suspended()
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._arm()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise LimitReached(f"{self._phase} took longer than {self._allowed():g} s") from late

    def _arm(self) -> None:
        self._handle = self._loop.call_at(self._end, self._check)

    @property
    def _end(self) -> float:
        return self._start + self._suspended() + self._allowed()

    def _check(self) -> None:
        if self._loop.time() >= self._end:
            self._timeout.reschedule(self._loop.time())
        else:
            self._arm()
