"""kill -9 of worker and conductor while a taskset of verifiers is scored: nothing is scored twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, lines, serving, until
from tests.server_harness import kill
from tests.verifiers_commands import copy_taskset, find_interpreter

import holdwater as hw
from holdwater.ledger.reader import LedgerReader

MODEL = Path(__file__).parents[1] / "clients" / "task_model.py"
AGENT = """
async def solve(instance, sandbox, model):
    await model.chat([{"role": "user", "content": f"{instance.instruction} {model.seed}"}])
"""
SAMPLES = 2
# Workers and tasks. Each worker imports the package, which takes seconds.
SIZES = [(1, 3), pytest.param((2, 24), marks=pytest.mark.proof)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with serving(str(MODEL), str(tmp_path / "requests"), str(tmp_path / "none")) as url:
        env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "x"}
        scene = Scene(tmp_path, env=env, forks=find_interpreter())
        (tmp_path / "agent.py").write_text(AGENT)
        yield scene
        scene.close()


def count_notes(scene: Scene, what: str) -> Counter[str]:
    """How often each task has noted that."""
    notes = lines(scene.place / "notes")
    return Counter(name for name, noted in map(str.split, notes) if noted == what)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[1]} tasks")
def test_killed_processes_score_no_rollout_of_a_taskset_twice(scene: Scene, size: tuple[int, int]) -> None:
    workers, tasks = size
    rollouts, open_tasks = SAMPLES * tasks, tasks // 3
    gate = scene.place / "gate"
    gate.touch()
    taskset = copy_taskset(scene.place, "counted")
    command = scene.start(
        *("run", f"vf:{taskset}?env=counted&place={scene.place}&count={tasks}&open={open_tasks}"),
        *("--agent", f"{scene.place}/agent.py:solve", "--model", "m", "--samples", str(SAMPLES)),
        *("--workers", str(workers), "--concurrency", str(rollouts), "--sandbox-memory", "32MiB"),
        *("--backoff", "0.01", "--out", str(scene.out)),
    )
    until("all rollouts are being scored", lambda: count_notes(scene, "begin").total() == rollouts, 120)
    until("the open tasks have their verdicts", lambda: count_settled(scene) == SAMPLES * open_tasks, 60)

    kill(scene.workers()[0].pid)
    until("lost rollouts are scored again", lambda: count_notes(scene, "begin").total() > rollouts, 120)
    command.kill()
    gate.unlink()
    resumed = scene.resume()

    assert resumed.wait(180) == 0, resumed
    everything = {f"t{number}": SAMPLES for number in range(tasks)}
    assert count_notes(scene, "end") == everything
    assert count_notes(scene, "compare") == dict.fromkeys(everything, 1)
    audit = hw.audit(scene.out)
    assert (audit.planned, audit.settled, audit.lost, audit.duplicated) == (rollouts, rollouts, 0, 0)
    with LedgerReader(scene.out) as reader:
        grades = [row.verdict.grade for row in reader.attempts() if row.verdict and row.verdict.grade]
    assert [grade.score for grade in grades] == [2.0] * rollouts
    assert len(lines(scene.place / "requests")) == rollouts  # no turn was paid twice
    scene.assert_clean()


def count_settled(scene: Scene) -> int:
    with LedgerReader(scene.out) as reader:
        return reader.counts().settled
