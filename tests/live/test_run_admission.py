"""Attempts wait for their images before they start: with a real ledger, governor and scheduler."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.supply_harness import conducted
from tests.wait_bounds import stretch

from holdwater.core.errors import ImageFailed, RunInterrupted
from holdwater.core.records import AttemptFailure, Instance, SandboxSpec
from holdwater.rollout.worker_protocol import AttemptJob
from holdwater.run.conductor.admission import ImageRequest
from holdwater.run.conductor.scheduler import AttemptScheduler


class Pantry:
    """A supply that has everything at once, but for what a test keeps back."""

    def __init__(self, *broken: str, shut: bool = False) -> None:
        self.open = asyncio.Event()
        if not shut:
            self.open.set()
        self.asked = asyncio.Event()  # by two
        self.held: set[int] = set()
        self.seen: Counter[str] = Counter()
        self.expected: list[str] = []
        self.stopped = False
        self._broken = broken

    async def estimate_need(self, wanted: ImageRequest) -> int:
        return 1

    async def hold(self, attempt: int, wanted: ImageRequest) -> dict[str, str]:
        self.seen[wanted.id] += 1
        if self.seen.total() == 2:
            self.asked.set()
        await self.open.wait()
        if wanted.id in self._broken:
            raise ImageFailed(f"`{wanted.start.image}` cannot be pulled")
        self.held.add(attempt)
        return {start.key: f"local/{start.key}" for start in wanted.starts}

    def release(self, attempt: int, failure: AttemptFailure | None = None) -> None:
        self.held.discard(attempt)

    def end_group(self, group: int) -> None: ...

    def expect(self, wanted: ImageRequest) -> None:
        self.expected.append(wanted.id)

    def stop(self) -> None:
        self.stopped = True


def instances(count: int) -> list[Instance]:
    return [
        Instance(
            id=f"i{number}", start=SandboxSpec(image=f"image-{number}"), grader=SandboxSpec(image="grades")
        )
        for number in range(count)
    ]


async def test_an_attempt_has_its_images_until_it_is_settled(tmp_path: Path) -> None:
    pantry = Pantry()
    held: list[bool] = []

    async def act(job: AttemptJob) -> None:
        held.append(job.attempt.id in pantry.held)

    found = await conducted(tmp_path / "run", instances(12), pantry, act, concurrency=3)

    assert found.summary.outcomes == {"passed": 12} and found.error is None
    assert [job.images for job in found.jobs[:2]] == [
        {"grades": "local/grades", "image-0": "local/image-0"},
        {"grades": "local/grades", "image-1": "local/image-1"},
    ]
    assert held == [True] * 12 and pantry.held == set()
    assert pantry.expected == [f"i{number}" for number in range(12)]


async def test_an_unavailable_image_fails_its_attempt_and_is_tried_again(tmp_path: Path) -> None:
    pantry = Pantry("i1")

    found = await conducted(tmp_path / "run", instances(3), pantry, concurrency=3, retries=2)

    assert found.summary.outcomes == {"passed": 2, "image": 1}
    assert pantry.seen == {"i0": 1, "i1": 3, "i2": 1} and len(found.jobs) == 2
    assert pantry.held == set()


async def test_a_drain_ends_the_wait_for_images_without_a_record(tmp_path: Path) -> None:
    pantry = Pantry(shut=True)
    seen: list[dict[str, int]] = []

    def begun(scheduler: AttemptScheduler) -> None:
        async def drained() -> None:
            await pantry.asked.wait()
            seen.append(scheduler.waiting)
            assert scheduler.running == 0
            scheduler.drain()

        tasks.append(asyncio.get_running_loop().create_task(drained()))

    tasks: list[asyncio.Task[None]] = []
    async with asyncio.timeout(stretch(10)):
        found = await conducted(tmp_path / "run", instances(4), pantry, begun=begun, concurrency=2)
        await tasks[0]

    assert isinstance(found.error, RunInterrupted)
    assert seen and seen[0]["image"] == 2
    assert (found.summary.attempts, found.jobs, pantry.held, pantry.stopped) == (0, [], set(), True)


async def test_a_stop_ends_it_too(tmp_path: Path) -> None:
    pantry = Pantry(shut=True)
    tasks: list[asyncio.Task[None]] = []

    def begun(scheduler: AttemptScheduler) -> None:
        async def stopped() -> None:
            await pantry.asked.wait()
            scheduler.stop(ImageFailed("no daemon"))

        tasks.append(asyncio.get_running_loop().create_task(stopped()))

    async with asyncio.timeout(stretch(10)):
        found = await conducted(tmp_path / "run", instances(2), pantry, begun=begun, concurrency=2)
        await tasks[0]

    assert found.error is not None and found.error.message == "no daemon"
    assert pantry.held == set() and found.jobs == []
