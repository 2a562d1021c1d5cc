"""The variables of a recipe: from the environment, from a checkout, and from the rows of instances."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdwater.core.environment import build_environment
from holdwater.core.errors import BadInput
from holdwater.core.image import ImageRecipe
from holdwater.core.records import Instance
from holdwater.image.naming import image_of
from holdwater.image.recipe import read_recipe
from holdwater.ledger.directory import RunDirectory

BASES = '[bases]\nimages = ["debian:12"]\n'


def read(place: Path, text: str, **variables: str) -> ImageRecipe:
    path = place / "images.toml"
    path.write_text(text)
    return read_recipe(path, variables)


def git(place: Path, *words: str) -> str:
    command = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
    return subprocess.run(
        command, env=build_environment(HOME="/nonexistent"), check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A recipe's directory outside of git, with an agent that is a checkout of its own."""
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "tool").write_text("1")
    (agent / ".gitignore").write_text("ignored\n")
    git(agent, "init", "--quiet")
    git(agent, "add", ".")
    git(agent, "commit", "--quiet", "--message", "first")
    return agent


def test_variables_fill_all_fields_but_those_that_the_image_reads(tmp_path: Path) -> None:
    (tmp_path / "bases.txt").write_text("one ${HOST}/a:1  # ${NOT_READ}\n")
    recipe = read(
        tmp_path,
        '[bases]\nfile = "bases.txt"\n[target]\nrepository = "${HOST}/agents"\nalias = "${TAG:-{id}}"\n'
        '[agent]\nimage = "${HOST}/tool:/opt"\nenv = {A = "${TAG:-none}", B = "$c $${HOST}"}\n'
        'entrypoint = ["sh", "-c", "echo ${HOME}"]\ncmd = ["${HOME}"]\n'
        '[build]\nbefore = ["RUN echo ${HOME}"]\nafter = ["RUN echo ${HOME:-x}"]\ncache = "${SIZE}"\n'
        '[registries."${HOST}"]\ninsecure = true\n',
        HOST="localhost:5000",
        SIZE="2GiB",
        TAG="",
    )

    assert recipe.bases == (("one", "localhost:5000/a:1"),)
    assert recipe.repository == "localhost:5000/agents"
    assert recipe.aliases == ("{id}",)
    assert recipe.agent is not None and recipe.agent.image == "localhost:5000/tool:/opt"
    assert recipe.edits.env == {"A": "none", "B": "$c ${HOST}"}
    assert recipe.edits.entrypoint == ("sh", "-c", "echo ${HOME}") and recipe.edits.cmd == ("${HOME}",)
    assert recipe.steps.before == ("RUN echo ${HOME}",) and recipe.steps.after == ("RUN echo ${HOME:-x}",)
    assert list(recipe.registries) == ["localhost:5000"]
    assert recipe.cache == 2 << 30


def test_a_default_is_for_unset_and_empty_variables_and_may_hold_another(tmp_path: Path) -> None:
    text = f'{BASES}[target]\nrepository = "r/${{A:-${{B:-c}}}}"\n'

    assert read(tmp_path, text, A="1", B="2").repository == "r/1"
    assert read(tmp_path, text, A="", B="2").repository == "r/2"
    assert read(tmp_path, text).repository == "r/c"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${TAG}", "images.toml:5: `target.alias`: the variable `TAG` is not set"),
        ("a-${TAG-x}", "images.toml:5: `target.alias`: not a variable: `${TAG-x}`"),
        ("${", "images.toml:5: `target.alias`: not a variable: `${`"),
        ("${OPENAI_API_KEY}", "images.toml:5: `target.alias`: the variable `OPENAI_API_KEY` is a key"),
        ("{git.tag}", "images.toml:5: `target.alias`: unknown field: `{git.tag}`"),
        ("{git.sha}", "images.toml:5: `target.alias`: no commit is known for `"),
        ("{id}-{x}", "images.toml:5: `target.alias`: unknown field: `{x}`"),
    ],
)
def test_an_error_of_a_variable_names_file_line_field_and_variable(
    tmp_path: Path, value: str, message: str
) -> None:
    with pytest.raises(BadInput) as raised:
        read(tmp_path, f'{BASES}[target]\nrepository = "r/a"\nalias = "{value}"\n', OPENAI_API_KEY="secret")

    assert message in raised.value.message
    assert "secret" not in raised.value.message + raised.value.hint


def test_a_missing_variable_of_a_base_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bases.txt").write_text("debian:12\nold ${HOST}/a\n")

    with pytest.raises(BadInput, match=r"bases\.txt:2: the variable `HOST` is not set"):
        read(tmp_path, '[bases]\nfile = "bases.txt"\n[target]\nrepository = "r/a"\n')


