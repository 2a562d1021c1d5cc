"""Faults on purpose: an exception or a hang at a named stage of an attempt, so many times and no more.

`Fault.enclose` puts them around what an attempt opens, `Fault.before` in front of a function of a suite or an
agent. Nothing is patched: a run is given the faulty thing in the place of the sound one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from types import TracebackType
from typing import Any

CALLS = ("run", "read", "write", "furnish", "mark", "salvage", "restore")
STAGES = ("open", "close", *CALLS)  # of a sandbox; a gateway session has the first two
POLL = 0.02  # seconds between two looks of a stubborn hang at whether it is released


class Manner(StrEnum):
    """How a stage goes wrong."""

    RAISE = "raise"
    HANG = "hang"  # until it is cancelled; in a thread, until it is released
    STUBBORN = "stubborn"  # until it is released, whoever cancels it


class Injected(Exception):
    """What a fault raises: no error of ours, so that nothing knows it."""


class Fault:
    """Goes wrong at `stage`, for example `sandbox.close`, the first `times` times that it is reached."""

    def __init__(self, stage: str, manner: Manner, times: int = 1) -> None:
        self.stage = stage
        self.manner = manner
        self.struck = 0
        self._times = times
        self._lock = threading.Lock()
        self._released = threading.Event()

    def release(self) -> None:
        """Let everything that hangs go on."""
        self._released.set()

    def enclose(
        self, name: str, manager: AbstractAsyncContextManager[Any]
    ) -> AbstractAsyncContextManager[Any]:
        """`manager`, going wrong at this fault's stage: `<name>.open`, `<name>.close` or `<name>.<call>`."""
        return _Enclosed(self, name, manager)

    def before(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, plain or `async`, going wrong before it does anything."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def struck(*args: Any, **kwargs: Any) -> Any:
                await self.strike(stage)
                return await function(*args, **kwargs)

            return struck

        @functools.wraps(function)
        def blocked(*args: Any, **kwargs: Any) -> Any:
            self.block(stage)
            return function(*args, **kwargs)

        return blocked

    async def strike(self, stage: str) -> None:
        """Go wrong if this is the stage and there are times left; for code on an event loop."""
        if not self._due(stage):
            return
        if self.manner is Manner.RAISE:
            raise Injected(f"injected at {stage}")
        while not self._released.is_set():
            try:
                await asyncio.sleep(POLL)
            except asyncio.CancelledError:
                if self.manner is Manner.HANG:
                    raise

    def block(self, stage: str) -> None:
        """`strike`, for code in a thread."""
        if not self._due(stage):
            return
        if self.manner is Manner.RAISE:
            raise Injected(f"injected at {stage}")
        self._released.wait()

    def _due(self, stage: str) -> bool:
        with self._lock:
            if stage != self.stage or self.struck >= self._times:
                return False
            self.struck += 1
            return True


class _Enclosed:
    """A context manager whose opening, closing and calls go wrong."""

    def __init__(self, fault: Fault, name: str, manager: AbstractAsyncContextManager[Any]) -> None:
        self._fault = fault
        self._name = name
        self._manager = manager

    async def __aenter__(self) -> Any:
        await self._fault.strike(f"{self._name}.open")
        opened = await self._manager.__aenter__()
        calls = self._fault.stage.removeprefix(f"{self._name}.") in CALLS
        return _Faulty(self._fault, self._name, opened) if calls else opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # What is really open is closed first: a fault in a test must not leave a process behind.
        closed = await self._manager.__aexit__(kind, error, trace)
        await self._fault.strike(f"{self._name}.close")
        return closed


class _Faulty:
    """A sandbox whose calls go wrong."""

    def __init__(self, fault: Fault, name: str, opened: Any) -> None:
        self._fault = fault
        self._name = name
        self._opened = opened

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._opened, attribute)
        return self._fault.before(f"{self._name}.{attribute}", found) if attribute in CALLS else found
