"""Images in a run, on a real daemon with a real registry: found, pulled, built, made, evicted, adopted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests import docker_daemon
from tests.command_runner import SOURCE, until
from tests.docker_daemon import MB, Daemon, Notes, Registry, noise
from tests.wait_bounds import stretch

from holdwater.core.config import RunConfig
from holdwater.core.errors import ImageFailed
from holdwater.core.image import AgentSource, BuildSteps, ImageRecipe
from holdwater.core.records import SandboxSpec
from holdwater.docker.client import DockerClient
from holdwater.image.docker.daemon import NAMESPACE
from holdwater.run.builds.docker_supply import DockerSupply
from holdwater.run.conductor.admission import ImageRequest
from holdwater.run.setup.config import ProcessEnvironment


def config_of(run: str, disk: int | None = None, images: ImageRecipe | None = None) -> RunConfig:
    return RunConfig(
        id=run,
        suite="s",
        agent="a",
        created=1.0,
        version="0",
        sandbox="docker",
        disk=disk,
        images=images,
    )


@asynccontextmanager
async def supplied(
    daemon: Daemon, place: Path, run: str, disk: int | None = None, images: ImageRecipe | None = None
) -> AsyncIterator[DockerSupply]:
    environment = ProcessEnvironment(docker_host=daemon.host, cache=place / "cache", path=os.environ["PATH"])
    logs = place / "logs"
    logs.mkdir(exist_ok=True)
    notes = Notes()
    async with (
        DockerClient(daemon.host) as client,
        DockerSupply(config_of(run, disk, images), environment, client, notes, logs) as supply,
    ):
        yield supply
    assert notes == []


def wants(image: str | None = None, name: str = "one", build: Path | None = None) -> ImageRequest:
    return ImageRequest(id=name, start=SandboxSpec(image=image, build=build and str(build)))


def names(daemon: Daemon, word: str) -> set[str]:
    return {one for one in daemon.images() if word in one}


def runs(daemon: Daemon, reference: str) -> str:
    """What a container of it says."""
    return daemon.docker("run", "--rm", "--network", "none", reference, "/bin/cat", "/said")


async def test_a_local_image_is_used_as_it_is_and_never_removed(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    there = registry.put("local/there", [root])
    daemon.docker("pull", "--quiet", there)
    daemon.docker("tag", there, "only-here:1")
    before = daemon.images()
    try:
        async with supplied(daemon, tmp_path, "local") as supply:
            for number, image in enumerate((there, "only-here:1")):
                assert await supply.estimate_need(wants(image)) == 0
                assert await supply.hold(number, wants(image)) == {image: image}
                supply.release(number)
            await supply._relieve(1 << 60)
            assert daemon.images() == before
        assert daemon.images() == before
    finally:
        daemon.docker("rmi", there, "only-here:1")


@pytest.mark.parametrize("each", [10 * MB, pytest.param(30 * MB, marks=pytest.mark.proof)])
async def test_more_images_than_the_budget_holds_are_all_held_in_turn(
    registry: Registry, tmp_path: Path, each: int
) -> None:
    images = [registry.put(f"turn-{each}/{number}", [noise(each)]) for number in range(12)]
    foreign = registry.put("turn/foreign", [noise(MB)])
    with docker_daemon.daemon(tmp_path / "docker", 14 * each) as daemon:
        daemon.docker("pull", "--quiet", foreign)
        before, budget = daemon.free(), 4 * each
        theirs, highest = daemon.images(), 0
        async with supplied(daemon, tmp_path, "turn", budget) as supply:
            kept = (await supply.hold(1000, wants(images[0])))[images[0]]
            for number, image in enumerate(images):
                need = await supply.estimate_need(wants(image))
                assert (need == 0) == (number == 0), "compressed and unpacked, unless it is there"
                held = await supply.hold(number, wants(image))
                highest = max(highest, before - daemon.free())
                assert daemon.docker("image", "inspect", held[image], kept)
                supply.release(number)
            assert each < highest <= budget
            assert await supply.estimate_need(wants(images[0])) == 0, "it was held all the time"
            assert await supply.estimate_need(wants(images[11])) == 0, "the last that was used is there"
            assert await supply.estimate_need(wants(images[1])) > each
        assert daemon.images() == theirs


async def test_many_holders_pull_once_and_what_a_container_uses_stays(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    image = registry.put("many/one", [root, noise(2 * MB)])
    async with supplied(daemon, tmp_path, "many") as supply:
        pulls: list[str] = []
        pull = supply._stock._puller.pull

        async def counted(reference: str, *rest: object) -> int:
            pulls.append(reference)
            return await pull(reference, *rest)  # type: ignore[arg-type]

        supply._stock._puller.pull = counted  # type: ignore[method-assign, assignment]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(supply.hold(number, wants(image))) for number in range(8)]
        assert len(pulls) == 1 and len({task.result()[image] for task in tasks}) == 1
        held = tasks[0].result()[image]
        for number in range(7):
            supply.release(number)
        await supply._relieve(1 << 60)
        assert names(daemon, "many/one"), "one holds it still"

        daemon.docker("create", "--name", "uses", held, "sleep")
        supply.release(7)
        await supply._relieve(1 << 60)
        assert await supply.hold(8, wants(image)) == {image: held}, "a container uses it"
        supply.release(8)
        daemon.docker("rm", "uses")
        await supply._relieve(1 << 60)
        assert not names(daemon, "many/one") and not names(daemon, f"{NAMESPACE}/many")


async def test_what_two_runs_hold_stays_when_the_one_that_brought_it_ends(
    daemon: Daemon, registry: Registry, tmp_path: Path
) -> None:
    before = daemon.images()
    image = registry.put("two/one", [noise(41 * MB)])  # more than what may stay warm
    async with supplied(daemon, tmp_path, "two-b") as second:
        async with supplied(daemon, tmp_path, "two-a") as first:
            await first.hold(1, wants(image))
            held = (await second.hold(1, wants(image)))[image]
        assert daemon.docker("image", "inspect", held)
        assert await second.estimate_need(wants(image)) == 0
        assert await second.hold(2, wants(image)) == {image: held}
    assert daemon.images() == before


async def test_a_daemon_that_comes_back_is_found_again(daemon: Daemon, tmp_path: Path) -> None:
    async with supplied(daemon, tmp_path, "back") as supply:
        relieve, *_ = supply.periodic_tasks(Gate(0))  # type: ignore[arg-type]
        seen = supply.disk()
        supply._disk = msgspec.structs.replace(supply._disk, path="/proc/0/root/of/a/dead/daemon")
        assert supply.disk().free == seen.free, "as it was last"
        await relieve._work()
        assert supply.disk().path == seen.path


async def test_the_plan_makes_a_missing_image_and_pulls_it(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    base = registry.put("plan/base", [root])
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "tool").write_text("hello")
    before = BuildSteps(before=("RUN echo step > /step",))
    for name, steps, bases in (
        ("registry", BuildSteps(), None),
        ("docker", before, None),
        ("phased", before, f"{registry.host}/plan/bases"),
    ):
        recipe = ImageRecipe(
            path="images.toml",
            repository=f"{registry.host}/plan/{name}/{{id}}",
            agent=AgentSource(directory=str(tmp_path / "agent")),
            steps=steps,
            base_repository=bases,
            aliases=("{id}",),
            network="none",
            cache=0,
        )
        wanted = ImageRequest(
            id="Task", start=SandboxSpec(image=base), grader=SandboxSpec(image="only-here:1")
        )
        daemon.docker("import", "-", "only-here:1", data=docker_daemon.tar([("a", b"b")]))
        async with supplied(daemon, tmp_path, f"plan-{name}", images=recipe) as supply:
            assert await supply.estimate_need(wanted) > len(root)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(supply.hold(number, wanted)) for number in range(3)]
            held = tasks[0].result()
            assert held["only-here:1"] == "only-here:1", "graders have no agent"
            words = ("run", "--rm", "--network", "none", held[base], "/bin/cat", "/opt/agent/tool")
            assert daemon.docker(*words) == "hello"
            assert await supply.estimate_need(wanted) == 0
        tags = registry.tags(f"plan/{name}/task-{_suffix(registry, name)}")
        assert len(tags) == 2 and "Task" in tags, "the key, and the alias"
        daemon.docker("rmi", "only-here:1")
    assert not names(daemon, "/plan/") and not names(daemon, NAMESPACE)
    assert len(registry.tags("plan/bases")) == 1


def _suffix(registry: Registry, name: str) -> str:
    """Of the repository: a name that had to be changed has a hash behind it."""
    found = json.loads(registry.ask("GET", "/v2/_catalog"))["repositories"]
    return next(one.rpartition("-")[2] for one in found if one.startswith(f"plan/{name}/task-"))


DOCKERFILE = r"""
FROM scratch
ADD root.tar /
# what a task does
RUN echo one > /one && \
    # in several lines
    echo two > /two
