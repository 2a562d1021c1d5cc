"""Holds a place on the sandbox server for each attempt before it starts: no time limit runs meanwhile.

A place is memory, disk and the images of one sandbox. While the server is gone, no attempt is admitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from ...core.config import RunConfig
from ...core.errors import AttemptInterrupted, RunStopped, SandboxFailed
from ...core.failures import MOST_OUTAGES, OUTAGES, SERVER, double_delay
from ...core.policy import LONGEST_BACKOFF
from ...core.records import AttemptFailure
from ...core.sandbox_kind import ProvisionSite, SandboxProvision
from ...core.sandbox_protocol import AnyWork, CallDone, EndGroup, HoldPlace, ReleasePlace, SandboxCall
from ...governor.leases import AttemptLeases
from ...image.docker.image_store import name_build_log
from ...rollout.periodic_task import PeriodicTask
from ...sandbox.remote.connection import RemoteConnection, TakePiece
from ..conductor.admission import ImageRequest
from ..conductor.run_tasks import PendingNotes
from ..conductor.scheduler import AttemptScheduler
from .remote_images import RemoteImages
from .remote_kind import find_access

SERVER_LOST = "server.lost"  # an event: the server was lost while an attempt waited for a place
LOOK_SECONDS = 0.5
RELEASE_SECONDS = 5.0  # for the last releases, at the end of a run
PAUSE = 1.0  # seconds before a place is requested again from a server that is being stopped


class RemoteSupply(SandboxProvision):
    """Opened around one run. Implements `ImageSupply`."""

    def __init__(self, site: ProvisionSite) -> None:
        self._config: RunConfig = site.config
        self._access = find_access(site.config, site.environment)
        self._ledger = site.ledger
        self._note = PendingNotes()
        self._connection = RemoteConnection(self._access, reaches_gateway=False)
        self._images = RemoteImages(
            site.config, site.environment, site.logs, self._note, partial(self._call, 0)
        )
        self._logs = site.logs
        self._followed: set[str] = set()  # contexts whose build one attempt follows; bound: the concurrency
        self._releases: set[asyncio.Task[None]] = set()  # bound: the run's concurrency
        self._gone_since: float | None = None
        self._stack = AsyncExitStack()
        self.provided = msgspec.to_builtins(self._access)
        self.images = self

    async def __aenter__(self) -> RemoteSupply:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._note.write, self._ledger)
            await stack.enter_async_context(self._connection)
            await stack.enter_async_context(self._images)
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
        outages = 0
        while True:
            try:
                return await self._request_place(attempt, wanted)
            except AttemptInterrupted as error:
                if error.kind not in OUTAGES:  # the server is being stopped
                    await asyncio.sleep(PAUSE)
                    continue
                outages += 1
                self._note(SERVER_LOST, error.message)
                if outages >= MOST_OUTAGES:
                    raise make_waiting_error(error, outages) from None
                await asyncio.sleep(double_delay(self._config.backoff, outages, LONGEST_BACKOFF))

    def release(self, attempt: int, failure: AttemptFailure | None = None) -> None:
        self._spawn(self._settle(attempt, ReleasePlace()))

    def end_group(self, group: int) -> None:
        self._spawn(self._settle(0, EndGroup(group=group)))

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
            leases.release(SERVER)
            return
        problem = f"no connection to the sandbox server: {self._connection.problem or 'not yet connected'}"
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            leases.hold(SERVER)
            self._note("server.gone", problem)
        elif time.monotonic() - self._gone_since > self._config.disk_patience:
            run.stop(RunStopped(problem, "start it again, then `holdwater resume`"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _settle(self, attempt: int, work: ReleasePlace | EndGroup) -> None:
        try:
            await self._call(attempt, work)
        except AttemptInterrupted:
            pass  # the place or the group ends with the session that held it

    async def _call(
        self,
        attempt: int,
        work: AnyWork,
        content: AsyncIterable[bytes] | None = None,
        take: TakePiece | None = None,
    ) -> CallDone:
        session = await self._connection.join_session(None)
        return await session.call(SandboxCall(run=self._config.id, attempt=attempt, work=work), content, take)

    async def _finish_releases(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_SECONDS)
        for task in self._releases:
            task.cancel()

    def _make_request(self, wanted: ImageRequest) -> HoldPlace:
        return HoldPlace(
            id=wanted.id,
            start=wanted.start,
            grader=wanted.grader,
            limits=self._config.limits.with_overrides(wanted.limits).scale_by(wanted.scale),
            group=wanted.group,
            members=wanted.members,
        )

    async def _request_place(self, attempt: int, wanted: ImageRequest) -> dict[str, str]:
        work = self._make_request(await self._images.locate(wanted))
        build = work.start.build
        if build is None or build in self._followed:
            done = await self._call(attempt, work)
        else:
            self._followed.add(build)
            try:
                done = await self._call(attempt, work, take=partial(self._append_log, build))
            finally:
                self._followed.discard(build)
        found = msgspec.convert(done.result, dict[str, str])
        pairs = ((wanted.start, work.start), (wanted.grader, work.grader))
        return {
            near.key: found[far.key]
            for near, far in pairs
            if near is not None and far is not None and far.key in found
        }

    async def _append_log(self, build: str, piece: bytes) -> None:
        """Write the output of the server's build to this run's logs."""
        with (self._logs / name_build_log(build)).open("ab") as log:
            log.write(piece)


def make_waiting_error(error: AttemptInterrupted, outages: int) -> SandboxFailed:
    """Return the error of an attempt for which the server was lost too often while it waited for a place."""
    message = f"the sandbox server was lost {outages} times before it gave a place: {error.message}"
    return SandboxFailed(message, "see the log of the server", kind=error.kind, again=False)
