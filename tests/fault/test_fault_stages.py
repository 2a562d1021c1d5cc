"""An exception, and a hang, in every stage in turn: the verdict is right, none is lost, the others go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene
from tests.forked_command import start_server
from tests.in_process_run import (
    COUNT,
    all_passed,
    attempts,
    events,
    failed,
    grade,
    kinds,
    names,
    numbered,
    outcomes,
    play,
    solve,
    suite,
    whole,
)
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.records import FailureOrigin
from holdwater.rollout.periodic_task import PeriodicTask
from holdwater.testing.faults import FaultMode, InjectedFault, StageFault
from holdwater.testing.leaks import PATIENCE, no_leaks
from holdwater.testing.scripted_model import ScriptedReply, serve_script

BOTH = (FaultMode.RAISE, FaultMode.HANG)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    start_server()  # its socket stays, and is no leak of the first test that runs a command
    with no_leaks(stretch(PATIENCE)):
        yield


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for a thread: its sandbox has the same methods without `await`."""

    def solve_plainly(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        sandbox.write("made.txt", instance.id)
        return instance.id

    def grade_plainly(instance: hw.Instance, sandbox: Any, answer: str | None) -> bool:
        return bool(sandbox.read("made.txt").decode() == instance.id)

    return {solve: solve_plainly, grade: grade_plainly}[function]


# Set-up: an infrastructure failure, tried again, never a zero.


@pytest.mark.parametrize("manner", BOTH)
@pytest.mark.parametrize(
    "stage", ["sandbox.open", "session.open", "sandbox.write", "sandbox.run", "sandbox.mark"]
)
def test_set_up(tmp_path: Path, stage: str, manner: FaultMode) -> None:
    fault = StageFault(stage, manner)

    summary = play(tmp_path / "run", suite(), fault=fault, setup_timeout=stretch(0.5))

    assert fault.struck == 1
    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    [lost] = failed(tmp_path / "run")
    assert lost.verdict is not None and lost.verdict.failure is not None
    assert (lost.verdict.failure.where, lost.verdict.grade) == (FailureOrigin.SANDBOX, None)
    assert len(attempts(tmp_path / "run")) == COUNT + 1
    whole(tmp_path / "run")


@pytest.mark.parametrize("manner", BOTH)
def test_set_up_that_never_works_is_no_zero(tmp_path: Path, manner: FaultMode) -> None:
    fault = StageFault("suite.setup", manner, times=3)

    async def setup(instance: hw.Instance, sandbox: hw.Sandbox) -> None:
        if instance.id == "i0":
            await fault.strike("suite.setup")

    summary = play(tmp_path / "run", suite(setup=setup), fault=fault, setup_timeout=stretch(0.5))

    row = outcomes(tmp_path / "run")["i0"]
    assert (row.kind, row.score, row.attempts) == ("sandbox", None, 3)
    assert kinds(tmp_path / "run") == {**all_passed(), "i0": "sandbox"}
    assert summary.exit_status == 1
    whole(tmp_path / "run")


# Acting: the agent's own failure, graded on what it left.


@pytest.mark.parametrize("manner", BOTH)
@pytest.mark.parametrize("shape", ["async", "thread"])
def test_agent(tmp_path: Path, manner: FaultMode, shape: str) -> None:
    fault = StageFault("agent", manner)
    agent = fault.wrap_function("agent", solve if shape == "async" else plain(solve))

    summary = play(tmp_path / "run", suite(), agent, fault=fault, timeout=stretch(0.5))

    assert summary.exit_status == 0
    assert summary.outcomes == {"passed": COUNT - 1, "failed": 1}
    [lost] = failed(tmp_path / "run")
    assert lost.verdict is not None and lost.verdict.failure is not None
    assert lost.verdict.failure.where is (
        FailureOrigin.AGENT if manner is FaultMode.RAISE else FailureOrigin.LIMIT
    )
    whole(tmp_path / "run")


# Salvage: an event, and no more.


@pytest.mark.parametrize("manner", BOTH)
def test_salvage(tmp_path: Path, manner: FaultMode) -> None:
    fault = StageFault("sandbox.salvage", manner)

    summary = play(tmp_path / "run", suite(), fault=fault, salvaging=stretch(2.0))

    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    assert len(attempts(tmp_path / "run")) == COUNT
    assert len(events(tmp_path / "run", "salvage.failed")) == 1
    whole(tmp_path / "run")


# Grading: tried again, never a zero.


@pytest.mark.parametrize("manner", BOTH)
@pytest.mark.parametrize("shape", ["async", "thread"])
def test_grade(tmp_path: Path, manner: FaultMode, shape: str) -> None:
    fault = StageFault("grade", manner)
    faulty = fault.wrap_function("grade", grade if shape == "async" else plain(grade))

    summary = play(tmp_path / "run", suite(grade=faulty), fault=fault, grade_timeout=stretch(0.5))

    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    [lost] = failed(tmp_path / "run")
    assert lost.verdict is not None and lost.verdict.failure is not None
    assert lost.verdict.failure.where is FailureOrigin.GRADE
    whole(tmp_path / "run")


# Closing: counted, and changes no verdict.


@pytest.mark.parametrize("manner", [*BOTH, FaultMode.STUBBORN])
@pytest.mark.parametrize("stage", ["sandbox.close", "session.close"])
def test_close(tmp_path: Path, stage: str, manner: FaultMode) -> None:
    fault = StageFault(stage, manner)

    summary = play(tmp_path / "run", suite(), fault=fault)

    assert fault.struck == 1
    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    assert len(attempts(tmp_path / "run")) == COUNT
    kind = "close.failed" if manner is FaultMode.RAISE else "close.hung"
    assert len(events(tmp_path / "run", kind)) == 1
    whole(tmp_path / "run")


async def test_close_of_a_session_with_a_call_in_flight(tmp_path: Path) -> None:
    """An agent that leaves without its answer: the call is answered, the session closes, all go on."""
    arrived = asyncio.Event()

    async def stall(request: dict[str, Any]) -> ScriptedReply:
        arrived.set()
        await asyncio.sleep(3600)
        raise AssertionError("nobody waits so long")

    async def leave(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
        await sandbox.write("made.txt", instance.id)
        call = asyncio.ensure_future(model.chat([{"role": "user", "content": "hello"}]))
        await arrived.wait()
        call.add_done_callback(lambda done: done.exception())
        return instance.id

    async with serve_script(stall) as url:
        summary = await hw.arun(
            suite(), leave, out=tmp_path / "run", workers=0, model="m", base_url=url, backoff=0.01
        )

    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())


# The suite: what it yielded before still settles.


@pytest.mark.parametrize("manner", BOTH)
def test_suite_while_yielding(tmp_path: Path, manner: FaultMode) -> None:
    fault = StageFault("suite", manner)

    def instances() -> Iterator[hw.Instance]:
        yield from numbered(3)()
        fault.block("suite")

    summary = play(tmp_path / "run", suite(instances=instances), fault=fault, suite_timeout=stretch(0.5))

    assert (summary.state, summary.exit_status) == ("stopped", 2)
    assert kinds(tmp_path / "run") == all_passed(3)
    assert ("injected at suite" if manner is FaultMode.RAISE else "yielded no instance") in summary.reason


@pytest.mark.parametrize("manner", BOTH)
def test_suite_before_it_yields(tmp_path: Path, manner: FaultMode) -> None:
    fault = StageFault("suite", manner)

    summary = play(
        tmp_path / "run",
        suite(instances=fault.wrap_function("suite", numbered())),
        fault=fault,
        suite_timeout=stretch(0.5),
    )

    assert (summary.exit_status, summary.planned) == (2, 0)


# Observers and duties: nobody waits for them.


@pytest.mark.parametrize("manner", BOTH)
def test_observer(tmp_path: Path, manner: FaultMode) -> None:
    fault = StageFault("observer", manner)
    heard: list[int] = []

    summary = play(
        tmp_path / "run",
        suite(),
        fault=fault,
        observers=[
            fault.wrap_function("observer", lambda verdict: None),
            lambda verdict: heard.append(verdict.attempt),
        ],
    )

    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    assert len(heard) == COUNT, "the other observer hears of everything"
    kind = "observer.failed" if manner is FaultMode.RAISE else "observer.behind"
    assert len(events(tmp_path / "run", kind)) == 1


def test_a_failure_of_an_observer_after_the_last_verdict_is_recorded(tmp_path: Path) -> None:
    heard: list[int] = []

    def fail_late(verdict: hw.Verdict) -> None:
        heard.append(verdict.attempt)
        if len(heard) == COUNT:
            time.sleep(0.5)  # the schedule is over by then
            raise RuntimeError("late")

    summary = play(tmp_path / "run", suite(), observers=[fail_late])

    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    assert len(events(tmp_path / "run", "observer.failed")) == 1


@pytest.mark.parametrize("manner", BOTH)
def test_duty(tmp_path: Path, manner: FaultMode) -> None:
    fault = StageFault("duty", manner)
    turns: list[float] = []

    async def work() -> None:
        await fault.strike("duty")
        turns.append(time.monotonic())

    async def wait_for_turns(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
        while len(turns) < 2:
            await asyncio.sleep(0.01)
        return await solve(instance, sandbox, model)

    summary = play(
        tmp_path / "run",
        suite(),
        wait_for_turns,
        fault=fault,
        duties=[PeriodicTask("faulty", 0.05, work, longest=0.2)],
    )

    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    kind = "duty.failed" if manner is FaultMode.RAISE else "duty.hung"
    assert [event.message.split(":")[0] for event in events(tmp_path / "run", kind)] == ["faulty"]


# The watchdog: what overran all its limits is named, ended and handed back.


HASTY = {
    "setup_timeout": stretch(0.5),
    "timeout": stretch(0.5),
    "grade_timeout": stretch(0.5),
    "salvaging": 0.1,
    "closing": 0.1,
    "patience": 0.1,
}


def test_an_attempt_that_nothing_can_end(tmp_path: Path) -> None:
    fault = StageFault("sandbox.open", FaultMode.STUBBORN)

    summary = play(tmp_path / "run", suite(), fault=fault, **HASTY)

    assert (summary.exit_status, kinds(tmp_path / "run")) == (0, all_passed())
    [lost] = failed(tmp_path / "run")
    assert lost.verdict is not None and lost.verdict.failure is not None
    assert (lost.verdict.failure.where, lost.verdict.failure.kind) == (FailureOrigin.WORKER, "lost")
    [named] = events(tmp_path / "run", "attempt.hung")
    assert named.message.startswith(f"attempt {lost.attempt} hangs in setup for ")
    whole(tmp_path / "run")


def test_an_instance_whose_attempts_nothing_can_ever_end_is_poison(tmp_path: Path) -> None:
    fault = StageFault("sandbox.open", FaultMode.STUBBORN, times=100)

    summary = play(tmp_path / "run", suite(instances=numbered(1)), fault=fault, **HASTY)

    assert (summary.exit_status, kinds(tmp_path / "run")) == (1, {"i0": "worker"})
    tried = attempts(tmp_path / "run")
    reasons = [row.verdict.failure.kind for row in tried if row.verdict and row.verdict.failure]
    assert reasons == ["lost", "lost", "crashed", "poison"]
    assert outcomes(tmp_path / "run")["i0"].score is None
    whole(tmp_path / "run")


def test_an_agent_that_ignores_its_cancellation(tmp_path: Path) -> None:
    fault = StageFault("agent", FaultMode.STUBBORN)

    summary = play(
        tmp_path / "run", suite(), fault.wrap_function("agent", solve), fault=fault, timeout=stretch(0.5)
    )

    assert (summary.exit_status, summary.outcomes) == (0, {"passed": COUNT - 1, "failed": 1})
    [lost] = failed(tmp_path / "run")
    assert lost.verdict is not None and lost.verdict.failure is not None
    assert lost.verdict.failure.where is FailureOrigin.LIMIT
    assert len(events(tmp_path / "run", "thread.left")) == 1
    whole(tmp_path / "run")


STUBBORN = """
import asyncio

import holdwater as hw


def instances():
    yield hw.Instance(id="i0")


def grade(instance, sandbox, answer):
    return True


async def solve(instance, sandbox, model):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


suite = hw.Suite(name="stubborn", instances=instances, grade=grade)
"""


def test_the_command_leaves_although_an_agent_never_will(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.suite(STUBBORN)

    command = scene.run(*scene.agent(), "--workers", "0", "--timeout", "0.5")

    assert command.wait(30) == 0, command
    assert command.document()["outcomes"] == {"passed": 1}
    assert "Traceback" not in command.stderr, command


def test_a_thread_that_writes_late_changes_no_result(tmp_path: Path) -> None:
    let_go, late = threading.Event(), []

    def agent(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        sandbox.write("made.txt", instance.id)
        if instance.id == "i0":
            let_go.wait()
            try:
                sandbox.write("made.txt", "late")
            except hw.HoldwaterError as error:
                late.append(error)
        return instance.id

    summary = play(tmp_path / "run", suite(), agent, timeout=stretch(0.5))
    let_go.set()
    while not late:
        time.sleep(0.01)

    assert kinds(tmp_path / "run") == all_passed(), "what the hung one had left is graded"
    assert summary.events.get("thread.left") == 1


def test_a_foreign_exception_becomes_a_failure_with_its_name(tmp_path: Path) -> None:
    """An exception that is no error of ours becomes a failure that names it."""
    fault = StageFault("agent", FaultMode.RAISE, times=COUNT)

    play(tmp_path / "run", suite(), fault.wrap_function("agent", solve), fault=fault)

    messages = {row.verdict.failure.message for row in failed(tmp_path / "run")}  # type: ignore[union-attr]
    assert messages == {f"{InjectedFault.__name__}: injected at agent"}
    assert names() == sorted(outcomes(tmp_path / "run"))