COPY said \
  /said
"""


STAGES = """
FROM scratch AS base
ADD root.tar /

FROM base AS fast
ARG WORD=nothing
RUN echo "fast $WORD" > /said

FROM base AS slow
RUN false
"""


async def test_a_stage_of_a_dockerfile_is_built_with_its_arguments(
    daemon: Daemon, root: bytes, tmp_path: Path
) -> None:
    (tmp_path / "root.tar").write_bytes(root)
    (tmp_path / "Dockerfile").write_text(STAGES)
    recipe = ImageRecipe(path="images.toml", repository="r/a", network="none", cache=0)
    start = SandboxSpec(build=str(tmp_path), build_target="fast", build_args={"WORD": "one"})
    async with supplied(daemon, tmp_path, "stages", images=recipe) as supply:
        said = []
        for word in ("one", "two"):
            wanted = msgspec.structs.replace(start, build_args={"WORD": word})
            held = await supply.hold(len(said), ImageRequest(id=word, start=wanted))
            said.append(runs(daemon, held[wanted.key]))
        assert said == ["fast one\n", "fast two\n"]

        for wrong, problem in (
            ({"build_target": "fats"}, "no such stage: `fats`; the stages are `base`, `fast`, `slow`"),
            ({"build_args": {"WRD": "x"}}, "no `ARG` declares this argument: `WRD`"),
        ):
            wanted = msgspec.structs.replace(start, **wrong)  # type: ignore[arg-type]
            with pytest.raises(ImageFailed, match=problem) as raised:
                await supply.hold(9, ImageRequest(id="wrong", start=wanted))
            assert not raised.value.again
        assert len(list((tmp_path / "logs").glob("*.build.log"))) == 2, "nothing else was built"
        for number in range(2):
            supply.release(number)


async def test_a_dockerfile_is_built_once_and_again_when_it_changes(
    daemon: Daemon, root: bytes, tmp_path: Path
) -> None:
    before, records = daemon.images(), set(daemon.records())
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
        (place / "root.tar").write_bytes(root)
        (place / "said").write_text("first")
        (place / "Dockerfile").write_text(DOCKERFILE)
    recipe = ImageRecipe(path="images.toml", repository="r/a", network="none", cache=0)  # there is no bridge
    async with supplied(daemon, tmp_path, "built", images=recipe) as supply:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(supply.hold(number, wants(build=places[number % 2]))) for number in range(6)
            ]
        held = {reference for task in tasks for reference in task.result().values()}
        assert len(held) == 1 and len(list((tmp_path / "logs").glob("*.build.log"))) == 1
        assert runs(daemon, held.pop()) == "first"

        (places[0] / "said").write_text("second")
        other = (await supply.hold(9, wants(build=places[0])))[str(places[0])]
        assert runs(daemon, other) == "second"
        for number in range(10):
            supply.release(number)
        async with supplied(daemon, tmp_path, "beside") as beside:
            assert await beside.estimate_need(wants(build=places[0])) == 0, "another run has built the same"
        await supply._relieve(1 << 60)
        assert daemon.images() == before
        assert set(daemon.records()) == records
    assert daemon.images() == before


async def test_failures_name_the_image(daemon: Daemon, registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "Dockerfile").write_text("FROM scratch\nCOPY nowhere /\n")
    cases = [
        (wants(f"{registry.host}/no/such:1"), f"{registry.host}/no/such:1"),
        (wants("Not A Name"), "Not A Name"),
        (wants(build=tmp_path / "bad"), "nowhere"),
        (wants(build=tmp_path / "gone"), "gone/Dockerfile"),
        (wants(registry.put("large/one", [noise(12 * MB)])), "22.9"),
    ]
    async with supplied(daemon, tmp_path, "fails", 20 * MB) as supply:
        for number, (wanted, word) in enumerate(cases):
            await supply.estimate_need(wanted)
            with pytest.raises(ImageFailed) as caught:
                await supply.hold(number, wanted)
            assert word in caught.value.message and wanted.start.key in caught.value.message
        assert supply._held == {}
        both = ImageRequest(
            id="x", start=SandboxSpec(image=f"{registry.host}/no/such:1", build=str(tmp_path / "bad"))
        )
        with pytest.raises(ImageFailed, match="cannot be built"):
            await supply.hold(1, both)


class Gate:
    """A governor with so much room, and perhaps somebody who waits."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.waiting: tuple[int, ...] = ()
        self.lacking = 0

    def lend(self, disk: int) -> int | None:
        return -1 if disk <= self.room else None

    def repay(self, loan: int) -> None:
        return


