"""Groups as trainers ask for them: scored with everything alive, settled as asked, and then gone."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.server_harness import Model, Server, eventually, kill, model, server
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.client import AsyncClient, GroupTerms, LimitOverrides, ModelChoice, ModelSource, OrderResult
from holdwater.core.records import AttemptFailure, MiB

SUITE = '''
import asyncio, itertools, json, os, signal
from pathlib import Path
import holdwater as hw
from holdwater.testing.leaks import count_objects

HERE = Path(__file__).parent


def begun(name):
    """Which of those that were begun this one is: 0, 1, 2, ..."""
    for number in itertools.count():
        try:
            (HERE / f"{name}.{number}").touch(exist_ok=False)
            return number
        except FileExistsError:
            continue


async def solve(instance, sandbox, model):
    """Two turns, and then what the instance has for an attempt of this number, once."""
    if instance.data.get("census"):
        return count_objects()
    name = instance.data["name"]
    number = begun(name)
    end = instance.data.get("ends", {}).get(str(number), "")
    await sandbox.write("state", f"of {number}")
    messages = []
    for turn in range(2):
        messages.append({"role": "user", "content": f"{name} turn {turn}"})
        messages.append((await model.chat(messages))["choices"][0]["message"])
    if end == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if end == "wait":
        (HERE / f"{name}.waits").touch()
    if end in ("hang", "wait"):
        await asyncio.sleep(3600)
    if end == "refuse":
        await model.chat([{"role": "user", "content": "refuse"}])
    return f"answer of {number}"


async def grade(instance, sandbox, answer):
    return hw.Grade(passed=answer is not None, score=0.5)


async def group(instance, members):
    name, seen = instance.data["name"], []
    with (HERE / f"{name}.scored").open("a") as scored:
        for member in members:
            state = (await member.sandbox.read("state")).decode()
            seen.append([state, member.answer, len(list(member.exchanges())), member.grade.score])
        scored.write(json.dumps(seen) + "\\n")
    if instance.data.get("group") == "raise":
        raise RuntimeError("no idea")
    if instance.data.get("judged"):
        for member in members:
            await member.spawn(judge, f"what of {member.answer}?", name="judge")
    return [hw.Grade(passed=True, score=10.0 + member.number) for member in members]


async def judge(instance, sandbox, model):
    seen = (await sandbox.read("state")).decode()
    await model.chat([{"role": "user", "content": f"{instance.instruction} {seen}"}])


suite = hw.Suite(name="groups", instances=list, grade=grade, group=group)
'''
SLOTS = 4


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all that follows: what one group leaves behind is another one's trouble."""
    flags = ("--workers", "1", "--concurrency", str(SLOTS), "--retries", "1", "--backoff", "0.05")
    with server(tmp_path_factory.mktemp("groups"), *flags, "--memory", "1GiB", suite=SUITE) as found:
        yield found


class Scene:
    def __init__(self, serve: Server, client: AsyncClient, upstream: Model) -> None:
        self.serve, self.client, self.upstream = serve, client, upstream

    async def group(
        self, name: str, size: int, terms: GroupTerms | None = None, **wishes: Any
    ) -> OrderResult:
        limits = wishes.pop("limits", LimitOverrides())
        instance = hw.Instance(id=name, data={"name": name, **wishes})
        return await self.client.run_group(
            instance, size, group=terms, model=self.model, limits=limits, key=name
        )

    @property
    def model(self) -> ModelChoice:
        return ModelChoice(source=ModelSource.ENDPOINT, url=self.upstream.url, name="m")

    async def waits(self, why: str) -> bool:
        return (await self.client.stats()).waiting.get(why, 0) > 0

    def scored(self, name: str) -> list[list[Any]]:
        """What the hook saw of the members, each time."""
        path = self.serve.place / f"{name}.scored"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def census(self) -> Counter[str]:
        """What is alive of rollouts in the worker; of the one that looks there is one each."""
        instance = hw.Instance(id="census", data={"census": True})
        rollout = await self.client.run(instance, model=self.model)
        return Counter(
            {name: count for name, count in rollout.answer.items() if not name.endswith(".LogSink")}
        )

    def sandboxes(self) -> list[str]:
        return [path.name for path in (self.serve.out / "scratch").glob("holdwater-*/[0-9]*")]


@asynccontextmanager
async def scene(serve: Server) -> AsyncIterator[Scene]:
    async with model() as upstream, serve.client() as client:
        await serve.ready(client)
        yield Scene(serve, client, upstream)


def failures(result: OrderResult) -> list[tuple[str, str] | None]:
    return [_told(rollout.failure) for rollout in result.rollouts]


