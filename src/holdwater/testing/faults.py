"""Injects faults: an exception or a hang at a named stage of an attempt, a fixed number of times.

`StageFault.enclose` wraps a resource that an attempt opens, `StageFault.wrap_function` a function of a
suite or an agent. Nothing is patched: a run receives the faulty object in place of the sound one.
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
POLL = 0.02  # seconds between two checks of a stubborn hang for its release


class FaultMode(StrEnum):
    """The way in which a stage fails."""

    RAISE = "raise"
    HANG = "hang"  # until it is cancelled; in a thread, until it is released
    STUBBORN = "stubborn"  # until it is released; it ignores cancellation


class InjectedFault(Exception):
    """The exception of a fault. It is no `HoldwaterError`, so that no code handles it specially."""


class StageFault:
    """Fails at `stage`, for example `sandbox.close`, the first `times` times that it is reached."""

    def __init__(self, stage: str, manner: FaultMode, times: int = 1) -> None:
        self.stage = stage
        self.manner = manner
        self.struck = 0
        self._times = times
        self._lock = threading.Lock()
        self._released = threading.Event()

    def release(self) -> None:
        """Let all hanging stages continue."""
        self._released.set()

    def enclose(
        self, name: str, manager: AbstractAsyncContextManager[Any]
    ) -> AbstractAsyncContextManager[Any]:
        """Wrap `manager` so that it fails at this stage: `<name>.open`, `<name>.close` or `<name>.<call>`."""
        return _FaultyManager(self, name, manager)

    def wrap_function(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`, plain or `async`, so that it fails before it does anything."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def strike_first(*args: Any, **kwargs: Any) -> Any:
                await self.strike(stage)
                return await function(*args, **kwargs)

            return strike_first

        @functools.wraps(function)
        def block_first(*args: Any, **kwargs: Any) -> Any:
            self.block(stage)
            return function(*args, **kwargs)

        return block_first

    async def strike(self, stage: str) -> None:
        """Fail if this is the stage and failures are left; for code on an event loop."""
        if not self._due(stage):
            return
        if self.manner is FaultMode.RAISE:
            raise InjectedFault(f"injected at {stage}")
        while not self._released.is_set():
            try:
                await asyncio.sleep(POLL)
            except asyncio.CancelledError:
                if self.manner is FaultMode.HANG:
                    raise

    def block(self, stage: str) -> None:
        """Fail like `strike`, for code in a thread."""
        if not self._due(stage):
            return
        if self.manner is FaultMode.RAISE:
            raise InjectedFault(f"injected at {stage}")
        self._released.wait()

    def _due(self, stage: str) -> bool:
        with self._lock:
            if stage != self.stage or self.struck >= self._times:
                return False
            self.struck += 1
            return True


class _FaultyManager:
    """A context manager whose opening, closing and calls can fail."""

    def __init__(self, fault: StageFault, name: str, manager: AbstractAsyncContextManager[Any]) -> None:
        self._fault = fault
        self._name = name
        self._manager = manager

    async def __aenter__(self) -> Any:
        await self._fault.strike(f"{self._name}.open")
        opened = await self._manager.__aenter__()
        calls = self._fault.stage.removeprefix(f"{self._name}.") in CALLS
        return _FaultySandbox(self._fault, self._name, opened) if calls else opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # The real resource is closed first: a fault in a test must not leave a process behind.
        closed = await self._manager.__aexit__(kind, error, trace)
        await self._fault.strike(f"{self._name}.close")
        return closed


class _FaultySandbox:
    """A sandbox whose calls can fail."""

    def __init__(self, fault: StageFault, name: str, opened: Any) -> None:
        self._fault = fault
        self._name = name
        self._opened = opened

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._opened, attribute)
        return self._fault.wrap_function(f"{self._name}.{attribute}", found) if attribute in CALLS else found
