"""kill -9 in the middle of appending: the next build makes everything whole, and nothing is left here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from tests.registry_server import (
    FORMS,
    RealRegistry,
    engine,
    front,
    layer,
    real_registry,
    refused,
    tar,
)
from tests.wait_bounds import stretch

from holdwater.core.image import ImageLayer, ImageOutcome
from holdwater.image.registry.lookup import check_image


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RealRegistry]:
    with real_registry(tmp_path / "one") as made:
        yield made


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.proof)])
async def test_what_a_killed_build_left_is_completed(
    registry: RealRegistry, tmp_path: Path, count: int
) -> None:
    for number in range(count):
        registry.push(f"base{number}", "1", FORMS[number % 4], layers=[tar({"x": b"%d" % number})])
    bases = [f"{registry.address}/base{number}:1" for number in range(count)]
    agent = layer(tmp_path / "agent", {"opt/agent": os.urandom(8_000_000)})
    places = [tmp_path / "cwd", tmp_path / "temp"]
    for place in places:
        place.mkdir()
    for tags in (0, count // 2):  # while the layer is on its way, then among the images
        await kill_build(registry, agent, count, tags, places)
    assert len(registry.tags("agents")) < count
    async with engine((agent,)) as making:
        made = await making.all(bases, f"{registry.address}/agents")
        assert {one.how for one in made} == {ImageOutcome.MADE, ImageOutcome.PRESENT}
        assert [await check_image(making.registries, one) for one in made] == [""] * count
    assert [one for place in places for one in place.iterdir()] == []
    assert len(registry.tags("agents")) == count


async def kill_build(
    registry: RealRegistry, agent: ImageLayer, count: int, tags: int, places: list[Path]
) -> None:
    """Kill a build while it sends the layer, or the image after so many tags: it cannot be over before."""
    script = Path(__file__).parents[1] / "registry_build.py"
    async with front(registry) as before:

        def strike(kind: str, request: web.Request) -> web.Response | None:
            sends = "PUT manifest" if tags else "PUT blob"
            if kind != sends or len(registry.tags("agents")) < tags:
                return None
            if child.returncode is None:
                child.kill()
            return refused(500)

        before.fault = strike
        asked = {
            "bases": [f"{before.address}/base{number}:1" for number in range(count)],
            "repositories": [f"{before.address}/agents"],
            "layers": [msgspec.to_builtins(agent)],
        }
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), json.dumps(asked)),
            cwd=places[0],
            env={**os.environ, "TMPDIR": str(places[1]), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.DEVNULL,
        )
        async with asyncio.timeout(stretch(60)):
            assert await child.wait() == -signal.SIGKILL