def _told(failure: AttemptFailure | None) -> tuple[str, str] | None:
    return None if failure is None else (str(failure.where), failure.kind)


def rewards(result: OrderResult) -> list[float | None]:
    return [rollout.reward for rollout in result.rollouts]


async def test_everything_is_there_when_a_group_is_scored_and_nothing_after(serving: Server) -> None:
    async with scene(serving) as s:
        result = await s.group("judged", 3, judged=True)

        (seen,) = s.scored("judged")
        assert sorted(seen) == [[f"of {n}", f"answer of {n}", 2, 0.5] for n in range(3)]
        assert (result.together, rewards(result)) == (True, [10.0, 11.0, 12.0])
        for rollout in result.rollouts:
            (child,) = rollout.children
            assert (child.name, child.failure, child.exchanges) == ("judge", None, 1)
            asked = [node for node in rollout.trajectory or () if node.by == "judge"]
            assert [node.sampled for node in asked] == [False, True]
            number = str(rollout.answer).removeprefix("answer of ")
            assert asked[0].message["content"] == f"what of {rollout.answer}? of {number}"
        assert set((await s.census()).values()) == {1}
        await eventually(lambda: not s.sandboxes(), 5.0, lambda: str(s.sandboxes()))


async def test_a_group_whose_worker_dies_runs_again_and_is_scored_once(serving: Server) -> None:
    async with scene(serving) as s:
        result = await s.group("dies", 3, ends={"2": "die"})

        assert (result.together, rewards(result)) == (True, [10.0, 11.0, 12.0])
        assert len(s.scored("dies")) == 1
        # Whoever had come less far when the worker died may have had a call on its way.
        assert 6 <= sum(s.upstream.asked.values()) <= 8
        assert sum(rollout.saved.requests for rollout in result.rollouts) >= 2
        assert all(rollout.exchanges == 2 for rollout in result.rollouts)


async def test_a_member_that_times_out_is_scored_with_the_others(serving: Server) -> None:
    async with scene(serving) as s:
        result = await s.group("late", 3, ends={"1": "hang"}, limits=LimitOverrides(acting=stretch(1.0)))

        assert sorted(map(str, failures(result))) == ["('limit', 'timeout')", "None", "None"]
        assert (result.together, rewards(result)) == (True, [10.0, 11.0, 12.0])


@pytest.mark.parametrize(
    ("replace", "least", "together", "scored"),
    [(1, 3, True, 3), (0, 1, True, 2), (0, 3, False, 0)],
    ids=["replaced", "short", "too short"],
)
async def test_a_failed_member_is_replaced_or_its_group_is_settled_without_it(
    serving: Server, replace: int, least: int, together: bool, scored: int
) -> None:
    name = f"refused-{replace}-{least}"
    async with scene(serving) as s:
        result = await s.group(name, 3, GroupTerms(replace=replace, least=least), ends={"0": "refuse"})

        assert len(result.rollouts) == 3
        assert len(result.replaced) == replace
        told = [rollout.failure for rollout in (*result.rollouts, *result.replaced) if rollout.failure]
        assert [failure.where for failure in told] == ["model"]
        assert all(rollout.failure for rollout in result.replaced)
        assert result.together is together
        assert [len(seen) for seen in s.scored(name)] == [scored] * together
        own = [0.5] * 2 if not together else [10.0 + n for n in range(scored)]
        assert [reward for reward in rewards(result) if reward is not None] == own


async def test_stragglers_are_cut_with_a_verdict_of_their_own(serving: Server) -> None:
    async with scene(serving) as s:
        terms = GroupTerms(quorum=3, patience=0.2)
        result = await s.group("straggles", 4, terms, ends={"3": "hang"})

        assert Counter(map(str, failures(result))) == {"None": 3, "('limit', 'straggler')": 1}
        assert (result.together, rewards(result)) == (True, [10.0, 11.0, 12.0, 13.0])


async def test_a_group_that_is_cancelled_in_the_middle_leaves_nothing_running(serving: Server) -> None:
    async with scene(serving) as s:
        s.upstream.gate.clear()
        running = asyncio.create_task(s.group("cancelled", 3))
        await eventually(lambda: s.upstream.waiting == 3, 10.0)
        await s.client.cancel("cancelled")
        result = await running

        assert failures(result) == [("cancelled", "asked")] * 3
        assert (result.together, s.scored("cancelled")) == (False, [])
        await eventually(lambda: s.upstream.waiting == 0, 5.0)
        assert (await s.client.stats()).running == 0
        assert set((await s.census()).values()) == {1}


