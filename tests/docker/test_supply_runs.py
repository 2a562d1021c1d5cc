"""Whole runs over more images than their disk holds: leases, pulls and evictions, on a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import docker_daemon
from tests.docker_daemon import MB, Daemon, Notes, Registry, noise
from tests.supply_harness import Conducted, conducted
from tests.wait_bounds import stretch

from holdwater.core.config import RunConfig
from holdwater.core.records import Instance, SandboxSpec
from holdwater.docker.client import DockerClient
from holdwater.rollout.worker_protocol import AttemptJob
from holdwater.run.builds.docker_supply import DockerSupply
from holdwater.run.setup.config import ProcessEnvironment


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with docker_daemon.daemon(tmp_path_factory.mktemp("small"), 160 * MB) as found:
        yield found


class Watch:
    """The most bytes that the daemon's disk had more than before, at any moment of a run."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._before = daemon.free()
        self.highest = 0

    async def look(self) -> None:
        while True:
            self.highest = max(self.highest, self._before - self._daemon.free())
            await asyncio.sleep(0.005)


async def played(
    daemon: Daemon, place: Path, instances: list[Instance], watch: Watch, **asked: object
) -> tuple[Conducted, Notes, list[str]]:
    environment = ProcessEnvironment(docker_host=daemon.host, cache=place / "cache", path=os.environ["PATH"])
    config = RunConfig(
        id=place.name.replace("_", "-"),
        suite="s",
        agent="a",
        created=1.0,
        version="0",
        sandbox="docker",
        **asked,  # type: ignore[arg-type]
    )
    notes, used = Notes(), list[str]()

    async def act(job: AttemptJob) -> None:
        """The image is there, and stays: a container can be made, and another later."""
        (image,) = job.images.values()
        for _ in range(2):
            made = await asyncio.to_thread(daemon.docker, "create", image, "x")
            used.append(image)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(daemon.docker, "rm", made.strip())

    async with (
        DockerClient(daemon.host) as client,
        DockerSupply(config, environment, client, notes, place) as supply,
        asyncio.timeout(stretch(90)),
    ):
        looking = asyncio.get_running_loop().create_task(watch.look())
        try:
            found = await conducted(place / "run", instances, supply, act, retries=0, **asked)
        finally:
            looking.cancel()
    return found, notes, used


async def test_a_run_over_more_images_than_its_budget_holds(
    small: Daemon, registry: Registry, tmp_path: Path
) -> None:
    images = [registry.put(f"run/{number}", [noise(10 * MB)]) for number in range(8)]
    instances = [
        Instance(id=f"i{number}", start=SandboxSpec(image=images[number % 8])) for number in range(16)
    ]
    watch = Watch(small)
    before = small.images()

    found, notes, used = await played(small, tmp_path, instances, watch, concurrency=4, disk=65 * MB)

    assert found.summary.outcomes == {"passed": 16} and found.error is None, found
    assert found.summary.attempts == 16 and len(used) == 32 and len(set(used)) == 8
    assert 20 * MB < watch.highest <= 65 * MB
    assert notes == []
    assert len(small.images() - before) == 0, "what stays warm is less than 10 MB"


async def test_without_a_budget_the_disk_itself_is_the_bound(
    small: Daemon, registry: Registry, tmp_path: Path
) -> None:
    images = [registry.put(f"whole/{number}", [noise(20 * MB)]) for number in range(7)]
    instances = [
        Instance(id=f"i{number}", start=SandboxSpec(image=image)) for number, image in enumerate(images)
    ]
    foreign = registry.put("whole/foreign", [noise(10 * MB)])
    small.docker("pull", "--quiet", foreign)

    found, notes, used = await played(small, tmp_path, instances, Watch(small), concurrency=6)

    assert found.summary.outcomes == {"passed": 7} and found.summary.attempts == 7, found
    assert len(set(used)) == 7 and notes == []
    assert json.loads(small.docker("image", "inspect", foreign))
    small.docker("rmi", foreign)


async def test_an_image_that_can_never_fit_is_its_own_failure(
    small: Daemon, registry: Registry, tmp_path: Path
) -> None:
    images = [registry.put("never/large", [noise(30 * MB)]), registry.put("never/small", [noise(2 * MB)])]
    instances = [
        Instance(id=f"i{number}", start=SandboxSpec(image=image)) for number, image in enumerate(images)
    ]

    found, _, used = await played(small, tmp_path, instances, Watch(small), concurrency=2, disk=50 * MB)

    assert found.summary.outcomes == {"passed": 1, "budget": 1}, found
    assert len(set(used)) == 1
