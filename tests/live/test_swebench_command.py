"""`holdwater grade` as a process: one JSON document, a report in the run, refusals that name the place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.command_runner import Scene
from tests.swebench_rows import Benchmark

pytestmark = pytest.mark.skipif(
    find_spec("swebench") is None and os.environ.get("CI") != "true",
    reason="`swebench` is not installed: `scripts/setup dev`",
)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "scene")
    yield scene
    scene.close()


def test_grade_prints_the_report_and_keeps_it(tmp_path: Path, scene: Scene) -> None:
    benchmark = Benchmark(tmp_path / "benchmark")
    row = benchmark.add("one")
    benchmark.add("[two]")  # no pattern
    predictions = benchmark.predictions({"one": row["patch"], "[two]": ""})
    benchmark.add("three")

    graded = scene.start(
        "grade", str(predictions), "--suite", benchmark.spec(), "--out", str(scene.out), "--json", "--quiet"
    )

    assert graded.wait(90) == 0, graded
    report = graded.document()
    assert report == json.loads((scene.out / "report.json").read_text())
    assert (report["resolved_ids"], report["empty_patch_ids"], report["incomplete_ids"]) == (
        ["one"],
        ["[two]"],
        ["three"],
    )
    scene.assert_whole(planned=2)


def test_gold_is_a_word(tmp_path: Path, scene: Scene) -> None:
    benchmark = Benchmark(tmp_path / "benchmark")
    benchmark.add("one")

    graded = scene.start("grade", "gold", "--suite", benchmark.spec(), "--out", str(scene.out), "--json")

    assert graded.wait(90) == 0, graded
    assert graded.document()["resolved_ids"] == ["one"]


def test_a_prediction_for_no_instance_is_named(tmp_path: Path, scene: Scene) -> None:
    benchmark = Benchmark(tmp_path / "benchmark")
    benchmark.add("one")
    predictions = benchmark.predictions({"one": "", "another": ""})

    graded = scene.start("grade", str(predictions), "--suite", benchmark.spec(), "--out", str(scene.out))

    assert graded.wait(60) == 2, graded
    assert "predictions.jsonl:2: no such instance in suite `rows`: `another`" in graded.stderr
    assert not scene.out.exists()
