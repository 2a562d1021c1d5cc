"""Groups in a host: members wait, alive, and are scored once; then nothing of the group is left."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.host_harness import GROUP, LIMITS, Hosted, hosting, left_of, suite, uncollected
from tests.wait_bounds import stretch
from tests.worker_harness import working

import holdwater as hw
from holdwater.core.errors import AttemptOver, ModelFailed
from holdwater.core.failures import make_interrupt_failure
from holdwater.core.groups import GroupTerms, make_cancel_failure, make_straggler_failure
from holdwater.core.records import Attempt, AttemptFailure, AttemptPhase, FailureOrigin, Grade, Verdict
from holdwater.rollout.worker_protocol import AttemptJob, MemberWaiting, ScoreMembers


async def solve(instance: Any, sandbox: Any, model: Any) -> str:
    """Leaves a file and asks once."""
    await sandbox.write("made", "work")
    reply = await model.chat([{"role": "user", "content": "what is it?"}])
    return str(reply["choices"][0]["message"]["content"])


async def failing(instance: Any, sandbox: Any, answer: Any) -> bool:
    return instance.id != "bad"


async def hang() -> None:
    await asyncio.Event().wait()


async def scored(hosted: Hosted, count: int, name: str = "i") -> list[Verdict]:
    members = hosted.start_group(count, hw.Instance(id=name))
    await hosted.arrived(*members)
    hosted.score()
    return await hosted.verdicts(members)


def where(verdict: Verdict) -> FailureOrigin | None:
    return verdict.failure.where if verdict.failure else None


# Scored together.


async def test_members_wait_alive_and_the_hook_sees_and_grades_them_all(tmp_path):
    seen: list[Any] = []

    async def group(instance, members):
        for member in members:
            made = (await member.sandbox.run("cat made")).stdout
            said = [exchange.number for exchange in member.exchanges()]
            seen.append(
                (member.number, made, member.answer, member.grade.passed, said, member.usage.requests)
            )
        return [0.25, None, hw.Grade(passed=True, score=3.0, metrics={"place": 1.0})]

    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        members = hosted.start_group(3)
        await hosted.arrived(*members)
        phases = {one.phase for one in hosted.host.list_living()}
        waiting = hosted.settled()
        hosted.score()
        verdicts = await hosted.verdicts(members)

    assert (phases, waiting) == ({AttemptPhase.SCORING}, set())
    assert seen == [(n, "work", "so: what is it?", True, [1], 1) for n in range(3)]
    assert [v.grade and v.grade.score for v in verdicts] == [0.25, 1.0, 3.0]
    assert all(v.group_scored and v.failure is None for v in verdicts)
    assert len(hosted.host.groups) == 0 and hosted.noted() == []


async def test_a_plain_function_scores_a_group_in_a_thread_of_its_own(tmp_path):
    threads: list[bool] = []

    def group(instance, members):
        threads.append(threading.current_thread() is threading.main_thread())
        asked = [
            m.model.chat([{"role": "user", "content": m.sandbox.run("cat made").stdout}]) for m in members
        ]
        return [reply["choices"][0]["message"]["content"] == "so: work" for reply in asked]

    async with hosting(tmp_path, suite(group=group, grade=failing), solve) as hosted:
        verdicts = await scored(hosted, 2, "bad")

    assert threads == [False]
    assert [[exchange.by for exchange in hosted.exchanges(n)] for n in (1, 2)] == [["", "group"]] * 2
    assert [(v.grade and v.grade.passed, v.exchanges, v.usage.requests) for v in verdicts] == [
        (True, 2, 2)
    ] * 2


async def test_members_are_scored_in_the_order_of_their_samples(tmp_path):
    turn, order = asyncio.Event(), []

    async def late_first(instance, sandbox, model):
        if instance.id == "first":
            await turn.wait()
        return instance.id

    async def group(instance, members):
        order.extend(member.answer for member in members)

    async with hosting(tmp_path, suite(group=group), late_first) as hosted:
        first = hosted.start(hw.Instance(id="first"), group=GROUP, sample=0)
        second = hosted.start(hw.Instance(id="second"), group=GROUP, sample=1)
        await hosted.arrived(second)
        turn.set()
        await hosted.arrived(first)
        hosted.score()
        await hosted.verdicts([first, second])

    assert order == ["first", "second"]


@pytest.mark.parametrize("hook", [True, False], ids=["with a hook", "without"])
async def test_a_group_that_is_not_scored_together_keeps_its_members_own_grades(tmp_path, hook):
    async def group(instance, members):
        raise AssertionError("nobody asks this")

    parts = {"group": group} if hook else {}
    async with hosting(tmp_path, suite(grade=failing, **parts), solve) as hosted:
        members = [hosted.start(hw.Instance(id=name), group=GROUP) for name in ("good", "bad")]
        await hosted.arrived(*members)
        hosted.score(together=not hook)
        verdicts = await hosted.verdicts(members)

    assert [(v.grade and v.grade.passed, v.group_scored, v.failure) for v in verdicts] == [
        (True, False, None),
        (False, False, None),
    ]


async def test_two_groups_of_a_host_do_not_know_each_other(tmp_path):
    sizes: list[int] = []

    async def group(instance, members):
        sizes.append(len(members))

    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        ours = hosted.start_group(2)
        others = [hosted.start(group=GROUP + 1) for _ in range(3)]
        await hosted.arrived(*ours, *others)
        hosted.score()
        await hosted.verdicts(ours)
        still = hosted.settled()
        hosted.score(group=GROUP + 1)
        await hosted.verdicts(others)

    assert sizes == [2, 3] and still == set(ours)


# Members that do not come to it, or leave.


async def test_only_a_member_whose_grade_counts_waits(tmp_path):
    async def act(instance, sandbox, model):
        if instance.id == "raises":
            raise ValueError("no")
        if instance.id == "no model":
            raise ModelFailed("busy")
        if instance.id == "late":
            await hang()

    async def grade(instance, sandbox, answer):
        if instance.id == "no grade":
            raise ValueError("no")
        return False

    seen: list[AttemptFailure | None] = []

    async def group(instance, members):
        seen.extend(member.failure for member in members)
        return [0.5] * len(members)

    limits = msgspec.structs.replace(LIMITS, acting=stretch(0.3))
    async with hosting(tmp_path, suite(group=group, grade=grade), act, limits=limits) as hosted:
        named = {
            name: hosted.start(hw.Instance(id=name), group=GROUP)
            for name in ("raises", "late", "no model", "no grade")
        }
        gone = [await hosted.verdict(named[name]) for name in ("no model", "no grade")]
        await hosted.arrived(named["raises"], named["late"])
        hosted.score()
        stayed = [await hosted.verdict(named[name]) for name in ("raises", "late")]

    assert [(where(v), v.group_scored) for v in gone] == [
        (FailureOrigin.MODEL, False),
        (FailureOrigin.GRADE, False),
    ]
    assert [f and f.where for f in seen] == [FailureOrigin.AGENT, FailureOrigin.LIMIT]
    assert [(where(v), v.grade and v.grade.score, v.group_scored) for v in stayed] == [
        (FailureOrigin.AGENT, 0.5, True),
        (FailureOrigin.LIMIT, 0.5, True),
    ]


@pytest.mark.parametrize(
    "failure", [make_interrupt_failure("preempted"), make_cancel_failure("client", "nobody wants it")]
)
async def test_a_member_that_is_ended_while_it_waits_leaves_at_once(tmp_path, failure):
    sizes: list[int] = []

    async def group(instance, members):
        sizes.append(len(members))

    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        first, second = hosted.start_group(2)
        await hosted.arrived(first, second)
        hosted.interrupt(first, failure)
        ended = await hosted.verdict(first)
        hosted.score()
        stayed = await hosted.verdict(second)

    assert (ended.failure, ended.grade, ended.group_scored) == (failure, None, False)
    assert sizes == [1] and stayed.group_scored


async def test_a_straggler_that_has_arrived_is_not_cut(tmp_path):
    async with hosting(tmp_path, suite(group=lambda instance, members: [0.5]), solve) as hosted:
        (member,) = hosted.start_group(1)
        await hosted.arrived(member)
        hosted.interrupt(member, make_straggler_failure(GroupTerms(quorum=1)))
        hosted.score()
        verdict = await hosted.verdict(member)

    assert (verdict.failure, verdict.grade) == (None, Grade(passed=False, score=0.5))


async def test_a_straggler_that_acts_is_cut_graded_and_scored_with_the_others(tmp_path):
    reached = asyncio.Event()

    async def act(instance, sandbox, model):
        reached.set()
        await hang()

    async with hosting(tmp_path, suite(group=lambda instance, members: [0.5]), act) as hosted:
        (member,) = hosted.start_group(1)
        await reached.wait()
        cut = make_straggler_failure(GroupTerms(quorum=1))
        hosted.interrupt(member, cut)
        await hosted.arrived(member)
        hosted.score()
        verdict = await hosted.verdict(member)

    assert (verdict.failure, verdict.grade, verdict.group_scored) == (
        cut,
        Grade(passed=False, score=0.5),
        True,
    )


@pytest.mark.parametrize("catches", [True, False])
async def test_a_member_ended_during_the_hook_is_over_and_others_are_scored(tmp_path, catches):
    reached, go_on = asyncio.Event(), asyncio.Event()
    found: list[Any] = []

    async def group(instance, members):
        reached.set()
        await go_on.wait()
        for member in members:
            try:
                found.append((member.answer, (await member.sandbox.run("cat made")).stdout))
            except AttemptOver:
                found.append((member.answer, "over"))
                if not catches:
                    raise
        return [0.5] * len(members)

    async def act(instance, sandbox, model):
        await sandbox.write("made", "work")
        return instance.id

    async with hosting(tmp_path, suite(group=group), act) as hosted:
        first, second = (hosted.start(hw.Instance(id=name), group=GROUP) for name in ("a", "b"))
        await hosted.arrived(first, second)
        hosted.score()
        await reached.wait()
        hosted.interrupt(first, make_interrupt_failure("preempted"))
        ended = await hosted.verdict(first)
        go_on.set()
        stayed = await hosted.verdict(second)

    assert where(ended) is FailureOrigin.INTERRUPTED and ended.grade is None
    assert (stayed.failure, stayed.grade) == (None, Grade(passed=False, score=0.5))
    assert found == [("a", "over"), ("b", "work")]


async def test_a_command_of_the_hook_in_a_sandbox_ends_with_its_member(tmp_path):
    reached = asyncio.Event()

    async def group(instance, members):
        if len(members) == 2:
            reached.set()
            await members[0].sandbox.run("sleep 60")
        return [0.5] * len(members)

    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        first, second = hosted.start_group(2)
        await hosted.arrived(first, second)
        hosted.score()
        await reached.wait()
        hosted.interrupt(first, make_interrupt_failure("preempted"))
        async with asyncio.timeout(stretch(5)):
            verdicts = await hosted.verdicts([first, second])

    assert [where(v) for v in verdicts] == [FailureOrigin.INTERRUPTED, None]


async def test_the_hook_ends_with_its_last_member(tmp_path):
    reached, ended = asyncio.Event(), asyncio.Event()

    async def group(instance, members):
        reached.set()
        try:
            await hang()
        finally:
            ended.set()

    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        members = hosted.start_group(2)
        await hosted.arrived(*members)
        hosted.score()
        await reached.wait()
        for member in members:
            assert not ended.is_set()
            hosted.interrupt(member, make_interrupt_failure("the run is over"))
            await hosted.verdict(member)

        assert ended.is_set()


# Hooks that fail.


def raising(error: Exception) -> Callable[..., Any]:
    def group(instance: Any, members: Any) -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        (raising(ValueError("no")), "exception"),
        (raising(hw.AgentFailed("no")), "error"),
        (raising(ModelFailed("busy")), "upstream"),
        (lambda instance, members: [1.0], "type"),
        (lambda instance, members: [1.0, "much"], "type"),
        (lambda instance, members: [1.0, float("nan")], "type"),
        (lambda instance, members: "ab", "type"),
        (lambda instance, members: 1.0, "type"),
    ],
    ids=["raises", "blames the agent", "no model", "short", "words", "nan", "text", "one for all"],
)
async def test_a_hook_that_fails_is_no_ones_zero(tmp_path, group, kind):
    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        verdicts = await scored(hosted, 2)

    assert [(v.failure and v.failure.where, v.failure and v.failure.kind) for v in verdicts] == [
        (FailureOrigin.GRADE, kind)
    ] * 2
    assert [(v.grade, v.group_scored) for v in verdicts] == [(None, False)] * 2


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_hook_that_hangs_is_given_up_after_the_grading_limit(tmp_path, threaded):
    release = threading.Event()

    async def group(instance, members):
        await hang()

    def group_in_a_thread(instance, members):
        release.wait(stretch(20))

    limits = msgspec.structs.replace(LIMITS, grading=stretch(0.3))
    hook = group_in_a_thread if threaded else group
    async with hosting(tmp_path, suite(group=hook), solve, limits=limits) as hosted:
        members = hosted.start_group(2)
        await hosted.arrived(*members)
        hosted.score()
        done = [await hosted.done(member) for member in members]
        release.set()

    assert [(where(d.verdict), d.verdict.failure and d.verdict.failure.kind) for d in done] == [
        (FailureOrigin.GRADE, "timeout")
    ] * 2
    assert any(d.tainted for d in done) == threaded


# In a process of its own.

SUITE = """
import holdwater as hw

