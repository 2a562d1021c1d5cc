"""Images appended to in a real registry: every form of base, twice, with another agent, into other places."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.registry_server import (
    DOCKER,
    FORMS,
    OCI,
    RealRegistry,
    Steps,
    digest,
    engine,
    front,
    layer,
    real_registry,
    tar,
)

from holdwater.core.errors import BadInput, ImageFailed
from holdwater.core.image import (
    BASE_DIGEST_LABEL,
    KEY_LABEL,
    ConfigEdits,
    EngineKind,
    ImageBlueprint,
    ImageOutcome,
    ImagePlatform,
    ImageTarget,
    compute_image_key,
)
from holdwater.core.image import BuildSteps as Lines
from holdwater.image.registry.engine import RegistryEngine
from holdwater.image.registry.lookup import check_image

PROOF = pytest.mark.proof
EDITS = ConfigEdits(
    env={"A": "agent", "B": "b"}, user="agent", entrypoint=("/opt/agent/run",), labels={"x": "y"}
)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "one") as made:
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "two") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the working directory nor the temporary one is touched."""
    for name in ("cwd", "temp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    yield
    assert [*(tmp_path / "cwd").iterdir(), *(tmp_path / "temp").iterdir()] == []


def agent(place: Path, content: bytes = b"#!/bin/sh\necho hello\n") -> Any:
    return layer(place / f"agent-{digest(content)[-8:]}.tar.gz", {"opt/agent/run": content})


def pushed(registry: RealRegistry, name: str, count: int) -> list[str]:
    """So many bases, in every form in turn."""
    for number in range(count):
        content = [
            tar({"etc/": b"", "etc/base": b"%d" % number}),
            tar({"usr/": b"", "usr/x": b"%d" % number}),
        ]
        registry.push(f"{name}/base{number}", "1", FORMS[number % len(FORMS)], layers=content)
    return [f"{registry.address}/{name}/base{number}:1" for number in range(count)]


@pytest.mark.parametrize("form", FORMS)
async def test_an_image_has_the_base_the_layer_and_the_edits(
    registry: RealRegistry, tmp_path: Path, form: str
) -> None:
    registry.push(f"forms/{form}", "1", form)
    base, target, made_of = f"{registry.address}/forms/{form}:1", f"made/{form}", agent(tmp_path)
    progress = Steps()
    async with engine((made_of,), EDITS) as making:
        image = ImageTarget(name="i", base=base, repository=f"{registry.address}/{target}", aliases=("nice",))
        foreseen = await making.engine.foresee(image)
        made = await making.engine.make(image, tmp_path / "log", progress)
        assert await check_image(making.registries, made) == ""
    types = OCI if form in ("oci", "index") else DOCKER
    body = registry.manifest(target, made.reference.rpartition(":")[2])
    config = registry.config(target, "nice")
    assert made.digest == registry.digest(target, "nice") == registry.digest(target, made.reference[-40:])
    assert body["mediaType"] == types["manifest"]
    assert [one["mediaType"] for one in body["layers"]] == [types["layer"]] * 2
    assert body["layers"][1]["digest"] == made_of.digest
    assert registry.blob(target, made_of.digest) == Path(made_of.path).read_bytes()
    assert config["rootfs"]["diff_ids"][1] == made_of.diff_id
    assert config["config"] == {
        "Env": ["PATH=/bin", "A=agent", "B=b"],
        "User": "agent",
        "Entrypoint": ["/opt/agent/run"],
        "Labels": {
            "of": "base",
            "x": "y",
            KEY_LABEL: made.reference[-40:],
            BASE_DIGEST_LABEL: made.base_digest,
        },
    }
    blueprint = ImageBlueprint(layers=(made_of,), edits=EDITS)
    assert made.reference == f"{registry.address}/{target}:{compute_image_key(made.base_digest, blueprint)}"
    assert (made.how, made.engine, made.aliases) == (ImageOutcome.MADE, EngineKind.REGISTRY, ("nice",))
    assert made.uploaded == foreseen.upload == made_of.size + body["config"]["size"]
    assert (made.downloaded, made.mounted, foreseen.download) == (0, 1, 0)
    assert (foreseen.reference, foreseen.base_digest) == (made.reference, made.base_digest)
    assert progress.phases == ["base", "layers", "push"] and not (tmp_path / "log").exists()


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=PROOF)])
async def test_many_bases_a_second_plan_and_a_changed_agent(
    registry: RealRegistry, tmp_path: Path, count: int
) -> None:
    bases = pushed(registry, f"many{count}", count)
    target = f"many{count}/agents"
    first, second = agent(tmp_path), agent(tmp_path, b"#!/bin/sh\necho other\n")
    async with front(registry) as before:
        place = f"{before.address}/{target}"
        bases = [base.replace(registry.address, before.address) for base in bases]
        async with engine((first,), EDITS) as making:
            made = await making.all(bases, place)
        assert {one.how for one in made} == {ImageOutcome.MADE}
        assert len({one.digest for one in made}) == count and len(registry.tags(target)) == count
        configs = sum(registry.manifest(target, one.digest)["config"]["size"] for one in made)
        assert sum(one.uploaded for one in made) == before.up == first.size + configs
        assert sum(one.mounted for one in made) == 2 * count and before.down < count * 1024

        before.seen.clear()
        async with engine((first,), EDITS) as making:
            plan = [await making.foresee(base, place) for base in bases]
            again = await making.all(bases, place)
        assert {(one.how, one.upload, one.download) for one in plan} == {(ImageOutcome.PRESENT, 0, 0)}
        assert {(one.how, one.uploaded, one.mounted) for one in again} == {(ImageOutcome.PRESENT, 0, 0)}
        assert [one.digest for one in again] == [one.digest for one in made]
        asked = {"GET manifest", "GET blob", "HEAD blob"}
        assert set(before.seen) == asked  # nothing was put, begun or mounted

        before.seen.clear()
        before.up = 0
        async with engine((second,), EDITS) as making:
            plan = [await making.foresee(base, place) for base in bases]
            changed = await making.all(bases, place)
        configs = sum(registry.manifest(target, one.digest)["config"]["size"] for one in changed)
        assert sum(one.upload for one in plan) == before.up == second.size + configs
        assert before.seen["PUT manifest"] == count
        assert {one.digest for one in changed}.isdisjoint(one.digest for one in made)


