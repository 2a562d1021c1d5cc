"""JSONL suites: what a row means, and what is said about a bad one."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.errors import BadInput
from holdwater.core.records import LimitOverrides, MiB
from holdwater.suite import jsonl as jsonl_module
from holdwater.suite.jsonl import jsonl

GOOD = '{"id": "a", "grade": "true"}'


def written(directory: Path, *lines: str | bytes) -> Path:
    path = directory / "tasks.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def refusal(path: Path) -> BadInput:
    suite = jsonl(path)
    assert suite.check is not None
    with pytest.raises(BadInput) as caught:
        suite.check()
    return caught.value


def test_a_row_becomes_an_instance(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    row = {
        "id": "a/../b",
        "instruction": "do it",
        "files": {"x/y.py": "1\n"},
        "directory": "repo",
        "setup": "make",
        "grade": "make test",
        "solution": "make fix",
        "limits": {"acting": 5, "memory": "512MiB", "disk": 1000, "pids": 7, "output": "1.5 kB"},
        "data": {"n": [1, None]},
    }
    suite = jsonl(written(tmp_path, json.dumps(row)))

    (instance,) = suite.instances()

    assert (suite.name, instance.id, instance.instruction) == ("tasks", "a/../b", "do it")
    assert (instance.files, instance.directory) == ({"x/y.py": "1\n"}, str(tmp_path / "repo"))
    assert (instance.setup, instance.grade, instance.solution) == ("make", "make test", "make fix")
    assert instance.limits == LimitOverrides(acting=5.0, memory=512 * MiB, disk=1000, pids=7, output=1500)
    assert instance.data == {"n": [1, None]}


def test_blank_lines_a_bom_and_windows_line_ends_are_no_rows(tmp_path: Path) -> None:
    path = written(
        tmp_path, b"\xef\xbb\xbf" + GOOD.encode() + b"\r", "", "  ", '{"id": "b", "grade": "true"}', ""
    )
    suite = jsonl(path)
    suite.check()

    assert [instance.id for instance in suite.instances()] == ["a", "b"]
    assert suite.size == 2


BAD_ROWS = [
    (
        '{"id": "x", "grade": "t", "limits": {"acting": "long"}}',
        "field `limits.acting`: expected float, got str",
    ),
    ('{"id": "x", "grade": "t", "limits": {"acting": 0}}', "field `limits.acting`: expected float > 0.0"),
    ('{"id": "x", "grade": "t", "limits": {"acting": 1e999}}', "field `limits.acting`: number out of range"),
    ('{"id": "x", "grade": "t", "limits": {"pids": 1.5}}', "field `limits.pids`: expected int, got float"),
    (
        '{"id": "x", "grade": "t", "limits": {"memory": []}}',
        "field `limits.memory`: expected int | str, got array",
    ),
    (
        '{"id": "x", "grade": "t", "limits": {"memory": "lots"}}',
        "field `limits.memory`: expected bytes or a size like `512MiB`, got `lots`",
    ),
    (
        '{"id": "x", "grade": "t", "limits": {"memory": "0MiB"}}',
        "field `limits.memory`: expected bytes or a size like `512MiB`, got `0MiB`",
    ),
    ('{"id": "x", "grade": "t", "limits": {"time": 1}}', "field `limits.time`: unknown"),
    ('{"id": "x", "grade": "t", "instructions": ""}', "field `instructions`: unknown"),
    ('{"grade": "t"}', "field `id`: missing"),
    ('{"id": "x"}', "field `grade`: missing"),
    ('{"id": "x", "grade": ""}', "field `grade`: expected str of length >= 1"),
    ('{"id": 5, "grade": "t"}', "field `id`: expected str, got int"),
    ('{"id": "", "grade": "t"}', "`id` is empty"),
    ('{"id": "a\\nb", "grade": "t"}', "`id` has unprintable characters: 'a\\nb'"),
    (json.dumps({"id": "x" * 10_000, "grade": "t"}), "`id` has 10000 characters, at most 512 are allowed"),
    ('{"id": "x", "grade": "t", "files": {"a": 1}}', "field `files`: expected str, got int"),
    (
        '{"id": "x", "grade": "t", "files": {"/a": ""}}',
        "field `files`: path leaves the working directory: '/a'",
    ),
    (
        '{"id": "x", "grade": "t", "files": {"a/../../b": ""}}',
        "field `files`: path leaves the working directory: 'a/../../b'",
    ),
    (
        '{"id": "x", "grade": "t", "tests": {"../b": ""}}',
        "field `tests`: path leaves the tests' directory: '../b'",
    ),
    ('["x"]', "expected object, got array"),
    ('{"id": "x", ', "not valid JSON: Input data was truncated"),
    ('{"id": "x", "grade": "t"} {}', "not valid JSON: trailing characters (byte 27)"),
    ('{"id": "x", "grade": "t", "data": {"a":' + "[" * 100_000, "not valid JSON: nested too deeply"),
    (b'{"id": "\xff", "grade": "t"}', "not valid UTF-8: byte 9"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message[:50] for _, message in BAD_ROWS])
def test_a_bad_row_is_named_by_file_line_and_field(row: str | bytes, message: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path, GOOD, "", row)).message == f"tasks.jsonl:3: {message}"


def test_a_misspelt_field_has_a_hint(tmp_path: Path) -> None:
    assert (
        refusal(written(tmp_path, '{"id": "x", "grade": "t", "limits": {"memmory": 1}}')).hint
        == "did you mean `memory`?"
    )


def test_a_directory_must_exist(tmp_path: Path) -> None:
    error = refusal(written(tmp_path, '{"id": "x", "grade": "t", "directory": "gone"}'))

    assert error.message == f"tasks.jsonl:1: field `directory`: no such directory: `{tmp_path / 'gone'}`"


@pytest.mark.parametrize("said", ["../beside", "{place}/beside", "repo/../../beside", "link"])
def test_a_directory_outside_of_the_suites_own_is_refused(tmp_path: Path, said: str) -> None:
    (tmp_path / "suite" / "repo").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    (tmp_path / "suite" / "link").symlink_to(tmp_path / "beside")
    said = said.format(place=tmp_path)
    row = json.dumps({"id": "x", "grade": "t", "directory": said})

    error = refusal(written(tmp_path / "suite", GOOD, row))

    problem = f"leads out of the suite's own directory: `{said}`"
    assert error.message == f"tasks.jsonl:2: field `directory`: {problem}"


def test_a_directory_by_a_link_that_stays_inside_is_taken(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "link").symlink_to("repo")

    (found,) = jsonl(written(tmp_path, '{"id": "x", "grade": "t", "directory": "link"}')).instances()

    assert found.directory == str(tmp_path / "link")


def test_a_bad_row_stops_the_instances_where_it_stands(tmp_path: Path) -> None:
    instances = iter(jsonl(written(tmp_path, GOOD, "nonsense")).instances())

    assert next(instances).id == "a"
    with pytest.raises(BadInput, match=r"tasks\.jsonl:2"):
        next(instances)


def test_duplicates_are_reported_with_both_places(tmp_path: Path) -> None:
    rows = [json.dumps({"id": f"x{n % 16}", "grade": "t"}) for n in range(2, 19)]

    assert (
        refusal(written(tmp_path, "", "", *rows)).message
        == "duplicate id `x2`: tasks.jsonl:3 and tasks.jsonl:19"
    )


def test_ids_whose_hashes_collide_are_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_module, "hash", len, raising=False)
    suite = jsonl(written(tmp_path, GOOD, '{"id": "b", "grade": "t"}'))
    suite.check()

    assert suite.size == 2


@given(ids=st.lists(st.sampled_from("abcdefgh"), max_size=12))
def test_check_refuses_exactly_what_has_a_duplicate(
    ids: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("rows"), *(json.dumps({"id": i, "grade": "t"}) for i in ids))
    suite = jsonl(path)
    if len(set(ids)) == len(ids):
        suite.check()
        assert suite.size == len(ids)
    else:
        refusal(path)


def test_a_large_file_is_checked_in_a_few_bytes_a_row(tmp_path: Path) -> None:
    rows = 50_000
    suite = jsonl(written(tmp_path, *(f'{{"id": "instance-{n}", "grade": "true"}}' for n in range(rows))))
    tracemalloc.start()
    try:
        suite.check()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert suite.size == rows
    assert peak < 12 * rows + 300_000


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no such file: `.*gone\.jsonl`"):
        jsonl(tmp_path / "gone.jsonl")
