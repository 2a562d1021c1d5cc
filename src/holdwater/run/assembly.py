"""The fleet of a build: each attempt makes one image, on the conductor's own loop.

What an engine does is in `image/`; what surrounds a build, its layer and its daemon, in `images.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from ..core.errors import ImageFailed, as_failure, let_go
from ..core.failures import daemon_died, interrupted
from ..core.image import Engine, Image, Made
from ..core.records import Attempt, Failure, Grade, Instance, Phase, Times, Verdict
from ..rollout.wire import Done, Job
from .daemon import Daemon
from .fleet import Census, Emit, Use

LEAVE_SECONDS = 60.0  # what builds that are interrupted get to clean up

_images = msgspec.msgpack.Decoder(Instance)


class Living:
    """One image that is being made; a `core.image.Progress`."""

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
    """Hosts builds; a `Governed` fleet without workers."""

    def __init__(
        self,
        engine: Engine,
        logs: Path,
        token: int,
        timeout: float,
        emit: Emit,
        daemon: Daemon | None = None,  # through which they are made
    ) -> None:
        self._engine = engine
        self._logs = logs
        self._token = token
        self._timeout = timeout
        self._emit = emit
        self._daemon = daemon
        self._living: dict[int, Living] = {}  # bound: the run's concurrency

    async def __aenter__(self) -> ImageFleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for attempt in list(self._living):
            self.interrupt(attempt, interrupted("the run is over"))
        if tasks := [one.task for one in self._living.values() if one.task is not None]:
            await asyncio.wait(tasks, timeout=LEAVE_SECONDS)

    async def start(self, job: Job) -> None:
        living = self._living[job.attempt.id] = Living(job.attempt)
        image = image_in(_images.decode(job.payload))
        living.task = asyncio.get_running_loop().create_task(self._make(living, image))

    def interrupt(self, attempt: int, failure: Failure) -> None:
        living = self._living.get(attempt)
        if living is not None and living.task is not None and not living.reason:
            living.reason = failure.message
            living.task.cancel()

    def give_up(self, attempt: int) -> str:
        living = self._living.pop(attempt, None)
        if living is None or living.task is None:
            return "nowhere to be found"
        living.task.cancel()
        return f"in {living.doing} for {living.seconds:.0f} s"

    def census(self) -> Census:
        phases = Counter(living.doing for living in self._living.values())
        uses = {attempt: Use(disk=living.bytes) for attempt, living in self._living.items()}
        return Census(workers=0, phases=dict(phases), uses=uses)

    # There is no worker whose memory could be governed.

    @property
    def news(self) -> int:
        return sum(living.bytes for living in self._living.values())

    def allow(self, attempt: int, memory: int) -> None:
        return

    def permit(self, leases: Mapping[int, int], room: int) -> None:
        return

    def trim(self) -> str:
        return ""

    def recycle(self, least: int, *, at_once: bool) -> str:
        return ""

    async def _make(self, living: Living, image: Image) -> None:
        """Make one image, whatever happens; its verdict is the last that is heard of it."""
        attempt = living.attempt.id
        made: Made | None = None
        failure: Failure | None = None
        died = self._daemon.watch.since() if self._daemon else None
        try:
            try:
                made = await self._made(living, image)
            except Exception as error:  # boundary: one image that fails never stops the others  # noqa: BLE001
                failure = as_failure(error, ImageFailed, Phase.ACTING)
                let_go(error)
                if died and died():
                    failure = await self._explain(failure)
        except asyncio.CancelledError:
            failure = interrupted(living.reason or "the run is over")
        if self._living.pop(attempt, None) is None:
            return  # given up on: its verdict has been told
        self._emit(
            Done(
                verdict=Verdict(
                    attempt=attempt,
                    token=self._token,
                    failure=failure,
                    grade=Grade(passed=True, score=1.0, detail=str(made.how)) if made else None,
                    answer=msgspec.json.encode(made).decode() if made else None,
                    times=Times(acting=living.seconds),
                )
            )
        )

    async def _explain(self, failure: Failure) -> Failure:
        """The failure of an image whose daemon died: nobody's fault, once the daemon is back."""
        assert self._daemon is not None
        try:
            await self._daemon.await_return()
        except TimeoutError:
            return failure
        return daemon_died()

    async def _made(self, living: Living, image: Image) -> Made:
        log = self._logs / f"{living.attempt.id:06d}.build.log"
        try:
            async with asyncio.timeout(self._timeout):
                made = await self._engine.make(image, log, living)
        except TimeoutError:
            where = f"`{image.name}`: not made within {self._timeout:g} s, in {living.doing}"
            raise ImageFailed(where, "give it more with `--timeout`", kind="timeout") from None
        return msgspec.structs.replace(made, seconds=round(living.seconds, 3))


def instance_of(image: Image) -> Instance:
    """An image as an instance of the ledger."""
    data = msgspec.to_builtins(image)
    return Instance(id=image.name, data={name: data[name] for name in data if name != "name"})


def image_in(instance: Instance) -> Image:
    return msgspec.convert({"name": instance.id, **instance.data}, Image)
