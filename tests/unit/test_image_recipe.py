"""What an `images.toml` can say, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdwater.core.config import RunConfig
from holdwater.core.errors import BadInput
from holdwater.core.image import (
    BuildSteps,
    ConfigEdits,
    EngineKind,
    ImageBlueprint,
    ImageLayer,
    ImagePlatform,
    RegistryOptions,
    compute_image_key,
    make_labels,
)
from holdwater.core.records import GiB, Instance, SandboxSpec
from holdwater.image.naming import as_tag, assign_image, base_of, fill_template, image_of
from holdwater.image.recipe import read_recipe
from holdwater.run.setup.config import check_config
from holdwater.run.setup.options import parse_settings

WHOLE = """
[bases]
images = ["debian:12", {name = "old", image = "registry.example/debian@sha256:abc"}]

[target]
repository = "localhost:5000/agents"
alias = "{id}-tip"

[agent]
directory = "agent"
prefix = "/opt/tool/"
env = {MODE = "fast"}
user = "1000:1000"
workdir = "/work"
entrypoint = ["/opt/tool/run"]
cmd = ["--help"]
labels = {team = "evals"}

[build]
concurrency = 4
disk = "60GiB"
cache = "2GiB"
platform = ["linux/amd64", "linux/arm64/v8"]

