"""The life of one attempt in a real sandbox: limits, which failure wins, salvage, answers, grades."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests.wait_bounds import stretch

from holdwater.core.authoring import Agent, Suite
from holdwater.core.config import Network
from holdwater.core.errors import AttemptOver, GradeFailed, ModelFailed, ResourceExhausted, RunFailed
from holdwater.core.failures import make_disk_failure, make_interrupt_failure
from holdwater.core.records import (
    Attempt,
    AttemptFailure,
    AttemptPhase,
    FailureOrigin,
    Grade,
    Health,
    Instance,
    LimitOverrides,
    Limits,
    MiB,
    ModelUsage,
    SandboxSpec,
    Verdict,
)
from holdwater.rollout.attempt import run_attempt
from holdwater.rollout.attempt_state import AttemptState
from holdwater.rollout.user_calls import LONGEST_ANSWER, as_grade
from holdwater.rollout.worker_protocol import AttemptJob
from holdwater.sandbox.probe import MachineFeatures
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

LONG = stretch(20.0)
SHORT = stretch(0.2)
LIMITS = Limits(setup=LONG, acting=LONG, grading=LONG)


class FakeSession:
    """A gateway's session whose waiting and failing are set by the test."""

    def __init__(self) -> None:
        self.key = "key"
        self.usage = ModelUsage(requests=3)
        self.replayed_usage = ModelUsage()
        self.version = ""
        self.drifted = 0
        self.unrepeated = ""
        self.waited = 0.0
        self.failure: AttemptFailure | None = None
        self.unanswered: AttemptFailure | None = None


class FakeLog:
    """A segment that counts."""

    count = 0
    synced = closed = False

    def append(self, exchange: Any) -> None:
        self.count += 1

    def blob(self, content: bytes) -> str:
        return "hash"

    def sync(self) -> None:
        self.synced = True

    def close(self) -> None:
        self.closed = True


class Files:
    def __init__(self, base: Path, attempt: int = 0) -> None:
        self._base = base
        self._attempt = attempt

    def log(self) -> Path:
        return self._base / "attempt.log"

    def output(self) -> Path:
        return self._base / "attempt.out"

    def salvage(self) -> Path:
        return self.kept_file(f"{self._attempt}.tar.zst")

    def patch(self) -> Path:
        return self.kept_file(f"{self._attempt}.patch")

    def answer(self) -> Path:
        return self.kept_file(f"{self._attempt}.answer.json")

    def kept_file(self, name: str) -> Path:
        return self._base / name

    def artifacts(self) -> Path:
        return self._base / "artifacts"


