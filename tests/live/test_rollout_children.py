"""Children of attempts in a real host: what they borrow, what they leave, and that they end first."""

from __future__ import annotations

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests.host_harness import GROUP, LIMITS, hosting, left_of, suite, uncollected
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.agent.loader import python
from holdwater.core.errors import AttemptOver
from holdwater.core.failures import make_interrupt_failure
from holdwater.core.records import FailureOrigin, Verdict
from holdwater.rollout import user_calls
from holdwater.rollout.attempt_state import MOST_KEPT
from holdwater.rollout.children import DEEPEST, MOST_CHILDREN


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled child has the time to end, however busy the machine is."""
    monkeypatch.setattr(user_calls, "CANCEL_SECONDS", stretch(user_calls.CANCEL_SECONDS))


ROOT = Path(__file__).parents[2]


async def ask(instance: Any, sandbox: Any, model: Any) -> str:
    """Says what the model says to its instruction."""
    reply = await model.chat([{"role": "user", "content": instance.instruction}])
    return str(reply["choices"][0]["message"]["content"])


async def hang() -> None:
    await asyncio.Event().wait()


def told(verdict: Verdict) -> list[Any]:
    return [
        (child.name, child.failure and child.failure.where, child.exchanges) for child in verdict.children
    ]


async def played(place: Path, act: Any, **around: Any) -> tuple[Verdict, Any]:
    """One attempt of an agent; its verdict, and what was heard."""
    async with hosting(place, suite(), act, **around) as hosted:
        verdict = await hosted.verdict(hosted.start(hw.Instance(id="i", instruction="its own")))
    return verdict, hosted


# What they are given.


async def test_a_child_acts_in_its_parents_sandbox_with_its_parents_model(tmp_path):
    async def sub(instance, sandbox, model):
        reply = await ask(instance, sandbox, model)
        await sandbox.write("from-child", (await sandbox.run("cat from-parent")).stdout + reply)
        return {"id": instance.id}

    async def act(instance, sandbox, model, attempt):
        await sandbox.write("from-parent", "p ")
        await ask(instance, sandbox, model)
        born = await attempt.spawn(sub, "the child's", name="sub")
        await ask(instance, sandbox, model)
        made = (await sandbox.run("cat from-child")).stdout
        return [born.answer, made, born.usage.requests, born.failure]

    verdict, hosted = await played(tmp_path, act)

    assert verdict.failure is None
    assert msgspec.json.decode(verdict.answer) == [{"id": "i"}, "p so: the child's", 1, None]
    assert told(verdict) == [("sub", None, 1)]
    assert (verdict.exchanges, verdict.usage.requests) == (3, 3)
    assert [(e.number, e.by) for e in hosted.exchanges(1)] == [(1, ""), (2, "sub"), (3, "")]


async def test_a_plain_function_has_children_from_its_threads(tmp_path):
    def sub(instance: Any, sandbox: Any, model: Any) -> str:
        return str(
            model.chat([{"role": "user", "content": instance.instruction}])["choices"][0]["message"][
                "content"
            ]
        )

    def act(instance: Any, sandbox: Any, model: Any, *, attempt: Any) -> list[str]:
        answers: dict[int, str] = {}

        def one(number: int) -> None:
            answers[number] = attempt.spawn(sub, f"n{number}", name=f"c{number}").answer

        threads = [threading.Thread(target=one, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [answers[n] for n in range(3)]

    verdict, _ = await played(tmp_path, act)

    assert verdict.answer == '["so: n0","so: n1","so: n2"]'
    assert sorted(told(verdict)) == [(f"c{n}", None, 1) for n in range(3)]


async def test_an_agent_is_found_by_its_name(tmp_path):
    async def act(instance, sandbox, model, attempt):
        by_name = await attempt.spawn("bash", "say it")
        by_path = await attempt.spawn(f"{tmp_path}/other.py:solve", name="other")
        with pytest.raises(hw.BadInput):
            await attempt.spawn("no-such-agent")
        return [by_name.answer, by_path.answer]

    (tmp_path / "other.py").write_text(
        "def solve(instance, sandbox, model):\n    return instance.instruction\n"
    )

    verdict, _ = await played(tmp_path, act)

    assert verdict.answer == '["so: say it","its own"]'
    assert told(verdict) == [("bash", None, 1), ("other", None, 0)]


@pytest.mark.parametrize("withheld", ["sandbox", "model"])
async def test_a_withheld_resource_is_absent_for_a_child_and_its_children(tmp_path, withheld):
    async def use(instance, sandbox, model):
        await (sandbox.run("true") if withheld == "sandbox" else ask(instance, sandbox, model))

    def use_in_a_thread(instance, sandbox, model):
        return sandbox.workdir if withheld == "sandbox" else model.key

    async def lend_on(instance, sandbox, model, attempt):
        return (await attempt.spawn(use)).failure.kind

    async def act(instance, sandbox, model, attempt):
        born = [await attempt.spawn(agent, **{withheld: False}) for agent in (use, use_in_a_thread, lend_on)]
        return [born[0].failure.kind, born[1].failure.kind, born[2].answer]

    verdict, hosted = await played(tmp_path, act)

    assert (verdict.failure, verdict.answer) == (None, '["withheld","withheld","withheld"]')
    assert hosted.exchanges(1) == []


async def test_no_two_children_have_the_same_seed(tmp_path):
    async def seed(instance, sandbox, model):
        return model.seed

    async def act(instance, sandbox, model, attempt):
        return [model.seed, *[(await attempt.spawn(seed)).answer for _ in range(3)]]

    verdict, _ = await played(tmp_path, act)

    assert len(set(msgspec.json.decode(verdict.answer))) == 4


# How they fail, which is their parent's to judge.


async def test_what_a_child_raises_or_exceeds_is_not_its_parents_failure(tmp_path):
    async def raises(instance, sandbox, model):
        raise ValueError("no")

    async def late(instance, sandbox, model):
        await hang()

    async def no_reply(instance, sandbox, model):
        await ask(instance, sandbox, model)

    async def policy(request):
        raise RuntimeError("the model is down")

    async def act(instance, sandbox, model, attempt):
        born = [
            await attempt.spawn(raises),
            await attempt.spawn(late, timeout=0.1),
            await attempt.spawn(no_reply),
        ]
        return [str(one.failure.where) for one in born]

    verdict, _ = await played(tmp_path, act, policy=policy)

    assert (verdict.failure, verdict.answer) == (None, '["agent","limit","model"]')
    assert [where for _, where, _ in told(verdict)] == [
        FailureOrigin.AGENT,
        FailureOrigin.LIMIT,
        FailureOrigin.MODEL,
    ]


async def test_what_children_use_counts_against_their_parents_budget(tmp_path):
    async def act(instance, sandbox, model, attempt):
        born = [await attempt.spawn(ask, "x", name=f"c{n}") for n in range(4)]
        return [one.failure and str(one.failure.where) for one in born]

    limits = msgspec.structs.replace(LIMITS, requests=2)
    verdict, hosted = await played(tmp_path, act, limits=limits)

    assert verdict.answer == '[null,null,"limit","limit"]'
    assert verdict.failure is not None and verdict.failure.where is FailureOrigin.LIMIT
    assert [e.by for e in hosted.exchanges(1)] == ["c0", "c1"]


# How many, and how deep.


async def test_children_act_at_once_up_to_a_bound_without_mutual_waiting(tmp_path):
    everybody = asyncio.Event()
    there = 0

    async def meet(instance, sandbox, model):
        nonlocal there
        there += 1
        if there == MOST_CHILDREN:
            everybody.set()
        await everybody.wait()

    async def act(instance, sandbox, model, attempt):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(attempt.spawn(meet)) for _ in range(MOST_CHILDREN + 1)]
        return [task.result().failure.kind for task in tasks if task.result().failure is not None]

    verdict, _ = await played(tmp_path, act)

    assert verdict.answer == '["children"]'
    assert len(verdict.children) == MOST_CHILDREN


async def test_children_have_children_up_to_a_depth(tmp_path):
    async def act(instance, sandbox, model, attempt):
        await ask(instance, sandbox, model)
        born = await attempt.spawn(act, name="c")
        return 0 if born.failure is not None and born.failure.kind == "depth" else 1 + born.answer

    verdict, hosted = await played(tmp_path, act)

    assert verdict.answer == str(DEEPEST)
    assert [e.by for e in hosted.exchanges(1)] == ["", "c", "c/c", "c/c/c", "c/c/c/c"]
    assert told(verdict) == [("/".join("c" * n), None, DEEPEST + 1 - n) for n in range(DEEPEST, 0, -1)]
    assert verdict.usage.requests == verdict.exchanges == DEEPEST + 1


async def test_a_verdict_tells_of_the_last_children_and_that_there_were_more(tmp_path):
    async def nothing(instance, sandbox, model):
        return None

    async def act(instance, sandbox, model, attempt):
        for number in range(MOST_KEPT + 2):
            await attempt.spawn(nothing, name=str(number), sandbox=False, model=False)

    verdict, hosted = await played(tmp_path, act)

    assert [child.name for child in verdict.children] == [str(n) for n in range(2, MOST_KEPT + 2)]
    assert hosted.noted() == ["children.dropped"]


# They end before their parent.


@pytest.mark.parametrize("end", ["returns", "raises", "too late", "interrupted"])
async def test_children_end_before_their_parent_does_whatever_ends_it(tmp_path, end):
    order: list[str] = []
    started = asyncio.Event()

    async def leaf(instance, sandbox, model):
        started.set()
        try:
            await sandbox.run("sleep 60")
        finally:
            order.append("leaf" if sandbox.workdir else "")  # which an attempt that is over has not

    async def middle(instance, sandbox, model, attempt):
        try:
            await attempt.spawn(leaf)
        finally:
            order.append("middle" if sandbox.workdir else "")

    left: list[Any] = []

    async def act(instance, sandbox, model, attempt):
        left.append(asyncio.ensure_future(attempt.spawn(middle)))
        await started.wait()
        if end == "raises":
            raise ValueError("no")
        if end != "returns":
            await hang()

    async def patch(instance, sandbox, answer):
        order.append("patch")
        return ""

    limits = msgspec.structs.replace(LIMITS, acting=stretch(0.5) if end == "too late" else stretch(20.0))
    async with hosting(tmp_path, suite(patch=patch), act, limits=limits) as hosted:
        attempt = hosted.start()
        await started.wait()
        if end == "interrupted":
            hosted.interrupt(attempt, make_interrupt_failure("preempted"))
        done = await hosted.done(attempt)
        over = await asyncio.gather(*left, return_exceptions=True)

    assert order == ["leaf", "middle", "patch"]
    assert [type(error) for error in over] == [AttemptOver]
    assert not done.tainted
    assert told(done.verdict)[-1] == (f"{__name__}:{middle.__qualname__}", FailureOrigin.CANCELLED, 0)


@pytest.mark.parametrize("ends", ["returns", "raises"])
@pytest.mark.parametrize("how", ["too late", "interrupted"])
async def test_an_attempt_ended_while_its_children_end_gets_its_verdict(tmp_path, ends, how):
    started, ending, limit = asyncio.Event(), asyncio.Event(), stretch(0.2)

    async def slow_to_end(instance, sandbox, model):
        started.set()
        try:
            await hang()
        finally:
            ending.set()
            await asyncio.sleep(2 * limit)

    async def act(instance, sandbox, model, attempt):
        left.append(asyncio.ensure_future(attempt.spawn(slow_to_end)))
        await started.wait()
        if ends == "raises":
            raise ValueError("no")

    left: list[Any] = []
    limits = msgspec.structs.replace(LIMITS, acting=limit if how == "too late" else stretch(20.0))
    async with hosting(tmp_path, suite(), act, limits=limits) as hosted:
        attempt = hosted.start()
        await ending.wait()
        if how == "interrupted":
            hosted.interrupt(attempt, make_interrupt_failure("preempted"))
        verdict = await hosted.verdict(attempt)
        await asyncio.gather(*left, return_exceptions=True)

    assert verdict.failure is not None
    if how == "too late":
        assert (verdict.failure.where, verdict.failure.kind) == (FailureOrigin.LIMIT, "timeout")
        assert verdict.grade is not None
    else:
        assert verdict.failure == make_interrupt_failure("preempted")


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_child_that_cannot_be_ended_taints_its_worker_and_reaches_nothing(tmp_path, threaded):
    release, late = threading.Event(), []
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def blocked(instance, sandbox, model):
        loop.call_soon_threadsafe(started.set)
        release.wait(stretch(20))
        try:
            sandbox.write("late", "no")
        except BaseException as error:
            late.append(error)

    async def stubborn(instance, sandbox, model):
        started.set()
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        try:
            await sandbox.write("late", "no")
        except BaseException as error:
            late.append(error)

    async def act(instance, sandbox, model, attempt):
        child = asyncio.ensure_future(attempt.spawn(blocked if threaded else stubborn))
        await started.wait()
        child.add_done_callback(lambda done: done.exception())

    async with hosting(tmp_path, suite(), act) as hosted:
        done = await hosted.done(hosted.start())
        release.set()
        async with asyncio.timeout(stretch(10)):
            while not late:
                await asyncio.sleep(0.005)

    assert done.tainted and done.verdict.failure is None
    assert [type(error) for error in late] == [AttemptOver]


async def test_a_child_ends_with_the_call_that_waits_for_it(tmp_path):
    ended: list[str] = []
    bound = asyncio.timeout(None)

    async def never(instance, sandbox, model):
        bound.reschedule(0.0)
        try:
            await hang()
        finally:
            ended.append("child")

    async def act(instance, sandbox, model, attempt):
        try:
            async with bound:
                await attempt.spawn(never, name="c")
        except TimeoutError:
            ended.append("parent goes on")
        return (await attempt.spawn(ask, "again", name="d")).answer

    verdict, _ = await played(tmp_path, act)

    assert (ended, verdict.answer) == (["child", "parent goes on"], '"so: again"')
    assert told(verdict) == [("c", FailureOrigin.CANCELLED, 0), ("d", None, 1)]


async def test_an_ended_attempt_spawns_no_children_and_its_handle_retains_nothing(tmp_path):
    kept: list[Any] = []

    async def act(instance, sandbox, model, attempt):
        kept.append(attempt)

    async with hosting(tmp_path, suite(), act) as hosted:
        with uncollected() as before:
            await hosted.verdict(hosted.start())

            assert await left_of(before, but="ChildSpawner") == []
    with pytest.raises(AttemptOver):
        await kept[0].spawn(ask)


# Children of a group's members.


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_judge_appends_to_the_trajectory_of_each_member(tmp_path, threaded):
    async def judge(instance, sandbox, model):
        made = (await sandbox.run("cat made")).stdout
        reply = await model.chat([{"role": "user", "content": f"{instance.instruction} {made}"}])
        return len(reply["choices"][0]["message"]["content"])

    async def group(instance, members):
        return [(await member.spawn(judge, "rate", name="judge")).answer for member in members]

    def group_in_a_thread(instance, members):
        return [member.spawn(judge, "rate", name="judge").answer for member in members]

    async def act(instance, sandbox, model):
        await sandbox.write("made", "x" * len(instance.id))
        await ask(instance, sandbox, model)

    hook = group_in_a_thread if threaded else group
    async with hosting(tmp_path, suite(group=hook), act) as hosted:
        members = [hosted.start(hw.Instance(id="i" * n), group=GROUP) for n in (1, 2)]
        await hosted.arrived(*members)
        hosted.score()
        verdicts = await hosted.verdicts(members)

    assert [v.grade and v.grade.score for v in verdicts] == [len("so: rate x"), len("so: rate xx")]
    for member, verdict in zip(members, verdicts, strict=True):
        assert (verdict.exchanges, verdict.usage.requests, told(verdict)) == (2, 2, [("judge", None, 1)])
        assert [(e.number, e.by) for e in hosted.exchanges(member)] == [(1, ""), (2, "judge")]


async def test_a_members_child_ends_with_the_member_and_the_others_are_scored(tmp_path):
    judging = asyncio.Event()

    async def judge(instance, sandbox, model):
        judging.set()
        await hang()

    async def group(instance, members):
        if len(members) == 2:
            await members[0].spawn(judge)
        return [0.5] * len(members)

    async with hosting(tmp_path, suite(group=group), ask) as hosted:
        first, second = hosted.start_group(2)
        await hosted.arrived(first, second)
        hosted.score()
        await judging.wait()
        hosted.interrupt(first, make_interrupt_failure("preempted"))
        ended, stayed = await hosted.verdicts([first, second])

    assert ended.failure is not None and ended.failure.where is FailureOrigin.INTERRUPTED
    assert [child.failure and child.failure.where for child in ended.children] == [FailureOrigin.CANCELLED]
    assert stayed.grade is not None and stayed.grade.score == 0.5


# The pages.


async def test_the_agent_of_the_docs_has_its_work_reviewed(tmp_path):
    async def policy(request):
        return "fine" if "wrong here?" in request["messages"][-1]["content"] else "done"

    act = block("agents.md", "Children")["solve"]

    verdict, _ = await played(tmp_path, act, policy=policy)

    assert told(verdict) == [("coder", None, 1), ("reviewer", None, 1)]


async def test_the_group_of_the_docs_is_judged(tmp_path):
    async def policy(request):
        return str(4 + len(request["messages"][-1]["content"].split("\n\n")[-1]))

    async def act(instance, sandbox, model):
        await sandbox.write("out.txt", instance.id)

    async with hosting(tmp_path, suite(group=block("suites.md", "Groups")["group"]), act, policy) as hosted:
        members = [hosted.start(hw.Instance(id=name), group=GROUP) for name in ("a", "bc")]
        await hosted.arrived(*members)
        hosted.score()
        verdicts = await hosted.verdicts(members)

    assert [v.grade and v.grade.score for v in verdicts] == [0.5, 0.6]


def block(page: str, heading: str) -> dict[str, Any]:
    """What the first Python block below a heading of a page defines."""
    text = (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2]
    found: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], found)
    return found


# Nothing is left, and agents of today are what they were.


def test_an_agent_may_take_its_attempt_and_nothing_else():
    python(lambda instance, sandbox, model, attempt: None)
    python(lambda instance, sandbox, model, *, attempt: None)
    with pytest.raises(hw.BadInput):
        python(lambda instance, sandbox, model, other: None)


class State:
    """Something that a child holds, and that can be watched."""

    made: ClassVar[weakref.WeakSet[State]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.made.add(self)


async def answers(instance: Any, sandbox: Any, model: Any) -> State:
    await ask(instance, sandbox, model)
    return State()


async def raises(instance: Any, sandbox: Any, model: Any) -> None:
    state = State()
    try:
        raise ValueError("no")
    except ValueError as error:
        state.error = error  # type: ignore[attr-defined]
        raise


def raises_in_a_thread(instance: Any, sandbox: Any, model: Any) -> None:
    state = State()
    raise ValueError(state)


async def never_ends(instance: Any, sandbox: Any, model: Any) -> None:
    state = State()
    await sandbox.run(f"sleep {len(str(state))}0")


def command_of_a_thread_never_ends(instance: Any, sandbox: Any, model: Any) -> None:
    state = State()
    sandbox.run(f"sleep {len(str(state))}0")


async def has_a_child(instance: Any, sandbox: Any, model: Any, attempt: Any) -> Any:
    state = State()
    born = await attempt.spawn(raises)
    return state, born


@pytest.mark.parametrize(
    ("child", "timeout"),
    [
        (answers, 20.0),
        (raises, 20.0),
        (raises_in_a_thread, 20.0),
        (has_a_child, 20.0),
        (never_ends, 0.1),
        (never_ends, None),
        (command_of_a_thread_never_ends, 0.1),
        (command_of_a_thread_never_ends, None),
    ],
)
async def test_nothing_of_a_child_waits_for_a_collection(
    tmp_path: Path, child: Any, timeout: float | None
) -> None:
    async def act(instance: Any, sandbox: Any, model: Any, attempt: Any) -> None:
        await attempt.spawn(child, timeout=timeout)
        async with asyncio.timeout(stretch(2)):
            while len(State.made):  # a thread ends a moment after its child
                await asyncio.sleep(0.005)

    def act_in_a_thread(instance: Any, sandbox: Any, model: Any, attempt: Any) -> None:
        attempt.spawn(child, timeout=timeout)

    limits = msgspec.structs.replace(LIMITS, acting=stretch(0.3) if timeout is None else stretch(20.0))
    for agent in (act, act_in_a_thread):
        place = tmp_path / agent.__name__
        async with hosting(place, suite(), agent, limits=limits) as hosted:
            with uncollected() as before:
                verdict = await hosted.verdict(hosted.start())

                assert await left_of(before, State.made) == []
            assert verdict.failure is None or verdict.failure.where is FailureOrigin.LIMIT
