"""The command on a recipe: planned, built, shown, audited and resumed against a real registry."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import until
from tests.image_builds import ImageScene, real_registry, settled
from tests.registry_server import front, refused
from tests.registry_server import real_registry as start_registry
from tests.wait_bounds import stretch

from holdwater.api.images import plan_build, prepare_images
from holdwater.core.image import KEY_LABEL


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the registry keeps all that it has."""
    return tmp_path_factory.mktemp("registry") / "here"


@pytest.fixture(scope="module")
def port(storage: Path) -> Iterator[int]:
    with real_registry(storage) as found:
        yield found


@pytest.fixture(scope="module")
def blobs(storage: Path) -> Path:
    """Where the registry keeps blobs."""
    return storage / "data/docker/registry/v2/blobs/sha256"


@pytest.fixture
def images(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageScene]:
    monkeypatch.setenv("HOLDWATER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    scene = ImageScene(tmp_path, port)
    yield scene
    scene.close()


def asked(port: int, method: str, path: str, kind: str = "") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=stretch(10))) as connection:
        connection.request(method, path, headers={"Accept": kind or "*/*"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def config_of(port: int, repository: str, tag: str) -> dict[str, Any]:
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.loads(asked(port, "GET", f"/v2/{repository}/manifests/{tag}", kind)[1])
    blob = asked(port, "GET", f"/v2/{repository}/blobs/{manifest['config']['digest']}")[1]
    config: dict[str, Any] = json.loads(blob)
    return config


def test_a_recipe_is_planned_built_found_present_and_audited(images: ImageScene) -> None:
    recipe = images.recipe(images.bases(3), repository="whole")
    plan = images.images("plan", recipe, "--json")
    assert plan.wait(30) == 0, plan
    assert (plan.document()["make"], plan.document()["present"]) == (3, 0)

    first = images.built(recipe, "first")
    second = images.built(recipe, "second")

    assert (first["made"], first["present"], first["failed"]) == (3, 0, 0)
    assert (second["made"], second["present"], second["uploaded"]) == (0, 3, 0)
    again = images.images("plan", recipe, "--json")
    assert again.wait(30) == 0, again
    assert (again.document()["make"], again.document()["present"], again.document()["upload"]) == (0, 3, 0)
    audit = images.images("audit", images.place / "first", "--json")
    assert audit.wait(30) == 0, audit
    assert (audit.document()["checked"], audit.document()["ok"]) == (3, True)
    config = config_of(images.port, "whole", "b1")  # the alias
    assert config["config"]["Entrypoint"] == ["/opt/agent/tool"]
    assert "MODE=eval" in config["config"]["Env"]
    assert config["config"]["Labels"]["base"] == "b1"


def test_the_manifest_of_a_build_pins_every_base(images: ImageScene) -> None:
    recipe = images.recipe(images.bases(2), repository="pinned")

    images.built(recipe)

    manifest = json.loads((images.place / "run" / "images.json").read_bytes())
    assert [row["name"] for row in manifest["images"]] == ["b0", "b1"]
    for row in manifest["images"]:
        made = row["made"]
        status, _ = asked(images.port, "HEAD", f"/v2/bases/manifests/{made['base_digest']}")
        assert status == 200
        tag = made["reference"].rpartition(":")[2]
        assert config_of(images.port, "pinned", tag)["config"]["Labels"][KEY_LABEL] == tag
    assert manifest["build"]["made"] == 2


def test_a_changed_agent_is_one_layer_and_new_manifests(images: ImageScene) -> None:
    recipe = images.recipe(images.bases(5), repository="changed")
    images.built(recipe, "before")
    (images.agent / "tool").write_bytes(b"#!/bin/sh\n# " + bytes(range(1, 256)).replace(b"\n", b"") * 40)

    after = images.built(recipe, "after")

    layer = json.loads((images.place / "after" / "images.json").read_bytes())["images"][0]["made"]["layers"]
    assert (after["made"], after["present"]) == (5, 0)
    status, blob = asked(images.port, "GET", f"/v2/changed/blobs/{layer[0]}")
    assert status == 200
    assert len(blob) <= after["uploaded"] < len(blob) + 5 * 2000  # and five configurations


def test_one_failed_base_stops_no_other_and_is_named(images: ImageScene) -> None:
    good = images.bases(3)
    recipe = images.recipe([good[0], f"{images.host}/bases:none", good[1]], repository="partly")

    report = images.built(recipe, "run", status=1)

    assert (report["made"], report["failed"]) == (2, 1)
    assert report["failures"][0]["name"] == "none"
    assert "MANIFEST_UNKNOWN" in report["failures"][0]["message"]
    audit = images.images("audit", images.place / "run")
    assert audit.wait(30) == 1, audit
    assert "`none` was not made" in audit.stdout


def manifest_of(port: int, repository: str, tag: str) -> dict[str, Any]:
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest: dict[str, Any] = json.loads(asked(port, "GET", f"/v2/{repository}/manifests/{tag}", kind)[1])
    return manifest


def altered(blobs: Path, digest: str, cut: int = 0) -> None:
    """Another byte in a blob of the registry's storage, and some fewer."""
    name = digest.removeprefix("sha256:")
    path = blobs / name[:2] / name / "data"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1 : len(content) - cut])


