"""A busy worker is never trimmed, a quiet one gives its memory back, one that cannot be trimmed goes on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from statistics import median

import pytest
from tests.wait_bounds import stretch
from tests.worker_harness import Worker, needs, trimmed, working

from holdwater.core.records import MiB
from holdwater.rollout.worker_memory import LOOK_SECONDS, QUIET_LOOKS
from holdwater.rollout.worker_protocol import EventNoted, TrimMemory, WorkerHeartbeat
from holdwater.testing.scripted_model import ScriptedReply, serve_script

QUIET = QUIET_LOOKS * LOOK_SECONDS
NEAR = 24 * MiB  # above its base: what a worker that has worked needs more than one that has not
SUITE = """
import asyncio
import random
import time

import holdwater as hw

suite = hw.Suite(name="memory", instances=list, grade=lambda instance, sandbox, answer: True)
stays = []  # what keeps the allocator's pages from being all free


def grow(size):
    numbers = random.Random(size)
    held = []
    while size > 0:
        held.append(b"x" * numbers.randrange(600, 64_000))
        size -= len(held[-1])
    stays.extend(held[::100])


async def solve(instance, sandbox, model):
    word, _, count = instance.id.partition(" ")
    if word in ("grow", "wait"):
        grow(int(count) << 20)
    if word == "wait":
        await asyncio.sleep(600)
    if word == "talk":
        grow(100 << 20)
        until = time.monotonic() + float(count)
        while time.monotonic() < until:
            await model.chat([{"role": "user", "content": "x" * 20_000}])
    if word == "litter":
        await asyncio.sleep(0.02)
        litter()
    if word == "litters":
        for _ in range(int(count)):
            litter()
            await asyncio.sleep(0.05)
    if word == "stall":
        time.sleep(float(count))


def litter():
    cycle = {"bytes": b"x" * 30_000_000}
    cycle["itself"] = cycle
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "suite.py"
    file.write_text(SUITE)
    return file


async def test_a_worker_that_serves_calls_is_not_trimmed_and_lags_no_more(
    tmp_path: Path, suite: Path
) -> None:
    seconds = 2 * QUIET

    async with (
        serve_script(lambda request: ScriptedReply(text="so it is")) as url,
        working(tmp_path / "on", suite, url=url) as (on, trims),
        working(tmp_path / "off", suite, url=url, give_back="None") as (off, _),
    ):
        talks = [(worker, worker.start(f"talk {seconds}")) for worker in (on, off)]
        on.send(TrimMemory())  # and it is asked to, besides
        for worker, attempt in talks:
            done = await worker.done(attempt)
            assert done.verdict.failure is None, done
            assert done.verdict.exchanges > 2 * seconds / LOOK_SECONDS

        assert trimmed(trims) == 0
        with_it, without = median(lags(on)), median(lags(off))
        # Both ran at once: what disturbs one on this machine disturbs the other.
        assert with_it < 2 * without + 0.05, (lags(on), lags(off))
        await becomes_trimmed(trims, QUIET + 10)


def lags(worker: Worker) -> list[float]:
    return [beat.lag for beat in worker.all(WorkerHeartbeat) if beat.living]


async def becomes_trimmed(trims: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(trims, readable.set)
    try:
        async with asyncio.timeout(stretch(seconds)):
            await readable.wait()
    finally:
        loop.remove_reader(trims)


@pytest.mark.parametrize("allocator", ["glibc", "jemalloc"])
async def test_a_quiet_worker_is_back_near_its_base(tmp_path: Path, suite: Path, allocator: str) -> None:
    await comes_back(tmp_path, suite, allocator, "grow 150")


async def test_so_is_one_whose_attempts_only_wait(tmp_path: Path, suite: Path) -> None:
    await comes_back(tmp_path, suite, "glibc", "wait 150")


@pytest.mark.proof
@pytest.mark.parametrize("allocator", ["glibc", "jemalloc"])
async def test_a_worker_of_600_mib_is_back_near_its_base(tmp_path: Path, suite: Path, allocator: str) -> None:
    await comes_back(tmp_path, suite, allocator, "grow 600")


async def comes_back(place: Path, suite: Path, allocator: str, work: str) -> None:
    if reason := needs(allocator):
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    size = int(work.split()[1]) * MiB
    async with working(place / "run", suite, allocator=allocator) as (worker, trims):
        base = (await worker.next_beat()).rss

        worker.start(work)
        while worker.peak < base + size * 0.8:
            await worker.next_beat()
        await worker.back_at(base + NEAR + size // 50, 30)

        if allocator == "glibc":
            assert trimmed(trims) == 1
            told = await worker.until(EventNoted, lambda noted: noted.kind == "worker.trimmed")
            assert told.message.startswith("worker 7: gave back ")


@pytest.mark.parametrize("give_back", [pytest.param("raising", marks=pytest.mark.proof), "missing"])
async def test_a_failed_trim_is_counted_once_and_changes_nothing_else(
    tmp_path: Path, suite: Path, give_back: str
) -> None:
    async with working(tmp_path / "run", suite, give_back=give_back) as (worker, _):
        first = await worker.done(worker.start("grow 100"))
        while not worker.noted("trim.failed"):
            await worker.next_beat()
        worker.send(TrimMemory())
        for _ in range(QUIET_LOOKS + 2):
            await worker.next_beat()
        second = await worker.done(worker.start("grow 1"))

        assert len(worker.noted("trim.failed")) == 1
        assert first.verdict.grade == second.verdict.grade is not None
        assert not (first.tainted or second.tainted)


async def test_a_worker_that_has_not_grown_is_trimmed_only_when_asked(tmp_path: Path, suite: Path) -> None:
    async with working(tmp_path / "run", suite) as (worker, trims):
        for _ in range(QUIET_LOOKS + 2):
            await worker.next_beat()
        assert trimmed(trims) == 0

        worker.send(TrimMemory())

        await becomes_trimmed(trims, QUIET + 10)


async def test_the_cycles_of_attempts_are_collected_by_their_bytes(tmp_path: Path, suite: Path) -> None:
    async with working(tmp_path / "run", suite, give_back="None") as (worker, _):
        base = (await worker.next_beat()).rss

        for _ in range(20):
            await worker.done(worker.start("litter"))

        assert worker.peak < base + 200 * MiB  # of 600


async def test_the_cycles_of_an_attempt_that_lives_on_are_collected_too(tmp_path: Path, suite: Path) -> None:
    async with working(tmp_path / "run", suite, give_back="None") as (worker, _):
        base = (await worker.next_beat()).rss

        await worker.done(worker.start("litters 20"))

        assert worker.peak < base + 300 * MiB  # of 600


async def test_a_beat_carries_the_longest_lag_since_the_last(tmp_path: Path, suite: Path) -> None:
    async with working(tmp_path / "run", suite) as (worker, _):
        await worker.done(worker.start("stall 0.4"))
        await worker.until(WorkerHeartbeat, lambda beat: beat.lag > 0.3)

        after = [await worker.next_beat() for _ in range(2)]

        assert after[-1].lag < 0.3
