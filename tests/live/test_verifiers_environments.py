"""Environments of verifiers 0.1, with that version of the package: rollouts, rubrics, groups."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, serving
from tests.forked_command import Interpreter
from tests.verifiers_commands import find_interpreter

from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import read_exchanges
from holdwater.ledger.reader import LedgerReader

pytestmark = pytest.mark.proof  # `scripts/proof-clients` installs the package

CLIENTS = Path(__file__).parents[1] / "clients"
FLAGS = ("--model", "m", "--workers", "0", "--retries", "0")


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return find_interpreter("environments", "verifiers.clients.openai_chat_completions_client")


@pytest.fixture
def scene(tmp_path: Path, interpreter: Interpreter) -> Iterator[Scene]:
    with serving(str(CLIENTS / "task_model.py"), str(tmp_path / "requests"), str(tmp_path / "gate")) as url:
        scene = Scene(tmp_path, env={"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "x"}, forks=interpreter)
        shutil.copy(CLIENTS / "environments" / "sums.py", tmp_path)
        yield scene
        scene.close()


def run(scene: Scene, options: str, *words: str) -> list[Any]:
    """Run the environment to its end; return the verdicts."""
    command = scene.start(
        "run", f"vf:{scene.place}/sums.py{options}", *FLAGS, *words, "--out", str(scene.out)
    )
    assert command.wait(120) == 0, command
    with LedgerReader(scene.out) as reader:
        return [row.verdict for row in reader.attempts()]


def test_an_environment_plays_its_turns_and_its_rubric_grades(scene: Scene) -> None:
    verdicts = run(scene, "?count=1")

    (grade,) = (verdict.grade for verdict in verdicts)
    assert (grade.score, grade.metrics["turns"]) == (0.0, 2.0)  # the model says `blue`
    exchanges = list(read_exchanges(RunDirectory(scene.out), verdicts[0].attempt))
    assert [exchange.by for exchange in exchanges] == ["", ""]
    assert [len(exchange.append) for exchange in exchanges] == [1, 2]


def test_group_rewards_score_the_samples_of_a_row_together(scene: Scene) -> None:
    verdicts = run(scene, "?count=2&grouped=true&env=sums", "--samples", "2", "--concurrency", "4")

    assert [verdict.group_scored for verdict in verdicts] == [True] * 4
    assert {verdict.grade.score for verdict in verdicts} == {0.5}
    assert {verdict.grade.metrics["longest"] for verdict in verdicts} == {1.0}


def test_a_single_sample_is_a_group_of_its_own(scene: Scene) -> None:
    (verdict,) = run(scene, "?count=1&grouped=true&env=sums")

    assert (verdict.group_scored, verdict.grade.score) == (False, 0.5)


@pytest.mark.parametrize(
    ("options", "words", "problem"),
    [
        ("?grouped=true", (), "environment `SumEnv` has group rewards"),
        ("", ("--agent", "nop"), "environment `SumEnv` plays its own turns: `--agent nop`"),
        ("?size=3", (), "got an unexpected keyword argument 'size'"),
    ],
)
def test_an_environment_that_cannot_run_is_refused_first(
    scene: Scene, options: str, words: tuple[str, ...], problem: str
) -> None:
    spec = f"vf:{scene.place}/sums.py{options}"
    command = scene.start("run", spec, *FLAGS, *words, "--out", str(scene.out))

    assert command.wait(120) == 2, command
    assert problem in command.stderr, command.stderr
    assert not scene.out.exists()


def test_a_resume_from_another_directory_finds_the_same_rows(scene: Scene) -> None:
    verdicts = run(scene, "?count=1", "--limit", "1")
    resumed = scene.resume()

    assert resumed.wait(120) == 0, resumed
    assert len(verdicts) == 1
