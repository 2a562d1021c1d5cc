"""A real host in this process, without its run: the test is its conductor, and hears all that it says."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.config import Network, RunConfig
from holdwater.core.exchange import Exchange
from holdwater.core.records import Attempt, AttemptFailure, Instance, Limits, Verdict
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import read_exchanges
from holdwater.rollout.host import AttemptHost
from holdwater.rollout.worker_protocol import (
    AttemptDone,
    AttemptJob,
    EventNoted,
    MemberWaiting,
    ScoreMembers,
    ToConductor,
    WorkerSetup,
)
from holdwater.testing.leaks import count_objects

M = TypeVar("M", bound=ToConductor)
GROUP = 5
LIMITS = Limits(setup=20.0, acting=20.0, grading=20.0)


async def polite(request: dict[str, Any]) -> dict[str, Any]:
    """A model: it says what it was asked."""
    message = {"role": "assistant", "content": f"so: {request['messages'][-1]['content']}"}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11},
    }


async def passing(instance: Instance, sandbox: Any, answer: Any) -> bool:
    return True


def suite(**parts: Any) -> hw.Suite:
    return hw.Suite(**{"name": "s", "instances": list, "grade": passing, **parts})


class Hosted:
    """What the conductor's side knows of a host."""

    def __init__(self, directory: RunDirectory) -> None:
        self.heard: list[ToConductor] = []
        self.host: AttemptHost = None  # type: ignore[assignment]
        self.tasks: asyncio.TaskGroup = None  # type: ignore[assignment]
        self._directory = directory
        self._news = asyncio.Event()
        self._attempts = 0

    def hear(self, message: ToConductor) -> None:
        self.heard.append(message)
        self._news.set()

    def start(self, instance: Instance | None = None, *, group: int | None = None, **attempt: Any) -> int:
        self._attempts += 1
        number = self._attempts
        fields = {"id": number, "instance": 1, "sample": number, "number": 1, "group": group, **attempt}
        payload = msgspec.msgpack.encode(instance or Instance(id="i"))
        self.host.start(AttemptJob(attempt=Attempt(**fields), payload=payload), self.tasks)
        return number

    def start_group(self, count: int, instance: Instance | None = None) -> list[int]:
        return [self.start(instance, group=GROUP) for _ in range(count)]

    def score(self, *, together: bool = True, group: int = GROUP) -> None:
        self.host.score(ScoreMembers(group=group, together=together))

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        self.host.interrupt(attempt, failure)

    async def arrived(self, *attempts: int) -> None:
        for attempt in attempts:
            await self.until(MemberWaiting, lambda said, attempt=attempt: said.attempt == attempt)  # type: ignore[misc]

    async def verdict(self, attempt: int) -> Verdict:
        return (await self.done(attempt)).verdict

    async def verdicts(self, attempts: list[int]) -> list[Verdict]:
        return [await self.verdict(attempt) for attempt in attempts]

    async def done(self, attempt: int) -> AttemptDone:
        return await self.until(AttemptDone, lambda said: said.verdict.attempt == attempt)

    async def until(self, kind: type[M], true: Callable[[M], bool]) -> M:
        async with asyncio.timeout(stretch(20)):
            while True:
                self._news.clear()
                for said in self.heard:
                    if isinstance(said, kind) and true(said):
                        return said
                await self._news.wait()

    def settled(self) -> set[int]:
        return {said.verdict.attempt for said in self.heard if isinstance(said, AttemptDone)}

    def noted(self) -> list[str]:
        return [said.kind for said in self.heard if isinstance(said, EventNoted)]

    def exchanges(self, attempt: int) -> list[Exchange]:
        return list(read_exchanges(self._directory, attempt))


@asynccontextmanager
async def hosting(
    place: Path,
    suite: hw.Suite,
    act: Callable[..., Any],
    policy: Callable[..., Any] | None = polite,
    limits: Limits = LIMITS,
) -> AsyncIterator[Hosted]:
    directory = RunDirectory.create(place / "run")
    hosted = Hosted(directory)
    config = RunConfig(
        id=f"{os.getpid()}-{place.name[-20:]}",  # its control groups are no other process's
        suite="s",
        agent="a",
        created=0.0,
        version="0",
        model="policy",
        limits=limits,
        network=Network.OPEN,
    )
    welcome = WorkerSetup(config=config, directory=str(directory.path), worker=1, token=7, path=os.defpath)
    agent = hw.Agent(name="a", act=act)
    async with (
        AttemptHost(welcome, hosted.hear, suite, agent, policy=policy).open() as hosted.host,
        asyncio.TaskGroup() as hosted.tasks,
    ):
        yield hosted


OF_AN_ATTEMPT = {
    "AttemptState",
    "Scope",
    "Session",
    "AttemptLog",
    "ProcessSandbox",
    "WaitingMember",
    "GroupScoring",
    "ChildSpawner",
}


@contextmanager
def uncollected() -> Iterator[Counter[str]]:
    """References alone decide what lives; what lived before."""
    gc.collect()
    gc.disable()
    try:
        yield count_objects()
    finally:
        gc.enable()
        gc.collect()


async def left_of(before: Counter[str], watched: Collection[object] = (), but: str = "") -> list[str]:
    """What is left of attempts, and of what was watched: threads of theirs end a moment after the verdict."""
    until = time.monotonic() + stretch(2.0)
    while True:
        left = [name for name in count_objects() - before if name.rpartition(".")[2] in OF_AN_ATTEMPT - {but}]
        left += [type(thing).__name__ for thing in watched]
        if not left or time.monotonic() > until:
            return left
        await asyncio.sleep(0.01)