async def solve(instance, sandbox, model):
    return instance.id

async def group(instance, members):
    return [len(members) + member.number for member in members]

suite = hw.Suite(name="s", instances=list, grade=lambda instance, sandbox, answer: False, group=group)
"""


async def test_a_worker_scores_a_group_on_request(tmp_path):
    (tmp_path / "suite.py").write_text(SUITE)
    payload = msgspec.msgpack.encode(hw.Instance(id="i"))

    async with working(tmp_path / "run", tmp_path / "suite.py") as (worker, _):
        for n in (1, 2):
            worker.send(
                AttemptJob(
                    attempt=Attempt(id=n, instance=1, sample=n, number=1, group=GROUP), payload=payload
                )
            )
        for n in (1, 2):
            await worker.until(MemberWaiting, lambda said, n=n: said.attempt == n)
        worker.send(ScoreMembers(group=GROUP, together=True))
        verdicts = [(await worker.done(n)).verdict for n in (1, 2)]

    assert [(v.grade and v.grade.score, v.group_scored) for v in verdicts] == [(2.0, True), (3.0, True)]


# Nothing is left.


class State:
    """Something that an answer holds, and that can be watched."""


async def keep_nothing(instance: Any, members: Any) -> list[float]:
    for member in members:
        await member.model.chat([{"role": "user", "content": "x"}])
    return [1.0] * len(members)


def keep_nothing_in_a_thread(instance: Any, members: Any) -> None:
    for member in members:
        member.sandbox.run("true")


async def keep_the_error(instance: Any, members: Any) -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        members[0].error = error
        raise


async def keep_them_waiting(instance: Any, members: Any) -> None:
    await hang()


@pytest.mark.parametrize(
    ("group", "leaves"),
    [
        (None, False),
        (keep_nothing, False),
        (keep_nothing, True),
        (keep_nothing_in_a_thread, False),
        (keep_the_error, False),
        (keep_them_waiting, True),
    ],
)
async def test_nothing_of_a_group_waits_for_a_collection(tmp_path: Path, group: Any, leaves: bool) -> None:
    states = weakref.WeakSet[State]()

    async def act(instance: Any, sandbox: Any, model: Any) -> State:
        states.add(state := State())
        return state

    limits = msgspec.structs.replace(LIMITS, grading=stretch(0.3))
    async with hosting(tmp_path, suite(group=group), act, limits=limits) as hosted:
        with uncollected() as before:
            members = hosted.start_group(3)
            await hosted.arrived(*members)
            assert len(states) == 3
            if leaves:
                hosted.interrupt(members[0], make_interrupt_failure("preempted"))
                await hosted.verdict(members[0])
            hosted.score()
            await hosted.verdicts(members)

            assert await left_of(before, states) == []
        assert len(hosted.host.groups) == 0


async def test_a_hook_that_keeps_its_members_keeps_nothing_of_their_attempts(tmp_path):
    kept: list[Any] = []

    async def group(instance, members):
        kept.extend(members)

    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        with uncollected() as before:
            await scored(hosted, 2)

            assert await left_of(before, but="WaitingMember") == []
    for use in (lambda: kept[0].usage, lambda: kept[0].exchanges()):
        with pytest.raises(AttemptOver):
            use()


async def test_a_hook_that_is_called_again_keeps_nothing_of_its_first_call(tmp_path):
    states = weakref.WeakSet[State]()
    reached, left = asyncio.Event(), asyncio.Event()

    async def group(instance, members):
        state = State()
        states.add(state)
        if len(members) == 2:
            reached.set()
            await left.wait()
            try:
                await members[0].spawn(solve)
            except AttemptOver as error:
                state.error = error  # type: ignore[attr-defined]
                raise

    async with hosting(tmp_path, suite(group=group), solve) as hosted:
        with uncollected() as before:
            first, second = hosted.start_group(2)
            await hosted.arrived(first, second)
            hosted.score()
            await reached.wait()
            hosted.interrupt(first, make_interrupt_failure("preempted"))
            await hosted.verdict(first)
            left.set()
            await hosted.verdict(second)

            assert await left_of(before, states) == []