async def test_a_tag_with_other_content_is_not_taken_for_done(registry: RealRegistry, tmp_path: Path) -> None:
    (base,) = pushed(registry, "stale", 1)
    async with engine((agent(tmp_path),)) as making:
        foreseen = await making.foresee(base, f"{registry.address}/stale/agents")
        impostor = registry.push("stale/agents", foreseen.reference[-40:], "oci")
        foreseen = await making.foresee(base, f"{registry.address}/stale/agents")
        assert (foreseen.how, foreseen.replaces) == (ImageOutcome.MADE, impostor)
        made = await making.make(base, f"{registry.address}/stale/agents")
    assert (made.how, made.replaced) == (ImageOutcome.MADE, impostor)
    assert registry.digest("stale/agents", made.reference[-40:]) == made.digest != impostor


async def test_aliases_follow_an_image_that_is_there_already(registry: RealRegistry, tmp_path: Path) -> None:
    (base,) = pushed(registry, "alias", 1)
    place = f"{registry.address}/alias/agents"
    other = registry.push("alias/agents", "moved", "schema2")
    async with engine((agent(tmp_path),)) as making:
        made = await making.make(base, place, "kept")
        assert await check_image(making.registries, made) == ""
        again = await making.make(base, place, "kept", "moved", "new")
    assert (again.how, again.uploaded) == (ImageOutcome.PRESENT, 0)
    assert (
        {registry.digest("alias/agents", tag) for tag in ("kept", "moved", "new")} == {made.digest} != {other}
    )


async def test_several_platforms_become_an_index_of_these_alone(
    registry: RealRegistry, tmp_path: Path
) -> None:
    for form, types in (("index", OCI), ("list", DOCKER)):
        base = registry.push(f"several/{form}", "1", form)
        platforms = (ImagePlatform(), ImagePlatform(architecture="arm64"))
        blueprint = ImageBlueprint(layers=(agent(tmp_path),), platforms=platforms)
        async with engine(blueprint=blueprint) as making:
            made = await making.make(
                f"{registry.address}/several/{form}:1", f"{registry.address}/several/made"
            )
            assert await check_image(making.registries, made) == ""
            again = await making.make(
                f"{registry.address}/several/{form}:1", f"{registry.address}/several/made"
            )
        assert made.base_digest == base and again.how is ImageOutcome.PRESENT
        body = registry.manifest("several/made", made.digest)
        assert body["mediaType"] == types["index"]
        assert [one["platform"]["architecture"] for one in body["manifests"]] == ["amd64", "arm64"]
        configs = [registry.config("several/made", one["digest"]) for one in body["manifests"]]
        assert [one["architecture"] for one in configs] == ["amd64", "arm64"]
        assert {one["config"]["Labels"][BASE_DIGEST_LABEL] for one in configs} == {base}


async def test_into_the_repository_of_the_base_nothing_is_moved(
    registry: RealRegistry, tmp_path: Path
) -> None:
    registry.push("same/place", "1", "oci")
    made_of = agent(tmp_path)
    async with front(registry) as before, engine((made_of,)) as making:
        made = await making.make(f"{before.address}/same/place:1", f"{before.address}/same/place")
        assert (made.mounted, made.downloaded) == (0, 0)
        assert before.seen["mount"] == 0 and before.up == made.uploaded


