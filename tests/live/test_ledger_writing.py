"""The ledger: exactly once, fenced, one bad operation fails alone, and a resume finds what it needs."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from pathlib import Path

import msgspec
import pytest
from tests.ledger_runs import failed, new_run, passed, planned, settle_all

from holdwater.core.errors import BadInput, DuplicateInstance, LedgerCorrupt, LedgerFailed
from holdwater.core.policy import PlannerPolicy, decide
from holdwater.core.records import Attempt, AttemptFailure, FailureOrigin, Grade, ModelUsage, Outcome, Verdict
from holdwater.core.summary import RunGauge
from holdwater.ledger import schema, statements
from holdwater.ledger.ledger import Ledger, SuitePass
from holdwater.ledger.reader import LedgerReader


async def begun(ledger: Ledger, name: str = "one") -> int:
    [row] = await ledger.plan([planned(name)])
    await ledger.begin_attempt(Attempt(id=row, instance=row, sample=0, number=1))
    return row


async def test_an_attempt_is_settled_exactly_once(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        attempt = await begun(ledger)

        async with asyncio.TaskGroup() as group:
            tries = [
                group.create_task(ledger.settle(passed(attempt, ledger.token, exchanges=2)))
                for _ in range(20)
            ]

        assert sorted(t.result() for t in tries) == [False] * 19 + [True]
        assert (await ledger.counts()).verdicts == {"passed": 1}
        assert (await ledger.counts()).usage == ModelUsage(requests=2, input_tokens=10, output_tokens=4)


async def test_a_verdict_with_the_token_of_another_conductor_is_fenced(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as first:
        await first.plan([planned("one")])
    async with Ledger(directory) as second:
        await second.begin_attempt(Attempt(id=1, instance=1, sample=0, number=1))

        assert second.token == first.token + 1
        assert await second.settle(passed(1, first.token)) is False
        assert await second.settle(passed(1, second.token)) is True


async def test_a_conductor_that_was_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as old:
        attempt = await begun(old)
        async with Ledger(directory) as new:
            with pytest.raises(LedgerFailed, match="taken the run over"):
                await old.settle(passed(attempt, old.token))
            assert await new.list_unsettled() == [(attempt, old.token)]


async def test_an_operation_fails_alone(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        await begun(ledger)
        twice = ledger.begin_attempt(Attempt(id=9, instance=1, sample=0, number=1))
        nowhere = ledger.begin_attempt(Attempt(id=10, instance=77, sample=0, number=1))
        good = ledger.begin_attempt(Attempt(id=11, instance=1, sample=1, number=1))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_caught(call)) for call in (twice, good, nowhere)]

        assert [type(t.result()) for t in tasks] == [LedgerFailed, type(None), LedgerFailed]
        assert [id_ for id_, _ in await ledger.list_unsettled()] == [1, 11]
        assert (await ledger.counts()).attempts == 2


async def _caught(call: object) -> BaseException | None:
    try:
        await call  # type: ignore[misc]
    except LedgerFailed as e:
        return e
    return None


async def test_a_duplicate_id_names_both_places_and_keeps_what_came_before(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        items = [planned("a", place="s.jsonl:1"), planned("b"), planned("a", place="s.jsonl:3"), planned("c")]

        with pytest.raises(BadInput, match=r"duplicate id `a`: first in s\.jsonl:1, again in s\.jsonl:3"):
            await ledger.plan(items)

        assert await ledger.find_known("b") is not None
        assert await ledger.find_known("c") is None
        assert (await ledger.counts()).planned == 2


async def test_a_cancelled_caller_leaves_its_operation_whole(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        attempt = await begun(ledger)
        task = asyncio.ensure_future(ledger.settle(passed(attempt, ledger.token)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

        assert await ledger.list_unsettled() == []
        assert await ledger.settle(passed(attempt, ledger.token)) is False


async def test_leaving_commits_what_waits_and_then_refuses(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as ledger:
        waiting = asyncio.ensure_future(ledger.note("last"))
        await asyncio.sleep(0)
    await waiting

    with pytest.raises(LedgerFailed, match="closed"):
        await ledger.note("late")
    with LedgerReader(directory) as reader:
        assert [event.kind for event in reader.events()] == ["last"]


async def test_more_callers_than_the_queue_holds_all_get_through(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        async with asyncio.TaskGroup() as group:
            for n in range(5000):
                group.create_task(ledger.note("tick", str(n)))

        assert (await ledger.counts()).events == {"tick": 5000}


async def test_a_new_outcome_takes_the_place_of_the_old_in_every_count(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as ledger:
        await settle_all(ledger, ["one", "two"])
        await ledger.close_sample(Outcome(instance=1, sample=0, attempt=1, kind="failed", score=0.25))

        found = await ledger.counts()
        assert (found.settled, found.outcomes, found.score) == (2, {"passed": 1, "failed": 1}, 0.625)

        await ledger.close_sample(Outcome(instance=2, sample=0, attempt=2, kind="model", score=None))
        found = await ledger.counts()
        assert (found.settled, found.outcomes, found.score) == (2, {"model": 1, "failed": 1}, 0.25)


@pytest.mark.parametrize("score", [math.nan, math.inf])
async def test_a_verdict_that_cannot_be_counted_is_still_kept(tmp_path: Path, score: float) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        attempt = await begun(ledger)
        odd = Verdict(
            attempt=attempt,
            token=ledger.token,
            grade=Grade(passed=False, score=score),
            failure=AttemptFailure(
                where=FailureOrigin.AGENT, kind="exception", message="half a character: \udcff"
            ),
            usage=ModelUsage(input_tokens=2**62),
        )

        assert await ledger.settle(odd) is True
        await ledger.close_sample(Outcome(instance=1, sample=0, attempt=attempt, kind="failed", score=score))
        assert (await ledger.counts()).score is None

    with LedgerReader(tmp_path) as reader:
        verdict = reader.verdict(attempt)
        assert verdict is not None and verdict.failure is not None
        assert verdict.failure.message == "half a character: \\udcff"


async def test_a_resume_tells_new_changed_missing_and_duplicate(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as first:
        await settle_all(first, ["same"])
        await first.plan([planned("changed", b"old"), planned("gone")])
    async with Ledger(directory) as ledger:
        items = [planned("same"), planned("changed", b"new"), planned("new")]
        same, changed, new = await ledger.mark_seen(items, SuitePass.COMPARE)

        assert same is not None and (same.id, same.closed) == (1, 1)
        assert changed is not None and changed.digest == b"old"
        assert new is None
        assert await ledger.find_missing() == ["gone"]
        assert await ledger.mark_seen([planned("same", place="elsewhere")], SuitePass.COMPARE) == [None]
        await ledger.mark_seen([planned("gone")], SuitePass.COMPARE)
        assert await ledger.find_missing() == []
        row = await ledger.replace_instance(
            msgspec.structs.replace(planned("changed", b"new"), payload=b"newer")
        )
        assert await ledger.payload(row) == b"newer"


async def test_planning_again_adds_new_instances_alone_and_refuses_duplicates(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as first:
        rows = await first.plan([planned("a"), planned("b", b"payload")])
    async with Ledger(directory) as second:
        await second.mark_seen([planned("a"), planned("b")], SuitePass.COMPARE)
        [new] = await second.plan([planned("b", b"payload"), planned("c"), planned("a")])
        assert new not in rows
        with pytest.raises(DuplicateInstance, match="duplicate id `b`") as refused:
            await second.plan([planned("d"), planned("b"), planned("e")])
        known = await second.find_known("d")
        assert known is not None and refused.value.rows == (known.id,)


async def test_an_open_sample_is_continued_where_it_stood(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        await settle_all(ledger, ["closed"])
        [row] = await ledger.plan([planned("open")])
        story = [
            (1, 1, failed(2, 0, FailureOrigin.AGENT)),
            (2, 1, failed(3, 0, FailureOrigin.MODEL)),
            (2, 1, failed(4, 0, FailureOrigin.WORKER, "lost")),
            (2, 2, failed(5, 0, FailureOrigin.RESOURCE)),
            (2, 4, failed(6, 0, FailureOrigin.INTERRUPTED)),
        ]
        for number, (round_, scale, verdict) in enumerate(story, 1):
            attempt = Attempt(
                id=verdict.attempt, instance=row, sample=0, number=number, round=round_, scale=scale
            )
            await ledger.begin_attempt(attempt)
            await ledger.settle(msgspec.structs.replace(verdict, token=ledger.token))

        [standing, other] = [s async for s in ledger.open_samples(2) if s.instance == row]

        assert (standing.sample, other.sample, other.number) == (0, 1, 0)
        assert (standing.number, standing.round, standing.retries, standing.scale) == (5, 2, 2, 4)
        assert standing.losses == 1
        assert standing.last is None, "an interrupted attempt is simply tried again"
        assert standing.best is not None and standing.best.attempt == 2, "a resource failure is no zero yet"


async def test_a_verdict_that_nothing_followed_on_is_given_back(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        attempt = await begun(ledger)
        await ledger.settle(failed(attempt, ledger.token, FailureOrigin.MODEL))

        [standing] = [s async for s in ledger.open_samples(1)]

        assert standing.last is not None and standing.last.where is FailureOrigin.MODEL
        following = decide(standing.last, standing.spent, PlannerPolicy(concurrency=1, retries=1))
        assert following is not None and following.retries == 1
        assert decide(standing.last, standing.spent, PlannerPolicy(concurrency=1, retries=0)) is None


async def test_open_samples_are_paged_without_those_planned_meanwhile(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        await ledger.plan([planned(f"i{n}") for n in range(700)])
        found = []
        async for standing in ledger.open_samples(1):
            if not found:
                await ledger.plan([planned("late")])
            found.append(standing.instance)

        assert found == list(range(1, 701))


async def test_the_timeline_is_thinned_out_and_keeps_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "LONGEST_TIMELINE", 50)
    async with Ledger(new_run(tmp_path)) as ledger:
        for n in range(120):
            await ledger.add_gauge(RunGauge(at=float(n)))

    with LedgerReader(tmp_path) as reader:
        times = [gauge.at for gauge in reader.gauges()]
        assert len(times) <= 51 and times == sorted(times) and times[-1] == 119.0
        latest = reader.gauge()
        assert latest is not None and latest.at == 119.0


async def test_an_older_ledger_is_migrated_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as ledger:
        await settle_all(ledger, ["one"])
    newer = (*schema.MIGRATIONS, "CREATE TABLE extra (a); INSERT INTO extra SELECT name FROM instance")
    monkeypatch.setattr(schema.migrate, "__defaults__", (newer,))

    async with Ledger(directory) as ledger:
        assert (await ledger.counts()).settled == 1

    with sqlite3.connect(directory.database) as connection:
        assert connection.execute("SELECT a FROM extra").fetchall() == [("one",)]
        assert connection.execute("PRAGMA user_version").fetchone() == (len(newer),)
    connection.close()


async def test_a_migration_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = new_run(tmp_path)
    broken = (*schema.MIGRATIONS, "CREATE TABLE extra (a); INSERT INTO nowhere VALUES (1)")
    with monkeypatch.context() as patch:
        patch.setattr(schema.migrate, "__defaults__", (broken,))
        with pytest.raises(LedgerFailed, match="nowhere"):
            async with Ledger(directory):
                pass

    async with Ledger(directory) as ledger:
        await settle_all(ledger, ["one"])


async def test_a_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    with sqlite3.connect(directory.database) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()

    for opening in (LedgerReader, _opened):
        with pytest.raises(BadInput, match="newer holdwater") as refused:
            found = opening(directory)
            await found  # type: ignore[misc]
        assert "upgrade" in refused.value.hint


async def _opened(directory: object) -> None:
    async with Ledger(directory):  # type: ignore[arg-type]
        pass


async def test_a_file_that_is_no_ledger_is_called_damaged(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    directory.database.write_bytes(b"not a database, whatever its name says" * 200)

    with pytest.raises(LedgerCorrupt):
        await _opened(directory)
