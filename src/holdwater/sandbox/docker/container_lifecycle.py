"""Manages the container of an attempt from its first use to its removal, and then the next one.

Callers may be cancelled while they wait. Tasks owned by `ContainerLifecycle` therefore create, limit and
remove the container, so that no half-created one is forgotten. `sandbox.py` decides how it is created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ...core.errors import AttemptError
from ...docker.client import DockerClient, DockerError
from .container import AttemptContainer, remove_container
from .spec import LEAST_MEMORY
from .watch import ContainerWatch

CLOSING = 10.0  # seconds
RENEWING = 120.0  # seconds to remove a container before the next: the attempt waits for a busy daemon
SLACK = 1.25  # lowest limit that is set, as a multiple of the memory in use

ContainerMaker = Callable[[str], Coroutine[Any, Any, AttemptContainer]]  # takes the container's name


class ContainerLifecycle:
    """Owns at most one container at a time."""

    def __init__(self, client: DockerClient, name: str, watch: ContainerWatch) -> None:
        self.leftovers: list[str] = []  # containers that could not be removed; a handful at most
        self._client = client
        self._prefix = name
        self._watch = watch
        self._count = 0
        self._making: asyncio.Task[AttemptContainer] | None = None  # awaited by `end`
        self._allowing: asyncio.Task[None] | None = None  # awaited by `end`

    @property
    def begun(self) -> bool:
        return self._making is not None

    async def ensure_container(self, make: ContainerMaker) -> AttemptContainer:
        """Return the container; create it if there is none."""
        if self._making is None:
            self._count += 1
            self._making = asyncio.ensure_future(make(f"{self._prefix}-{self._count}"))
        return await asyncio.shield(self._making)

    def allow(self) -> None:
        """Apply the current memory limit to the container."""
        if self._making is not None and (self._allowing is None or self._allowing.done()):
            self._allowing = asyncio.ensure_future(self._apply_limit(self._making))

    async def end(self, seconds: float = CLOSING) -> None:
        """Remove the container within `seconds`; record a failure in `leftovers`."""
        making, self._making = self._making, None
        if making is None:
            return
        name = f"{self._prefix}-{self._count}"
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait([task for task in (making, self._allowing) if task])
                self._watch.end()
                await remove_container(self._client, name, seconds)
        except TimeoutError:
            self.leftovers.append(f"not removed within {seconds:.0f} s: container {name}")
        except DockerError as error:
            self.leftovers.append(f"not removed: container {name}: {error.message}")
        finally:
            for task in (making, self._allowing):
                _discard_task(task)
            self._allowing = None

    async def _apply_limit(self, making: asyncio.Task[AttemptContainer]) -> None:
        try:
            container = await asyncio.shield(making)
            held = 0
            while (wanted := self._choose_limit()) and wanted != held:  # the limit may have changed meanwhile
                await container.allow(wanted)
                held = wanted
        except (DockerError, AttemptError):
            return  # the container keeps its limit

    def _choose_limit(self) -> int:
        """Return the limit to set: not so low that the memory in use would be killed."""
        wanted, group = self._watch.limits.memory_limit or 0, self._watch.group
        if group and wanted < (group.memory_limit() or wanted):
            wanted = max(wanted, int(group.memory_in_use() * SLACK))
        return max(LEAST_MEMORY, wanted)


def _discard_task(task: asyncio.Task[AttemptContainer] | asyncio.Task[None] | None) -> None:
    """Cancel a task that is not done, or mark the exception of a finished one as retrieved."""
    if task is not None and not task.done():
        task.cancel()
    elif task is not None and not task.cancelled():
        task.exception()
