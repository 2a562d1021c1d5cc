"""kill -9 in the middle of appending: the next build makes everything whole, and nothing is left here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.registry_server import FORMS, RealRegistry, engine, layer, real_registry, tar
from tests.wait_bounds import stretch

from holdwater.core.image import ImageOutcome
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
    asked = {
        "bases": bases,
        "repositories": [f"{registry.address}/agents"],
        "layers": [msgspec.to_builtins(agent)],
    }
    places = [tmp_path / "cwd", tmp_path / "temp"]
    for place in places:
        place.mkdir()
    script = Path(__file__).parents[1] / "registry_build.py"
    uploads = registry.root / "docker/registry/v2/repositories/agents/_uploads"
    for wanted in (0, count // 2):  # while the layer is on its way, then among the images
        child = subprocess.Popen(
            [sys.executable, str(script), json.dumps(asked)],
            cwd=places[0],
            env={**os.environ, "TMPDIR": str(places[1]), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + stretch(60)
        while not uploads.exists() or len(registry.tags("agents")) < wanted:
            assert time.monotonic() < until and child.poll() is None
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert len(registry.tags("agents")) < count
    async with engine((agent,)) as making:
        made = await making.all(bases, f"{registry.address}/agents")
        assert {one.how for one in made} == {ImageOutcome.MADE, ImageOutcome.PRESENT}
        assert [await check_image(making.registries, one) for one in made] == [""] * count
    assert [one for place in places for one in place.iterdir()] == []
    assert len(registry.tags("agents")) == count