class World:
    """`AttemptServices` with a real process sandbox, and what it noted."""

    token = 7
    salvage_seconds = 10.0
    gateway = None
    variables: ClassVar[dict[str, str]] = {"SET": "from outside"}
    agent_env: ClassVar[dict[str, str]] = {}
    critic = None
    spawns_children = False
    fork = None

    def __init__(self, base: Path) -> None:
        self.base = base
        self.files = Files
        self.log = FakeLog()
        self.session_ = FakeSession()
        self.notes: list[tuple[str, str]] = []
        self.befallen: AttemptFailure | None = None
        self.limits = LIMITS
        self.suite = Suite(name="s", instances=list, grade=lambda instance, sandbox, answer: True)
        self.agent = Agent(name="a", act=lambda instance, sandbox, model: None)
        self.sandboxes = ProcessSandboxes(
            base / "scratch",
            f"attempt test {os.getpid()}",
            Network.OPEN,
            machine=MachineFeatures(why_not="not needed"),
        )
        self.numbers = itertools.count(1)

    def enclose(self, name: str, manager: Any) -> Any:
        return manager

    def paths(self, attempt: int, name: str) -> Files:
        return self.files(self.base, attempt)

    def open_log(self, attempt: int) -> FakeLog:
        return self.log

    @asynccontextmanager
    async def open_session(
        self, attempt: int, log: FakeLog, limits: Limits, recording: None
    ) -> AsyncIterator[FakeSession]:
        yield self.session_

    def model(self, session: FakeSession | None, network: Network | None) -> None:
        return None

    def watch_surroundings(self, attempt: int) -> Callable[[], AttemptFailure | None]:
        return lambda: self.befallen

    def life(
        self, instance: Instance | None = None, work: Verdict | None = None, **attempt: Any
    ) -> AttemptState:
        number = next(self.numbers)
        tried = Attempt(**{"id": number, "instance": 1, "sample": 0, "number": number, **attempt})
        payload = msgspec.msgpack.encode(instance or Instance(id="i"))
        job = AttemptJob(attempt=tried, payload=payload, work=work)
        return AttemptState(job, lambda kind, message: self.notes.append((kind, message)), closing=5.0)

    async def verdict(self, instance: Instance | None = None, **attempt: Any) -> Verdict:
        return await run_attempt(self.life(instance, **attempt), self)

    def does(self, act: Callable[..., Any]) -> World:
        self.agent = Agent(name="a", act=act)
        return self

    def grades(self, grade: Callable[..., Any]) -> World:
        self.suite = msgspec.structs.replace(self.suite, grade=grade)
        return self


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def hang(*_: Any) -> None:
    await asyncio.Event().wait()


def raising(error: BaseException) -> Callable[..., Any]:
    async def fail(*_: Any) -> None:
        raise error

    return fail


def writing(then: BaseException | None = None) -> Callable[..., Any]:
    """An agent that leaves a file, and then ends as it is told."""

    async def act(instance: Instance, sandbox: Any, model: Any) -> str:
        await sandbox.write("made", "work")
        if then is not None:
            raise then
        return "done"

    return act


async def passes_by_its_file(instance: Instance, sandbox: Any, answer: Any) -> bool:
    return bool((await sandbox.run("cat made")).stdout == "work")


# The straight line.


async def test_an_attempt_is_set_up_lived_salvaged_and_graded(world):
    def act(instance: Instance, sandbox: Any, model: Any) -> dict[str, Any]:
        seen = sandbox.run("cat given setup").stdout
        sandbox.write("made", "work")
        return {"seen": seen}

    world.does(act).grades(passes_by_its_file)
    world.log.count = 2

    verdict = await world.verdict(Instance(id="i", files={"given": "file "}, setup="echo ready > setup"))

    assert (verdict.failure, verdict.grade) == (None, Grade(passed=True, score=1.0))
    assert (verdict.attempt, verdict.token, verdict.exchanges, verdict.usage.requests) == (1, 7, 2, 3)
    assert verdict.answer == '{"seen":"file ready\\n"}'
    assert verdict.salvage is not None and verdict.salvage.files == 1
    assert min(verdict.times.setup, verdict.times.acting, verdict.times.grading) > 0
    assert world.log.synced and world.log.closed
    assert (world.notes, list(world.sandboxes.scratch.iterdir())) == ([], [])


async def test_a_regrade_puts_the_earlier_work_and_answer_back(world):
    first = await world.does(writing()).grades(lambda *_: False).verdict()
    graded: list[Any] = []

    async def grade(instance: Instance, sandbox: Any, answer: Any) -> bool:
        graded.append(((await sandbox.read("made")).decode(), answer))
        return True

    world.does(raising(AssertionError("the agent is not asked"))).grades(grade)
    again = await run_attempt(world.life(work=first, regrades=first.attempt), world)

    assert (again.failure, again.grade) == (None, Grade(passed=True, score=1.0))
    assert graded == [("work", "done")]
    assert again.answer == first.answer


