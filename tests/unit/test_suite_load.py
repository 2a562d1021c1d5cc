"""Finding suites: by name, file, module and entry point; and what is said when one cannot be found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdwater.core.errors import BadInput
from holdwater.suite.loader import list_suites, load, make_absolute

SUITE = """
from holdwater.core.authoring import Suite
from sibling import NAME

def instances():
    yield from ()

suite = Suite(name=NAME, instances=instances)
called = Suite(name="called", instances=instances())
number = 7

def make():
    return suite

def explode():
    raise RuntimeError("no luck today")
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "sibling.py").write_text('NAME = "mine"\n')
    (tmp_path / "my suite.py").write_text(SUITE)
    yield tmp_path / "my suite.py"
    sys.modules.pop("sibling", None)


def refusal(spec: str) -> BadInput:
    with pytest.raises(BadInput) as caught:
        load(spec)
    return caught.value


def test_a_file_is_loaded_with_its_directory_on_the_path(written: Path) -> None:
    before = list(sys.path)

    assert load(f"{written}:suite").name == "mine"
    assert sys.path == before


def test_a_function_may_make_the_suite(written: Path) -> None:
    assert load(f"{written}:make").name == "mine"


def test_a_file_is_executed_once_for_all_its_names(written: Path) -> None:
    assert load(f"{written}:suite") is load(f"{written}:make")


def test_an_edited_file_is_seen(written: Path) -> None:
    load(f"{written}:suite")
    written.write_text(SUITE.replace("name=NAME", 'name="edited"'))

    assert load(f"{written}:suite").name == "edited"


def test_files_of_the_same_name_do_not_meet(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "suite.py").write_text(
            f"from holdwater.core.authoring import Suite\nsuite = Suite(name='{name}', instances=list)\n"
        )

    assert [load(f"{tmp_path}/{name}/suite.py:suite").name for name in ("one", "two")] == ["one", "two"]


def test_a_module_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here_suite.py").write_text(
        "from holdwater.core.authoring import Suite\nsuite = Suite(name='here', instances=list)\n"
    )
    monkeypatch.chdir(tmp_path)

    assert load("here_suite:suite").name == "here"


def test_a_spec_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    specs = ["a.py:suite", "tasks.jsonl", "demo", "package.module:suite"]

    assert [make_absolute(spec) for spec in specs] == [
        f"{tmp_path}/a.py:suite",
        f"{tmp_path}/tasks.jsonl",
        *specs[2:],
    ]


def test_an_unknown_name_lists_the_known_and_guesses() -> None:
    error = refusal("dmo")

    assert error.message == "unknown suite: `dmo`; known are `demo`"
    assert error.hint == "did you mean `demo`?"
    assert error.exit_status == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "not a suite: `{file}:number` is of type `int`"),
        ("called", "`{file}:called`: `instances` must be a function, not generator"),
        ("explode", "cannot load `{file}:explode`: {file}:16: RuntimeError: no luck today"),
        ("", "no name given: `{file}:`"),
    ],
)
def test_an_invalid_suite_is_refused(written: Path, name: str, message: str) -> None:
    assert refusal(f"{written}:{name}").message == message.format(file=written)


def test_a_missing_name_is_refused_with_a_guess(written: Path) -> None:
    error = refusal(f"{written}:siute")

    assert (error.message, error.hint) == (f"`{written}` has no `siute`", "did you mean `suite`?")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("\nimport absent_package\n", "{file}:2: ModuleNotFoundError: No module named 'absent_package'"),
        ("x = 1\ndef broken(:\n", "{file}:2: SyntaxError: invalid syntax"),
        ("import sys\n\nsys.exit('bye')\n", "{file}:3: SystemExit: bye"),
        (
            "import json\njson.loads('nope')\n",
            "{file}:2: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
        ("from below import x\n", "{directory}/below.py:2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_failing_import_is_named_by_file_line_and_exception(
    tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "below.py").write_text("\nx = 1 / 0\n")
    file = tmp_path / "suite.py"
    file.write_text(source)
    expected = reason.format(file=file, directory=tmp_path)

    for _ in range(2):  # a failure leaves nothing behind that would pass for a module
        assert refusal(f"{file}:suite").message == f"cannot load `{file}`: {expected}"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/nowhere/suite.py:suite", "no such file: `/nowhere/suite.py`"),
        ("/nowhere/tasks.jsonl", "no such file: `/nowhere/tasks.jsonl`"),
        ("absent_package.module:suite", "no such module: `absent_package.module`"),
        ("json.absent:suite", "no such module: `json.absent`"),
        ("suites/a.txt:suite", "not a Python file: `suites/a.txt`"),
        ("suite.py", "missing suite name: `suite.py`"),
        (":suite", "no name given: `:suite`"),
    ],
)
def test_a_missing_suite_is_reported(spec: str, message: str) -> None:
    assert refusal(spec).message == message


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that brings two suites, one of which cannot be imported."""
    (tmp_path / "brought.py").write_text(
        "from holdwater.core.authoring import Suite\nsuite = Suite(name='brought', instances=list)\n"
    )
    info = tmp_path / "bringer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bringer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[holdwater.suites]\nbrought = brought:suite\nbroken = absent_package:suite\ndemo = brought:suite\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_entry_points_bring_suites() -> None:
    assert load("brought").name == "brought"
    assert ("brought", "bringer") in [(k.name, k.source) for k in list_suites()]


@pytest.mark.usefixtures("installed")
def test_an_entry_point_does_not_take_our_own_names() -> None:
    assert load("demo").name == "demo"
    assert [k.source for k in list_suites() if k.name == "demo"] == [""]


@pytest.mark.usefixtures("installed")
def test_a_broken_entry_point_is_named_with_its_distribution() -> None:
    message = refusal("broken").message

    assert message == (
        "cannot load the entry point `broken` of `bringer`: "
        "ModuleNotFoundError: No module named 'absent_package'"
    )
