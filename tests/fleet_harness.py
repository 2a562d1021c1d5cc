"""A real fleet of worker processes without its run: the test is the scheduler, and hears all its news."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.command_runner import SOURCE
from tests.wait_bounds import stretch

from holdwater.core.config import RunConfig, ServingConfig
from holdwater.core.records import Attempt, Instance, MiB, Verdict
from holdwater.core.worker_events import ReplacementRequested, SuccessorStart
from holdwater.ledger.directory import RunDirectory
from holdwater.rollout.worker_protocol import (
    AttemptDone,
    AttemptJob,
    EventNoted,
    MemberWaiting,
    WorkerSetup,
    WorkerUnfit,
)
from holdwater.run.fleet.interface import FleetUpdate
from holdwater.run.fleet.local import LocalFleet

ROOM = 1 << 40
LEASE = 40 * MiB
# An instance's id says what its attempt does; `HERE` is put before it.
SUITE = """
import asyncio
import functools
import operator
import os
import time
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)
trouble = (HERE / "trouble").read_text() if (HERE / "trouble").exists() else ""
if trouble == "dies":
    os.write(2, b"the licence server is down")
    os._exit(1)
if trouble == "refuses":
    raise ImportError("the licence server is down")
if trouble == "hangs":
    time.sleep(1e9)


async def solve(instance, sandbox, model):
    word, _, more = instance.id.partition(" ")
    if word == "wait":
        while not (HERE / more).exists():
            await asyncio.sleep(0.02)
    if word == "sleep":
        time.sleep(1e9)
    if word == "compute":  # one call in C, which holds the interpreter all the while
        late = functools.partial(operator.lt, time.monotonic() + float(more))
        next(filter(late, iter(time.monotonic, None)))
    return os.getpid()


suite = hw.Suite(name="fleet", instances=list, grade=lambda instance, sandbox, answer: True)
"""


class Scene:
    """What the scheduler's end knows."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.fleet: LocalFleet
        self.news: list[FleetUpdate] = []
        self._attempts = 0

    async def start(self, name: str, group: int | None = None, alone: bool = False) -> int:
        """Have an attempt at the instance `name` placed; its number."""
        self._attempts += 1
        attempt = Attempt(
            id=self._attempts, instance=1, sample=self._attempts, number=1, alone=alone, group=group
        )
        payload = msgspec.msgpack.encode(Instance(id=name))
        await self.fleet.start(AttemptJob(attempt=attempt, payload=payload, lease=LEASE))
        return attempt.id

    def verdicts(self) -> dict[int, Verdict]:
        return {said.verdict.attempt: said.verdict for said in self.news if isinstance(said, AttemptDone)}

    async def verdict(self, attempt: int, seconds: float = 20.0) -> Verdict:
        await until("its verdict", lambda: attempt in self.verdicts(), seconds)
        return self.verdicts()[attempt]

    async def pid(self, attempt: int) -> int:
        """The process that an attempt was in, as it answers when it has passed."""
        verdict = await self.verdict(attempt)
        assert verdict.grade is not None and verdict.grade.passed, verdict
        assert verdict.answer is not None
        pid: int = json.loads(verdict.answer)
        return pid

    async def score(self, group: int, members: Sequence[int]) -> set[int]:
        """Have the members settled when all of them wait; the processes that they were in."""
        await until("all wait", lambda: self._arrived() >= set(members))
        self.fleet.score_group(group, together=False)
        return {await self.pid(member) for member in members}

    def retire(self, attempt: int) -> int:
        """Have the worker of an attempt drain; its process."""
        worker = self.fleet._plan.workers.find_host(attempt)
        assert worker is not None
        self.fleet._handle(
            ReplacementRequested(worker=worker.number, reason="a test says so", successor=SuccessorStart.NOW)
        )
        return self.fleet._processes[worker.number].pid

    def hosts(self) -> dict[int, int]:
        """Process -> attempts that it hosts."""
        workers = self.fleet._plan.workers
        return {
            process.pid: len(workers[number].attempts) for number, process in self.fleet._processes.items()
        }

    def _arrived(self) -> set[int]:
        return {said.attempt for said in self.news if isinstance(said, MemberWaiting)}

    def noted(self, kind: str) -> list[str]:
        return [said.message for said in self.news if isinstance(said, EventNoted) and said.kind == kind]

    def unfit(self) -> list[WorkerUnfit]:
        return [said for said in self.news if isinstance(said, WorkerUnfit)]

    def go(self, name: str) -> None:
        """Let those who wait for `name` go on."""
        (self.place / name).touch()


@asynccontextmanager
async def fleet(place: Path, *, serving: ServingConfig | None = None, **config: Any) -> AsyncIterator[Scene]:
    """A fleet, from its first moment on."""
    suite = place / "suite.py"
    suite.write_text(f"HERE = {str(place)!r}\n{SUITE}")
    directory = RunDirectory.create(place / "run")
    run = RunConfig(
        id=f"fleet-{os.getpid()}-{place.name}",
        suite=f"{suite}:suite",
        agent=f"{suite}:solve",
        created=0.0,
        version="0",
        serving=serving or ServingConfig(),
        **config,
    )
    scene = Scene(place)
    welcome = WorkerSetup(config=run, directory=str(directory.path), worker=0, token=1, path=os.defpath)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    async with LocalFleet(welcome, scene.news.append, env) as scene.fleet:
        yield scene


async def until(what: str, true: Callable[[], Any], seconds: float = 20.0) -> float:
    """Wait until `true()`; how many seconds that took."""
    begun, bound = time.monotonic(), stretch(seconds)
    while not true():
        assert time.monotonic() - begun < bound, f"waited for {bound:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - begun
