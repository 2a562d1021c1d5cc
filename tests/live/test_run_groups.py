"""Samples of a run as groups: the suite's hook scores all samples of an instance together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.in_process_run import events, play, whole

import holdwater as hw
from holdwater.core.errors import BadInput, SandboxFailed
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.rows import OutcomeRow

LEADS = 100.0  # the hook's scores are this and the number of the member


class GroupScene:
    """A suite whose hook scores by the order of its members, and an agent whose work names its sample."""

    def __init__(self, out: Path, *names: str) -> None:
        self.out = out
        self.names = names or ("a", "b")
        self.begun: dict[str, int] = {}
        self.scored: list[tuple[str, list[str]]] = []  # what the hook saw, each time
        self.broken: set[tuple[str, int]] = set()  # attempts whose set-up fails, for good

    async def setup(self, instance: hw.Instance, sandbox: Any) -> None:
        number = self.begun[instance.id] = self.begun.get(instance.id, -1) + 1
        if (instance.id, number) in self.broken:
            raise SandboxFailed("it does not start", again=False)
        await sandbox.write("number", str(number))

    async def act(self, instance: hw.Instance, sandbox: Any, model: Any) -> str:
        number = (await sandbox.read("number")).decode()
        await sandbox.write("work", number)
        return number

    async def grade(self, instance: hw.Instance, sandbox: Any, answer: Any) -> float:
        return 0.5

    async def group(self, instance: hw.Instance, members: Any) -> list[float]:
        works = [(await member.sandbox.read("work")).decode() for member in members]
        assert works == [member.answer for member in members]
        self.scored.append((instance.id, sorted(works)))
        return [LEADS + member.number for member in members]

    @property
    def suite(self) -> hw.Suite:
        def instances() -> Iterator[hw.Instance]:
            return (hw.Instance(id=name) for name in self.names)

        hooks: dict[str, Any] = {"setup": self.setup, "grade": self.grade, "group": self.group}
        return hw.Suite(name="groups", instances=instances, **hooks)

    def play(self, **options: Any) -> Any:
        return play(self.out, self.suite, self.act, **options)

    def rows(self, name: str) -> list[OutcomeRow]:
        with LedgerReader(self.out) as reader:
            return [row for row in reader.outcomes() if row.instance == name]

    def scores(self, name: str) -> list[float | None]:
        return [row.score for row in self.rows(name)]


@pytest.mark.parametrize("concurrency", [3, 6])
def test_all_samples_of_an_instance_are_scored_together_once(tmp_path: Path, concurrency: int) -> None:
    scene = GroupScene(tmp_path / "run", *"abcde")

    summary = scene.play(samples=3, concurrency=concurrency)

    assert summary.exit_status == 0
    assert sorted(scene.scored) == [(name, ["0", "1", "2"]) for name in "abcde"]
    assert all(scene.scores(name) == [100.0, 101.0, 102.0] for name in "abcde")
    assert events(scene.out, "group.apart") == []
    whole(scene.out)


def test_a_single_sample_keeps_its_own_grade(tmp_path: Path) -> None:
    scene = GroupScene(tmp_path / "run")

    scene.play()

    assert scene.scored == []
    assert scene.scores("a") == [0.5]


def test_samples_without_a_hook_are_independent(tmp_path: Path) -> None:
    scene = GroupScene(tmp_path / "run")
    suite = hw.Suite(name="s", instances=scene.suite.instances, setup=scene.setup, grade=scene.grade)

    play(scene.out, suite, scene.act, samples=3, concurrency=1)

    assert scene.scores("a") == [0.5] * 3


def test_a_sample_that_fails_for_good_is_no_member(tmp_path: Path) -> None:
    scene = GroupScene(tmp_path / "run")
    scene.broken = {("a", 1)}

    summary = scene.play(samples=3)

    assert summary.exit_status == 1
    assert sorted(scene.scored) == [("a", ["0", "2"]), ("b", ["0", "1", "2"])]
    assert sorted(scene.scores("a"), key=str) == [100.0, 101.0, None]
    assert [row.kind for row in scene.rows("a") if row.score is None] == ["sandbox"]


def test_a_member_that_is_tried_again_later_keeps_its_own_grade(tmp_path: Path) -> None:
    scene = GroupScene(tmp_path / "run")
    scene.broken = {("a", 1)}
    scene.play(samples=3)
    before = scene.scored.copy()

    hw.resume(scene.out, suite=scene.suite, agent=scene.act, retry=["infrastructure"])

    assert scene.scored == before
    assert sorted(scene.scores("a"), key=str) == [0.5, 100.0, 101.0]
    assert len(events(scene.out, "group.apart")) == 1
    whole(scene.out)


def test_a_group_that_is_tried_again_as_a_whole_is_scored_again(tmp_path: Path) -> None:
    scene = GroupScene(tmp_path / "run", "a")
    scene.broken = {("a", number) for number in range(3)}
    scene.play(samples=3)

    hw.resume(scene.out, suite=scene.suite, agent=scene.act, retry=["infrastructure"])

    assert scene.scored == [("a", ["3", "4", "5"])]
    assert scene.scores("a") == [100.0, 101.0, 102.0]


def test_a_regrade_scores_whole_groups_again(tmp_path: Path) -> None:
    scene = GroupScene(tmp_path / "run")
    scene.play(samples=3)
    before = sorted(scene.scored)
    scene.scored.clear()

    hw.regrade(scene.out, suite=scene.suite)

    assert sorted(scene.scored) == before
    assert scene.scores("a") == [100.0, 101.0, 102.0]


def test_a_group_of_which_work_is_lost_is_not_regraded(tmp_path: Path) -> None:
    scene = GroupScene(tmp_path / "run")
    scene.play(samples=3)
    (lost,) = (row.attempt for row in scene.rows("a") if row.sample == 1)
    (salvage,) = (scene.out / "artifacts").glob(f"{lost:06d}*")
    salvage.unlink()
    scene.scored.clear()

    summary = hw.regrade(scene.out, suite=scene.suite)

    assert [name for name, _ in scene.scored] == ["b"]
    assert scene.scores("a") == [100.0, 101.0, 102.0]
    assert summary.exit_status == 1  # the lost work is an infrastructure failure


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"samples": 4, "concurrency": 3}, "4 of them do not fit 3 slots"),
        ({"samples": 2, "attempts": 2}, "each has one round: `--attempts 2`"),
    ],
)
def test_a_group_that_cannot_run_is_refused_first(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BadInput, match=problem):
        GroupScene(tmp_path / "run").play(**options)

    assert not (tmp_path / "run").exists()
