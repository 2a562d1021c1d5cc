"""The tasksets that verifiers brings, with the packages behind them: games, OpenEnv, tasks of Harbor."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import harbor_tasks
from tests.command_runner import Scene, serving
from tests.forked_command import Interpreter
from tests.verifiers_commands import find_interpreter
from tests.wait_bounds import stretch

from holdwater.ledger.reader import LedgerReader

pytestmark = pytest.mark.proof  # `scripts/proof-clients` installs the packages

CLIENTS = Path(__file__).parents[1] / "clients"
NULL = ("--agent", "holdwater.suite.verifiers.harness:null")


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    corpus = tmp_path_factory.mktemp("nltk") / "corpora" / "words"  # downloaded, where there is a network
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("gear\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(corpus.parents[1]))
        yield find_interpreter("tasksets", "verifiers.v1", "openenv", "harbor", "textarena")


@pytest.fixture
def scene(tmp_path: Path, interpreter: Interpreter) -> Iterator[Scene]:
    with serving(str(CLIENTS / "task_model.py"), str(tmp_path / "requests"), str(tmp_path / "gate")) as url:
        env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "x", "HOME": str(tmp_path)}
        scene = Scene(tmp_path, env=env, forks=interpreter)
        yield scene
        scene.close()


def finish(scene: Scene, spec: str, *words: str, status: int = 0) -> list[Any]:
    """Run a taskset to its end; return the verdicts."""
    flags = ("--model", "m", "--workers", "0", "--retries", "0", "--out", str(scene.out))
    command = scene.start("run", spec, *flags, *words)
    assert command.wait(180) == status, command
    with LedgerReader(scene.out) as reader:
        return [row.verdict for row in reader.attempts()]


def read_trace(scene: Scene, verdict: Any) -> Any:
    files = scene.out / "artifacts" / f"{verdict.attempt:06d}.files"
    return json.loads((files / "trace.json").read_text())


def test_a_game_of_textarena_is_played_against_its_engine(scene: Scene) -> None:
    (verdict,) = finish(scene, "vf:textarena?game=Hangman-v0", *NULL, "--limit", "1")

    assert (verdict.failure, verdict.grade.passed) == (None, True)
    assert verdict.grade.metrics["reward.game_reward"] == 1.0
    assert verdict.usage.requests == 2  # a wrong letter, then the word
    assert "completed the Hangman puzzle" in read_trace(scene, verdict)["info"]["game_outcome"]


def test_a_server_of_openenv_is_stepped_with_the_replies(scene: Scene, interpreter: Interpreter) -> None:
    with subprocess.Popen(
        [interpreter.python, CLIENTS / "openenv_server.py"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            (verdict,) = finish(scene, f"vf:openenv?base_url={url}", *NULL)
        finally:
            server.kill()

    assert (verdict.failure, verdict.usage.requests) == (None, 2)
    assert verdict.grade.metrics["reward.openenv_reward"] == verdict.grade.score == 1.0


def test_a_server_that_is_gone_is_no_zero(scene: Scene) -> None:
    (verdict,) = finish(scene, "vf:openenv?base_url=http://127.0.0.1:9", *NULL, status=1)

    assert (verdict.failure.where, verdict.failure.kind) == ("sandbox", "environment")
    assert "environment `OpenEnvEnv`" in verdict.failure.message


def test_tasks_of_harbor_are_downloaded_and_tested_in_a_sandbox(scene: Scene) -> None:
    registry = make_registry(scene.place, "text", "json", "separate")

    verdicts = finish(scene, f"vf:harbor?dataset=scene@1.0&registry_path={registry}", status=1)

    by_name = {read_name(scene, verdict): verdict for verdict in verdicts}
    assert by_name["1-separate"].failure.message.startswith("field `verifier`: ")
    for name in ("0-json", "2-text"):
        assert (by_name[name].failure, by_name[name].grade.score) == (None, 1.0), by_name[name]


def make_registry(place: Path, *names: str) -> Path:
    """Make a registry of Harbor with tasks in a repository of this machine."""
    tree = place / "tree"
    harbor_tasks.write(tree)
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@t")
    for words in (("init", "-q", "."), ("add", "-A"), ("commit", "-qm", "tasks")):
        subprocess.run([*git, *words], cwd=tree, check=True, timeout=stretch(30), env={**os.environ})
    url = f"file://{tree}"
    tasks = [{"name": name, "git_url": url, "path": f"processes/{name}"} for name in names]
    registry = place / "registry.json"
    dataset = {"name": "scene", "version": "1.0", "description": "tasks of a test", "tasks": tasks}
    registry.write_text(json.dumps([dataset]))
    return registry


def read_name(scene: Scene, verdict: Any) -> str:
    with LedgerReader(scene.out) as reader:
        row = reader.attempt(verdict.attempt)
        assert row is not None
        return row.instance