async def test_groups_that_do_not_fit_at_once_run_one_after_the_other(serving: Server) -> None:
    async with scene(serving) as s:
        names = [f"slots-{n}" for n in range(4)]
        results = await asyncio.gather(*(s.group(name, 3) for name in names))

        assert all(result.together for result in results)
        assert s.upstream.most <= SLOTS


async def test_groups_that_exceed_the_memory_together_run_one_after_the_other(serving: Server) -> None:
    async with scene(serving) as s:
        names = [f"memory-{n}" for n in range(3)]
        s.upstream.gate.clear()
        asked = [
            asyncio.create_task(s.group(name, 2, limits=LimitOverrides(memory=300 * MiB))) for name in names
        ]
        await eventually(lambda: s.upstream.waiting == 2, 10.0)
        await eventually(lambda: s.waits("memory"), 10.0)
        s.upstream.gate.set()
        results = [await one for one in asked]

        assert all(result.together for result in results)
        assert s.upstream.most == 2


async def test_a_hook_that_raises_is_a_failure_and_no_zero(serving: Server) -> None:
    async with scene(serving) as s:
        result = await s.group("raises", 2, group="raise")

        assert failures(result) == [("grade", "exception")] * 2
        assert {rollout.outcome for rollout in result.rollouts} == {"grade"}
        assert rewards(result) == [None, None]
        assert len(s.scored("raises")) == 2
        assert sum(s.upstream.asked.values()) == 4  # the second time is answered from the record


async def test_a_group_whose_server_dies_continues_with_its_remaining_terms(serving: Server) -> None:
    """One member was replaced before: after that nobody else is."""
    async with scene(serving) as s:
        ends = {"0": "refuse", "3": "wait", "4": "refuse"}
        running = asyncio.create_task(s.group("killed", 3, GroupTerms(replace=1), ends=ends))
        await eventually((serving.place / "killed.waits").exists, 10.0)
        serving.kill()
        serving.start()
        result = await running

        assert Counter(map(str, failures(result))) == {"None": 2, "('model', 'invalid')": 1}
        assert [(lost.failure.where, lost.failure.kind) for lost in result.replaced if lost.failure] == [
            ("model", "invalid")
        ]
        assert (result.together, [len(seen) for seen in s.scored("killed")]) == (True, [2])


@pytest.mark.proof
async def test_many_groups_of_every_kind_settle_as_asked_while_workers_die(tmp_path: Path) -> None:
    kinds: list[tuple[GroupTerms, dict[str, Any]]] = [
        (GroupTerms(), {"judged": True}),
        (GroupTerms(replace=1), {"ends": {"0": "refuse"}}),
        (GroupTerms(), {"ends": {"1": "refuse"}}),
        (GroupTerms(), {"ends": {"2": "hang"}, "limits": LimitOverrides(acting=stretch(1.0))}),
        (GroupTerms(quorum=5, patience=0.1), {"ends": {"3": "hang"}}),
        (GroupTerms(), {"ends": {"0": "die"}}),
        (GroupTerms(), {"group": "raise"}),
    ]
    flags = ("--workers", "2", "--least-workers", "2", "--concurrency", "24", "--retries", "1")
    with server(tmp_path, *flags, "--backoff", "0.05", "--memory", "3GiB", suite=SUITE) as serve:
        async with scene(serve) as s:
            groups = [(f"{n}", *kinds[n % len(kinds)]) for n in range(70)]
            asked = [asyncio.create_task(s.group(name, 6, terms, **how)) for name, terms, how in groups]
            for _ in range(3):
                await asyncio.sleep(1.0)
                await serve.ready(s.client)
                kill(serve.workers()[0])
            results = [await one for one in asked]
            assert set((await s.census()).values()) == {1}
            await eventually(lambda: not s.sandboxes(), 5.0, lambda: str(s.sandboxes()))
    audit = hw.audit(tmp_path / "run")

    for (name, terms, how), result in zip(groups, results, strict=True):
        assert len(result.rollouts) == 6
        told = {failure for failure in failures(result) if failure is not None}
        if how.get("group") == "raise":
            assert (rewards(result), told) == ([None] * 6, {("grade", "exception")}), name
            continue
        cut = {("limit", "straggler"), ("cancelled", "straggler")}  # acting, or lost
        assert told <= {("model", "invalid"), ("limit", "timeout"), *cut}, name
        scored = [reward for reward in rewards(result) if reward is not None]
        # Those who are lost while others, who were scored with them, are over already keep their own grade.
        late = scored.count(0.5)
        assert len(set(scored) - {0.5}) == len(scored) - late, name
        assert result.together is (late == 0), name
        assert len(scored) >= (6 if terms.replace else 5), name
    rollouts = sum(len(result.rollouts) + len(result.replaced) for result in results)
    assert audit.ok and audit.settled == rollouts + 1