def test_an_audit_finds_a_configuration_that_was_altered_and_a_build_too(
    images: ImageScene, blobs: Path
) -> None:
    recipe = images.recipe(images.bases(2), repository="altered")
    images.built(recipe)
    config = manifest_of(images.port, "altered", "b0")["config"]["digest"]
    altered(blobs, config)

    audit = images.images("audit", images.place / "run", "--json")
    assert audit.wait(60) == 1, audit
    again = images.built(recipe, "again", "--retries", "0", status=1)

    (problem,) = audit.document()["problems"]
    assert "`b0`" in problem and config in problem
    assert (again["made"], again["present"], again["failed"]) == (0, 1, 1)
    failed = (images.place / "again" / "images.json").read_text()
    assert "the registry keeps a damaged copy of it" in failed and config in failed


def test_an_audit_finds_layers_by_size_and_deep_by_content(images: ImageScene, blobs: Path) -> None:
    """Given two layers of bases, one that is too short and one with another byte."""
    recipe = images.recipe(images.bases(2, repository="thick"), repository="layered")
    images.built(recipe)
    short, wrong = (manifest_of(images.port, "layered", name)["layers"][1]["digest"] for name in ("b0", "b1"))
    altered(blobs, short, cut=1)
    altered(blobs, wrong)

    shallow = images.images("audit", images.place / "run", "--json")
    deep = images.images("audit", images.place / "run", "--json", "--deep")

    assert (shallow.wait(60), deep.wait(60)) == (1, 1)
    (problem,) = shallow.document()["problems"]
    assert short in problem and "bytes, not" in problem
    found = deep.document()["problems"]
    assert len(found) == 2 and short in found[0] and wrong in found[1]


def test_a_blob_that_was_removed_is_uploaded_again(images: ImageScene, blobs: Path) -> None:
    recipe = images.recipe(images.bases(1), repository="removed")
    images.built(recipe)
    name = manifest_of(images.port, "removed", "b0")["config"]["digest"].removeprefix("sha256:")
    (blobs / name[:2] / name / "data").unlink()

    again = images.built(recipe, "again")

    assert (again["made"], again["present"]) == (1, 0)
    assert (blobs / name[:2] / name / "data").exists()