async def test_a_retry_gets_its_scale_of_what_the_instance_asks_for(world):
    seen: list[Limits] = []
    opener = world.sandboxes.open
    world.sandboxes.open = lambda attempt, limits, gateway, start: (  # type: ignore[method-assign]
        seen.append(limits) or opener(attempt, msgspec.structs.replace(limits, memory=None), gateway, start)
    )

    await world.verdict(Instance(id="i", limits=LimitOverrides(memory=100 * MiB, acting=3.0)), scale=4)

    assert (seen[0].memory, seen[0].acting, seen[0].grading) == (400 * MiB, 3.0, LIMITS.grading)


# Limits: each phase's time starts when that phase starts.


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_acting_too_long_is_a_limit_and_what_was_done_is_graded(world, kind):
    async def act(instance: Instance, sandbox: Any, model: Any) -> None:
        await sandbox.write("made", "work")
        await hang()

    def act_plainly(instance: Instance, sandbox: Any, model: Any) -> None:
        sandbox.write("made", "work")
        sandbox.run("sleep 60")

    world.limits = msgspec.structs.replace(LIMITS, acting=SHORT)
    world.does(act if kind == "async def" else act_plainly).grades(passes_by_its_file)

    verdict = await world.verdict()

    assert verdict.failure is not None and verdict.grade is not None
    assert (verdict.failure.where, verdict.failure.kind) == (FailureOrigin.LIMIT, "timeout")
    assert verdict.failure.message == f"acting took longer than {SHORT:g} s"
    assert verdict.grade.passed and verdict.salvage is not None


async def test_the_time_of_a_phase_is_not_taken_from_the_next(world):
    async def slowly(*_: Any) -> bool:
        await asyncio.sleep(0.6 * limit)
        return True

    limit = stretch(0.4)
    world.limits = Limits(setup=limit, acting=limit, grading=limit)
    world.suite = msgspec.structs.replace(world.suite, setup=slowly, grade=slowly)

    verdict = await world.does(slowly).verdict()

    assert (verdict.failure, verdict.grade) == (None, Grade(passed=True, score=1.0))


async def test_set_up_and_grading_that_take_too_long_are_never_a_zero(world):
    world.limits = Limits(setup=SHORT, acting=LONG, grading=SHORT)
    slow = await world.grades(hang).verdict()
    world.suite = msgspec.structs.replace(world.suite, setup=hang)
    never = await world.verdict()

    assert slow.failure is not None and never.failure is not None
    assert (slow.failure.where, slow.failure.phase, slow.grade) == (
        FailureOrigin.GRADE,
        AttemptPhase.GRADING,
        None,
    )
    assert (never.failure.where, never.failure.phase, never.grade) == (
        FailureOrigin.SANDBOX,
        AttemptPhase.SETUP,
        None,
    )
    assert never.salvage is None


async def test_waiting_for_a_rate_limit_is_no_working_time(world):
    async def act(*_: Any) -> None:
        for _ in range(6):
            begun = time.monotonic()
            await asyncio.sleep(pause)
            world.session_.waited += time.monotonic() - begun  # on a busy machine a pause is longer

    pause = stretch(0.05)
    world.limits = msgspec.structs.replace(LIMITS, working=3 * pause)
    patient = await world.does(act).verdict()
    world.session_.waited = 0.0
    busy = await world.does(hang).verdict()

    assert patient.failure is None
    assert patient.times.waited >= 6 * pause
    assert busy.failure is not None and busy.failure.where is FailureOrigin.LIMIT
    assert busy.times.acting < stretch(5.0)


async def test_waiting_does_not_lift_the_acting_limit(world):
    world.session_.waited = 1000.0
    world.limits = msgspec.structs.replace(LIMITS, acting=SHORT, working=0.1)

    verdict = await world.does(hang).verdict()

    assert verdict.failure is not None and verdict.failure.where is FailureOrigin.LIMIT


async def test_a_timeout_of_the_agents_own_is_the_agents(world):
    async def act(*_: Any) -> None:
        async with asyncio.timeout(0.01):
            await hang()

    verdict = await world.does(act).verdict()

    assert verdict.failure is not None
    assert (verdict.failure.where, verdict.failure.kind) == (FailureOrigin.AGENT, "exception")


