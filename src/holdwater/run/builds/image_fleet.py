"""The fleet of a build: each attempt makes one image, on the conductor's own loop.

The engines are in `image/`; the layer and the daemon of a build are in `build_run.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from ...core.config import RunConfig
from ...core.errors import ImageFailed, as_failure, drop_tracebacks
from ...core.failures import make_daemon_failure, make_interrupt_failure
from ...core.image import ImageEngine, ImageTarget, PublishedImage
from ...core.records import Attempt, AttemptFailure, AttemptPhase, Grade, Instance, PhaseTimes, Verdict
from ...governor.resource_reading import AttemptUse, FleetCensus
from ...rollout.worker_protocol import AttemptDone, AttemptJob, StandingMessage
from ..fleet.interface import Emit
from .build_daemon import BuildDaemon

LEAVE_SECONDS = 60.0  # for interrupted builds to clean up

_instance_decoder = msgspec.msgpack.Decoder(Instance)


class ImageProgress:
    """One image in the making. Implements `core.image.BuildProgress`."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.began = time.monotonic()
        self.doing = "base"
        self.bytes = 0
        self.reason = ""  # why it was interrupted, if it was
        self.task: asyncio.Task[None] | None = None

    def phase(self, name: str) -> None:
        self.doing = name

    def disk(self, bytes_: int) -> None:
        self.bytes = bytes_

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class ImageFleet:
    """Hosts image builds. Implements `GovernedFleet` without workers."""

    def __init__(
        self,
        engine: ImageEngine,
        logs: Path,
        token: int,
        timeout: float,
        emit: Emit,
        daemon: BuildDaemon | None = None,  # the daemon that makes the images
    ) -> None:
        self._engine = engine
        self._logs = logs
        self._token = token
        self._timeout = timeout
        self._emit = emit
        self._daemon = daemon
        self._living: dict[int, ImageProgress] = {}  # bound: the run's concurrency

    async def __aenter__(self) -> ImageFleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for attempt in list(self._living):
            self.interrupt(attempt, make_interrupt_failure("the run is over"))
        if tasks := [one.task for one in self._living.values() if one.task is not None]:
            await asyncio.wait(tasks, timeout=LEAVE_SECONDS)

    async def start(self, job: AttemptJob) -> None:
        living = self._living[job.attempt.id] = ImageProgress(job.attempt)
        image = instance_to_image(_instance_decoder.decode(job.payload))
        living.task = asyncio.get_running_loop().create_task(self._run_build(living, image))

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        living = self._living.get(attempt)
        if living is not None and living.task is not None and not living.reason:
            living.reason = failure.message
            living.task.cancel()

    def give_up(self, attempt: int) -> str:
        living = self._living.pop(attempt, None)
        if living is None or living.task is None:
            return "(no such attempt)"
        living.task.cancel()
        return f"in {living.doing} for {living.seconds:.0f} s"

    def score_group(self, group: int, together: bool) -> None:
        raise AssertionError("image builds form no groups")

    def take_census(self) -> FleetCensus:
        phases = Counter(living.doing for living in self._living.values())
        uses = {attempt: AttemptUse(disk=living.bytes) for attempt, living in self._living.items()}
        return FleetCensus(workers=0, phases=dict(phases), uses=uses)

    def announce(self, message: StandingMessage) -> None:
        return  # a build calls no model: a running one finishes

    def change(self, config: RunConfig) -> None:
        return

    # There is no worker whose memory could be governed.

    @property
    def memory_version(self) -> int:
        return sum(living.bytes for living in self._living.values())

    def allow_memory(self, attempt: int, memory: int) -> None:
        return

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        return

    def trim(self) -> str:
        return ""

    def recycle(self, least: int, *, at_once: bool) -> str:
        return ""

    async def _run_build(self, living: ImageProgress, image: ImageTarget) -> None:
        """Make one image and emit exactly one verdict, also on failure or cancellation."""
        attempt = living.attempt.id
        made: PublishedImage | None = None
        failure: AttemptFailure | None = None
        died = self._daemon.watch.make_death_check() if self._daemon else None
        try:
            try:
                made = await self._make_image(living, image)
            except Exception as error:  # boundary: a failed image never stops the others  # noqa: BLE001
                failure = as_failure(error, ImageFailed, AttemptPhase.ACTING)
                drop_tracebacks(error)
                if died and died():
                    failure = await self._explain(failure)
        except asyncio.CancelledError:
            failure = make_interrupt_failure(living.reason or "the run is over")
        if self._living.pop(attempt, None) is None:
            return  # given up on: its verdict is already recorded
        self._emit(
            AttemptDone(
                verdict=Verdict(
                    attempt=attempt,
                    token=self._token,
                    failure=failure,
                    grade=Grade(passed=True, score=1.0, detail=str(made.how)) if made else None,
                    answer=msgspec.json.encode(made).decode() if made else None,
                    times=PhaseTimes(acting=living.seconds),
                )
            )
        )

    async def _explain(self, failure: AttemptFailure) -> AttemptFailure:
        """Return the failure of an image whose daemon died: without blame, once the daemon is back."""
        assert self._daemon is not None
        try:
            await self._daemon.await_return()
        except TimeoutError:
            return failure
        return make_daemon_failure()

    async def _make_image(self, living: ImageProgress, image: ImageTarget) -> PublishedImage:
        log = self._logs / f"{living.attempt.id:06d}.build.log"
        try:
            async with asyncio.timeout(self._timeout):
                made = await self._engine.make(image, log, living)
        except TimeoutError:
            where = f"`{image.name}`: not made within {self._timeout:g} s, in {living.doing}"
            raise ImageFailed(where, "raise the limit with `--timeout`", kind="timeout") from None
        return msgspec.structs.replace(made, seconds=round(living.seconds, 3))


def image_to_instance(image: ImageTarget) -> Instance:
    """Return an image as an instance of the ledger."""
    data = msgspec.to_builtins(image)
    return Instance(id=image.name, data={name: data[name] for name in data if name != "name"})


def instance_to_image(instance: Instance) -> ImageTarget:
    return msgspec.convert({"name": instance.id, **instance.data}, ImageTarget)
