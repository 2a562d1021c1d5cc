"""What a `task.toml` is taken for, and what is said of a wrong one."""

import re
from pathlib import Path

import pytest
from tests.harbor_tasks import task, write

from holdwater.core.environment import fill_templates, list_required
from holdwater.core.errors import BadInput, GradeFailed, SandboxFailed
from holdwater.core.records import MiB, Network
from holdwater.suite.harbor import digest, find_common_directory, find_tasks, harbor
from holdwater.suite.harbor.grading import (
    combine_rewards,
    grade_of,
    parse_json_reward,
    parse_text_reward,
    short_of,
)
from holdwater.suite.harbor.records import RewardStrategy
from holdwater.suite.harbor.stages import stages
from holdwater.suite.harbor.task_file import read_task
from holdwater.suite.loader import load, make_absolute


def instance(path: Path):
    """The only instance of the suite at `path`, after its check."""
    suite = harbor(path)
    suite.check()
    (found,) = suite.instances()
    return found


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as error:
        harbor(path).check()
    return error.value.message


WRONG = {
    '[environment]\ncpus = "two"': "field `environment.cpus`: expected float, got str",
    "[environment]\ncpus = nan": "field `environment.cpus`: expected ",
    "[environment]\nmemory_mb = 0": "field `environment.memory_mb`: expected int >= 1",
    '[environment]\nmemory = "lots"': "field `environment.memory`: expected a size like `2G`, got `lots`",
    '[environment]\nmemory = "2G"\nmemory_mb = 1024': "field `environment.memory`: `2G` contradicts",
    '[environment]\nnetwork_mode = "some"': "field `environment.network_mode`: invalid enum value",
    '[environment]\nallowed_hosts = ["a.b"]': "field `environment.allowed_hosts`: requires",
    "[environment.healthcheck]\nretries = 2": "field `environment.healthcheck.command`: missing",
    "[agent]\ntimeout_sec = -1.0": "field `agent.timeout_sec`: expected float > 0",
    "[verifier]\nenv = { A = 1 }": "field `verifier.env`: expected str, got int",
    '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]': "field `verifier.environment_mode`",
    '[verifier.environment]\nstorage = "x"': "field `verifier.environment.storage`: expected a size",
    "[[verifier.collect]]\nservice = 'main'": "field `verifier.collect.0.command`: missing",
    "artifacts = ['/a/../b']": "field `artifacts.0.source`: must not contain `..`",
    "artifacts = [{ source = '/a', destination = '/b' }]": "field `artifacts.0.destination`: expected a",
    "artifacts = [{ source = '/a', destination = 'manifest.json' }]": "field `artifacts.0.destination`",
    "artifacts = [1]": "field `artifacts.0`: expected ",
    "[task]\nname = 'nameless'": "field `task.name`: expected str matching",
    "[task]\nname = 'org/a..b'": "field `task.name`: must not contain `..`",
    "multi_step_reward_strategy = 'best'": "field `multi_step_reward_strategy`: invalid enum value",
    "[[steps]]\nname = 'a/b'": "field `steps.0.name`: not a valid directory name",
    "[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'": "field `steps.1.name`: duplicate step name",
    "[[steps]]\nname = 'a'\nmin_reward = 'x'": "field `steps.0.min_reward`: expected ",
    "[environment": "not valid TOML: ",
}


@pytest.mark.parametrize("toml", WRONG)
def test_a_wrong_value_is_named_with_file_and_key(tmp_path, toml):
    task(tmp_path / "tree" / "one", toml)

    assert refused(tmp_path / "tree").startswith(f"tree/one/task.toml: {WRONG[toml]}")


def test_a_bad_task_beside_a_valid_one_is_refused_alone(tmp_path, caplog):
    task(tmp_path / "a")
    task(tmp_path / "b", "[agent]\ntimeout_sec = 'x'")
    suite = harbor(tmp_path)

    suite.check()

    assert suite.size == 2 and "b/task.toml: field `agent.timeout_sec`" in caplog.text
    one, two = suite.instances()
    assert not one.refused and "b/task.toml: field `agent.timeout_sec`" in two.refused


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh"])
def test_a_part_that_is_missing_is_named(tmp_path, missing):
    path = task(tmp_path / "one")
    (path / missing).unlink()

    assert refused(tmp_path).endswith(f"/one/task.toml: no such file beside it: `{missing}`")