# Which failure it is.

BUSY = AttemptFailure(where=FailureOrigin.MODEL, kind="429", message="busy", after=9.0)


@pytest.mark.parametrize("end", [ValueError("no"), None, ModelFailed("as the agent saw it")])
async def test_a_model_call_that_failed_last_is_why_the_agent_ended(world, end):
    world.session_.failure = BUSY

    verdict = await world.does(writing(end)).verdict()

    assert (verdict.failure, verdict.grade) == (BUSY, None)
    assert verdict.salvage is not None


async def test_a_model_failure_is_no_reason_for_a_sandbox_that_was_killed(world):
    world.session_.failure = BUSY

    verdict = await world.does(writing(ResourceExhausted("killed"))).verdict()

    assert verdict.failure is not None and verdict.failure.where is FailureOrigin.RESOURCE
    assert verdict.grade == Grade(passed=True, score=1.0)


@pytest.mark.parametrize(
    ("act", "grade", "where", "graded"),
    [
        (raising(ValueError("no")), lambda *_: False, FailureOrigin.AGENT, True),
        (raising(ValueError("no")), raising(ValueError("no")), FailureOrigin.GRADE, False),
        (writing(), raising(ValueError("no")), FailureOrigin.GRADE, False),
        (writing(), raising(SystemExit(1)), FailureOrigin.GRADE, False),
        (writing(), lambda *_: "excellent", FailureOrigin.GRADE, False),
        (writing(ResourceExhausted("killed")), raising(ValueError("no")), FailureOrigin.RESOURCE, False),
        (writing(ModelFailed("busy")), lambda *_: True, FailureOrigin.MODEL, False),
        (writing(RunFailed("bad key")), lambda *_: True, FailureOrigin.RUN, False),
        (raising(SystemExit(2)), lambda *_: True, FailureOrigin.AGENT, True),
        (raising(KeyboardInterrupt()), lambda *_: True, FailureOrigin.AGENT, True),
        (raising(asyncio.CancelledError()), lambda *_: True, FailureOrigin.AGENT, True),
        (raising(StopIteration()), lambda *_: True, FailureOrigin.AGENT, True),
    ],
)
async def test_the_failure_that_counts(world, act, grade, where, graded):
    verdict = await world.does(act).grades(grade).verdict()

    assert verdict.failure is not None
    assert (verdict.failure.where, verdict.grade is not None) == (where, graded)


async def test_a_failed_set_up_command_is_a_sandbox_failure_without_a_grade(world):
    verdict = await world.verdict(Instance(id="i", setup="echo broken >&2; exit 3"))

    assert verdict.failure is not None
    assert (verdict.failure.where, verdict.failure.kind, verdict.grade) == (
        FailureOrigin.SANDBOX,
        "setup",
        None,
    )
    assert verdict.failure.message == "set-up command exited with 3: broken\n"


async def test_a_suite_without_a_grade_function_says_so(world):
    world.suite = Suite(name="s", instances=list)

    verdict = await world.verdict()

    assert verdict.failure is not None
    assert (verdict.failure.where, verdict.failure.again) == (FailureOrigin.GRADE, False)


