"""The cache of layers: built once however many ask, found whole or built again, bounded."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdwater.core.image import ImageLayer
from holdwater.image.layer.cache import LayerCache, ScratchDirectory
from holdwater.image.layer.tree import pack

KiB = 1024
CAP = 1024 * KiB


class Builder:
    """Builds layers of random bytes and counts them."""

    def __init__(self, size: int = 100 * KiB) -> None:
        self.built = 0
        self._size = size

    async def __call__(self, scratch: ScratchDirectory) -> ImageLayer:
        self.built += 1
        (scratch.path / "tree").mkdir()
        (scratch.path / "tree" / "file").write_bytes(os.urandom(self._size))
        await asyncio.sleep(0)
        return pack(scratch.path / "tree", "/opt/agent", scratch.path / "any-name")


def cached(directory: Path) -> set[str]:
    return {path.name for path in (directory / "layers").iterdir()}


async def test_a_layer_is_built_once_and_outlives_the_cache_object(tmp_path: Path) -> None:
    build = Builder()
    async with LayerCache(tmp_path, CAP) as cache:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(cache.get("k1", build)) for _ in range(5)]
        first = asked[0].result()
    async with LayerCache(tmp_path, CAP) as cache:
        again = await cache.get("k1", build)

    assert build.built == 1
    assert {task.result() for task in asked} == {first} == {again}
    assert Path(first.path).stat().st_size == first.size
    assert not list((tmp_path / "scratch").iterdir())


async def test_a_request_for_a_key_in_construction_waits_without_blocking_the_loop(
    tmp_path: Path,
) -> None:
    begun, finish = asyncio.Event(), asyncio.Event()
    build = Builder()

    async def slow(scratch: ScratchDirectory) -> ImageLayer:
        begun.set()
        await finish.wait()
        return await build(scratch)

    caches = LayerCache(tmp_path, CAP), LayerCache(tmp_path, CAP)
    async with caches[0] as one, caches[1] as two, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(one.get("k1", slow))
        await begun.wait()
        second = tasks.create_task(two.get("k1", build))
        await two.get("k2", build)  # another key goes ahead
        assert not second.done()
        finish.set()

    assert first.result() == second.result()
    assert build.built == 2


@pytest.mark.parametrize("how", ["truncated", "flipped", "no record", "broken record"])
async def test_a_damaged_layer_is_built_again(how: str, tmp_path: Path) -> None:
    build = Builder()
    async with LayerCache(tmp_path, CAP) as cache:
        layer = await cache.get("k1", build)
    file = Path(layer.path)
    content = file.read_bytes()
    if how == "truncated":
        file.write_bytes(content[:-1])
    elif how == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "no record":
        file.with_name("layer.json").unlink()
    else:
        file.with_name("layer.json").write_text("{")

    async with LayerCache(tmp_path, CAP) as cache:
        again = await cache.get("k1", build)
        assert build.built == 2
        assert Path(again.path).stat().st_size == again.size
        assert await cache.get("k1", build) == again


async def test_beyond_the_cap_what_was_used_least_recently_goes(tmp_path: Path) -> None:
    build = Builder()
    for key in ("k1", "k2", "k3"):
        async with LayerCache(tmp_path, CAP) as cache:
            await cache.get(key, build)
            os.utime(tmp_path / "layers" / key / "layer.json", (1, int(key[1])))
    async with LayerCache(tmp_path, CAP) as cache:
        await cache.get("k1", build)  # used again

    async with LayerCache(tmp_path, 250 * KiB):
        pass

    assert cached(tmp_path) == {"k1", "k3"}
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 250 * KiB


async def test_a_layer_in_use_is_never_evicted(tmp_path: Path) -> None:
    build = Builder()
    async with LayerCache(tmp_path, CAP) as user:
        layer = await user.get("k1", build)
        async with LayerCache(tmp_path, 0) as other:
            await other.get("k2", build)
            assert cached(tmp_path) == {"k1", "k2"}
        assert cached(tmp_path) == {"k1"}
        assert Path(layer.path).exists()
    async with LayerCache(tmp_path, 0):
        pass

    assert cached(tmp_path) == set()
    assert not list((tmp_path / "locks").iterdir())


async def test_nothing_is_left_of_a_build_that_fails(tmp_path: Path) -> None:
    async def fail(scratch: ScratchDirectory) -> ImageLayer:
        (scratch.path / "locked").mkdir()
        (scratch.path / "locked" / "file").write_text("x")
        (scratch.path / "locked").chmod(0)
        raise RuntimeError("no")

    async with LayerCache(tmp_path, CAP) as cache:
        with pytest.raises(RuntimeError, match="no"):
            await cache.get("k1", fail)

        assert not list((tmp_path / "scratch").iterdir())
        assert (await cache.get("k1", Builder())).size
