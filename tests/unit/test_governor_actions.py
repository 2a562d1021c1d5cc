"""What the governor does with what it measures, with a kernel made of files and a fleet that takes notes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from holdwater.core.config import RunConfig
from holdwater.core.records import Attempt, AttemptFailure, LimitOverrides, Limits, MiB, Verdict
from holdwater.governor.gate import Lease
from holdwater.governor.leases import FLOOR, AttemptLeases
from holdwater.governor.memory_control import PATIENCE, MemoryControl
from holdwater.governor.meter import ResourceMeter
from holdwater.governor.resource_reading import AttemptUse, FleetCensus, ResourceBound
from holdwater.governor.run_usage import MemoryFootprint, RunUsage

BASE = 100  # MiB of conductor and workers


class Kernel:
    """A container with a limit on memory, as the kernel would tell it."""

    def __init__(self, place: Path, limit: int) -> None:
        self._group = place / "cgroup/memory/box"
        self._group.mkdir(parents=True)
        (place / "proc/self").mkdir(parents=True)
        (place / "proc/self/cgroup").write_text("4:memory:/box\n")
        (place / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
        (self._group / "memory.limit_in_bytes").write_text(str(limit * MiB))
        (self._group / "memory.usage_in_bytes").write_text(str(limit * MiB))
        self.uses(BASE)
        self.meter = ResourceMeter(
            {"run": place, "scratch": place}, proc=place / "proc", cgroups=place / "cgroup"
        )

    def uses(self, mib: int) -> None:
        (self._group / "memory.stat").write_text(f"total_rss {mib * MiB}\ntotal_shmem 0\n")


class Fleet:
    """Attempts that use what a test says."""

    def __init__(self) -> None:
        self.uses: dict[int, AttemptUse] = {}
        self.allowed: dict[int, int] = {}
        self.did: list[str] = []
        self.left = 0
        self.memory_version = 0

    def take_census(self) -> FleetCensus:
        return FleetCensus(workers=2, uses=dict(self.uses))

    def allow_memory(self, attempt: int, memory: int) -> None:
        self.allowed[attempt] = memory

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        self.room = room

    def trim(self) -> str:
        self.did.append("trim")
        return "trimmed"

    def recycle(self, least: int, *, at_once: bool) -> str:
        if self.left < least:
            return ""
        self.did.append("recycle")
        return "recycled"


class Footprint(MemoryFootprint):
    """A conductor of a fixed size: the process of these tests has the size that other tests left it."""

    def read(self, census: FleetCensus) -> int:
        self.base = BASE * MiB
        return self.base + census.sandboxes


class Scene:
    def __init__(self, place: Path, limit: int = 500, **config: object) -> None:
        self.kernel = Kernel(place, limit)
        self.fleet = Fleet()
        self.preempted: list[int] = []
        self.spared: set[int] = set()
        self.notes: list[tuple[str, str]] = []
        settings = RunConfig(
            id="r",
            suite="s",
            agent="a",
            created=0.0,
            version="",
            **{"concurrency": 64, **config},  # type: ignore[arg-type]
        )
        self.usage = RunUsage(self.kernel.meter, Footprint())
        self.leases = AttemptLeases(settings, self.usage, lambda: ResourceBound("disk", 1 << 40, 0, ""))
        self.control = MemoryControl(
            settings,
            self.usage,
            self.leases,
            self.fleet,
            self._preempt,
            lambda kind, message: self.notes.append((kind, message)),
        )

    def _preempt(self, attempt: int) -> bool:
        if attempt in self.spared:
            return False
        self.preempted.append(attempt)
        return True

    async def begun(self, attempt: int, *, asks: LimitOverrides = LimitOverrides(), scale: int = 1) -> Lease:  # noqa: B008
        lease = await self.leases.lease(Attempt(attempt, attempt, 0, 1, scale=scale), asks)
        assert isinstance(lease, Lease)
        self.leases.derive_limits(attempt, lease)
        return lease

    def look(self, times: int = 1, **more: int) -> None:
        """Attempts use these MiB, beside the rest: `a1=60`."""
        for name, mib in more.items():
            self.fleet.uses[int(name[1:])] = AttemptUse(sandbox=mib * MiB)
        self.kernel.uses(BASE + sum(use.memory for use in self.fleet.uses.values()) // MiB)
        for _ in range(times):
            self.control.look()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_sandbox_that_comes_near_its_lease_gets_a_larger_one(scene: Scene):
    lease = await scene.begun(1)
    before = scene.leases.leased

    scene.look(a1=lease.memory // MiB)

    assert before < scene.leases.leased < 2 * before


async def test_free_memory_is_lent_and_returns_when_it_is_leased(scene: Scene):
    lease = await scene.begun(1)
    scene.look(a1=10)
    memory, _ = scene.leases.derive_limits(1, lease)
    assert memory > 200 * MiB, "alone in a roomy container"

    for attempt in (2, 3, 4, 5):
        await scene.begun(attempt)
        scene.look(**{f"a{attempt}": 10})

    assert scene.fleet.allowed[1] < lease.memory + 30 * MiB


async def test_a_sandbox_is_never_held_to_less_than_it_uses(scene: Scene):
    await scene.begun(1)
    await scene.begun(2)
    scene.look(a1=10, a2=10)
    scene.look(a1=280)
    scene.look(a2=90)

    assert scene.fleet.allowed[1] >= 280 * MiB


async def test_what_was_declared_is_what_it_is_held_to(scene: Scene):
    lease = await scene.begun(1, asks=LimitOverrides(memory=50 * MiB))
    memory, _ = scene.leases.derive_limits(1, lease)
    scene.look(3, a1=49)

    assert memory == 50 * MiB and scene.fleet.allowed == {}


async def test_a_retry_is_granted_more(scene: Scene):
    first = await scene.begun(1)
    scene.leases.on_settled(Verdict(attempt=1, token=1, failure=AttemptFailure("resource", "memory", "")))  # type: ignore[arg-type]
    second = await scene.begun(2, scale=2)
    scene.leases.on_settled(Verdict(attempt=2, token=1))
    third = await scene.begun(3, scale=4)

    assert 128 * MiB <= second.memory <= 2 * first.memory and 256 * MiB <= third.memory <= 4 * first.memory


async def test_one_that_cannot_grow_holds_admission_and_costs_the_youngest_its_place(scene: Scene):
    for attempt in (1, 2, 3, 4):
        await scene.begun(attempt)
    scene.look(PATIENCE, a1=230, a2=40, a3=40, a4=40)
    assert not scene.preempted, "it has more than its lease, but does not grow"

    scene.spared = {4}
    for mib in range(232, 232 + 2 * PATIENCE, 2):
        scene.look(a1=mib)

    assert scene.preempted == [3], "4 has been preempted often enough, 1 is the one that grows"
    assert scene.notes[0][0] == "governor.preempt" and "(40 MiB)" in scene.notes[0][1]


async def test_use_beyond_all_leases_is_answered_in_steps_and_relief_is_noted(scene: Scene):
    await scene.begun(1)
    scene.fleet.left = 100 * MiB
    scene.look(a1=20)
    scene.kernel.uses(490)
    for _ in range(12):
        scene.control.look()
    scene.kernel.uses(120)
    scene.control.look()

    kinds = [kind for kind, _ in scene.notes]
    assert kinds.index("governor.trim") < kinds.index("governor.preempt") < kinds.index("governor.relieved")
    assert scene.preempted[0] == 1
    assert "490 of 500 MiB (container)" in dict(scene.notes)["governor.trim"]
    assert dict(scene.notes)["governor.relieved"].startswith("370 MiB less")


async def test_ungoverned_it_measures_and_leaves_it_at_that(tmp_path: Path):
    scene = Scene(tmp_path, ungoverned=True)
    lease = await scene.begun(1)
    scene.kernel.uses(499)
    scene.look(20, a1=390)

    assert lease == Lease(0) and scene.leases.derive_limits(1, lease) == (0, 0)
    assert (scene.fleet.did, scene.fleet.allowed, scene.preempted, scene.notes) == ([], {}, [], [])
    assert scene.usage.reading.bound.used == 490 * MiB


async def test_learned_use_makes_room_for_more_attempts(scene: Scene):
    first = await scene.begun(1)
    scene.leases.on_settled(Verdict(attempt=1, token=1))
    for attempt in range(2, 12):
        await scene.begun(attempt)
        scene.look(**{f"a{attempt}": 5})
        del scene.fleet.uses[attempt]
        scene.leases.on_settled(Verdict(attempt=attempt, token=1))

    learned = await scene.begun(20)
    memory, _ = scene.leases.derive_limits(20, learned)

    assert learned.memory < 12 * MiB < first.memory
    assert memory >= FLOOR, "a shell starts in it, whatever was learned"


async def test_what_was_interrupted_teaches_nothing(scene: Scene):
    before = (await scene.begun(1)).memory
    for attempt in range(2, 12):
        await scene.begun(attempt)
        failure = AttemptFailure("interrupted", "interrupted", "")  # type: ignore[arg-type]
        scene.leases.on_settled(Verdict(attempt=attempt, token=1, failure=failure))

    assert (await scene.begun(20)).memory == before


async def test_limits_of_the_run_count_where_the_instance_says_nothing(tmp_path: Path):
    scene = Scene(tmp_path, limits=Limits(memory=64 * MiB))
    lease = await scene.begun(1)

    assert scene.leases.derive_limits(1, lease)[0] == 64 * MiB


async def test_a_worker_that_holds_leftover_memory_is_replaced_even_without_a_queue(scene: Scene):
    for attempt in (1, 2, 3, 4, 5):
        await scene.begun(attempt)
    scene.look()
    assert scene.fleet.did == []

    scene.fleet.left = 50 * MiB
    scene.look()

    assert scene.fleet.did == ["recycle"] and scene.leases.waiting == ()