@pytest.mark.parametrize("phase", [AttemptPhase.SETUP, AttemptPhase.ACTING, AttemptPhase.GRADING])
async def test_an_interrupted_attempt_ends_soon_wherever_it_is(world, phase):
    reached = asyncio.Event()

    async def stop_here(*_: Any) -> None:
        reached.set()
        await hang()

    world.does(writing())
    if phase is AttemptPhase.SETUP:
        world.suite = msgspec.structs.replace(world.suite, setup=stop_here)
    elif phase is AttemptPhase.ACTING:
        world.does(stop_here)
    else:
        world.grades(stop_here)

    lives: list[AttemptState] = []

    async def attempt() -> Verdict:
        lives.append(world.life())
        return await run_attempt(lives[0], world)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(attempt())
        await reached.wait()
        lives[0].interrupt(make_interrupt_failure("a signal"))
        lives[0].interrupt(make_interrupt_failure("another one"))

    verdict = task.result()
    assert verdict.failure is not None
    assert (verdict.failure.where, verdict.failure.message) == (FailureOrigin.INTERRUPTED, "a signal")
    assert verdict.grade is None
    assert (verdict.salvage is not None) == (phase is AttemptPhase.GRADING)


@pytest.mark.parametrize("end", [ValueError("no"), ResourceExhausted("killed"), ModelFailed("busy")])
async def test_a_bad_end_beside_a_full_disk_is_a_disk_failure(world, end):
    world.befallen = make_disk_failure()

    failing = world.does(raising(end)).grades(lambda instance, sandbox, answer: False)

    assert (await failing.verdict()).failure == make_disk_failure()


async def test_a_pass_beside_a_full_disk_is_a_pass(world):
    world.befallen = make_disk_failure()

    verdict = await world.verdict()

    assert verdict.failure is None
    assert verdict.grade is not None and verdict.grade.passed


async def test_a_failure_that_hits_every_instance_stays_one_beside_a_full_disk(world):
    world.befallen = make_disk_failure()

    verdict = await world.does(raising(RunFailed("bad key", kind="key"))).verdict()

    assert verdict.failure is not None and (verdict.failure.where, verdict.failure.kind) == (
        FailureOrigin.RUN,
        "key",
    )


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RunFailed("full", kind="disk")])
async def test_a_caught_write_error_on_a_full_disk_is_a_disk_failure(world, error):
    """There is room again when the attempt ends, and its grade is a pass."""

    async def fail(path, content):
        raise error

    def enclose(name, manager):
        if name == "sandbox":
            manager.write = fail
        return manager

    async def careless(instance, sandbox, model):
        with suppress(Exception):
            await sandbox.write("x", "x")

    world.enclose = enclose

    verdict = await world.does(careless).verdict()

    assert verdict.failure == make_disk_failure()


# Salvage, and what is left behind.


@pytest.mark.parametrize(
    "end", [None, ValueError("no"), ModelFailed("busy"), ResourceExhausted("killed"), RunFailed("bad key")]
)
async def test_work_is_salvaged_on_every_kind_of_end(world, end):
    verdict = await world.does(writing(end)).verdict()

    assert verdict.salvage is not None
    assert (verdict.salvage.files, (world.base / "1.tar.zst").stat().st_size) == (1, verdict.salvage.bytes)


async def test_a_salvage_that_fails_is_noted_and_changes_no_verdict(world):
    class Nowhere(Files):
        def salvage(self) -> Path:
            return Path("/proc/nowhere/a")

    world.files = Nowhere

    verdict = await world.does(writing()).verdict()

    assert (verdict.failure, verdict.grade, verdict.salvage) == (None, Grade(passed=True, score=1.0), None)
    assert verdict.kept.lacks.startswith("it could not be kept: ")
    assert [kind for kind, _ in world.notes] == ["salvage.failed"]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"x" * path.stat().st_size)])
async def test_kept_work_that_is_gone_or_changed_is_not_graded(world, harm):
    first = await world.does(writing()).grades(passes_by_its_file).verdict()
    harm(world.base / "1.tar.zst")

    again = await run_attempt(world.life(work=first, regrades=first.attempt), world)

    assert (again.failure.where, again.failure.kind, again.grade) == (
        FailureOrigin.SANDBOX,
        "unrestored",
        None,
    )
    assert (first.grade.passed, again.kept) == (True, first.kept)


