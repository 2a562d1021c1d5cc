"""Tracks a session's calls in flight, which closing it ends, and turns that its budget counts in advance."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from ..core.errors import AttemptOver


class ActiveCall:
    """Registers a call that closing its session ends. A class, because a generator costs more per call."""

    def __init__(self, calls: set[asyncio.Timeout], idle: asyncio.Event, *, closed: bool) -> None:
        self._calls = calls
        self._idle = idle
        self._closed = closed
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        if self._closed:
            raise AttemptOver("the attempt is over")
        await self._scope.__aenter__()
        self._calls.add(self._scope)
        self._idle.clear()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise AttemptOver("the attempt is over") from None
        finally:
            self._calls.discard(self._scope)
            if not self._calls:
                self._idle.set()


class UnrecordedTurn:
    """Registers a turn that is not in the record yet."""

    def __init__(self, unrecorded: set[asyncio.Task[Any] | None]) -> None:
        self._unrecorded = unrecorded
        self._task = asyncio.current_task()

    async def __aenter__(self) -> None:
        self._unrecorded.add(self._task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unrecorded.discard(self._task)