def test_an_audit_finds_a_tag_that_is_not_what_was_made(images: ImageScene) -> None:
    recipe = images.recipe(images.bases(2), repository="moved")
    images.built(recipe)
    made = json.loads((images.place / "run" / "images.json").read_bytes())["images"][0]["made"]
    images.pusher.push("moved", made["reference"].rpartition(":")[2], [], "something else")

    audit = images.images("audit", images.place / "run", "--json")

    assert audit.wait(30) == 1, audit
    assert len(audit.document()["problems"]) == 1
    assert made["digest"] in audit.document()["problems"][0]
    again = images.built(recipe, "again")
    assert (again["made"], again["present"]) == (1, 1)


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.proof)])
def test_kill_9_in_the_middle_loses_nothing_and_leaves_nothing(
    images: ImageScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setenv("TMPDIR", str(temp))
    bases = images.bases(count, repository=f"killed-{count}")
    recipe = images.recipe(bases, "[build]\nconcurrency = 1", repository=f"kills-{count}")
    command = images.build(recipe)
    for part in (8, 4, 2):
        until("some more are settled", lambda part=part: settled(images.place / "run") > count // part)  # type: ignore[misc]
        command.kill()
        command = images.scene.start("resume", str(images.place / "run"), "--json")

    assert command.wait(60) == 0, command

    report = command.document()
    assert report["made"] + report["present"] == count
    audit = images.scene.start("audit", str(images.place / "run"))
    assert audit.wait(30) == 0, audit
    checked = images.images("audit", images.place / "run")
    assert checked.wait(60) == 0, checked
    assert list(temp.iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["layers"]


def test_force_makes_present_images_and_their_layer_again(images: ImageScene) -> None:
    recipe = images.recipe(images.bases(2), repository="forced")
    images.built(recipe, "first")
    (layer,) = (images.place / "cache/layers/layers").iterdir()
    inode = (layer / "layer.tar.gz").stat().st_ino

    plan = images.images("plan", recipe, "--force", "--json")
    again = images.built(recipe, "again", "--force", "agent")

    assert plan.wait(30) == 0, plan
    assert (plan.document()["make"], plan.document()["present"]) == (2, 0)
    assert (again["made"], again["present"]) == (2, 0)
    assert (layer / "layer.tar.gz").stat().st_ino != inode, "the layer was built again"
    rows = [json.loads((images.place / name / "images.json").read_bytes()) for name in ("first", "again")]
    digests = [[row["made"]["digest"] for row in one["images"]] for one in rows]
    assert digests[0] == digests[1]
    assert all("replaced" not in row["made"] for row in rows[1]["images"]), "it is the same image"
    assert images.built(recipe, "third")["present"] == 2


@pytest.mark.parametrize("variable", [True, False], ids=["variable", "flag"])
def test_a_cache_of_no_size_keeps_no_layer(
    images: ImageScene, monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    recipe = images.recipe(images.bases(1), '[build]\ncache = "1GiB"', repository="uncached")
    if variable:
        monkeypatch.setenv("HOLDWATER_CACHE_SIZE", "0")

    images.built(recipe, "run", *([] if variable else ["--cache", "0"]))

    assert list((images.place / "cache/layers/layers").iterdir()) == []
    monkeypatch.setenv("HOLDWATER_CACHE_SIZE", "0")
    images.built(recipe, "again", "--cache", "1GiB")
    assert len(list((images.place / "cache/layers/layers").iterdir())) == 1, "the flag comes first"


def test_each_image_gets_several_aliases_with_columns_of_its_row(images: ImageScene) -> None:
    images.bases(2)
    rows = [{"id": f"b{n}", "grade": "true", "data": {"repo": f"r{n}"}} for n in range(2)]
    (images.place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = images.place / "suite.toml"
    recipe.write_text(
        f'[bases]\nsuite = "tasks.jsonl"\ntemplate = "{images.host}/bases:{{id}}"\n'
        f'[target]\nrepository = "{images.host}/named/{{data.repo}}"\nalias = ["{{id}}", "{{data.repo}}-x"]\n'
    )

    images.built(recipe)

    for n in range(2):
        status, tags = asked(images.port, "GET", f"/v2/named/r{n}/tags/list")
        assert status == 200
        assert {f"b{n}", f"r{n}-x"} < set(json.loads(tags)["tags"])
    audit = images.images("audit", images.place / "run", "--json")
    assert audit.wait(30) == 0, audit


async def test_a_plan_tells_impossible_images_from_unknown_ones(tmp_path: Path) -> None:
    with start_registry(tmp_path / "registry") as registry:
        for name in ("one", "two", "down"):
            registry.push(f"base-{name}", "1", "oci")
        async with front(registry) as before:

            def fail(kind: str, request: Any) -> Any:
                if kind == "begin" and "/closed/" in request.path:
                    return refused(403, "DENIED")
                return refused(500) if "/base-down/" in request.path else None

            before.fault = fail

            async def plan(repository: str, *bases: str) -> tuple[int, ...]:
                names = [f'"{before.address}/base-{base}:1"' for base in bases]
                recipe = tmp_path / "images.toml"
                recipe.write_text(
                    f"[bases]\nimages = [{', '.join(names)}]\n"
                    f'[target]\nrepository = "{before.address}/{repository}"\n'
                )
                found = await plan_build(prepare_images(recipe, None))
                return found.exit_status, found.make, found.impossible, found.unknown

            assert await plan("open", "one", "two") == (0, 2, 0, 0)
            assert await plan("open", "one", "none") == (1, 1, 1, 0)
            assert await plan("closed", "one", "two") == (1, 0, 2, 0)
            assert await plan("open", "one", "down") == (1, 1, 0, 1)
            assert (before.seen["begin"], before.seen["cancel"]) == (4, 3), "one for each plan"


def test_a_suite_names_the_bases(images: ImageScene) -> None:
    images.bases(2)
    rows = [{"id": f"x/b{n}", "grade": "true", "data": {"tag": f"b{n}"}} for n in range(2)]
    (images.place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = images.place / "suite.toml"
    recipe.write_text(
        f'[bases]\nsuite = "tasks.jsonl"\ntemplate = "{images.host}/bases:{{data.tag}}"\n'
        f'[target]\nrepository = "{images.host}/suites/{{id}}"\n'
    )

    report = images.built(recipe)

    assert report["made"] == 2
    rows = json.loads((images.place / "run" / "images.json").read_bytes())["images"]
    assert [row["name"] for row in rows] == ["x/b0", "x/b1"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "none.toml"], "cannot read `none.toml`"),
        (["build", "images.toml", "--engine", "podman"], "`--engine` must be one of"),
        (["build", "images.toml", "--disk", "much"], "invalid size for `--disk`"),
        (["build", "steps.toml", "--engine", "registry"], "`--engine registry` cannot carry out"),
        (["show", "none"], "no such directory"),
        (["bake"], "bake"),
    ],
)
def test_bad_input_is_named_and_makes_nothing(images: ImageScene, words: list[str], told: str) -> None:
    recipe = images.recipe(images.bases(1))
    (images.place / "steps.toml").write_text(recipe.read_text() + '[build]\nbefore = ["RUN true"]\n')
    words = [str(images.place / word) if word in ("images.toml", "steps.toml") else word for word in words]
    out = ["--out", str(images.place / "run")] if words[0] == "build" else []

    command = images.scene.start("images", *words, *out)

    assert command.wait(20) == 2, command
    assert told in command.stderr
    assert command.stdout == ""
    assert not (images.place / "run").exists()