[registries."localhost:5000"]
insecure = true
requests_a_minute = 600
"""
SMALL = '[bases]\nimages = ["a"]\n[target]\nrepository = "r/a"\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "agent").mkdir()
    return tmp_path


def written(place: Path, text: str) -> Path:
    path = place / "images.toml"
    path.write_text(text)
    return path


def test_all_that_a_recipe_says_arrives(place: Path) -> None:
    recipe = read_recipe(written(place, WHOLE))

    assert recipe.bases == (("debian:12", "debian:12"), ("old", "registry.example/debian@sha256:abc"))
    assert (recipe.repository, recipe.aliases) == ("localhost:5000/agents", ("{id}-tip",))
    assert recipe.agent is not None
    assert (recipe.agent.directory, recipe.agent.prefix) == (str(place / "agent"), "/opt/tool")
    assert recipe.edits == ConfigEdits(
        env={"MODE": "fast"},
        user="1000:1000",
        workdir="/work",
        entrypoint=("/opt/tool/run",),
        cmd=("--help",),
        labels={"team": "evals"},
    )
    assert (recipe.concurrency, recipe.disk, recipe.cache) == (4, 60 * GiB, 2 * GiB)
    assert recipe.platforms == (ImagePlatform(), ImagePlatform(architecture="arm64", variant="v8"))
    assert recipe.registries == {"localhost:5000": RegistryOptions(insecure=True, requests_a_minute=600)}
    assert recipe.chosen_engine is EngineKind.REGISTRY


def test_the_example_is_a_recipe() -> None:
    recipe = read_recipe(Path(__file__).parents[2] / "examples" / "images.toml")

    assert [name for name, _ in recipe.bases] == ["debian:12", "older"]


def test_steps_ask_for_docker(place: Path) -> None:
    recipe = read_recipe(written(place, SMALL + '[build]\nbefore = ["RUN apt-get update"]\n'))

    assert recipe.steps == BuildSteps(before=("RUN apt-get update",))
    assert recipe.chosen_engine is EngineKind.DOCKER


def test_bases_can_stand_in_a_file_of_their_own(place: Path) -> None:
    (place / "bases.txt").write_text("# ours\ndebian:12\n\nold debian:11  # with a name\n")

    recipe = read_recipe(written(place, '[bases]\nfile = "bases.txt"\n[target]\nrepository = "r/a"\n'))

    assert recipe.bases == (("debian:12", "debian:12"), ("old", "debian:11"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "images.toml: not TOML: "),
        ("[bases]\nimages = []\n[target]\nrepository = 'r/a'", "images.toml:1: `bases`: needs one of"),
        (
            SMALL + "[agent]\nprefix = 'opt'\ndirectory = 'agent'",
            "images.toml:6: `agent.prefix`: must be absolute",
        ),
        (
            SMALL + "[agent]\nprefix = '/'\ndirectory = 'agent'",
            "images.toml:6: `agent.prefix`: must be a directory",
        ),
        (SMALL + "[agent]\ndirectory = 'none'", "images.toml:6: `agent.directory`: no such directory: `"),
        (SMALL + "[agent]\nprefx = '/opt'", "images.toml:6: `agent.prefx`: no such field"),
        (SMALL + "[agent]\ndirectory = 'agent'\nimage = 'x:/y'", "images.toml:7: `agent.image`: only one of"),
        (SMALL + "[agent]\nenv = {'A B' = 'x'}", "`agent.env.A B`: invalid variable name"),
        (SMALL + "[build]\ndisk = 'much'", "images.toml:6: `build.disk`: invalid size: `much`"),
        (SMALL + "[build]\nconcurrency = 0", "images.toml:6: `build.concurrency`: must be from 1 to 1000: 0"),
        (SMALL + "[build]\nengine = 'podman'", "images.toml:6: `build.engine`: invalid enum value 'podman'"),
        (
            SMALL + "[build]\nplatform = 'amd64'",
            "images.toml:6: `build.platform`: must look like `linux/amd64`",
        ),
        (SMALL + "[build]\nbefore = ['FROM x']", "images.toml:6: `build.before`: not a Dockerfile"),
        (
            SMALL + "[build]\nengine = 'registry'\nbefore = ['RUN x']",
            "`build.engine`: the registry engine cannot run",
        ),
        (SMALL.replace('"r/a"', '"r/{name}"'), "images.toml:4: `target.repository`: unknown field: `{name}`"),
        (
            "[bases]\nimages = ['a', 'a']\n[target]\nrepository = 'r/a'",
            "`bases.images[1]`: duplicate base",
        ),
        (
            "[bases]\nimages = ['a']\ntemplate = 'x'\n[target]\nrepository = 'r/a'",
            "`bases.template`: needs `suite`",
        ),
        (
            "[bases]\nfile = 'none.txt'\n[target]\nrepository = 'r/a'",
            "images.toml:2: `bases.file`: cannot read",
        ),
    ],
)
def test_a_fault_of_a_recipe_is_named_with_its_place(place: Path, text: str, told: str) -> None:
    with pytest.raises(BadInput) as raised:
        read_recipe(written(place, text))

    assert told in raised.value.message


def test_a_bad_line_in_a_file_of_bases_is_named(place: Path) -> None:
    (place / "bases.txt").write_text("debian:12\na b c\n")

    with pytest.raises(BadInput, match=r"bases\.txt:2: expected at most a name and a reference"):
        read_recipe(written(place, '[bases]\nfile = "bases.txt"\n[target]\nrepository = "r/a"\n'))


def test_a_suite_names_its_bases_by_a_template_or_itself() -> None:
    one = Instance(id="django__django-1", data={"image": "their/own", "tag": 7})

    assert base_of(one, None, "") == "their/own"
    assert base_of(one, "ghcr.io/x/{id}:{data.tag}", "") == "ghcr.io/x/django__django-1:7"
    assert fill_template("sweb.eval.x86_64.{swebench_id}:latest", one, "") == (
        "sweb.eval.x86_64.django_1776_django-1:latest"
    )
    with pytest.raises(BadInput, match=r"instance 3 .*names no image"):
        base_of(Instance(id="x"), None, "instance 3 of suite `s`")
    with pytest.raises(BadInput, match=r"has no `data\.version`"):
        base_of(one, "{data.version}", "instance 3 of suite `s`")


def test_an_instance_of_a_run_has_its_own_image_before_any_other() -> None:
    bare, data = Instance(id="x"), Instance(id="x", data={"image": "told/in:data"})
    own = Instance(id="x", start=SandboxSpec(image="its/own"), data=data.data)
    built = Instance(id="x", start=SandboxSpec(build="/tasks/x"), data=data.data)

    def image(one: Instance, suite: str | None = None, template: str | None = None) -> str | None:
        return assign_image(
            one, (lambda instance: suite) if suite is not None else None, template, ""
        ).start.image

    assert base_of(own, None, "") == "its/own"
    assert image(own, "suite", "template") == "its/own"
    assert image(data, "suite", "template") == image(built, "suite") == "suite"
    assert image(data, "", "r/{id}") == image(built, None, "r/{id}") == "r/x"
    assert image(data) == "told/in:data"
    assert image(built) is image(bare) is None and assign_image(built, None, None, "") is built


def test_a_plan_of_images_is_for_containers(place: Path) -> None:
    said = parse_settings({"images": written(place, SMALL)})
    config = RunConfig(id="r", suite="s", agent="a", created=0.0, version="0", images=said["images"])

    assert said["images"].repository == "r/a"
    check_config(msgspec.structs.replace(config, sandbox="docker"))
    with pytest.raises(BadInput, match="`--images` requires containers"):
        check_config(config)


def test_a_name_is_data_in_tags_and_repositories(place: Path) -> None:
    recipe = read_recipe(written(place, SMALL.replace('"r/a"', '"r/a/{id}"\nalias = "{id}"')))
    names = ["plain", "A/b", "a-b", "..", "é;$(x)", "x" * 200]

    images = [image_of(recipe, Instance(id=name), "base", "") for name in names]

    assert images[0].repository == "r/a/plain"
    assert images[0].aliases == ("plain",)
    assert len({image.repository for image in images}) == len(names)
    assert len({image.aliases for image in images}) == len(names)
    for image in images:
        assert set(image.repository) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_./")
        assert ".." not in image.repository
        assert len(image.aliases[0]) <= 128
    assert as_tag("ok_1.2-x") == "ok_1.2-x"


def test_a_key_depends_on_all_contents_of_an_image_and_nothing_else() -> None:
    layer = ImageLayer(digest="sha256:1", diff_id="sha256:2", size=1, unpacked=2, path="/cache/1")
    whole = ImageBlueprint(layers=(layer,), edits=ConfigEdits(env={"A": "1", "B": "2"}))
    turned = ImageBlueprint(layers=(layer,), edits=ConfigEdits(env={"B": "2", "A": "1"}))
    moved = ImageBlueprint(
        layers=(ImageLayer(digest="sha256:9", diff_id="sha256:2", size=3, unpacked=2, path="/elsewhere"),),
        edits=whole.edits,
    )
    others = [
        compute_image_key("sha256:other", whole),
        compute_image_key("sha256:base", ImageBlueprint(edits=whole.edits)),
        compute_image_key("sha256:base", ImageBlueprint(layers=(layer,))),
        compute_image_key(
            "sha256:base",
            ImageBlueprint(layers=(layer,), edits=whole.edits, steps=BuildSteps(after=("RUN x",))),
        ),
        compute_image_key(
            "sha256:base",
            ImageBlueprint(layers=(layer,), edits=whole.edits, platforms=(ImagePlatform("a", "b"),)),
        ),
    ]

    key = compute_image_key("sha256:base", whole)

    assert key == compute_image_key("sha256:base", turned) == compute_image_key("sha256:base", moved)
    assert len({key, *others}) == 6
    assert make_labels("sha256:base", whole)["io.holdwater.key"] == key
