"""pass@k of runs with several samples: the estimator, its interval, and where both are shown."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import holdwater as hw
from holdwater.cli.console import render_text
from holdwater.core.summary import compute_pass_rates, estimate_pass, wilson_interval
from holdwater.export.formats import export_run
from holdwater.ledger.reader import LedgerReader
from holdwater.view.report import render_report

PASSES = {"all": {0, 1, 2, 3}, "half": {0, 2}, "one": {3}, "none": set[int]()}


def grade(instance: hw.Instance, sandbox: Any, answer: Any) -> bool:
    if instance.id == "broken" and answer > 1:
        raise OSError("no grade for this sample")
    return answer in PASSES.get(instance.id, set())


def make_suite(*names: str) -> hw.Suite:
    return hw.Suite(name="s", instances=lambda: (hw.Instance(id=name) for name in names), grade=grade)


class Counting:
    """An agent that answers with the number of its sample."""

    def __init__(self) -> None:
        self.seen: dict[str, itertools.count[int]] = {}

    async def __call__(self, instance: hw.Instance, sandbox: Any, model: Any) -> int:
        return next(self.seen.setdefault(instance.id, itertools.count()))


@pytest.mark.parametrize(("samples", "passed"), [(4, 0), (4, 1), (5, 2), (6, 6), (1, 1)])
def test_the_estimator_is_the_share_of_subsets_with_a_pass(samples: int, passed: int) -> None:
    results = [True] * passed + [False] * (samples - passed)
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(results, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert estimate_pass(samples, passed, k) == pytest.approx(share)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    chance = random.Random(5)
    held = 0
    for _ in range(400):
        counts: dict[tuple[int, int], int] = {}
        for _ in range(60):
            ease = chance.random()  # instances are not equally hard: the mean of pass@1 is 0.5
            passed = sum(chance.random() < ease for _ in range(4))
            counts[4, passed] = counts.get((4, passed), 0) + 1
        rate = compute_pass_rates(counts)[0]
        held += rate.low <= 0.5 <= rate.high
    assert 0.91 <= held / 400 <= 0.99


def test_instances_that_all_agree_still_have_an_interval() -> None:
    (always, *_) = compute_pass_rates({(4, 4): 10})
    assert (always.value, always.high) == (1.0, 1.0)
    assert (always.low, 1.0) == pytest.approx(wilson_interval(1.0, 10))
    assert 0.6 < always.low < 0.8


async def test_pass_at_k_is_in_show_in_json_and_in_exports(tmp_path: Path) -> None:
    out = tmp_path / "run"
    suite = make_suite(*PASSES)

    summary = await hw.arun(suite, Counting(), out=out, samples=4, concurrency=1)

    values = [rate.value for rate in summary.pass_at]
    assert values == pytest.approx([7 / 16, (1 + 5 / 6 + 1 / 2) / 4, (1 + 1 + 3 / 4) / 4, 3 / 4])
    assert all(0 <= rate.low < rate.value < rate.high <= 1 for rate in summary.pass_at)
    with LedgerReader(out) as reader:
        page = re.sub(r"\s+", " ", render_text(render_report(reader.summary(), reader), -1))
    first = summary.pass_at[0]
    assert f"pass@1 0.438, 95 % interval {first.low:.3f} to {first.high:.3f} over 4 instances" in page
    assert "pass@4 0.750" in page
    lines = [json.loads(line) for line in exported(out, "jsonl").splitlines()]
    assert [(row["k"], row["value"], row["instances"]) for row in lines] == [
        (rate.k, rate.value, 4) for rate in summary.pass_at
    ]
    rows = list(csv.DictReader(io.StringIO(exported(out, "csv"))))
    assert [float(row["low"]) for row in rows] == [rate.low for rate in summary.pass_at]
    hw.export(out, tmp_path / "jobs", format="harbor")
    (result,) = (tmp_path / "jobs").glob("*/result.json")
    (stats,) = json.loads(result.read_text())["stats"]["evals"].values()
    assert stats["pass_at_k"] == {str(rate.k): rate.value for rate in summary.pass_at}


async def test_samples_that_could_not_be_scored_count_for_no_k(tmp_path: Path) -> None:
    suite = make_suite("all", "broken")

    summary = await hw.arun(suite, Counting(), out=tmp_path / "run", samples=4, concurrency=1, retries=0)

    assert [(rate.k, rate.instances, rate.value) for rate in summary.pass_at] == [
        (1, 2, 0.5),
        (2, 2, 0.5),
        (3, 1, 1.0),
        (4, 1, 1.0),
    ]


async def test_a_run_with_one_sample_has_no_pass_at_k(tmp_path: Path) -> None:
    summary = await hw.arun(make_suite("all"), Counting(), out=tmp_path / "run")

    assert summary.pass_at == ()
    assert exported(tmp_path / "run", "jsonl") == ""


def exported(path: Path, format: str) -> str:
    out = io.BytesIO()
    export_run(path, "pass-at-k", format, out)
    return out.getvalue().decode()