def test_two_tasks_of_one_name_are_both_named(tmp_path):
    for name in ("a", "b"):
        task(tmp_path / "t" / name, "[task]\nname = 'org/same'\n")

    assert refused(tmp_path / "t") == "duplicate id `org/same`: t/a/task.toml and t/b/task.toml"


def test_a_directory_without_tasks_is_refused(tmp_path):
    assert refused(tmp_path).startswith("no `task.toml` in or below")


def test_an_option_of_a_tree_names_the_tasks_whose_processes_stay(tmp_path):
    for name in ("one", "two"):
        task(tmp_path / name)

    found = {
        one.id: one.data.get("keeps_processes")
        for one in load(f"harbor:{tmp_path}?keep-processes=t*").instances()
    }

    assert found == {"one": None, "two": True}
    for wrong in ("?keep-processes=", "?keeps=x"):
        with pytest.raises(BadInput, match="invalid option of a Harbor suite"):
            load(f"harbor:{tmp_path}{wrong}")


def test_an_unknown_field_is_named_once_a_suite_and_changes_nothing(tmp_path, caplog):
    """Given two tasks with fields of a version to come, as they are pulled, twice."""
    toml = "colour = 'red'\n[environment]\ntaste = 1\n[[steps]]\nname = 's'\nmood = 2\n"
    for name in ("a", "b"):
        files = {"steps__s__instruction_md": "x", "steps__s__tests__test_sh": "x"}
        task(tmp_path / name, toml, **files)
    suite = harbor(tmp_path)

    assert [len(list(suite.instances())) for _ in range(2)] == [2, 2]

    named = [re.search(r"field `([^`]*)`: unknown", record.getMessage())[1] for record in caplog.records]
    assert sorted(named) == ["colour", "environment.taste", "steps.mood"]


def test_limits_are_asked_for_in_old_words_and_new(tmp_path):
    old = task(
        tmp_path / "old", 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\ncpus = 2\n'
    )
    new = task(tmp_path / "new", "[environment]\nmemory_mb = 2048\nstorage_mb = 512\ncpus = 2.0\n")

    for path in (old, new):
        ask = instance(path).limits
        assert (ask.memory, ask.disk, ask.cpus) == (2048 * MiB, 512 * MiB, 2.0)


def test_what_an_agent_and_a_verifier_take_is_asked_for(tmp_path):
    toml = """
    [agent]
    timeout_sec = 90
    [verifier]
    timeout_sec = 30.0
    [[verifier.collect]]
    command = "x"
    timeout_sec = 7.0
    """
    ask = instance(task(tmp_path / "one", toml)).limits

    assert ask.acting == 90.0
    assert ask.grading > 37.0


MODES = {
    "": (None, None),
    "[environment]\nallow_internet = true": (Network.OPEN, Network.OPEN),
    '[environment]\nnetwork_mode = "public"': (Network.OPEN, Network.OPEN),
    '[environment]\nnetwork_mode = "no-network"': (Network.GATEWAY, Network.NONE),
    "[environment]\nallow_internet = false": (Network.GATEWAY, Network.NONE),
    '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]': (Network.GATEWAY, Network.GATEWAY),
    '[agent]\nnetwork_mode = "no-network"': (Network.GATEWAY, None),
    '[verifier]\nnetwork_mode = "no-network"': (None, Network.NONE),
    '[verifier.environment]\nnetwork_mode = "no-network"': (None, Network.NONE),
}


@pytest.mark.parametrize("toml", MODES)
def test_networks_are_those_of_each_phase(tmp_path, toml):
    (stage,) = stages(read_task(task(tmp_path / "one", toml), "place"))

    assert (stage.reaches, stage.verifier_reaches) == MODES[toml]


