"""A server's workers: as many as are needed, a group on one, and the truth about those that die or hang."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.fleet_harness import ROOM, Scene, fleet, until
from tests.wait_bounds import stretch

from holdwater.core.config import ServingConfig
from holdwater.core.records import FailureOrigin, MiB
from holdwater.governor.memory_control import NEW_WORKER
from holdwater.run.fleet.interface import FleetCondition


def ready(scene: Scene, count: int) -> bool:
    return scene.fleet.condition().ready == count


@contextmanager
def crowd(pid: int) -> Iterator[None]:
    """Leave the main thread of a process a quarter of a processor, or less, inside of `with`."""
    free = os.sched_getaffinity(pid)
    burning = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{min(free)}}})\nwhile True: pass"]
    burners = [subprocess.Popen(burning, start_new_session=True) for _ in range(3)]
    os.sched_setaffinity(pid, {min(free)})
    try:
        yield
    finally:
        os.sched_setaffinity(pid, free)
        for burner in burners:
            burner.kill()
            burner.wait()


async def test_workers_come_with_the_load_and_go_without_losing_a_rollout(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=3, concurrency=6, serving=ServingConfig(quiet=0.3)) as scene:
        await until("the least", lambda: ready(scene, 1))
        async with asyncio.TaskGroup() as group:
            starts = [group.create_task(scene.start("wait first")) for _ in range(3)]
            starts += [group.create_task(scene.start("wait second")) for _ in range(3)]
            await until("the first has its share", lambda: list(scene.hosts().values()) == [2])

            scene.fleet.adjust_workers(2, 4, room=0)
            assert scene.fleet.condition().wanted == 2, "as far as they have leased themselves"
            scene.fleet.adjust_workers(2, 4, room=ROOM)
            assert scene.fleet.condition().wanted == 3

        attempts = [start.result() for start in starts]
        assert list(scene.hosts().values()) == [2, 2, 2]
        scene.go("first")

        def calm(running: int) -> FleetCondition:
            scene.fleet.adjust_workers(running, 0, room=ROOM)
            return scene.fleet.condition()

        for attempt in attempts[:3]:
            await scene.pid(attempt)
        await until("one drains, with what it hosts", lambda: calm(3).draining == 1)
        assert all(attempt not in scene.verdicts() for attempt in attempts[3:])
        scene.go("second")
        for attempt in attempts[3:]:
            await scene.pid(attempt)
        await until(
            "the least is left", lambda: calm(0) == FleetCondition(ready=1, starting=0, draining=0, wanted=1)
        )
        assert len(scene.hosts()) == 1
        assert scene.noted("worker.lost") == []


async def test_a_group_is_on_one_worker_also_when_that_drains(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=2, concurrency=4, serving=ServingConfig(least_workers=2)) as scene:
        await until("both", lambda: ready(scene, 2))
        members = [await scene.start("wait go", group=7) for _ in range(4)]
        assert sorted(scene.hosts().values()) == [0, 4], "beyond its share of 2"
        other = await scene.start("wait go", group=8)
        assert sorted(scene.hosts().values()) == [1, 4]

        home = scene.retire(members[0])
        assert scene.fleet.condition().draining == 1
        members.append(await scene.start("wait go", group=7))
        scene.go("go")

        assert await scene.score(7, members) == {home}
        assert home not in await scene.score(8, [other])
        await until("another in its place", lambda: ready(scene, 2))
        await until("it left when it was empty", lambda: scene.fleet.condition().draining == 0)


async def test_too_many_draining_workers_empty_the_oldest_and_its_group_continues_elsewhere(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, workers=1, concurrency=4) as scene:
        members = [await scene.start("wait go", group=7) for _ in range(2)]
        oldest = scene.retire(members[0])
        others = [await scene.start("wait go", group=8) for _ in range(2)]
        assert list(scene.hosts().values()) == [2, 2], "it drains, and another takes what comes"

        draining = scene.retire(others[0])
        again = [await scene.start("wait go", group=7) for _ in range(2)]

        for member in members:
            failure = (await scene.verdict(member)).failure
            assert failure is not None and failure.where is FailureOrigin.INTERRUPTED
        scene.go("go")
        assert not await scene.score(7, again) & {oldest, draining}
        assert await scene.score(8, others) == {draining}


async def test_suspects_of_a_group_share_a_worker_of_their_own(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=1, concurrency=4) as scene:
        await until("it", lambda: ready(scene, 1))
        neighbour = await scene.start("wait go")
        async with asyncio.TaskGroup() as group:
            starts = [group.create_task(scene.start("wait go", group=7, alone=True)) for _ in range(3)]
        assert sorted(scene.hosts().values()) == [1, 3]
        scene.go("go")

        pids = await scene.score(7, [start.result() for start in starts])
        assert len(pids) == 1 and await scene.pid(neighbour) not in pids
        await until("it is gone with the last", lambda: not pids & scene.hosts().keys())
        assert scene.fleet.condition() == FleetCondition(ready=1, starting=0, draining=0, wanted=1)


async def test_a_killed_worker_is_reported_and_replaced_at_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=2, concurrency=4, serving=ServingConfig(least_workers=2)) as scene:
        await until("both", lambda: ready(scene, 2))
        attempts = [await scene.start("wait go") for _ in range(4)]
        victim = next(iter(scene.hosts()))

        os.kill(victim, signal.SIGKILL)

        assert await until("health tells", lambda: scene.fleet.condition().lost == 1) < stretch(1.0)
        await until("another one starts", lambda: scene.fleet.condition().starting == 1 or ready(scene, 2))
        assert scene.fleet.condition() in (
            FleetCondition(ready=1, starting=1, draining=0, wanted=2, lost=1),
            FleetCondition(ready=2, starting=0, draining=0, wanted=2, lost=1),
        )
        lost = {a: v.failure for a, v in scene.verdicts().items()}
        assert len(lost) == 2 and lost.keys() < set(attempts)
        assert all(
            f is not None and (f.where, f.kind) == (FailureOrigin.WORKER, "lost") for f in lost.values()
        )
        again = [await scene.start("wait go") for _ in range(2)]
        scene.go("go")
        for attempt in {*attempts, *again} - lost.keys():
            assert await scene.pid(attempt) != victim


async def test_a_worker_leaves_room_for_a_worker_that_starts(tmp_path: Path) -> None:
    room = 512 * MiB
    async with fleet(tmp_path, workers=2, concurrency=4, serving=ServingConfig(least_workers=2)) as scene:
        await until("both", lambda: ready(scene, 2))
        for _ in range(4):
            await scene.start("wait go")
        victim, other = scene.hosts()
        os.kill(victim, signal.SIGKILL)
        await until("another one starts", lambda: scene.fleet.condition().starting == 1)

        scene.fleet.permit_growth({}, room)
        beside_start, _ = resource.prlimit(other, resource.RLIMIT_DATA)
        await until("both again", lambda: ready(scene, 2))
        scene.fleet.permit_growth({}, 2 * room)  # divided by two
        alone, _ = resource.prlimit(other, resource.RLIMIT_DATA)
        scene.go("go")

    assert alone - beside_start > NEW_WORKER - 16 * MiB, "the rest is what the worker itself grew by"


@pytest.mark.parametrize(
    ("trouble", "reason", "starting"),
    [
        ("dies", "exited with 1: the licence server is down", 60.0),
        pytest.param("refuses", "the licence server is down", 60.0, marks=pytest.mark.proof),
        pytest.param("hangs", "not ready after", 6.0, marks=pytest.mark.proof),
        pytest.param("no log", "cannot be started", 60.0, marks=pytest.mark.proof),
    ],
)
async def test_a_worker_that_cannot_start_is_reported_soon_while_others_serve(
    tmp_path: Path, trouble: str, reason: str, starting: float
) -> None:
    serving = ServingConfig(least_workers=2, starting=starting)
    async with fleet(tmp_path, workers=2, concurrency=4, serving=serving) as scene:
        await until("both", lambda: ready(scene, 2))
        (tmp_path / "trouble").write_text(trouble)
        if trouble == "no log":
            (tmp_path / "run" / "logs").rename(tmp_path / "run" / "elsewhere")

        os.kill(next(iter(scene.hosts())), signal.SIGKILL)

        within = 6 + (starting if trouble == "hangs" else 0)
        await until("it is told", lambda: reason in scene.fleet.condition().unfit, within)
        assert ready(scene, 1) and scene.fleet.condition().wanted == 2
        await scene.pid(await scene.start("pass"))
        (tmp_path / "trouble").unlink()
        if trouble == "no log":
            (tmp_path / "run" / "elsewhere").rename(tmp_path / "run" / "logs")
        await until("it could be started", lambda: ready(scene, 2), seconds=10)
        assert scene.fleet.condition().unfit == ""
        assert len(scene.noted("worker.unfit")) == 1 and scene.unfit() == []


@pytest.mark.parametrize(
    ("trouble", "tries"), [("refuses", 1), pytest.param("dies", 3, marks=pytest.mark.proof)]
)
async def test_a_server_that_never_had_a_worker_stops_with_the_reason(
    tmp_path: Path, trouble: str, tries: int
) -> None:
    (tmp_path / "trouble").write_text(trouble)
    async with fleet(tmp_path, workers=2) as scene:
        await until("it gives up", scene.unfit)
        assert "the licence server is down" in scene.unfit()[0].message
        assert scene.unfit()[0].exit_status in (2, 4)
        assert len(list((tmp_path / "run" / "logs").glob("worker-*.log"))) == tries


async def test_a_loop_that_sleeps_is_found_and_its_neighbour_goes_on_elsewhere(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=1, concurrency=2, silence=2.0) as scene:
        await until("it", lambda: ready(scene, 1))
        neighbour, guilty = await scene.start("wait go"), await scene.start("sleep")

        took = await until("it is found", lambda: len(scene.verdicts()) == 2)

        assert took < stretch(6)
        for attempt in (guilty, neighbour):
            failure = scene.verdicts()[attempt].failure
            assert failure is not None and failure.kind == "lost", "nobody is to blame yet"
            assert "hung: no sign of life for" in failure.message
        scene.go("go")
        assert await scene.pid(await scene.start("wait go"))


@pytest.mark.parametrize(
    ("seconds", "silence"),
    [(3.5, 2.0), pytest.param(20.0, 3.0, marks=pytest.mark.proof)],
)
async def test_c_code_that_holds_the_interpreter_is_not_taken_for_dead(
    tmp_path: Path, seconds: float, silence: float
) -> None:
    async with fleet(tmp_path, workers=1, concurrency=2, silence=silence) as scene:
        await until("it", lambda: ready(scene, 1))
        neighbour = await scene.start("wait go")

        (worker,) = scene.hosts()
        with crowd(worker):
            busy = await scene.start(f"compute {seconds}")
            verdict = await scene.verdict(busy, seconds + 20)

        assert verdict.times.acting > seconds - 0.5, (
            "neither that nor a wait for the processor is a suspension"
        )
        scene.go("go")
        assert await scene.pid(neighbour) == await scene.pid(busy)
        assert scene.fleet.condition().lost == 0


@pytest.mark.proof
async def test_c_code_that_holds_the_interpreter_beyond_the_bound_is(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=1, concurrency=1, silence=1.5) as scene:
        await until("it", lambda: ready(scene, 1))

        busy = await scene.start("compute 60")

        failure = (await scene.verdict(busy)).failure
        assert failure is not None and "hung: no sign of life for" in failure.message


async def test_who_is_recycled_goes_on_until_another_is_ready(tmp_path: Path) -> None:
    seen: set[int] = set()
    async with fleet(tmp_path, workers=1, concurrency=2, recycle_after=3) as scene:
        await until("it", lambda: ready(scene, 1))

        async def watch() -> None:
            while len(seen) < 2:
                assert scene.fleet.condition().ready >= 1, "there is never nobody"
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            while len(seen) < 2:
                seen.add(await scene.pid(await scene.start("pass")))
        assert scene.fleet.condition().recycled == 1
        await until("they are gone", lambda: len(scene.hosts()) == 1)
        assert scene.noted("worker.lost") == []
        assert not any(psutil.pid_exists(pid) for pid in seen - scene.hosts().keys())
