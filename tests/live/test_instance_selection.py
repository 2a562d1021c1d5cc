"""`--select FILE` chooses instances by id, and the run keeps the list."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked_command import run_forked

import holdwater as hw
from holdwater.core.config import RunConfig
from holdwater.core.errors import BadInput
from holdwater.ledger.reader import LedgerReader
from holdwater.run.conductor import instance_source
from holdwater.run.conductor.instance_selection import (
    InstanceSelection,
    SelectionMarks,
    read_selection,
)
from holdwater.run.conductor.instance_source import check_selected

MiB = 1024 * 1024
CONFIG = RunConfig(id="r", suite="s", agent="a", created=0.0, version="0")


def endless() -> Iterator[hw.Instance]:
    return (hw.Instance(id=f"i{n}") for n in itertools.count())


def twenty() -> Iterator[hw.Instance]:
    return itertools.islice(endless(), 20)


def run(out: Path, instances: object = twenty, **options: object) -> list[str]:
    """The instances of a run that has ended."""
    suite = hw.Suite(name="s", instances=instances, grade=lambda *given: True)  # type: ignore[arg-type]
    hw.run(suite, lambda *given: None, out=out, workers=0, **options)  # type: ignore[arg-type]
    return planned(out)


def planned(out: Path) -> list[str]:
    with LedgerReader(out) as reader:
        return [row.name for row in reader.instances()]


def test_ids_choose_instances_in_the_order_of_the_suite(tmp_path: Path) -> None:
    list_ = tmp_path / "ids.txt"
    list_.write_bytes(b"\xef\xbb\xbf# the hard ones\r\ni7\r\n\r\n  i3  \ni12\n# again\ni7\ni0")

    assert run(tmp_path / "run", endless, select=list_) == ["i0", "i3", "i7", "i12"]
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {**config["select"], "digest": ""} == {"file": str(list_), "ids": 4, "digest": ""}
    assert (tmp_path / "run" / "select.txt").read_bytes() == list_.read_bytes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"only": ["i1*"]}, ["i1", "i12", "i15"]),
        ({"limit": 2}, ["i1", "i2"]),
        ({"shard": "1/3"}, ["i9", "i12", "i15"]),
        ({"shard": "2/3"}, ["i1"]),
        ({"shard": "3/3"}, ["i2"]),
        ({"only": ["i1*"], "shard": "1/3", "limit": 1}, ["i12"]),
    ],
)
def test_other_choices_apply_to_the_selected_ones(
    tmp_path: Path, options: dict[str, object], expected: list[str]
) -> None:
    ids = ["i12", "i9", "i1", "i15", "i2"]

    assert run(tmp_path / "run", select=ids, **options) == expected


async def test_an_id_beyond_the_bound_of_a_suite_without_end_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance_source, "READ_LEAST", 300)
    suite = hw.Suite(name="s", instances=endless)

    await check_selected(suite, CONFIG, InstanceSelection("ids", b"i299\ni5"))
    with pytest.raises(BadInput, match=r"^ids:2: no such instance in suite `s`: `i5000`$") as caught:
        await check_selected(suite, CONFIG, InstanceSelection("ids", b"i1\ni5000"))

    assert caught.value.hint == "only its first 320 instances were read"


def test_a_resume_has_the_selection_of_a_file_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "suite.py").write_text(
        "import holdwater as hw\n"
        "def instances():\n    return (hw.Instance(id=f'i{n}') for n in range(20))\n"
        "def refuse(instance, sandbox, model):\n    raise hw.ModelFailed('later')\n"
        "suite = hw.Suite(name='s', instances=instances, grade=lambda *given: True)\n"
    )
    (tmp_path / "ids.txt").write_text("i3\ni7\ni1\n")
    agent = ("--agent", "suite.py:refuse", "--retries", "0", "--only", "i*")
    words = ("run", "suite.py:suite", *agent, "--select", "ids.txt", "--out", "run", "--quiet")
    first = run_forked(*words, cwd=tmp_path)
    (tmp_path / "ids.txt").unlink()

    again = run_forked("resume", "run", "--retry", "all", "--quiet", cwd=tmp_path)

    assert (first.returncode, again.returncode) == (1, 1), first.stderr + again.stderr
    assert planned(tmp_path / "run") == ["i1", "i3", "i7"]
    with LedgerReader(tmp_path / "run") as reader:
        assert reader.summary().attempts == 6
    (tmp_path / "run" / "select.txt").write_text("i3\n")
    changed = run_forked("resume", "run", cwd=tmp_path)
    assert (changed.returncode, changed.stderr.partition("\n")[0]) == (
        2,
        "error: the list of instances has changed since the run was created: `run/select.txt`",
    )


def test_ids_come_from_standard_input(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text("cli-flags\n")
    with ids.open() as stdin:
        words = ("run", "demo", "--agent", "nop", "--select", "-", "--dry-run", "--json")
        done = run_forked(*words, cwd=tmp_path, stdin=stdin.fileno())
    with ids.open() as stdin:
        checked = run_forked("check", "demo", "--select", "-", cwd=tmp_path, stdin=stdin.fileno())

    document = json.loads(done.stdout)
    assert (document["first"], document["instances"]) == (["cli-flags"], 1), done.stderr
    assert document["config"]["select"]["file"] == "standard input"
    assert checked.stdout.startswith("demo: 1 instances, 1 good"), checked.stderr


def test_a_hundred_thousand_ids_take_little_memory(tmp_path: Path) -> None:
    count = 100_000
    (tmp_path / "ids.txt").write_text("".join(f"project__repository-{n}\n" for n in reversed(range(count))))
    tracemalloc.start()
    try:
        selection = read_selection(tmp_path / "ids.txt")
        assert selection is not None and len(selection) == count
        marks = SelectionMarks(selection)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert used < 5 * MiB, used  # 2.6 MB of them are the text
    assert all(marks.mark(f"project__repository-{n}") for n in range(0, count, 1000)) and not marks.mark("x")