def test_the_commit_is_that_of_the_checkout_of_the_agent(checkout: Path) -> None:
    text = (
        f'{BASES}[target]\nrepository = "r/a"\nalias = ["{{id}}-{{git.short}}", "{{git.sha}}"]\n'
        '[agent]\ndirectory = "agent"\nlabels = {revision = "{git.sha}"}\nenv = {JSON = \'{"a": 1}\'}\n'
    )
    commit = git(checkout, "rev-parse", "HEAD")

    recipe = read(checkout.parent, text)

    assert recipe.aliases == (f"{{id}}-{commit[:7]}", commit)
    assert recipe.edits.labels == {"revision": commit} and recipe.revision == commit
    assert recipe.edits.env == {"JSON": '{"a": 1}'}


def test_without_files_of_an_agent_the_commit_is_that_of_the_recipe(checkout: Path) -> None:
    (checkout / "more").mkdir()
    (checkout / "more" / "notes").write_text("untracked files are in no image")

    recipe = read(checkout / "more", f'{BASES}[target]\nrepository = "r/a"\nalias = "{{git.short}}"\n')

    assert recipe.aliases == (git(checkout, "rev-parse", "HEAD")[:7],)


@pytest.mark.parametrize(
    ("name", "dirty"),
    [("tool", "-dirty"), ("new/module.py", "-dirty"), ("ignored", ""), ("runs/one/made-by-a-run", "")],
)
def test_changed_files_that_go_into_an_image_mark_its_commit(checkout: Path, name: str, dirty: str) -> None:
    text = f'{BASES}[target]\nrepository = "r/a"\nalias = "{{git.sha}}"\n[agent]\ndirectory = "agent"\n'
    run = RunDirectory(checkout / "runs" / "one")
    for path in (
        (checkout / name, run.config, run.database) if name.startswith("runs/") else (checkout / name,)
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("changed")

    recipe = read(checkout.parent, text)

    assert recipe.aliases == (git(checkout, "rev-parse", "HEAD") + dirty,)


def test_an_untracked_file_of_another_workspace_member_marks_the_commit(checkout: Path) -> None:
    project = '[project]\nname = "{}"\nversion = "1"\n[build-system]\nrequires = ["hatchling"]\n'
    (checkout / "pyproject.toml").write_text(
        f'{project.format("top")}[tool.uv.workspace]\nmembers = ["packages/*"]\n'
        "[tool.uv.sources]\nother = {workspace = true}\n"
    )
    for name in ("main", "other"):
        (checkout / "packages" / name).mkdir(parents=True)
        (checkout / "packages" / name / "pyproject.toml").write_text(project.format(name))
    (checkout / "notes").mkdir()
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "second")
    text = (
        f'{BASES}[target]\nrepository = "r/a"\nalias = "{{git.sha}}"\n'
        '[agent]\nsource = "agent/packages/main"\n'
    )
    commit = git(checkout, "rev-parse", "HEAD")
    assert read(checkout.parent, text).aliases == (commit,)

    (checkout / "packages" / "other" / "new.py").write_text("")

    assert read(checkout.parent, text).aliases == (f"{commit}-dirty",)


def test_an_image_has_several_aliases_with_columns_of_its_row(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        f'{BASES}[target]\nrepository = "r/{{data.repo}}"\n'
        'alias = ["{id}", "{data.repo}-{data.n}", "{id}"]\n',
    )
    instance = Instance(id="x__y-1", data={"repo": "Y", "n": 1})

    image = image_of(recipe, instance, "debian:12", "row 1")

    assert image.aliases == ("x__y-1", "Y-1")
    assert image.repository.startswith("r/y-")
    with pytest.raises(BadInput, match=r"row 2 \(`b`\) has no `data\.repo`"):
        image_of(recipe, Instance(id="b"), "debian:12", "row 2")


def test_an_alias_that_several_images_would_share_is_refused(tmp_path: Path) -> None:
    several = '[bases]\nimages = ["debian:12", "debian:11"]\n[target]\nalias = "latest"\nrepository = "r/a'

    with pytest.raises(BadInput, match=r"images\.toml:4: `target\.alias`: every image would get this tag"):
        read(tmp_path, f'{several}"\n')

    assert read(tmp_path, f'{several}/{{id}}"\n').aliases == ("latest",)
    assert read(tmp_path, f'{BASES}[target]\nrepository = "r/a"\nalias = "latest"\n').aliases == ("latest",)