async def test_a_grading_of_kept_work_inherits_how_its_agent_ended(world):
    first = await world.does(writing(ValueError("gave up"))).grades(raising(OSError("no"))).verdict()

    again = await run_attempt(
        world.grades(passes_by_its_file).life(work=first, regrades=first.attempt), world
    )

    assert (first.failure.where, first.kept.failure.where) == (FailureOrigin.GRADE, FailureOrigin.AGENT)
    assert (again.failure.where, again.grade) == (FailureOrigin.AGENT, Grade(passed=True, score=1.0))


async def test_an_agent_that_outlives_its_limit_taints_its_worker_and_reaches_nothing(world):
    release, late = threading.Event(), []

    def act(instance: Instance, sandbox: Any, model: Any) -> None:
        release.wait(stretch(20))
        try:
            sandbox.write("late", "no")
        except BaseException as error:
            late.append(error)

    world.limits = msgspec.structs.replace(LIMITS, acting=SHORT)
    life = world.does(act).life()
    verdict = await run_attempt(life, world)
    tainted = life.tainted
    release.set()
    async with asyncio.timeout(stretch(10)):
        while life.calls.alive:
            await asyncio.sleep(0.005)

    assert verdict.failure is not None and verdict.failure.where is FailureOrigin.LIMIT
    assert tainted and not life.tainted
    assert [type(error) for error in late] == [AttemptOver]


# Answers and grades.


class Silent:
    def __repr__(self) -> str:
        raise ValueError("no words")


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (None, None),
        ("text", '"text"'),
        ({"a": [1, None, 2.5]}, '{"a":[1,null,2.5]}'),
        (2**70, str(2**70)),
        (object, "\"<class 'object'>\""),
        (endless(), '"[[...]]"'),
        ("\ud800", "\"'\\\\ud800'\""),
        (Silent(), '"<Silent>"'),
    ],
)
async def test_an_answer_is_kept_as_json_whatever_it_is(world, answer, kept):
    async def act(*_: Any) -> Any:
        return answer

    verdict = await world.does(act).verdict()

    assert (verdict.answer, verdict.failure) == (kept, None)


async def test_a_long_answer_is_a_file_and_graded_from_it(world):
    graded: list[Any] = []
    world.grades(lambda instance, sandbox, answer: graded.append(answer) or True)
    long = "x" * (2 * LONGEST_ANSWER)

    verdict = await world.does(lambda *_: long).verdict()
    again = await run_attempt(world.life(work=verdict, regrades=verdict.attempt), world)

    assert (verdict.answer, again.answer, again.failure) == (None, None, None)
    assert verdict.kept.answer.bytes == len(long) + 2 and verdict.kept.lacks == ""
    assert graded == [long, long]


@pytest.mark.parametrize(
    "answer",
    [{1: "one"}, (1, 2), b"bytes", float("nan"), object(), Grade(passed=True, score=1.0), {"a": {2: 3}}],
)
async def test_an_answer_that_json_changes_is_said_to_be_unkept(world, answer):
    verdict = await world.does(lambda *_: answer).verdict()

    assert verdict.kept.lacks == "a JSON round trip changes the answer"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error", [OSError("a\udcff"), Unspeakable(), ModelFailed(404), ModelFailed("\udcff")]
)
async def test_a_verdict_can_be_written_down_whatever_was_raised(world, error):
    world.grades(lambda *_: Grade(passed=False, score=0.0, detail="\udcff"))

    verdict = await world.does(raising(error)).verdict()

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict


@pytest.mark.parametrize(
    ("result", "grade"),
    [
        (True, Grade(passed=True, score=1.0)),
        (False, Grade(passed=False, score=0.0)),
        (1, Grade(passed=True, score=1.0)),
        (0.99, Grade(passed=False, score=0.99)),
        (1.5, Grade(passed=True, score=1.5)),
        (Grade(passed=True, score=1, detail="d"), Grade(passed=True, score=1.0, detail="d")),
    ],
)
def test_what_a_grade_function_may_return(result, grade):
    assert as_grade(result) == grade


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1",
        float("nan"),
        float("inf"),
        Grade(passed=True, score=float("nan")),
        Grade(passed="yes", score=1.0),
        Grade(passed=True, score=None),
        Grade(passed=True, score=1.0, detail=b"d"),
        Grade(passed=True, score=1.0, metrics={"a": len}),
    ],
    ids=repr,
)
def test_what_a_grade_function_may_not_return(result):
    with pytest.raises(GradeFailed):
        as_grade(result)


