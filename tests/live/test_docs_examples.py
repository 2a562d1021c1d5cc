"""Every example of README.md and docs/*.md runs as it stands, or is named here with the test that runs it."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from tests.command_runner import SOURCE
from tests.docs_examples import PAGES, ROOT, Desk, Example, examples, furnished

from holdwater.core.image import ImageRecipe
from holdwater.gateway.prices import read_prices
from holdwater.image.recipe import read_recipe

# Commands that need a docker daemon, or an hour: (how they begin, who runs them, or says why not).
ELSEWHERE = {
    "holdwater check ./terminal-bench-2": "tests/docker/test_container_run_harbor.py",
    "holdwater check --attack ./terminal-bench-2": "tests/docker/test_container_run_grades.py",
    "holdwater grade predictions.jsonl --suite swebench:": "tests/docker/test_container_run_swebench.py",
    # A stand-in takes the place of OpenHands' benchmarks, which PyPI does not have.
    "holdwater run openhands:": "tests/live/test_openhands_evaluation.py",
    "holdwater export runs/infer": "tests/live/test_openhands_evaluation.py",
    "holdwater resume runs/infer": "tests/fault/test_evaluation_kills.py",
    "holdwater run swebench:": "tests/docker/test_container_run_swebench.py",
    "holdwater sandboxd --listen 0.0.0.0:8500": "tests/fault/test_escape_remote.py",
    "holdwater run tasks.jsonl --agent bash --model gpt-5 --sandbox remote --sandbox-url https:": (
        "tests/fault/test_escape_remote.py"
    ),
    "pip wheel ": "tests/docker/test_conductor_image.py",
    "docker build ": "tests/docker/test_conductor_image.py",
    "holdwater images clean": "tests/docker/test_images_command.py",
    "holdwater run vf:": "tests/live/test_verifiers_suite.py",
    'holdwater run "vf:': "tests/live/test_verifiers_suite.py",
    "holdwater view": "tests/live/test_view_pages.py",
    "holdwater run demo --view": "tests/live/test_view_pages.py",
    "holdwater compare": "tests/live/test_compare.py",
    "holdwater search": "tests/live/test_view_search.py",
    **{
        f"holdwater {verb} ": "tests/live/test_control_verbs.py"
        for verb in ("top", "pause", "unpause", "set", "retry", "cancel", "note", "stop")
    },
    "holdwater run tasks.jsonl --agent openhands-sdk": "tests/live/test_openhands_sdk.py",
}
# Runs that need a program or a daemon that is not here: everything is checked, nothing is started.
REHEARSED = ("--agent claude-code", "--agent codex", "--agent mini-swe-agent", "--sandbox docker")
HELLO = "--command 'sh -c \"echo hello > hello.txt\"'"
SHELL_ONLY = ("source ", "export ")  # the desk's environment has them
BEFORE = {  # what a page's prose says is there: (page, text of the example) -> code that comes first
    ("README.md", "hw.run(suite, solve"): "import holdwater as hw\nfrom suite import suite, solve",
    ("README.md", "run_group("): (
        "from holdwater.client import CallAnswer\nmean = 0.5\n"
        "def answer(call): return CallAnswer(call=call.id, text='2')"
    ),
    (
        "training.md",
        "GroupTerms(",
    ): "from holdwater.client import *\nclient = await AsyncClient().__aenter__()",
    ("training.md", "sample(call.chat)"): (
        "from holdwater.client import *\nclient = await AsyncClient().__aenter__()\n"
        "def sample(chat): return [1], [2], [-0.5], '2'"
    ),
    ("training.md", "TokenPolicy(tokenizer"): (
        "from holdwater.client import *\nclient = await AsyncClient().__aenter__()\n"
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        "from tests.small_tokenizer import SmallTokenizer\ntokenizer = SmallTokenizer()\n"
        "def sample(prompts): return [(tokenizer.spell('2', '<end>'), [-0.5, -0.5]) for _ in prompts]"
    ),
}
AFTER = {  # what shows that a definition works
    ("running.md", "def good_enough"): (
        "import holdwater as hw\n"
        "hw.run('suite.py:suite', 'suite.py:solve', model='gpt-5', critic=good_enough, out='runs/critic')\n"
        "hw.resume('runs/critic', critic=good_enough)"
    ),
    ("agents.md", 'return "done"'): (
        "import holdwater as hw\n"
        "assert hw.run('suite.py:suite', solve, model='gpt-5').outcomes == {'failed': 1}"
    ),
    ("agents.md", "attempt.spawn(review"): (
        "import holdwater as hw\n"
        "assert hw.run('suite.py:suite', solve, model='gpt-5').outcomes == {'failed': 1}"
    ),
    ("suites.md", "def judge"): (
        "import holdwater as hw\nfrom suite import grade, instances, solve\n"
        "hw.Suite(name='judged', instances=instances, grade=grade, group=group)"
    ),
    ("training.md", "GroupTerms("): "await client.__aexit__(None, None, None)",
    **{
        ("training.md", example): (
            "await client.__aexit__(None, None, None)\n"
            "assert any(node.tokens and node.logprobs for node in rollout.trajectory), rollout"
        )
        for example in ("sample(call.chat)", "TokenPolicy(tokenizer")
    },
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    found = examples(page)
    if not found:
        return
    with furnished(tmp_path, page.read_text()) as desk:
        for example in found:
            run_example(example, desk)


@pytest.mark.timeout(300)
def test_the_first_suite_of_the_manual_passes_its_check(tmp_path: Path) -> None:
    first = examples(ROOT / "docs" / "suites.md")[0]
    with furnished(tmp_path) as desk:
        (tmp_path / "first.py").write_text(first.text)

        desk.type("holdwater check first.py:suite --limit 3")
        desk.type("holdwater check suite.py:suite")  # the README's own


@pytest.mark.parametrize("file", sorted(set(ELSEWHERE.values())))
def test_an_example_that_is_left_to_another_test_has_one(file: str) -> None:
    assert (ROOT / file).is_file()


def run_example(example: Example, desk: Desk) -> None:
    if example.language == "console":
        for command, output in example.commands:
            run_command(command, output, desk)
    elif example.language == "python":
        run_python(example, desk)
    elif example.language == "toml":
        read_toml(example, desk)
    elif example.language == "json":
        (desk.place / "row.jsonl").write_text(example.text)
        agent = "--agent oracle" if '"solution"' in example.text else HELLO
        desk.type(f"holdwater run row.jsonl {agent} --out runs/row-{example.line}")
        assert '"passed": 1' in desk.type(f"holdwater show runs/row-{example.line} --json")
    else:
        assert not example.text.startswith(("$", "holdwater ")), f"{example.name} is a console's example"


def run_command(command: str, output: str, desk: Desk) -> None:
    line = " ".join(shlex.split(command, comments=True))
    if line.startswith((*SHELL_ONLY, *ELSEWHERE)) and " --export " not in line:
        return
    if line.startswith(("holdwater serve ", "holdwater sandboxd ")):
        desk.serve(command, output)
    elif line.startswith("make "):
        desk.type(f"make -C {ROOT} --dry-run {line.removeprefix('make ')}")
    elif line.startswith("python benchmarks/"):
        check_script(line, desk)
    elif line.startswith("pip install "):
        extra = re.findall(r"holdwater\[(\w+)\]", line)
        assert set(extra) <= set(pyproject()["project"]["optional-dependencies"])
    elif line.startswith("curl "):
        printed = desk.type(command)
        assert printed.startswith(output.partition("...")[0].split("\n")[0].strip(" ,"))
    else:
        assert line.startswith("holdwater "), f"no way to run: {line}"
        rehearsed = line.startswith("holdwater run ") and any(words in line for words in REHEARSED)
        code = re.split(r"\s+# ", command)[0]
        desk.type(f"{code} --dry-run" if rehearsed else code)


def run_python(example: Example, desk: Desk) -> None:
    if "from holdwater.trainers" in example.text:
        return  # the trainers are not here: tests/live/test_trainer_packages.py runs these

    def beside(texts: dict[tuple[str, str], str]) -> str:
        page = example.page.name
        return "\n".join(
            code for (name, text), code in texts.items() if name == page and text in example.text
        )

    desk.execute(f"{beside(BEFORE)}\n{example.text}\n{beside(AFTER)}\n")


def read_toml(example: Example, desk: Desk) -> None:
    values = tomllib.loads(example.text)
    path = desk.place / "example.toml"
    path.write_text(example.text)
    if "target" in values:
        furnish_agent(values.get("agent", {}), desk.place)
        assert isinstance(read_recipe(path), ImageRecipe)
    elif "project" in values:
        for group, names in values["project"]["entry-points"].items():
            assert group in ("holdwater.agents", "holdwater.suites", "holdwater.sandboxes")
            assert all(re.fullmatch(r"[\w.]+:\w+", target) for target in names.values())
    elif "agent" in values:
        desk.type("holdwater run tasks.jsonl --config example.toml --limit 10 --dry-run")
    else:
        assert read_prices(path)


def furnish_agent(agent: dict[str, str], place: Path) -> None:
    """Put the files into the directory that a recipe's agent is made of."""
    (place / agent.get("source", ".")).mkdir(parents=True, exist_ok=True)
    if "dockerfile" in agent:
        (place / agent["dockerfile"]).parent.mkdir(parents=True, exist_ok=True)
        (place / agent["dockerfile"]).write_text(f"FROM scratch AS {agent['target']}\nARG MODE\n")


def check_script(line: str, desk: Desk) -> None:
    """A benchmark takes too long: it is there and knows its flags."""
    _, script, *words = shlex.split(line)
    known = desk.type(f"PYTHONPATH={ROOT}:{SOURCE} {sys.executable} {ROOT / script} -h")
    for flag in (word for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){flag}\b", known), line


def pyproject() -> dict[str, dict[str, dict[str, object]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
