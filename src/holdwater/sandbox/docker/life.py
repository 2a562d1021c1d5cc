"""The container of an attempt, from its first use to its removal, and the next one after it.

Whoever waits for it may be cancelled: tasks that belong to this make it, change its limit and remove it, so
that none is left half made that nobody knows of. What it is made from is decided in `sandbox.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ...core.errors import AttemptError
from ...docker.client import DockerClient, DockerError
from .container import Container, remove
from .spec import LEAST_MEMORY
from .watch import ContainerWatch

CLOSING = 10.0  # seconds
RENEWING = 120.0  # seconds to remove one before the next: its attempt goes on, and waits for a busy daemon
SLACK = 1.25  # times what a container uses: a lower limit than this is not set

Make = Callable[[str], Coroutine[Any, Any, Container]]  # takes its name


class ContainerLife:
    """At most one container at a time."""

    def __init__(self, client: DockerClient, name: str, watch: ContainerWatch) -> None:
        self.leftovers: list[str] = []  # what could not be removed, a handful at most
        self._client = client
        self._prefix = name
        self._watch = watch
        self._count = 0
        self._making: asyncio.Task[Container] | None = None  # awaited by `end`
        self._allowing: asyncio.Task[None] | None = None  # awaited by `end`

    @property
    def begun(self) -> bool:
        return self._making is not None

    async def container(self, make: Make) -> Container:
        """The container; it is made if there is none."""
        if self._making is None:
            self._count += 1
            self._making = asyncio.ensure_future(make(f"{self._prefix}-{self._count}"))
        return await asyncio.shield(self._making)

    def allow(self) -> None:
        """Have the container held to what the limits are now."""
        if self._making is not None and (self._allowing is None or self._allowing.done()):
            self._allowing = asyncio.ensure_future(self._hold(self._making))

    async def end(self, seconds: float = CLOSING) -> None:
        """Remove it, in so many seconds; what is left then is told."""
        making, self._making = self._making, None
        if making is None:
            return
        name = f"{self._prefix}-{self._count}"
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait([task for task in (making, self._allowing) if task])
                self._watch.end()
                await remove(self._client, name, seconds)
        except TimeoutError:
            self.leftovers.append(f"not removed within {seconds:.0f} s: container {name}")
        except DockerError as error:
            self.leftovers.append(f"not removed: container {name}: {error.message}")
        finally:
            for task in (making, self._allowing):
                _dismiss(task)
            self._allowing = None

    async def _hold(self, making: asyncio.Task[Container]) -> None:
        try:
            container = await asyncio.shield(making)
            held = 0
            while (wanted := self._wanted()) and wanted != held:  # it may have changed again meanwhile
                await container.allow(wanted)
                held = wanted
        except (DockerError, AttemptError):
            return  # it keeps what it has

    def _wanted(self) -> int:
        """Not so low that what it uses now would be killed."""
        wanted, group = self._watch.limits.held_to or 0, self._watch.group
        if group and wanted < (group.memory_limit() or wanted):
            wanted = max(wanted, int(group.use() * SLACK))
        return max(LEAST_MEMORY, wanted)


def _dismiss(task: asyncio.Task[Container] | asyncio.Task[None] | None) -> None:
    """It is over, or is not waited for any longer."""
    if task is not None and not task.done():
        task.cancel()
    elif task is not None and not task.cancelled():
        task.exception()
