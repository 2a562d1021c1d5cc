"""Rows, specs, prompts and predictions as people write them, and what is said of the wrong ones."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from holdwater.agent.baselines import index_predictions, predictions
from holdwater.core.errors import BadInput
from holdwater.core.records import Instance
from holdwater.suite import loader
from holdwater.suite.swebench import reference
from holdwater.suite.swebench.patches import files_of
from holdwater.suite.swebench.rows import make_absolute, parse_options, read_rows, recognised
from holdwater.suite.swebench.script import make_evaluation, replace_tests

needs_swebench = pytest.mark.skipif(
    find_spec("swebench") is None and os.environ.get("CI") != "true",
    reason="`swebench` is not installed: `scripts/setup dev`",
)
SCRIPT = (
    "cd /testbed\n: '>>>>> Start Test Output'\npytest -rA tests/a.py\n: '>>>>> End Test Output'\ngit status"
)
ROW: dict[str, Any] = {
    "repo": "astropy/astropy",
    "instance_id": "astropy__astropy-1",
    "base_commit": "abc",
    "patch": "diff --git a/a b/a\n",
    "test_patch": "",
    "problem_statement": "It is wrong.",
    "hints_text": "",
    "created_at": "2020",
    "version": "1.0",
    "FAIL_TO_PASS": '["a", "b"]',
    "PASS_TO_PASS": ["c"],
    "environment_setup_commit": "abc",
    "image": None,
    "eval_script": SCRIPT,
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}


def write(path: Path, *changes: dict[str, Any]) -> Path:
    found = [{name: v for name, v in (ROW | change).items() if v is not ...} for change in changes]
    if path.suffix == ".json":
        path.write_text(json.dumps(found))
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(found), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def made(spec: str) -> list[Instance]:
    return list(loader.load(spec).instances())  # type: ignore[arg-type]


@needs_swebench
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_become_instances(tmp_path: Path, suffix: str) -> None:
    path = write(
        tmp_path / f"rows{suffix}", {}, {"instance_id": "Astropy__Astropy-2", "image": "own/image:1"}
    )

    suite = loader.load(f"swebench:{path}")
    assert suite.check is not None
    suite.check()
    first, second = made(f"swebench:{path}")

    assert suite.size == 2 and suite.defaults.sandbox == "docker"
    assert first.start.image == "swebench/sweb.eval.x86_64.astropy_1776_astropy-1:latest"
    assert (first.start.workdir, first.start.processes) == ("/testbed", False)
    assert second.start.image == "own/image:1"
    assert first.data["FAIL_TO_PASS"] == ["a", "b"] and first.data["PASS_TO_PASS"] == ["c"]
    assert "It is wrong." in first.instruction and "astropy/astropy" in first.instruction
    assert "diff --git" not in first.instruction


@needs_swebench
def test_the_images_of_an_issue_are_listed(tmp_path: Path) -> None:
    assets = json.dumps({"problem_statement": ["https://images.test/1.png"], "test_patch": []})
    path = write(tmp_path / "rows.jsonl", {"image_assets": assets})

    [instance] = made(str(path))

    assert "https://images.test/1.png" in instance.instruction


@needs_swebench
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repo": ...}, "rows.jsonl:2: field `repo`: missing"),
        ({"base_commit": 5}, "rows.jsonl:2: field `base_commit`: expected str, got int"),
        ({"FAIL_TO_PASS": "[1"}, "rows.jsonl:2: field `FAIL_TO_PASS`: not valid JSON"),
        ({"FAIL_TO_PASS": "[1]"}, "rows.jsonl:2: field `FAIL_TO_PASS`: expected a list of test ids"),
        ({"eval_script": "pytest"}, "rows.jsonl:2: field `eval_script`: the markers"),
        ({"log_parser": "parse_log_nothing"}, "rows.jsonl:2: field `log_parser`: unknown to swebench"),
        ({"eval_type": "all"}, "rows.jsonl:2: field `eval_type`: one of pass_and_fail, fail_only, not `all`"),
        ({"instance_id": ROW["instance_id"]}, "duplicate id `astropy__astropy-1`: rows.jsonl:1 and rows"),
        ({"instance_id": "a\n"}, "rows.jsonl:2: `id` has unprintable characters"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "rows.jsonl", {}, {"instance_id": "other"} | change)

    with pytest.raises(BadInput) as caught:
        loader.load(f"swebench:{path}").check()  # type: ignore[misc]

    assert caught.value.message.startswith(message)


@needs_swebench
@pytest.mark.skipif(
    find_spec("swebench") is not None and reference.version() < "5", reason="swebench 4 makes scripts"
)
def test_a_row_that_brings_no_script_says_what_can_be_done(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"eval_script": ..., "log_parser": ..., "eval_type": ...})

    with pytest.raises(BadInput, match=r"rows.jsonl:1: field `eval_script`: missing.*swebench<5"):
        loader.load(f"swebench:{path}").check()  # type: ignore[misc]


@needs_swebench
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ repo }}\n{% if %}", "prompt.j2:2: Expected an expression"),
        ("{{ repo }}\n\n{{ pathc }}", "prompt.j2:3: 'pathc' is undefined"),
        ("{{ patch }}", "prompt.j2:1: 'patch' is undefined"),  # what would give it away is not to be had
        ("\n{{ ''.__class__.__mro__ }}", "prompt.j2:2: access to attribute '__class__'"),
    ],
)
def test_a_mistake_in_a_template_is_named_with_its_line(tmp_path: Path, template: str, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", {})
    (tmp_path / "prompt.j2").write_text(template)

    with pytest.raises(BadInput) as caught:
        made(f"swebench:{path}?template={tmp_path}/prompt.j2")

    assert caught.value.message.startswith(message)


def test_what_the_extra_brings_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(BadInput) as caught:
        made(f"swebench:{write(tmp_path / 'rows.jsonl', {})}")

    assert caught.value.message == "SWE-bench needs the package `jinja2`, which is not installed"
    assert caught.value.hint == "`pip install 'holdwater[swebench]'`"


def test_a_spec_means_the_same_from_any_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    spec = make_absolute("swt:rows.jsonl?template=my prompt.j2&image=r.test/{id}:1&timeout=60")

    options = parse_options(spec)
    assert (options.kind, options.path, options.timeout) == ("swt", f"{tmp_path}/rows.jsonl", 60)
    assert (options.template, options.image) == (f"{tmp_path}/my prompt.j2", "r.test/{id}:1")
    assert make_absolute(spec) == spec


@pytest.mark.parametrize("query", ["tempalte=x", "timeout=soon", "timeout=0", "network=some", "nothing"])
def test_a_wrong_option_is_refused(query: str) -> None:
    with pytest.raises(BadInput, match=r"invalid option"):
        parse_options(f"swebench:rows.jsonl?{query}")


def test_a_file_is_recognised_by_its_first_row(tmp_path: Path) -> None:
    assert recognised(write(tmp_path / "ours.jsonl", {}))
    assert not recognised(write(tmp_path / "others.jsonl", {"instance_id": ..., "id": "a"}))
    assert not recognised(tmp_path / "none.jsonl")


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {}, {"repo": ...})

    found = read_rows(path)

    assert next(found)[0] == "rows.jsonl:1"  # the wrong one has not been looked at


def test_a_patch_names_the_files_that_it_touches() -> None:
    patch = "".join(
        [
            "diff --git a/a b.py b/a b.py\n--- a/a b.py\n+++ b/a b.py\n@@ -1 +1 @@\n",
            "--- a/not-this\n+++ b/nor-this\n",
            'diff --git "a/\\303\\274.py" "b/\\303\\274.py"\n--- "a/\\303\\274.py"\n+++ "b/\\303\\274.py"\n',
            "@@ -1 +1 @@\ndiff --git a/gone.py b/gone.py\ndeleted file mode 100644\n--- a/gone.py\n",
            "+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
            "diff --git a/old.py b/new.py\nsimilarity index 100%\nrename from old.py\nrename to new.py\n",
            "diff --git a/p.png b/p.png\nnew file mode 100644\nindex 0..1\nGIT binary patch\nliteral 1\n",
        ]
    )

    assert files_of(patch) == ["a b.py", "\u00fc.py", "gone.py", "old.py", "new.py", "p.png"]


def test_pytest_is_asked_for_a_report_of_its_own() -> None:
    watched = make_evaluation(SCRIPT, "n0nce", "/testbed")
    other = make_evaluation(SCRIPT.replace("pytest -rA", "./tests/runtests.py"), "n0nce", "/testbed")

    assert watched.report == "/testbed/.git/holdwater-n0nce/report.xml"
    options = "-p holdwater_n0nce --junitxml=/testbed/.git/holdwater-n0nce/report.xml"
    assert f" pytest {options} -rA tests/a.py\n" in watched.text
    assert other.report is None and "junit" not in other.text
    assert "n0nce" in watched.start and "n0nce" in watched.end


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pytest -rA tests/a.py", "pytest -rA tests/b.py"),
        ("./runtests.py --verbosity 2 a", "./runtests.py --verbosity 2 b"),
        ("npm test", "npm test"),
    ],
)
def test_an_agents_own_tests_are_run_as_the_benchmark_runs_its_own(command: str, expected: str) -> None:
    script = SCRIPT.replace("pytest -rA tests/a.py", command).replace(
        "cd /testbed",
        "cd /testbed\ngit checkout abc tests/a.py\ngit apply -v - <<'EOF'\n+x = 'tests'\nEOF\nmake",
    )

    made = replace_tests(script, ["tests/a.py"], ["tests/b.py"])

    assert made == f"cd /testbed\nmake\n: '>>>>> Start Test Output'\n{expected}\n: '>>>>> End Test Output'"


GOOD = {"instance_id": "a", "model_name_or_path": "m", "model_patch": "x"}


@pytest.mark.parametrize("content", [[GOOD], {"a": GOOD}])
def test_predictions_are_found_by_their_id(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))

    answer = predictions(path).act(Instance(id="a"), None, None)

    assert answer == {"model_patch": "x", "model_name_or_path": "m"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"instance_id": "b"}', "p.jsonl:3: Object missing required field `model_patch`"),
        ('{"model_patch": "b"}', "p.jsonl:3: Object missing required field `instance_id`"),
        (json.dumps(GOOD), "duplicate id `a`: p.jsonl:1 and p.jsonl:3"),
        ("{", "p.jsonl:3: Input data was truncated"),
    ],
)
def test_a_wrong_prediction_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")

    with pytest.raises(BadInput) as caught:
        index_predictions(path)

    assert caught.value.message == message
