"""`holdwater compare` over real runs: the terminal, JSON, exit statuses, and runs that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.command_runner import Command
from tests.ledger_runs import new_run, passed, planned

import holdwater as hw
from holdwater.core.comparison import ComparisonReport
from holdwater.core.records import Attempt, Outcome
from holdwater.ledger.ledger import Ledger


async def answer_score(instance: hw.Instance, sandbox: Any, model: Any) -> object:
    return instance.data["scores"]


def grade_score(instance: hw.Instance, sandbox: Any, answer: dict[str, Any]) -> hw.Grade:
    score = answer[AGENTS[-1]]
    if score is None:
        raise OSError("the grader is broken")
    return hw.Grade(passed=score >= 0.5, score=score)


AGENTS: list[str] = []  # whose scores the next run gets
SCORES = {
    "fixed": {"before": 0.0, "after": 1.0, "worse": 0.0},
    "broken": {"before": 1.0, "after": 0.25, "worse": 0.0},
    "same": {"before": 1.0, "after": 1.0, "worse": 0.0},
    "crashed": {"before": 1.0, "after": None, "worse": 0.0},
    **{f"easy-{n}": {"before": 1.0, "after": 1.0, "worse": 0.0} for n in range(8)},
}


def make_instances(changed: str = "") -> list[hw.Instance]:
    return [
        hw.Instance(
            id=name,
            instruction="again" if name == changed else "",
            data={"scores": scores, "repo": "easy" if "-" in name else "hard", "tags": [name[0]]},
        )
        for name, scores in SCORES.items()
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of one suite: `after` has other content in one instance."""
    directory = tmp_path_factory.mktemp("compare")
    for name in ("before", "after", "worse"):
        AGENTS[:] = [name]
        suite = hw.Suite(
            name="s",
            instances=lambda name=name: iter(make_instances("easy-0" if name == "after" else "")),
            grade=grade_score,
        )
        hw.run(suite, answer_score, out=directory / name, retries=0, workers=0)
    return directory


def test_the_report_names_what_changed(runs: Path) -> None:
    report = hw.compare(runs / "before", runs / "after")

    assert (report.fixed, report.broken, report.same) == (("fixed",), ("broken",), 8)
    assert (report.unscored, report.changed) == (("crashed",), ("easy-0",))
    assert report.difference == 0.0 and report.p == 1.0
    assert report.score is not None
    assert report.score.difference == pytest.approx((1.0 - 0.75) / 10)
    assert [figures.run for figures in report.runs] == [str(runs / "before"), str(runs / "after")]
    assert [rate.k for rate in report.runs[0].pass_at] == [1]
    assert {row.tag for row in report.tags} == {"f", "b", "s", "e"}


def play(place: Path, *words: str | Path, status: int = 0, **env: str) -> Command:
    command = Command(place, "compare", *map(str, words), env=env)
    assert command.wait() == status, command.stderr
    return command


def test_the_command_prints_the_same_as_json(runs: Path, tmp_path: Path) -> None:
    compared = (runs / "before", runs / "after", runs / "worse")
    printed = play(tmp_path, *compared, "--by", "repo", "--json")

    document = json.loads(printed.stdout)
    assert (document["fixed"], document["broken"], document["same"]) == (["fixed"], ["broken"], 8)
    assert document["unscored"] == ["crashed"]
    assert document["interval"][0] < document["difference"] < document["interval"][1]
    assert 0.0 <= document["p"] <= 1.0
    assert [row["tag"] for row in document["tags"]] == ["easy", "hard"]
    assert [other["run"] for other in document["others"]] == [str(runs / "worse")]
    assert document.keys() == set(ComparisonReport.__struct_fields__)


def test_a_worse_run_exits_with_5_only_beyond_the_tolerance(runs: Path, tmp_path: Path) -> None:
    before, after, worse = runs / "before", runs / "after", runs / "worse"

    play(tmp_path, before, worse, "--fail-if-worse", "2%", status=5)
    play(tmp_path, before, after, worse, "--fail-if-worse", "0.02", status=5)
    play(tmp_path, before, after, "--fail-if-worse", "2%")
    play(tmp_path, worse, before, "--fail-if-worse", "0")


def test_the_page_shows_matrix_interval_and_names(runs: Path, tmp_path: Path) -> None:
    page = " ".join(play(tmp_path, runs / "before", runs / "worse").stdout.split())

    assert "12 instances compared" in page
    assert "95 % interval" in page and "McNemar" in page
    assert "broken 11:" in page
    assert "then passed then failed then not scored" in page


def test_runs_without_common_instances_are_refused(runs: Path, tmp_path: Path) -> None:
    other = hw.Suite(name="o", instances=lambda: iter([hw.Instance(id="other")]), grade=lambda *_: True)
    hw.run(other, answer_nothing, out=tmp_path / "other", workers=0)

    refused = play(tmp_path, runs / "before", tmp_path / "other", status=2)

    assert "cannot be compared: they have no instance in common" in refused.stderr
    assert refused.stdout == ""


async def answer_nothing(instance: hw.Instance, sandbox: Any, model: Any) -> None:
    return None


async def test_samples_without_an_outcome_are_not_scored(runs: Path, tmp_path: Path) -> None:
    payload = msgspec.msgpack.encode(hw.Instance(id="any"))
    async with Ledger(new_run(tmp_path / "half")) as ledger:
        done, _ = await ledger.plan([planned("done", payload), planned("open", payload)])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=done, sample=0, number=1))
        await ledger.settle(passed(attempt, ledger.token))
        await ledger.close_sample(Outcome(instance=done, sample=0, attempt=attempt, kind="passed", score=1.0))

    report = hw.compare(tmp_path / "half", tmp_path / "half")

    assert (report.instances, report.broken, report.matrix["not scored"]["not scored"]) == (1, (), 1)
    assert report.unscored == ("open",)