ASKS_OPEN = {
    '[environment]\nnetwork_mode = "public"': "environment.network_mode",
    "[environment]\nallow_internet = true": "environment.allow_internet",
    '[agent]\nnetwork_mode = "public"': "agent.network_mode",
    '[verifier]\nnetwork_mode = "public"': "verifier.network_mode",
    '[verifier.environment]\nnetwork_mode = "public"': "verifier.environment.network_mode",
}


@pytest.mark.parametrize("toml", ASKS_OPEN)
def test_the_field_that_asks_for_an_open_network_is_known(tmp_path, toml):
    found = instance(task(tmp_path / "one", toml))

    assert found.open_network == f"one/task.toml: field `{ASKS_OPEN[toml]}`"


def test_public_counts_only_where_a_phase_has_it(tmp_path):
    modes = "".join(f"[{phase}]\nnetwork_mode = 'no-network'\n" for phase in ("agent", "verifier"))

    found = instance(task(tmp_path / "one", f"[environment]\nnetwork_mode = 'public'\n{modes}"))

    assert found.open_network == ""


NUMBERS = {  # as Harbor 0.24 takes them
    "[environment]\nmemory_mb = true": ("memory_mb", 1),
    '[environment]\nmemory_mb = " 30 "': ("memory_mb", 30),
    '[environment]\nmemory_mb = "1_000"': ("memory_mb", 1000),
    '[environment]\nmemory_mb = "512.0"': ("memory_mb", 512),
    '[environment]\nmemory_mb = "+5"': ("memory_mb", 5),
    "[environment]\ncpus = true": ("cpus", 1.0),
    "[environment]\ngpus = false": ("gpus", 0),
    '[environment]\nbuild_timeout_sec = "1_000.5"': ("build_timeout_sec", 1000.5),
    '[environment]\nbuild_timeout_sec = " 30 "': ("build_timeout_sec", 30.0),
}


@pytest.mark.parametrize("toml", NUMBERS)
def test_a_number_is_what_harbor_takes_for_one(tmp_path, toml):
    field, value = NUMBERS[toml]

    assert getattr(read_task(task(tmp_path / "one", toml), "place").toml.environment, field) == value


@pytest.mark.parametrize("said", ['"512.5"', '"0x10"', '"1__0"', '"_10"', '"\u0663"', '""'])
def test_what_harbor_takes_for_no_number_is_refused(tmp_path, said):
    with pytest.raises(BadInput, match=re.escape("field `environment.memory_mb`: expected int, got str")):
        read_task(task(tmp_path / "one", f"[environment]\nmemory_mb = {said}"), "place")


def test_a_link_to_itself_is_a_missing_file(tmp_path):
    """Given a valid task beside it."""
    task(tmp_path / "tree" / "good")
    instruction = task(tmp_path / "tree" / "loop") / "instruction.md"
    instruction.unlink()
    instruction.symlink_to("instruction.md")

    found = {one.id: one.refused for one in harbor(tmp_path / "tree").instances()}

    assert found == {"good": "", "loop": "tree/loop/task.toml: no such file beside it: `instruction.md`"}


LINKS = ("instruction.md", "environment", "tests", "solution", "task.toml")


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_suites_directory_refuses_the_task(tmp_path, name):
    """Given a task beside it whose link stays in the suite's directory."""
    for place in (tmp_path / "tree" / "inside", tmp_path / "tree" / "outside"):
        task(place, environment__Dockerfile="FROM x")
    for place, whole in (("inside", tmp_path / "tree" / ".shared"), ("outside", tmp_path / "elsewhere")):
        whole.mkdir()
        (tmp_path / "tree" / place / name).rename(whole / name)
        (tmp_path / "tree" / place / name).symlink_to(whole / name)

    suite = harbor(tmp_path / "tree")
    suite.check()
    found = {one.id: one.refused for one in suite.instances()}

    assert found["inside"] == ""
    where = f"tree/outside/task.toml: `outside/{name}` leads out of the suite's own directory"
    assert found["outside"] == f"{where}: `{tmp_path / 'elsewhere' / name}`"


