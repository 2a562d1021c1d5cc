"""A path of an image in a real registry, written to a directory."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.registry_server import RealRegistry, digest, front, real_registry, registries, tar

from holdwater.core.errors import BadInput, ImageFailed
from holdwater.core.image import ImagePlatform
from holdwater.image.registry.blob_stream import BlobStream
from holdwater.image.registry.path_extraction import UnpackedTree, _apply_layer, extract_path

BIG = os.urandom(2_000_000)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "one") as made:
        lower = {"opt/a/": b"", "opt/a/gone": b"x", "opt/a/big": BIG, "usr/x": b"x"}
        layers = [tar(lower), tar({"opt/a/.wh.gone": b"", "opt/a/new": b"new"})]
        made.push("agents", "1", "index", layers=layers)
        made.push("odd", "1", "oci", layers=[tar({"opt/a/../../x": b"x", "pad": BIG})])
        made.push("foreign", "1", "schema2", foreign=True)
        yield made


async def test_what_lies_below_the_path_is_there_and_nothing_else(
    registry: RealRegistry, tmp_path: Path
) -> None:
    async with front(registry) as before, registries() as (opened, notes):
        before.redirects_blobs = True
        before.cuts_downloads = 1
        found = await extract_path(
            opened, f"{before.address}/agents:1", "/opt/a", tmp_path / "into", ImagePlatform()
        )
        assert found in {one["digest"] for one in registry.manifest("agents", "1")["manifests"]}
        assert [kind for kind, _ in notes] == ["registry.registry"]
    assert sorted(one.name for one in (tmp_path / "into").rglob("*")) == ["big", "new"]
    assert (tmp_path / "into/big").read_bytes() == BIG
    assert [one.name for one in tmp_path.iterdir()] == ["into"]


async def test_a_pick_that_is_cancelled_in_the_middle_leaves_no_thread(
    registry: RealRegistry, tmp_path: Path
) -> None:
    head = tar({"opt/a/big": BIG})[: len(BIG) // 2]
    arrived = asyncio.Event()

    class Stuck(BlobStream):
        async def _read(self) -> bytes:
            if self._count:
                arrived.set()
                await asyncio.Event().wait()
            return head

    tree, threads = UnpackedTree("image:1", "/opt/a", tmp_path), threading.active_count()
    with ThreadPoolExecutor(1) as thread:
        applying = asyncio.ensure_future(_apply_layer(tree, Stuck("x", digest(b""), 1 << 30), thread))
        await arrived.wait()
        applying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await applying
    assert threading.active_count() == threads


async def test_what_cannot_be_had_is_named(registry: RealRegistry, tmp_path: Path) -> None:
    async with front(registry) as before, registries() as (opened, _):
        place = before.address
        with pytest.raises(ImageFailed, match="no such path") as caught:
            await extract_path(opened, f"{place}/agents:1", "/opt/b", tmp_path / "a")
        assert caught.value.kind == "missing"
        with pytest.raises(ImageFailed, match="would leave the directory"):
            await extract_path(opened, f"{place}/odd:1", "/opt/a", tmp_path / "b")
        with pytest.raises(ImageFailed, match="no registry stores"):
            await extract_path(opened, f"{place}/foreign:1", "/etc", tmp_path / "c")
        before.spoils = registry.manifest("odd", "1")["layers"][0]["digest"]
        with pytest.raises(ImageFailed, match="does not match the digest") as caught:
            await extract_path(opened, f"{place}/odd:1", "/opt/a", tmp_path / "d")
        assert caught.value.kind == "digest"
        (tmp_path / "full").mkdir()
        (tmp_path / "full/mine").touch()
        with pytest.raises(BadInput, match="not empty"):
            await extract_path(opened, f"{place}/agents:1", "/opt/a", tmp_path / "full")
        assert (tmp_path / "full/mine").exists()
