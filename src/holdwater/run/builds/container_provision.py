"""Provides what attempts in containers need before a worker starts them: networks and images.

`sandbox_daemon.py` handles networks and orphans, `docker_supply.py` images; this module joins them for one
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType

import msgspec

from ...core.errors import AttemptError, ImageFailed
from ...core.failures import DAEMON
from ...core.records import AttemptFailure, FailureOrigin
from ...core.sandbox_kind import ProvisionSite, SandboxProvision
from ...docker.client import DockerError
from ...governor.leases import AttemptLeases
from ...rollout.periodic_task import PeriodicTask
from ..conductor.admission import ImageRequest
from ..conductor.run_tasks import PendingNotes
from ..conductor.scheduler import AttemptScheduler
from .docker_supply import DockerSupply
from .sandbox_daemon import DaemonControls, SandboxDaemon


class ContainerProvision(SandboxProvision):
    """Opened around one run. Implements `ImageSupply`."""

    def __init__(self, site: ProvisionSite) -> None:
        self._config = site.config
        self._environment = site.environment
        self._logs = site.logs
        self._ledger = site.ledger
        self._note = PendingNotes()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ContainerProvision:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._note.write, self._ledger)
            self._dock = await stack.enter_async_context(
                SandboxDaemon(self._config, self._environment, self._note)
            )
            supply = DockerSupply(self._config, self._environment, self._dock.client, self._note, self._logs)
            self.store = self._supply = await stack.enter_async_context(supply)
            self.images = self
            stack.push_async_callback(self._dock.remove_containers)
            self.provided = msgspec.to_builtins(self._dock.containers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def estimate_need(self, wanted: ImageRequest) -> int:
        return await self._supply.estimate_need(self._name_image(wanted))

    async def hold(self, attempt: int, wanted: ImageRequest) -> dict[str, str]:
        """Hold the images of an attempt once its networks exist; if the daemon dies, wait and try again."""
        named = self._name_image(wanted)
        starts = [start for start in (wanted.start, wanted.grader) if start is not None]
        while True:
            died = self._dock.watch.make_death_check()
            try:
                await self._dock.provide_networks(starts)
                found = await self._supply.hold(attempt, named)
            except (AttemptError, DockerError):
                if not died():
                    raise
                await self._dock.await_return()
                continue
            return {**found, wanted.start.key: found[named.start.key]}

    def release(self, attempt: int, failure: AttemptFailure | None = None) -> None:
        self._supply.release(attempt)
        if failure is not None and failure.where is FailureOrigin.INTERRUPTED and failure.kind == DAEMON:
            self._dock.suspect()

    def end_group(self, group: int) -> None:
        """Do nothing: images are held by attempt."""

    def expect(self, wanted: ImageRequest) -> None:
        if wanted.start.key or self._config.image:
            self._supply.expect(self._name_image(wanted))

    def stop(self) -> None:
        self._supply.stop()

    def periodic_tasks(self, run: AttemptScheduler, leases: AttemptLeases) -> Sequence[PeriodicTask]:
        levers = DaemonControls(leases.hold, leases.release, run.stop, run.list_unsettled)
        return (
            *self._dock.periodic_tasks(levers),
            *self._supply.periodic_tasks(leases),
            self._note.periodic_task(self._ledger),
        )

    def _name_image(self, wanted: ImageRequest) -> ImageRequest:
        """Return the request with an image: the run's `--image` where the instance names none."""
        if wanted.start.key:
            return wanted
        if self._config.image is None:
            hint = "`--image` sets the image of instances that name none"
            raise ImageFailed("the instance names no image", hint, kind="none", again=False)
        start = msgspec.structs.replace(wanted.start, image=self._config.image)
        return msgspec.structs.replace(wanted, start=start)