REFUSED = {
    "[environment]\ngpus = 2": "field `environment.gpus`: 2 GPUs requested",
    "[environment]\nos = 'Windows'": "field `environment.os`: `windows` is not supported",
    "[environment.tpu]\ntype = 'v4'\ntopology = '2x2'": "field `environment.tpu`",
    "artifacts = [{ source = '/a', service = 'db' }]": "field `artifacts.service`: there is no service `db`",
    "[[verifier.collect]]\ncommand = 'x'\nservice = 'db'": "field `verifier.collect.service`: there is",
}


@pytest.mark.parametrize("toml", REFUSED)
def test_what_cannot_be_given_refuses_the_task_and_not_the_suite(tmp_path, toml):
    found = instance(task(tmp_path / "one", toml))

    assert REFUSED[toml] in found.refused
    assert found.start.key == ""


def test_services_beside_the_container_refuse_the_task(tmp_path):
    found = instance(task(tmp_path / "one", **{"environment__docker-compose.yaml": "services: {}"}))

    assert "docker-compose.yaml" in found.refused


def test_images_and_processes(tmp_path):
    """Given the whole tree with an image, each task starts from what it names."""
    write(tmp_path, "base:1")
    found = {i.id: i for i in harbor(tmp_path).instances()}

    def start(name):
        return found[name].start

    assert (start("processes/text").image, start("processes/text").processes) == ("base:1", True)
    assert (start("containers/prebuilt").image, start("containers/prebuilt").processes) == ("base:1", False)
    assert start("containers/dockerfile").build == str(tmp_path / "containers/dockerfile/environment")
    assert found["containers/bundled"].grader.build == str(tmp_path / "containers/bundled/tests")
    assert found["processes/separate"].grader.image == "base:1"
    assert (start("containers/users").user, found["containers/users"].grader) == ("1000", None)
    assert harbor(tmp_path).defaults.sandbox == "docker"
    assert harbor(tmp_path / "processes").defaults.sandbox is None


def test_an_instruction_is_given_without_its_canary(tmp_path):
    path = task(tmp_path / "one", instruction_md="<!-- a canary GUID -->\n# canary 1\n\nDo it.\n# canary 2\n")

    assert instance(path).instruction == "Do it.\n# canary 2\n"


def test_tasks_are_found_in_order_and_not_below_each_other(tmp_path):
    for name in ("b/2", "a", "b/1", "b/1/inner", ".hidden/x", "a-b"):
        task(tmp_path / name)

    assert [str(p.relative_to(tmp_path)) for p in find_tasks(tmp_path)] == ["a", "a-b", "b/1", "b/2"]


def test_the_directory_of_all_tasks_is_hidden_and_its_siblings_are_not(tmp_path):
    (tmp_path / "code").mkdir()
    for name in ("tasks/a", "tasks/b/c"):
        task(tmp_path / name)

    assert find_common_directory(tmp_path) == tmp_path / "tasks"
    assert harbor(tmp_path).hidden == (str(tmp_path / "tasks"),)
    assert find_common_directory(tmp_path / "tasks" / "a") == tmp_path / "tasks" / "a"
    assert find_common_directory(tmp_path / "code") is None


def _changed(path: Path) -> list[str]:
    """The digests of a task as its files change, one way after the other."""
    found = [digest(path)]
    (path / "tests" / "test.sh").write_text("exit 1")
    found.append(digest(path))
    (path / "tests" / "test.sh").chmod(0o600)
    found.append(digest(path))
    (path / "tests" / "other").symlink_to("test.sh")
    found.append(digest(path))
    (path / "tests" / "other").rename(path / "tests" / "another")
    return [*found, digest(path)]


def test_a_digest_tells_every_change(tmp_path):
    digests = _changed(task(tmp_path / "one"))

    assert len(set(digests)) == 5
    assert digest(tmp_path / "one") == digests[-1]