async def test_what_comes_next_is_prefetched_and_goes_when_its_room_is_needed(
    daemon: Daemon, registry: Registry, tmp_path: Path
) -> None:
    images = [registry.put(f"next/{number}", [noise(4 * MB)]) for number in range(3)]
    wanted = [wants(image, f"i{number}") for number, image in enumerate(images)]
    async with supplied(daemon, tmp_path, "next") as supply:
        await supply.hold(1, wants(images[2], "i2"))
        supply.release(1)
        gate = Gate(1 << 60)
        relieve, prefetch, _ = supply.periodic_tasks(gate)  # type: ignore[arg-type]
        for one in wanted[:2]:
            supply.expect(one)
        gate.waiting = (7,)
        await prefetch._work()
        assert await supply.estimate_need(wanted[0]) > 0, "somebody waits"
        gate.waiting = ()
        await prefetch._work()
        await prefetch._work()
        assert [await supply.estimate_need(one) for one in wanted] == [0, 0, 0]

        gate.lacking = 1
        await relieve._work()
        assert [await supply.estimate_need(one) == 0 for one in wanted] == [True, True, False], (
            "expected ones go last"
        )
        gate.lacking = 1 << 60
        await relieve._work()
        assert all([await supply.estimate_need(one) for one in wanted])

        supply.expect(wanted[2])
        gate.lacking = 1
        async with asyncio.TaskGroup() as group:
            group.create_task(prefetch._work())
            while not supply._prefetching:
                await asyncio.sleep(0)
            group.create_task(relieve._work())
        assert await supply.estimate_need(wanted[2]) > 0, "it was broken off"
        supply.stop()
        supply.expect(wanted[0])
        await prefetch._work()
        assert await supply.estimate_need(wanted[0]) > 0


