"""What appending costs in memory, time and local disk, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.registry_server import OCI, RealRegistry, digest, layer, real_registry, tar

from holdwater.core.image import ImageLayer
from holdwater.core.records import MiB
from holdwater.image.registry.reference import ImageReference
from holdwater.image.registry.transfer import MOST_BLOBS, MOST_PLACES, BlobLocations

PROOF = pytest.mark.proof


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RealRegistry]:
    with real_registry(tmp_path / "one") as made:
        yield made


def build(tmp_path: Path, **asked: Any) -> Any:
    """A build in a process with a working directory and a temporary one of its own, both empty at the end."""
    places = [tmp_path / "cwd", tmp_path / "temp"]
    for place in places:
        place.mkdir()
    environment = {**os.environ, "TMPDIR": str(places[1]), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parents[1] / "registry_build.py"
    asked["layers"] = [msgspec.to_builtins(one) for one in asked["layers"]]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(asked)],
        cwd=places[0],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert [one for place in places for one in place.iterdir()] == []
    return json.loads(done.stdout)


def raw_layer(path: Path, size: int) -> ImageLayer:
    """A layer of random bytes: what is in it does not matter here."""
    path.write_bytes(os.urandom(MiB) * (size // MiB))
    content = path.read_bytes()
    return ImageLayer(digest(content), digest(b"unpacked"), len(content), 1, str(path))


@pytest.mark.parametrize("size", [96 * MiB, pytest.param(300 * MiB, marks=PROOF)])
def test_a_large_blob_goes_from_registry_to_registry_without_being_held(
    registry: RealRegistry, tmp_path: Path, size: int
) -> None:
    blob = os.urandom(MiB) * (size // MiB)
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": [digest(b"x")]}, "os": "linux"}).encode()
    body = {
        "schemaVersion": 2,
        "mediaType": OCI["manifest"],
        "config": {
            "mediaType": OCI["config"],
            "size": len(config),
            "digest": registry.put_blob("base", config),
        },
        "layers": [{"mediaType": OCI["layer"], "size": size, "digest": registry.put_blob("base", blob)}],
    }
    del blob
    registry.put_manifest("base", "1", body, OCI["manifest"])
    agent = raw_layer(tmp_path / "agent", size)
    with real_registry(tmp_path / "two") as other:
        told = build(
            tmp_path,
            bases=[f"{registry.address}/base:1"],
            repositories=[f"{other.address}/agents"],
            layers=[agent],
        )
        tag = told["made"][0][0].rpartition(":")[2]
        assert [one["size"] for one in other.manifest("agents", tag)["layers"]] == [size, size]
    assert told["grown"] < 64 * MiB, f"{told['grown'] / MiB:.0f} MiB"


@pytest.mark.parametrize(
    ("bases", "repositories"), [(10, 4), pytest.param(100, 100, marks=PROOF, id="10000 images")]
)
def test_memory_stays_flat_over_many_images(
    registry: RealRegistry, tmp_path: Path, bases: int, repositories: int
) -> None:
    for number in range(bases):
        registry.push(f"base{number}", "1", "oci", layers=[tar({"x": b"%d" % number})])
    told = build(
        tmp_path,
        bases=[f"{registry.address}/base{number}:1" for number in range(bases)],
        repositories=[f"{registry.address}/agents{number}" for number in range(repositories)],
        layers=[layer(tmp_path / "agent", {"opt/agent": b"agent"})],
    )
    assert {how for _, how in told["made"]} == {"made"}
    early, late = told["resident"][1], told["resident"][-1]
    assert late - early < 16 * MiB, [f"{one / MiB:.1f}" for one in told["resident"]]


@pytest.mark.parametrize(("count", "seconds"), [pytest.param(433, 30.0, marks=PROOF)])
def test_images_are_made_in_time(registry: RealRegistry, tmp_path: Path, count: int, seconds: float) -> None:
    for number in range(count):
        registry.push(
            f"base{number}", "1", "schema2", layers=[tar({f"x{n}": b"%d" % number}) for n in range(3)]
        )
    told = build(
        tmp_path,
        bases=[f"{registry.address}/base{number}:1" for number in range(count)],
        repositories=[f"{registry.address}/agents"],
        layers=[layer(tmp_path / "agent", {"opt/agent": os.urandom(20 * MiB)})],
    )
    assert len(registry.tags("agents")) == count and told["seconds"] < seconds


def test_the_memory_of_blob_locations_is_bounded() -> None:
    known = BlobLocations()
    for number in range(MOST_BLOBS + 500):
        known.add(ImageReference("r", "shared"), digest(b"%d" % number))
    for number in range(MOST_PLACES + 50):
        known.add(ImageReference("r", f"place{number}"), digest(b"everywhere"))
    assert len(known._places) == MOST_BLOBS
    assert len(known._places["r", digest(b"everywhere")]) == MOST_PLACES
    assert not known.has(ImageReference("r", "shared"), digest(b"0"))  # the oldest
    assert known.has(ImageReference("r", "shared"), digest(b"%d" % (MOST_BLOBS + 499)))
    assert known.find_other(ImageReference("r", "new"), digest(b"everywhere")) == f"place{MOST_PLACES + 49}"
