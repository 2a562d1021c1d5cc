"""What the janitor removes and what it leaves, on a real daemon that others use at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.docker_daemon import MB, WAY, Daemon, Notes, Registry, RegistryBases, Watched, layer, noise, tar

from holdwater.core.image import BuildSteps, ImageBlueprint, ImageTarget, PublishedImage
from holdwater.docker.build import CacheRecord, DaemonCache
from holdwater.docker.client import DockerClient
from holdwater.image.docker.engine import DockerEngine
from holdwater.image.docker.janitor import Janitor
from holdwater.image.docker.ownership import BuildTrace

FIRST = BuildSteps(before=("RUN echo ours > /ours",))

EVERYTHING = 1 << 60  # bytes of room that no disk has


@asynccontextmanager
async def opened(
    daemon: Daemon, place: Path, notes: Notes, cache: int = 0, run: str = "run", steps: BuildSteps = FIRST
) -> AsyncIterator[tuple[DockerEngine, Janitor]]:
    content = layer(place, tar([("opt/agent/data", b"x" * 1000)]), f"{run}.tar.gz")
    blueprint = ImageBlueprint(layers=(content,), steps=steps)
    async with (
        DockerClient(daemon.host) as client,
        Janitor(client, place / "state", run, cache, notes) as janitor,
        DockerEngine(blueprint, client, RegistryBases(), janitor, notes, WAY) as engine,
    ):
        yield engine, janitor


async def make(engine: DockerEngine, base: str, place: Path) -> PublishedImage:
    host = base.partition("/")[0]
    name = base.partition("/")[2].replace("/", "-").replace(":", "-")
    return await engine.make(
        ImageTarget(name=name, base=base, repository=f"{host}/made/{name}"), place / f"{name}.log", Watched()
    )


async def test_eight_janitors_at_once_do_not_trip_over_each_other(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    bases = [registry.put(f"eight/{number}", [root, noise(MB)]) for number in range(8)]
    notes = Notes()

    async def one(number: int) -> None:
        async with opened(daemon, tmp_path, notes, run=f"run-{number}") as (engine, _):
            await make(engine, bases[number], tmp_path)

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(one(number))

    assert (notes, daemon.images(), daemon.records()) == ([], *before)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "_warm.jsonl",
        "builds.lock",
        "janitor.lock",
    ]


async def test_one_base_is_kept_for_the_layers_that_others_share(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    shared = noise(5 * MB)
    bases = [registry.put(f"warm/{number}", [root, shared, noise(MB)]) for number in range(4)]
    lonely = registry.put("warm/lonely", [noise(3 * MB)])
    notes = Notes()

    async with opened(daemon, tmp_path, notes, cache=20 * MB, steps=BuildSteps()) as (engine, janitor):
        for base in (*bases[:3], lonely):
            await engine.foresee(
                ImageTarget(name="planned", base=base, repository=f"{registry.host}/made/planned")
            )
        made = [await make(engine, base, tmp_path) for base in (*bases[:3], lonely)]
        during = daemon.images() - before[0]
        kept = await janitor.list_leftovers()
    assert made[0].downloaded > 6 * MB
    assert [one.downloaded < 2 * MB for one in made[1:3]] == [True, True]
    assert len(during) == 1 and [one.kind for one in kept if one.kind == "base"] == ["base"]
    assert daemon.images() - before[0] == during

    async with opened(daemon, tmp_path, notes, cache=20 * MB, steps=FIRST) as (engine, janitor):
        again = await make(engine, bases[3], tmp_path)
        assert again.downloaded < 2 * MB
        free = janitor.free_bytes() or 0
        assert await janitor.make_room(free) >= free and daemon.images() != before[0]
        await janitor.make_room(10**15)
        assert (daemon.images(), daemon.records()) == before
    assert (notes, daemon.images(), daemon.records()) == ([], *before)


async def test_what_stayed_warm_can_be_cleared_but_not_what_a_container_uses(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    bases = [registry.put(f"used/{number}", [root, noise(MB)]) for number in range(2)]
    notes = Notes()
    async with opened(daemon, tmp_path, notes, cache=20 * MB) as (engine, _):
        for base in bases:
            await engine.foresee(
                ImageTarget(name="planned", base=base, repository=f"{registry.host}/made/planned")
            )
        for base in bases:
            await make(engine, base, tmp_path)
    (kept,) = daemon.images() - before[0]
    reference = kept.replace(":<none>@", "@")
    daemon.docker("create", "--name", "user", reference, "sleep")

    try:
        async with (
            DockerClient(daemon.host) as client,
            Janitor(client, tmp_path / "state", "c", 0, notes) as one,
        ):
            await one.clear()
            assert daemon.images() - before[0] == {kept}
    finally:
        daemon.docker("rm", "user")

    async with DockerClient(daemon.host) as client, Janitor(client, tmp_path / "state", "c", 0, notes) as one:
        await one.clear()
        assert await one.list_leftovers() == []
    assert (notes, daemon.images(), daemon.records()) == ([], *before)


async def test_what_others_build_meanwhile_stays(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    base = registry.put("meanwhile/base", [root, noise(MB)])
    dockerfile = f"FROM {base}\nRUN echo theirs > /theirs\nRUN echo more > /more\n".encode()
    log = tmp_path / "meanwhile-base-1.log"
    steps = BuildSteps(before=("RUN echo begun; sleep 2",))
    notes = Notes()
    try:
        async with (
            opened(daemon, tmp_path, notes, steps=steps) as (engine, _),
            asyncio.TaskGroup() as group,
        ):
            making = group.create_task(make(engine, base, tmp_path))
            while not (log.exists() and "begun\n" in log.read_text()):
                await asyncio.sleep(0.02)
            daemon.docker("pull", "--quiet", base)  # the base that we pulled: it is theirs from now on too
            daemon.docker("build", "--network", "none", "--tag", "theirs:1", "-", data=dockerfile)
            assert not making.done()

        told = {one["Description"] for one in daemon.records().values()}
        assert {"mount / from exec /bin/sh -c echo theirs > /theirs", "from local "} <= told
        assert not [one for one in told if "begun" in one]
        assert {one.partition("@")[0] for one in daemon.images() - before[0]} == {"theirs:1", base}
        assert notes == []
    finally:
        daemon.docker("rmi", "theirs:1", base, check=False)
        daemon.docker("builder", "prune", "--all", "--force")
    assert (daemon.images(), daemon.records()) == before


async def test_a_base_that_was_there_before_us_stays(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    base = registry.put("before/base", [root, noise(MB)])
    digest = daemon.docker("pull", base).partition("Digest: ")[2].split()[0]
    daemon.docker("pull", "--quiet", f"{base.rpartition(':')[0]}@{digest}")
    before = daemon.images(), daemon.records()
    notes = Notes()
    try:
        async with opened(daemon, tmp_path, notes) as (engine, janitor):
            await make(engine, base, tmp_path)
            await janitor.make_room(10**15)
        assert (notes, daemon.images(), daemon.records()) == ([], *before)
    finally:
        daemon.docker("rmi", base)


async def test_what_a_build_uses_again_is_not_forgotten_meanwhile(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    bases = [registry.put(f"again/{number}", [root, noise(MB)]) for number in range(2)]
    steps = BuildSteps(before=("RUN echo begun; sleep 1",))
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),), steps=steps)
    log = tmp_path / "again-1-1.log"
    notes = Notes()

    async with (
        DockerClient(daemon.host) as client,
        Janitor(client, tmp_path / "state", "run", 0, notes, quiet=0.0) as janitor,
        DockerEngine(blueprint, client, RegistryBases(), janitor, notes, WAY) as engine,
    ):
        await make(engine, bases[0], tmp_path)
        async with asyncio.TaskGroup() as group:
            group.create_task(make(engine, bases[1], tmp_path))
            while not (log.exists() and "begun\n" in log.read_text()):
                await asyncio.sleep(0.02)
            # What the first build was sent is in use again, and listed otherwise.
            await janitor.make_room(EVERYTHING)

    assert (notes, daemon.images(), daemon.records()) == ([], *before)


async def test_the_cache_is_read_between_builds(daemon: Daemon, tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(DaemonCache):
        async def records(self) -> list[CacheRecord]:
            seen.append("read")
            return await super().records()

    async def one(word: str, over: asyncio.Event) -> None:
        async with janitor.track_build(lambda now: BuildTrace(begun=now)):
            seen.append(word)
            await over.wait()
            seen.append(f"{word} over")

    over = asyncio.Event()
    async with (
        DockerClient(daemon.host) as client,
        Janitor(client, tmp_path / "state", "run", 0, Notes(), Watching(client)) as janitor,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(one("first", over))
        while not seen:
            await asyncio.sleep(0.01)
        await janitor.reset()  # it is put off: nobody waits for it
        group.create_task(janitor.make_room(EVERYTHING))
        await asyncio.sleep(0.1)
        group.create_task(one("second", over))
        await asyncio.sleep(0.1)
        over.set()

    assert seen[:4] == ["first", "first over", "read", "second"]


async def test_a_prune_that_reclaims_nothing_is_noticed(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()

    class Elsewhere(DaemonCache):
        """As if the prune went to another builder than the one that holds the cache."""

        async def remove(self, record: str) -> bool:
            return False

    base = registry.put("noticed/base", [root, noise(MB)])
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),), steps=FIRST)
    notes = Notes()
    async with (
        DockerClient(daemon.host) as client,
        Janitor(client, tmp_path / "state", "run", 0, notes, Elsewhere(client)) as janitor,
        DockerEngine(blueprint, client, RegistryBases(), janitor, notes, WAY) as engine,
    ):
        await make(engine, base, tmp_path)
        left = [one for one in await janitor.list_leftovers() if one.kind == "cache"]
    assert left
    assert notes and {kind for kind, _ in notes} == {"cleanup.failed"}
    assert all("the prune reclaimed 0 B" in message for _, message in notes)
    daemon.docker("builder", "prune", "--all", "--force")
    assert (daemon.images(), daemon.records()) == before
