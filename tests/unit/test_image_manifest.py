"""What becomes of a base's manifest and configuration, without any registry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.registry_server import DOCKER, FOREIGN, OCI, digest

from holdwater.core.errors import ImageFailed
from holdwater.core.image import ConfigEdits, ImageBlueprint, ImageLayer, ImagePlatform
from holdwater.image.registry.manifest import (
    ImageIndex,
    ImageManifest,
    assemble_image,
    assemble_index,
    choose_entry,
    parse_manifest,
)

LAYER = ImageLayer(digest(b"packed"), digest(b"unpacked"), 6, 8, "/nowhere")
AMD64 = ImagePlatform()


def config(layers: int = 1, inner: dict[str, Any] | None = None, **more: Any) -> bytes:
    whole = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2024-01-02T03:04:05Z",
        "config": inner if inner is not None else {},
        "rootfs": {"type": "layers", "diff_ids": [digest(bytes([n])) for n in range(layers)]},
        "history": [{"created_by": "ENV", "empty_layer": True}] + [{"created_by": "base"}] * layers,
    }
    return json.dumps(whole | more).encode()


def manifest(types: dict[str, str] = OCI, layers: int = 1, kinds: dict[int, str] | None = None) -> bytes:
    described = [
        {"mediaType": (kinds or {}).get(n, types["layer"]), "size": 3, "digest": digest(b"%d" % n)}
        for n in range(layers)
    ]
    body = {
        "schemaVersion": 2,
        "mediaType": types["manifest"],
        "config": {"mediaType": types["config"], "size": 9, "digest": digest(b"config"), "data": "eyJ9"},
        "layers": described,
        "annotations": {"kept": "yes"},
    }
    return json.dumps(body).encode()


def parsed(content: bytes, media_type: str = "") -> ImageManifest:
    found = parse_manifest("base:1", content, media_type)
    assert isinstance(found, ImageManifest)
    return found


def edited(edits: ConfigEdits, inner: dict[str, Any]) -> dict[str, Any]:
    made = assemble_image(parsed(manifest()), config(inner=inner), ImageBlueprint(edits=edits), {}, AMD64)
    return json.loads(made.config)["config"]


@pytest.mark.parametrize("types", [OCI, DOCKER], ids=["oci", "schema2"])
def test_an_added_layer_has_the_family_of_its_base_and_all_agrees(types: dict[str, str]) -> None:
    base = parsed(manifest(types, layers=2), types["manifest"])
    made = assemble_image(base, config(layers=2), ImageBlueprint(layers=(LAYER,)), {"l": "v"}, AMD64)
    body, inside = json.loads(made.manifest.content), json.loads(made.config)
    assert made.manifest.media_type == body["mediaType"] == types["manifest"]
    assert body["layers"][:2] == json.loads(manifest(types, layers=2))["layers"]
    assert body["layers"][2] == {"mediaType": types["layer"], "size": 6, "digest": LAYER.digest}
    assert body["config"] == {
        "mediaType": types["config"],
        "size": len(made.config),
        "digest": made.config_digest,
    }
    assert body["annotations"] == {"kept": "yes"}
    assert inside["rootfs"]["diff_ids"][2] == LAYER.diff_id
    filled = [entry for entry in inside["history"] if not entry.get("empty_layer")]
    assert [entry["created_by"] for entry in filled] == ["base", "base", "holdwater"]
    assert inside["created"] == "2024-01-02T03:04:05Z"
    assert made.manifest.digest == digest(made.manifest.content)


def test_the_same_base_and_blueprint_give_the_same_bytes() -> None:
    blueprint = ImageBlueprint(layers=(LAYER,), edits=ConfigEdits(env={"B": "2", "A": "1"}))
    made = [assemble_image(parsed(manifest()), config(), blueprint, {"x": "y"}, AMD64) for _ in range(2)]
    assert made[0] == made[1]


def test_a_base_without_history_gets_none() -> None:
    made = assemble_image(
        parsed(manifest()), config(history=None), ImageBlueprint(layers=(LAYER,)), {}, AMD64
    )
    assert not json.loads(made.config)["history"]


def test_edits_are_those_of_a_dockerfile() -> None:
    base = {
        "Env": ["PATH=/bin", "A=old", "C=c=d"],
        "Entrypoint": ["/init"],
        "Cmd": ["sh"],
        "WorkingDir": "/srv",
        "User": "nobody",
        "Labels": {"of": "base", "both": "base"},
        "Volumes": {"/v": {}},
    }
    assert edited(ConfigEdits(), base) == base
    assert edited(ConfigEdits(env={"N": "new", "A": "a=b"}), base)["Env"] == [
        "PATH=/bin",
        "A=a=b",
        "C=c=d",
        "N=new",
    ]
    entered = edited(ConfigEdits(entrypoint=("/run",)), base)
    assert entered["Entrypoint"] == ["/run"] and "Cmd" not in entered
    both = edited(ConfigEdits(entrypoint=("/run",), cmd=("-x",)), base)
    assert (both["Entrypoint"], both["Cmd"]) == (["/run"], ["-x"])
    assert edited(ConfigEdits(cmd=("x",)), base)["Entrypoint"] == ["/init"]
    assert edited(ConfigEdits(user="1000:1000"), base)["User"] == "1000:1000"
    assert edited(ConfigEdits(workdir="sub/../other"), base)["WorkingDir"] == "/srv/other"
    assert edited(ConfigEdits(workdir="/app"), base)["WorkingDir"] == "/app"
    assert edited(ConfigEdits(workdir="app"), {})["WorkingDir"] == "/app"
    labelled = assemble_image(
        parsed(manifest()), config(inner=base), ImageBlueprint(), {"both": "new"}, AMD64
    )
    assert json.loads(labelled.config)["config"]["Labels"] == {"of": "base", "both": "new"}


@pytest.mark.parametrize(
    ("content", "media_type", "why"),
    [
        (b"[]", "", "not a JSON object"),
        (b"\xff", "", "not a JSON object"),
        (b"[" * 100_000, "", "not a JSON object"),
        (b'{"schemaVersion": 1, "fsLayers": []}', "", "unknown format"),
        (manifest(OCI), DOCKER["manifest"], "its media type is"),
        (b'{"schemaVersion": 2, "manifests": [], "layers": []}', "", "an index and an image at once"),
        (b'{"schemaVersion": 2, "layers": []}', "", "it is not an image"),
        (b'{"schemaVersion": 2, "config": {"mediaType": "application/x"}}', "", "it is not an image"),
        (manifest(kinds={0: OCI["layer"] + "+encrypted"}), "", "encrypted layer"),
        (manifest(kinds={0: "application/x"}), "", "unknown format"),
        (manifest().replace(digest(b"0").encode(), b"sha256:../../x"), "", "invalid digest or size"),
        (manifest().replace(b'"size": 3', b'"size": -3'), "", "invalid digest or size"),
    ],
)
def test_what_cannot_be_appended_to_is_named(content: bytes, media_type: str, why: str) -> None:
    with pytest.raises(ImageFailed, match=why) as caught:
        parse_manifest("base:1", content, media_type)
    assert (caught.value.kind, caught.value.again) == ("unsupported", False)
    assert "base:1" in caught.value.message


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (config(layers=2), "differ in the number of layers"),
        (config(inner={"OnBuild": ["RUN x"]}), "ONBUILD"),
        (config(architecture="arm64"), "built for `linux/arm64`"),
        (config(os="windows"), "built for `windows/amd64`"),
        (config(inner={"Env": "PATH"}), "its configuration is invalid"),
        (config(rootfs={}), "its configuration is invalid"),
    ],
)
def test_a_configuration_that_cannot_be_appended_to_is_named(content: bytes, why: str) -> None:
    with pytest.raises(ImageFailed, match=why) as caught:
        assemble_image(parsed(manifest()), content, ImageBlueprint(layers=(LAYER,)), {}, AMD64)
    assert (caught.value.kind, caught.value.again) == ("unsupported", False)


def test_more_layers_than_docker_takes_are_refused() -> None:
    def on_top_of(count: int) -> None:
        assemble_image(
            parsed(manifest(layers=count)), config(count), ImageBlueprint(layers=(LAYER,)), {}, AMD64
        )

    on_top_of(126)
    with pytest.raises(ImageFailed, match="128 layers"):
        on_top_of(127)


def test_foreign_layers_stay_in_the_manifest_but_are_no_registry_blobs() -> None:
    base = parsed(manifest(DOCKER, layers=2, kinds={1: FOREIGN}))
    assert [blob.digest for blob in base.layers] == [digest(b"0")]
    made = assemble_image(base, config(2), ImageBlueprint(layers=(LAYER,)), {}, AMD64)
    assert [one["mediaType"] for one in json.loads(made.manifest.content)["layers"]] == [
        DOCKER["layer"],
        FOREIGN,
        DOCKER["layer"],
    ]


def index(*platforms: str, types: dict[str, str] = OCI) -> ImageIndex:
    entries = []
    for number, platform in enumerate(platforms):
        os, architecture, *variant = platform.split("/")
        given = {"os": os, "architecture": architecture} | ({"variant": variant[0]} if variant else {})
        entry = {"mediaType": types["manifest"], "size": 1, "digest": digest(b"%d" % number)}
        entries.append(entry | {"platform": given})
    body = {"schemaVersion": 2, "mediaType": types["index"], "manifests": entries}
    found = parse_manifest("base:1", json.dumps(body).encode(), types["index"])
    assert isinstance(found, ImageIndex)
    return found


@pytest.mark.parametrize(
    ("asked", "there", "chosen"),
    [
        ("linux/amd64", ["linux/arm64", "linux/amd64"], 1),
        ("linux/amd64", ["linux/amd64/v3", "linux/amd64/v1"], 1),
        ("linux/amd64/v3", ["linux/amd64", "linux/amd64/v2", "linux/amd64/v4"], 1),
        ("linux/arm64", ["linux/arm/v7", "linux/arm64/v8"], 1),
        ("linux/arm64/v8", ["linux/arm64"], 0),
        ("linux/arm/v7", ["linux/arm/v5", "linux/arm/v6"], 1),
        ("linux/arm/v6", ["linux/arm/v7", "linux/arm/v5"], 1),
        ("linux/arm", ["linux/arm/v6", "linux/arm/v7"], 1),
        ("linux/riscv64", ["unknown/unknown", "linux/riscv64"], 1),
    ],
)
def test_the_best_image_that_runs_on_a_platform_is_chosen(asked: str, there: list[str], chosen: int) -> None:
    assert choose_entry(index(*there), ImagePlatform(*asked.split("/"))).digest == digest(b"%d" % chosen)


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ("linux/amd64", ["linux/amd64/v3"]),
        ("linux/arm/v6", ["linux/arm/v7"]),
        ("windows/amd64", ["linux/amd64", "unknown/unknown"]),
    ],
)
def test_an_index_without_the_platform_says_what_it_has(asked: str, there: list[str]) -> None:
    with pytest.raises(ImageFailed, match=f"no image for `{asked}`; available: `{there[0]}`$"):
        choose_entry(index(*there), ImagePlatform(*asked.split("/")))


@pytest.mark.parametrize("types", [OCI, DOCKER], ids=["oci", "schema2"])
def test_an_index_is_written_back_with_the_chosen_images_alone(types: dict[str, str]) -> None:
    whole = index("linux/amd64", "linux/arm64/v8", "linux/s390x", types=types)
    children = (whole.children[1], whole.children[0])
    parts = [
        assemble_image(
            parsed(manifest(types)),
            config(architecture=one.platform.architecture),
            ImageBlueprint(),
            {},
            one.platform,
        )
        for one in children
    ]
    written = assemble_index(whole, children, [part.manifest for part in parts])
    body = json.loads(written.content)
    assert written.media_type == body["mediaType"] == types["index"]
    assert [one["platform"]["architecture"] for one in body["manifests"]] == ["arm64", "amd64"]
    assert [(one["digest"], one["size"]) for one in body["manifests"]] == [
        (part.manifest.digest, len(part.manifest.content)) for part in parts
    ]
