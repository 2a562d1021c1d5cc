"""Who says that a sample needs no further attempt: each critic, in real runs of up to three attempts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import in_process_run
from tests.command_runner import Scene, until
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api import runs as api
from holdwater.core.errors import AgentFailed

# What happens in each round: how the attempt ends, and what it leaves.
ROUNDS = {
    "slow": (("fail", ""), ("fail", "some"), ("end", "all")),
    "idle": (("fail", "some"), ("end", ""), ("end", "all")),
}
SUITE = """
import holdwater as hw
from pathlib import Path
import time

def instances():
    yield hw.Instance(id="one")

def grade(instance, sandbox, answer):
    return False

def solve(instance, sandbox, model):
    round = model.seed % 1000
    if round == 2:
        Path(PLACE, "in-round-2").touch()
        while not Path(PLACE, "go").exists():
            time.sleep(0.02)
    return round

async def third(instance, tried):
    return tried.answer == 3

suite = hw.Suite(name="critics", instances=instances, grade=grade)
"""


def instances() -> list[hw.Instance]:
    return [hw.Instance(id=name) for name in ROUNDS]


def solve(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    how, work = ROUNDS[instance.id][model.seed % 1000 - 1]
    if work:
        sandbox.write("made.txt", work)
    if how == "fail":
        raise AgentFailed("gave up")
    return work


async def patch(instance: hw.Instance, sandbox: hw.Sandbox, answer: str | None) -> str:
    try:
        return (await sandbox.read("made.txt")).decode()
    except FileNotFoundError:
        return ""


def never(instance: hw.Instance, sandbox: hw.Sandbox, answer: str | None) -> bool:
    return False


def tried(out: Path) -> dict[str, int]:
    return dict(Counter(row.instance for row in in_process_run.attempts(out)))


def play(out: Path, critic: Any, **parts: Any) -> dict[str, int]:
    """How many attempts each instance was given."""
    suite = hw.Suite(**{"name": "critics", "instances": instances, "grade": never, "patch": patch, **parts})
    in_process_run.play(out, suite, solve, critic=critic, attempts=3)
    assert in_process_run.kinds(out) == {"slow": "failed", "idle": "failed"}
    return tried(out)


def untroubled(instance: hw.Instance, tried: hw.CriticInput) -> bool:
    return tried.failure is None


async def all_of_it(instance: hw.Instance, tried: hw.CriticInput) -> bool:
    assert tried.grade == hw.Grade(passed=False, score=0.0)
    return tried.patch == "all" and tried.answer == "all"


@pytest.mark.parametrize(
    ("critic", "slow", "idle"),
    [
        ("grade", 3, 3),
        ("finished", 3, 2),
        ("finished-with-patch", 3, 3),
        ("patch", 2, 1),
        ("command:grep -q some made.txt", 2, 1),
        ("command:grep -q all made.txt", 3, 3),
        (untroubled, 3, 2),
        (all_of_it, 3, 3),
        (f"{__file__}:untroubled", 3, 2),
    ],
)
def test_a_sample_is_tried_until_its_critic_is_satisfied(
    tmp_path: Path, critic: Any, slow: int, idle: int
) -> None:
    assert play(tmp_path / "run", critic) == {"slow": slow, "idle": idle}


def test_where_no_patch_is_taken_it_is_the_work_that_counts(tmp_path: Path) -> None:
    assert play(tmp_path / "run", "patch", patch=None) == {"slow": 2, "idle": 1}


def confused(instance: hw.Instance, tried: hw.CriticInput) -> bool:
    raise RuntimeError("what was asked?")


def vague(instance: hw.Instance, tried: hw.CriticInput) -> Any:
    return "perhaps"


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        (confused, "RuntimeError: what was asked?"),
        (vague, "TypeError: the critic returned str: expected bool"),
    ],
)
def test_a_critic_that_fails_is_an_event_and_not_satisfied(tmp_path: Path, critic: Any, message: str) -> None:
    assert play(tmp_path / "run", critic) == {"slow": 3, "idle": 3}

    told = in_process_run.events(tmp_path / "run", "critic.failed")
    assert [event.message for event in told] == [message] * 6


def test_a_command_that_exceeds_its_time_is_noted_and_work_is_graded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    suite = in_process_run.suite(instances=in_process_run.numbered(1))

    in_process_run.play(out, suite, critic="command:sleep 60", attempts=3, grade_timeout=stretch(0.5))

    assert in_process_run.kinds(out) == {"i0": "passed"}
    assert len(in_process_run.events(out, "critic.failed")) == len(in_process_run.attempts(out)) == 3


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        ("finish", "unknown critic: `finish`"),
        ("command: ", "the critic's command is empty"),
        (f"{__file__}:ROUNDS", "is of type `dict`"),
        (f"{__file__}:solve", "must take two arguments: `(instance, tried)`"),
        (f"{__file__}:nobody", "has no `nobody`"),
    ],
)
def test_an_invalid_critic_is_refused_before_anything_is_made(
    tmp_path: Path, critic: str, message: str
) -> None:
    with pytest.raises(hw.BadInput) as refused:
        api.prepare(in_process_run.suite(), "nop", tmp_path / "run", {"critic": critic})

    assert message in refused.value.message
    assert not (tmp_path / "run").exists()


def test_a_regrade_asks_no_critic_and_needs_none(tmp_path: Path) -> None:
    out = tmp_path / "run"
    suite = in_process_run.suite(instances=in_process_run.numbered(1))
    in_process_run.play(out, suite, critic=lambda instance, tried: True)

    summary = hw.regrade(out, suite=suite)

    assert summary.outcomes == {"passed": 1}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def test_a_resumed_run_follows_the_earlier_decisions_of_its_critic(tmp_path: Path, scene: Scene) -> None:
    scene.suite(SUITE, PLACE=str(tmp_path))
    running = scene.run(
        *scene.agent(), "--attempts", "3", "--workers", "1", "--critic", f"{scene.file}:third"
    )
    until("the second round", (tmp_path / "in-round-2").exists)
    running.kill()
    (tmp_path / "go").touch()

    resumed = scene.resume()

    assert resumed.wait(60) == 0, resumed
    rows = scene.export("attempts")
    assert [row["round"] for row in rows if row["where"] is None] == [1, 2, 3]
    assert [row["where"] for row in rows].count("interrupted") == 1


async def test_a_run_that_was_given_a_function_is_given_it_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    suite = hw.Suite(name="critics", instances=instances, grade=never, patch=patch)
    begun = asyncio.Event()

    async def stuck(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        begun.set()
        await asyncio.sleep(60)
        return ""

    async with asyncio.timeout(stretch(30)):
        run = asyncio.ensure_future(hw.arun(suite, stuck, out=out, critic=untroubled, attempts=3, workers=0))
        await begun.wait()
        run.cancel()
        await asyncio.wait([run])

    summary = await asyncio.to_thread(hw.resume, out, suite=suite, agent=solve, critic=untroubled)

    assert summary.outcomes == {"failed": 2}
    settled = Counter(row.instance for row in in_process_run.attempts(out) if row.kind != "interrupted")
    assert settled == {"slow": 3, "idle": 2}