async def test_between_registries_blobs_are_streamed_once_and_found_again(
    registry: RealRegistry, other: RealRegistry, tmp_path: Path
) -> None:
    shared = tar({"lib/": b"", "lib/big": os.urandom(200_000)})
    for name in ("a", "b"):
        registry.push(f"far/{name}", "1", "schema2", layers=[shared, tar({f"{name}/": b""})])
    bases = [f"{registry.address}/far/{name}:1" for name in ("a", "b")]
    sizes = [registry.manifest(f"far/{name}", "1")["layers"] for name in ("a", "b")]
    moved = sum({one["digest"]: one["size"] for both in sizes for one in both}.values())
    made_of = agent(tmp_path)
    async with engine((made_of,)) as making:
        plan = [await making.foresee(base, f"{other.address}/far/agents") for base in bases]
        made = await making.all(bases, f"{other.address}/far/agents")
        assert sum(one.download for one in plan) == sum(one.downloaded for one in made) == moved
        assert sum(one.upload for one in plan) == sum(one.uploaded for one in made)
        elsewhere = await making.make(bases[0], f"{other.address}/far/second")
        assert (elsewhere.downloaded, elsewhere.mounted) == (
            0,
            3,
        )  # from the first repository: two and the layer
        for one in (*made, elsewhere):
            assert await check_image(making.registries, one) == ""
    async with engine((made_of,), EDITS) as making:  # another engine, which knows of nothing
        again = await making.make(bases[0], f"{other.address}/far/agents")
    assert (again.how, again.downloaded) == (ImageOutcome.MADE, 0)


async def test_concurrent_images_upload_their_layer_once_or_mount_it(
    registry: RealRegistry, tmp_path: Path
) -> None:
    bases = pushed(registry, "once", 12)
    made_of = layer(tmp_path / "big.tar.gz", {"opt/agent/big": os.urandom(3_000_000)})
    async with front(registry) as before, engine((made_of,)) as making:
        made = await making.all(bases, f"{before.address}/once/agents")
        assert sum(one.uploaded > made_of.size for one in made) == 1
        more = await making.make(bases[0], f"{before.address}/once/others")
        assert made_of.size <= before.up < 2 * made_of.size and more.uploaded < made_of.size


async def test_foreign_layers_are_kept_and_not_asked_for(registry: RealRegistry, tmp_path: Path) -> None:
    registry.push("foreign/base", "1", "schema2", foreign=True)
    async with engine((agent(tmp_path),)) as making:
        made = await making.make(f"{registry.address}/foreign/base:1", f"{registry.address}/foreign/agents")
        assert await check_image(making.registries, made) == ""
    layers = registry.manifest("foreign/agents", made.digest)["layers"]
    assert layers[1]["urls"] == ["https://example.com/layer"] and len(layers) == 3


async def test_what_cannot_be_appended_to_names_image_and_cause(
    registry: RealRegistry, tmp_path: Path
) -> None:
    registry.push("odd/onbuild", "1", "oci", config={"OnBuild": ["RUN x"]})
    registry.push("odd/arm", "1", "oci", architecture="arm64")
    place = registry.address
    cases = {
        f"{place}/odd/onbuild:1": ("unsupported", "ONBUILD"),
        f"{place}/odd/arm:1": ("unsupported", "built for `linux/arm64`"),
        f"{place}/odd/arm:none": ("missing", "MANIFEST_UNKNOWN"),
        f"{place}/odd/nowhere:1": ("missing", "404"),
        "not a reference": ("unsupported", "invalid image reference"),
    }
    async with engine((agent(tmp_path),)) as making:
        for base, (kind, cause) in cases.items():
            for doing in (making.make, making.foresee):
                with pytest.raises(ImageFailed, match=cause) as caught:
                    await doing(base, f"{place}/odd/agents")
                assert (caught.value.kind, caught.value.again) == (kind, False)
                assert base in caught.value.message
        with pytest.raises(BadInput, match="steps"):
            RegistryEngine(ImageBlueprint(steps=Lines(after=("RUN x",))), making.registries, making.notes)
    assert registry.tags("odd/agents") == []


async def test_a_check_reports_each_fault_of_an_image(registry: RealRegistry, tmp_path: Path) -> None:
    (base,) = pushed(registry, "checked", 1)
    made_of = agent(tmp_path, b"checked")
    async with engine((made_of,)) as making:
        made = await making.make(base, f"{registry.address}/checked/agents", "nice")
        assert await check_image(making.registries, made) == ""
        moved = registry.push("checked/agents", "nice", "oci")
        assert f"checked/agents:nice` points to `{moved}`" in await check_image(making.registries, made)
        await making.make(base, f"{registry.address}/checked/agents", "nice")
        status, _, _ = registry.ask("DELETE", f"checked/agents/blobs/{made_of.digest}")
        assert status == 202
        assert made_of.digest in await check_image(making.registries, made)
        registry.ask("DELETE", f"checked/agents/manifests/{made.digest}")
        assert await check_image(making.registries, made) == f"the tag `{made.reference}` is missing"


async def test_a_blob_that_was_known_and_is_gone_is_brought_again(
    registry: RealRegistry, tmp_path: Path
) -> None:
    bases = pushed(registry, "gone", 2)
    made_of = agent(tmp_path, b"gone")
    async with engine((made_of,)) as making:
        await making.make(bases[0], f"{registry.address}/gone/agents")
        registry.ask("DELETE", f"gone/agents/blobs/{made_of.digest}")
        made = await making.make(bases[1], f"{registry.address}/gone/agents")
        assert await check_image(making.registries, made) == ""
    assert json.loads(registry.ask("GET", "gone/agents/tags/list")[2])["tags"]
