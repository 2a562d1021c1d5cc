"""Holds a place on the sandbox server for each attempt before it starts: no time limit runs meanwhile.

A place is memory, disk and the images of one sandbox. While the server is gone, no attempt is admitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

import msgspec

from ...core.config import RunConfig
from ...core.errors import AttemptInterrupted, ImageFailed, RunStopped
from ...core.records import AttemptFailure, SandboxSpec
from ...core.sandbox_kind import ProvisionSite, SandboxProvision
from ...core.sandbox_protocol import AnyWork, CallDone, HoldPlace, ReleasePlace, SandboxCall
from ...governor.leases import AttemptLeases
from ...rollout.periodic_task import PeriodicTask
from ...sandbox.remote.connection import SERVER_GONE, RemoteConnection
from ...sandbox.remote.sandbox import make_build_error
from ..conductor.admission import ImageRequest
from ..conductor.run_tasks import PendingNotes
from ..conductor.scheduler import AttemptScheduler
from .remote_kind import find_access

LOOK_SECONDS = 0.5
RELEASE_SECONDS = 5.0  # for the last releases, at the end of a run
PAUSE = 1.0  # seconds before a place is requested again


class RemoteSupply(SandboxProvision):
    """Opened around one run. Implements `ImageSupply`."""

    def __init__(self, site: ProvisionSite) -> None:
        self._config: RunConfig = site.config
        self._access = find_access(site.config, site.environment)
        self._ledger = site.ledger
        self._note = PendingNotes()
        self._connection = RemoteConnection(self._access, reaches_gateway=False)
        self._releases: set[asyncio.Task[None]] = set()  # bound: the run's concurrency
        self._gone_since: float | None = None
        self._stack = AsyncExitStack()
        self.provided = msgspec.to_builtins(self._access)
        self.images = self

    async def __aenter__(self) -> RemoteSupply:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._note.write, self._ledger)
            await stack.enter_async_context(self._connection)
            stack.push_async_callback(self._finish_releases)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def estimate_need(self, wanted: ImageRequest) -> int:
        return 0  # images are on the server's disk

    async def hold(self, attempt: int, wanted: ImageRequest) -> dict[str, str]:
        """Wait for a place on the server, also while the server is gone; return the daemon's images."""
        if wanted.grouped:
            raise ImageFailed(
                "groups are scored together, and a sandbox server cannot hold places for whole groups",
                "use sandboxes of this machine",
                kind="group",
                again=False,
            )
        work = self._make_request(wanted)
        while True:
            try:
                done = await self._call(attempt, work)
            except AttemptInterrupted:  # the server is gone, or is being stopped
                await asyncio.sleep(PAUSE)
                continue
            found = msgspec.convert(done.result, dict[str, str])
            named = found.get(work.start.key)
            return found if named is None else {**found, wanted.start.key: named}

    def release(self, attempt: int, failure: AttemptFailure | None = None) -> None:
        task = asyncio.ensure_future(self._release(attempt))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def expect(self, wanted: ImageRequest) -> None:
        """Do nothing: the server fetches images when a place is requested."""

    def stop(self) -> None:
        """Do nothing: nothing is expected."""

    def periodic_tasks(self, run: AttemptScheduler, leases: AttemptLeases) -> Sequence[PeriodicTask]:
        def look() -> Coroutine[Any, Any, None]:
            return self._look(run, leases)

        return (PeriodicTask("sandbox server", LOOK_SECONDS, look), self._note.periodic_task(self._ledger))

    async def _look(self, run: AttemptScheduler, leases: AttemptLeases) -> None:
        """Check the connection; without it, hold admission, and stop the run after `disk_patience`."""
        if self._connection.connected:
            if self._gone_since is not None:
                self._note("server.back", f"after {time.monotonic() - self._gone_since:.0f} s")
                self._gone_since = None
            leases.release(SERVER_GONE)
            return
        problem = f"no connection to the sandbox server: {self._connection.problem or 'not yet connected'}"
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            leases.hold(SERVER_GONE)
            self._note("server.gone", problem)
        elif time.monotonic() - self._gone_since > self._config.disk_patience:
            run.stop(RunStopped(problem, "start it again, then `holdwater resume`"))

    async def _release(self, attempt: int) -> None:
        try:
            await self._call(attempt, ReleasePlace())
        except AttemptInterrupted:
            pass  # the place ends with the session that held it

    async def _call(self, attempt: int, work: AnyWork) -> CallDone:
        session = await self._connection.join_session(None)
        return await session.call(SandboxCall(run=self._config.id, attempt=attempt, work=work))

    async def _finish_releases(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_SECONDS)
        for task in self._releases:
            task.cancel()

    def _make_request(self, wanted: ImageRequest) -> HoldPlace:
        limits = self._config.limits.with_overrides(wanted.limits).scale_by(wanted.scale)
        grader = None if wanted.grader is None else self._resolve_start(wanted.grader)
        return HoldPlace(id=wanted.id, start=self._resolve_start(wanted.start), grader=grader, limits=limits)

    def _resolve_start(self, start: SandboxSpec) -> SandboxSpec:
        """Return the spec with the run's network, and with its image if it names none."""
        if start.image is None and start.build is not None:
            raise make_build_error(start.build)
        network = start.network or self._config.network
        image = start.image or self._config.image
        return msgspec.structs.replace(start, image=image, network=network, build=None)