HOLDER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from holdwater.docker.client import DockerClient
from holdwater.run.setup.config import ProcessEnvironment
from holdwater.run.builds.docker_supply import DockerSupply
from holdwater.run.conductor.admission import ImageRequest
from holdwater.core.config import RunConfig
from holdwater.core.records import SandboxSpec

async def main():
    config = RunConfig(id="killed", suite="s", agent="a", created=1.0, version="0",
                       sandbox="docker")
    environment = ProcessEnvironment(docker_host={host!r}, cache=Path({cache!r}))
    async with DockerClient({host!r}) as client:
        async with DockerSupply(config, environment, client, print, Path({logs!r})) as supply:
            await supply.hold(1, ImageRequest(id="x", start=SandboxSpec(image={image!r})))
            print("held", flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_leftovers_of_a_killed_run_are_adopted_by_its_resume_or_removed(
    daemon: Daemon, registry: Registry, tmp_path: Path
) -> None:
    before = daemon.images()
    image = registry.put("killed/one", [noise(41 * MB)])  # more than what may stay warm
    (tmp_path / "logs").mkdir()

    def killed() -> None:
        program = HOLDER.format(
            tests=str(Path(__file__).parents[2]),
            host=daemon.host,
            cache=str(tmp_path / "cache"),
            logs=str(tmp_path / "logs"),
            image=image,
        )
        with subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            process.send_signal(signal.SIGKILL)

    killed()
    async with supplied(daemon, tmp_path, "killed", 60 * MB) as supply:
        assert supply.used_bytes() >= 41 * MB, "what it left is in its budget"
        began = time.monotonic()
        assert await supply.estimate_need(wants(image)) == 0
        await supply.hold(1, wants(image))
        assert time.monotonic() - began < stretch(5)
    assert daemon.images() == before

    killed()
    assert daemon.images() != before
    async with supplied(daemon, tmp_path, "another") as supply:
        assert daemon.images() == before
    until("its journal is gone", lambda: not list((tmp_path / "cache").glob("daemons/*/killed.jsonl")), 5)