# A suite that asks for a patch.


def patched(world: World, graded: list[Any]) -> World:
    async def patch(instance: Instance, sandbox: Any, answer: Any) -> str:
        return str((await sandbox.run("cat made")).stdout)

    def grade(instance: Instance, sandbox: Any, answer: Any) -> bool:
        graded.append(answer)
        return answer == "work"

    world.suite = msgspec.structs.replace(world.suite, patch=patch, grade=grade)
    return world


@pytest.mark.parametrize("ends", ["well", "with an error", "too late"])
async def test_the_patch_is_taken_kept_and_graded_however_acting_ends(world, ends):
    async def late(instance: Instance, sandbox: Any, model: Any) -> None:
        await sandbox.write("made", "work")
        await hang()

    acts = {"well": writing(), "with an error": writing(ValueError("no")), "too late": late}
    graded: list[Any] = []
    patched(world, graded).does(acts[ends])
    world.limits = msgspec.structs.replace(world.limits, acting=stretch(0.5))

    verdict = await world.verdict()

    assert graded == ["work"] and verdict.grade == Grade(passed=True, score=1.0)
    assert verdict.patch == 4 and (world.base / "1.patch").read_text() == "work"


async def test_a_regrade_grades_the_patch_that_was_kept(world):
    graded: list[Any] = []
    first = await patched(world, graded).does(writing()).verdict()

    again = await run_attempt(world.life(work=first, regrades=first.attempt), world)

    assert graded == ["work", "work"]
    assert (again.failure, again.patch, again.kept) == (None, 4, first.kept)


async def test_a_patch_that_cannot_be_taken_is_no_zero(world):
    world.suite = msgspec.structs.replace(world.suite, patch=raising(OSError("gone")))

    verdict = await world.does(writing()).verdict()

    assert verdict.failure is not None and verdict.failure.where is FailureOrigin.GRADE
    assert (verdict.grade, verdict.patch) == (None, None)
    assert [kind for kind, _ in world.notes] == ["salvage.failed"]


async def test_a_renewed_sandbox_is_as_the_agent_found_it(world):
    seen: list[str] = []

    async def grade(instance: Instance, sandbox: Any, answer: Any) -> bool:
        await sandbox.renew()
        seen.append((await sandbox.run("ls; cat given")).stdout)
        await sandbox.renew(SandboxSpec())
        seen.append((await sandbox.run("ls")).stdout)
        return True

    verdict = await world.does(writing()).grades(grade).verdict(Instance(id="i", files={"given": "file"}))

    assert seen == ["given\nfile", ""] and verdict.failure is None


# Health.


async def test_no_agent_acts_before_the_sandbox_is_healthy(world, tmp_path):
    health = Health(
        command=f"echo x >>{tmp_path}/tries; test $(wc -l <{tmp_path}/tries) -ge 3", interval=0.01
    )
    world.does(writing())

    verdict = await world.verdict(Instance(id="i", start=SandboxSpec(health=health)))
    sick = await world.verdict(
        Instance(id="i", start=SandboxSpec(health=Health(command="false", interval=0.01)))
    )

    assert (verdict.failure, (tmp_path / "tries").read_text()) == (None, "x\nx\nx\n")
    assert sick.failure is not None and (sick.failure.where, sick.failure.kind) == (
        FailureOrigin.SANDBOX,
        "health",
    )
    assert sick.salvage is None