USABLE = {
    b"{}": {},
    b'{"reward": 1, "b": 0.5, "c": true}': {"reward": 1.0, "b": 0.5, "c": 1.0},
    b' {"b": -2}\n': {"b": -2.0},
}
UNUSABLE = [
    *(b"", b"  \n", b"{", b"[1]", b"1", b"null", b'{"a": null}', b'{"a": "1"}', b'{"a": NaN}'),
    *(b'{"a": 1e999}', b'{"a": {}}', b"\xff", b'{"a": ' + b"9" * 400 + b"}"),
]


@pytest.mark.parametrize("content", USABLE)
def test_a_reward_is_a_dict_of_numbers(content):
    assert parse_json_reward(content, "p") == USABLE[content]


@pytest.mark.parametrize("content", UNUSABLE)
def test_a_wrong_dict_is_no_reward(content):
    with pytest.raises(GradeFailed, match="cannot be used: `p`"):
        parse_json_reward(content, "p")


def test_a_reward_is_a_number():
    assert parse_text_reward(b" 0.25\n", "p") == {"reward": 0.25}


@pytest.mark.parametrize("content", [b"", b"\n", b"yes", b"1 2", b"nan", b"inf", b"{}", b"\xff\x00"])
def test_a_wrong_number_is_no_reward(content):
    with pytest.raises(GradeFailed, match="cannot be used: `p`"):
        parse_text_reward(content, "p")


def test_a_score_is_the_reward_or_the_mean():
    assert (grade_of({"reward": 1.0, "x": 0.0}, "").score, grade_of({"a": 1.0, "b": 0.0}, "").score) == (
        1.0,
        0.5,
    )
    assert [grade_of({"reward": r}, "").passed for r in (0.99, 1.0, 2.0)] == [False, True, True]


def test_steps_are_combined_as_the_task_says():
    steps = [{"reward": 1.0, "a": 1.0}, {"reward": 0.0}]

    assert combine_rewards(steps, None) == {"reward": 0.5, "a": 0.5}
    assert combine_rewards(steps, RewardStrategy.FINAL) == {"reward": 0.0}


def test_a_reward_that_is_not_there_is_too_low():
    assert short_of({"a": 1.0}, {"reward": 0.0})
    assert not short_of({"reward": 0.5}, {"reward": 0.5})
    assert not short_of({}, {})


def test_only_whole_values_are_filled_in():
    env = {"A": "${X}", "B": "${Y:-}", "C": "-${X}-", "D": "${X:-other}", "E": "plain"}

    assert fill_templates(env, {"X": "x"}) == {"A": "x", "B": "", "C": "-${X}-", "D": "x", "E": "plain"}
    assert list(list_required(env)) == [("A", "X")]
    with pytest.raises(SandboxFailed, match="variable `X` is not set, or not passed to sandboxes"):
        fill_templates(env, {})


def test_what_a_task_needs_is_said_with_its_place(tmp_path):
    toml = "[verifier]\nenv = { KEY = '${JUDGE}', B = '${C:-d}' }\n"
    task(tmp_path / "t", toml)

    assert list(harbor(tmp_path / "t").needs()) == [("t", "JUDGE", "t/task.toml: field `verifier.env.KEY`")]


def test_a_spec_means_the_same_from_anywhere(tmp_path, monkeypatch):
    task(tmp_path / "tasks" / "one")
    monkeypatch.chdir(tmp_path)
    specs = [make_absolute("tasks"), make_absolute("harbor:tasks"), make_absolute("./tasks")]

    assert set(specs) == {f"harbor:{tmp_path / 'tasks'}"}
    monkeypatch.chdir("/")
    assert [i.id for i in load(specs[0]).instances()] == ["one"]


def test_a_built_in_suite_is_not_a_directory_of_its_name(tmp_path, monkeypatch):
    task(tmp_path / "demo" / "one")
    monkeypatch.chdir(tmp_path)

    assert make_absolute("demo") == "demo"
    assert load("demo").name == "demo"


def test_a_directory_that_is_not_there_is_said(tmp_path):
    with pytest.raises(BadInput, match="no such directory"):
        load(f"harbor:{tmp_path / 'nowhere'}")
