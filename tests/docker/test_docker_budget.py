"""Images by the dozen on a daemon whose disk cannot hold them: admitted by their need, cleaned up behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests import docker_daemon
from tests.docker_daemon import MB, WAY, Daemon, Notes, Registry, RegistryBases, Watched, layer, noise, tar

from holdwater.core.errors import AttemptError, ResourceExhausted
from holdwater.core.image import BuildSteps, ImageBlueprint, ImageOutcome, ImageTarget, PublishedImage
from holdwater.docker.client import DockerClient
from holdwater.image.docker.engine import DockerEngine
from holdwater.image.docker.janitor import Janitor

AT_ONCE = 4


class Room:
    """What the governor does, as simply as it goes: bytes are leased before an image is begun."""

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._changed = asyncio.Condition()
        self._slots = asyncio.Semaphore(AT_ONCE)

    @asynccontextmanager
    async def lease(self, need: int) -> AsyncIterator[None]:
        async with self._slots:
            async with self._changed:
                await self._changed.wait_for(lambda: self._left >= need)
                self._left -= need
            try:
                yield
            finally:
                async with self._changed:
                    self._left += need
                    self._changed.notify_all()


class Careless(Janitor):
    """One that does nothing."""

    async def settle(self, tags: Sequence[str] = ()) -> None:
        pass

    async def make_room(self, wanted: int) -> int:
        return 0

    async def reset(self) -> None:
        pass


class Others:
    """What somebody else has there: a container, a volume, an image on a base of ours, build cache."""

    def __init__(self, daemon: Daemon, base: str) -> None:
        self._daemon = daemon
        daemon.docker("pull", "--quiet", base)
        daemon.docker("tag", base, "others/shares-layers:1")
        daemon.docker("rmi", base)
        dockerfile = b"FROM others/shares-layers:1\nRUN echo theirs > /theirs\n"
        daemon.docker("build", "--network", "none", "--tag", "others/built:1", "-", data=dockerfile)
        daemon.docker("volume", "create", "theirs")
        daemon.docker("create", "--name", "theirs", "--volume", "theirs:/data", "others/built:1", "sleep")
        self._before = self.now()

    def now(self) -> tuple[object, ...]:
        images = {one for one in self._daemon.images() if one.startswith("others/")}
        containers = self._daemon.docker("ps", "--all", "--format", "{{.Names}} {{.Image}} {{.Status}}")
        volumes = self._daemon.docker("volume", "ls", "--quiet")
        records = {one: (told["Description"], told["Size"]) for one, told in self._daemon.records().items()}
        return images, containers, volumes, records

    def untouched(self) -> bool:
        assert self.now() == self._before
        return True


async def played(
    daemon: Daemon, bases: list[str], registry: Registry, place: Path, cache: int
) -> tuple[list[PublishedImage], Notes, int]:
    """All images, admitted by their need; and the most bytes that the daemon's disk had more than before."""
    content = tar([("opt/agent/data", noise(MB)), ("opt/agent/run", b"#!/bin/sh\n")])
    blueprint = ImageBlueprint(
        layers=(layer(place, content),), steps=BuildSteps(before=("RUN echo hi > /hi",))
    )
    images = [
        ImageTarget(name=f"image-{number}", base=base, repository=f"{registry.host}/budget/agent")
        for number, base in enumerate(bases)
    ]
    notes, before = Notes(), daemon.free()
    budget = before - 8 * MB  # the file system's own
    async with (
        DockerClient(daemon.host) as client,
        Janitor(client, place / "state", "budget", cache, notes) as janitor,
        DockerEngine(blueprint, client, RegistryBases(), janitor, notes, WAY) as engine,
        _lowest(daemon) as lowest,
    ):
        room = Room(budget - cache)
        foreseen = [await engine.foresee(image) for image in images]

        async def one(image: ImageTarget, need: int) -> PublishedImage:
            async with room.lease(need):
                return await engine.make(image, place / f"{image.name}.log", Watched())

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(image, told.disk)) for image, told in zip(images, foreseen, strict=True)
            ]
    return [task.result() for task in tasks], notes, before - lowest[0]


@asynccontextmanager
async def _lowest(daemon: Daemon) -> AsyncIterator[list[int]]:
    """The fewest bytes that were free, looked at all the time."""
    lowest = [daemon.free()]

    async def look() -> None:
        while True:
            lowest[0] = min(lowest[0], daemon.free())
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look())
        yield lowest
        looking.cancel()


async def _scene(
    place: Path, registry: Registry, root: bytes, *, size: int, count: int, each: int, cache: int
) -> None:
    bases = [registry.put(f"budget/base-{number}", [root, noise(each)]) for number in range(count)]
    with docker_daemon.daemon(place / "docker", size) as daemon:
        others = Others(daemon, bases[0])
        before = daemon.free()

        made, notes, highest = await played(daemon, bases, registry, place, cache)

        assert [one.how for one in made] == [ImageOutcome.MADE] * count
        assert len(registry.tags("budget/agent")) == count
        assert notes == []
        assert each < highest < before - 8 * MB
        assert others.untouched()
        warm = [one for one in daemon.images() if not one.startswith("others/")]
        assert len(warm) == 1 and "/budget/base-" in warm[0]
        assert before - daemon.free() < cache
        first = made[0].downloaded + made[1].downloaded
        assert sum(one.downloaded for one in made[2:]) < count * (each + MB // 2), (
            "the root is pulled but once"
        )
        assert first > 0


async def test_more_bases_than_the_disk_can_hold_are_all_made(
    registry: Registry, root: bytes, tmp_path: Path
) -> None:
    await _scene(tmp_path, registry, root, size=130 * MB, count=9, each=12 * MB, cache=18 * MB)


@pytest.mark.parametrize(
    ("size", "count", "each"),
    [
        pytest.param(130 * MB, 9, 12 * MB, marks=pytest.mark.proof),
        pytest.param(2000 * MB, 40, 150 * MB, marks=pytest.mark.proof),
    ],
)
async def test_without_admission_and_clean_up_the_same_fills_the_disk(
    registry: Registry, root: bytes, tmp_path: Path, size: int, count: int, each: int
) -> None:
    bases = [registry.put(f"careless-{count}/base-{n}", [root, noise(each)]) for n in range(count)]
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/agent/data", noise(MB))])),))
    notes = Notes()
    with docker_daemon.daemon(tmp_path / "docker", size) as daemon:
        async with (
            DockerClient(daemon.host) as client,
            Careless(client, tmp_path / "state", "careless", 0, notes) as janitor,
            DockerEngine(blueprint, client, RegistryBases(), janitor, notes, WAY) as engine,
        ):
            slots = asyncio.Semaphore(AT_ONCE)

            async def one(number: int, base: str) -> AttemptError | None:
                image = ImageTarget(
                    name=f"{number}", base=base, repository=f"{registry.host}/careless-{count}/agent"
                )
                async with slots:
                    try:
                        await engine.make(image, tmp_path / f"{number}.log", Watched())
                    except AttemptError as error:
                        return error
                return None

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*pair)) for pair in enumerate(bases)]

            full = [task.result() for task in tasks if isinstance(task.result(), ResourceExhausted)]
            assert full and {one.kind for one in full if one} == {"disk"}
        assert daemon.free() > size * 4 // 5, "what a full disk left is gone at the end all the same"
