"""Summaries, audits and exports: right while a conductor writes, flat in memory, and not fooled."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import os
import sqlite3
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from tests.ledger_runs import exchange, failed, new_run, passed, planned, settle_all

from holdwater.core.errors import BadInput
from holdwater.core.records import Attempt, FailureOrigin, Outcome
from holdwater.export.formats import export_run
from holdwater.gateway.media import extract_media
from holdwater.ledger.audit import audit_run
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader

IMAGE = "data:image/png;base64," + base64.b64encode(os.urandom(6000)).decode()


async def recorded_run(path: Path) -> RunDirectory:
    """One instance with two exchanges and an image, finished."""
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        await ledger.plan([planned("=cmd()")])
        await ledger.begin_attempt(Attempt(id=1, instance=1, sample=0, number=1))
        log = AttemptLog(directory, 1)
        message = json.dumps({"role": "user", "content": IMAGE}, indent=1).encode()
        log.append(exchange(1, [extract_media(message, log.blob)]))
        log.append(exchange(2, keep=1))
        log.close()
        await ledger.settle(passed(1, ledger.token, exchanges=2))
        await ledger.close_sample(Outcome(instance=1, sample=0, attempt=1, kind="passed", score=1.0))
        await ledger.finish("finished", "", 0)
    return directory


def lines(path: Path, what: str) -> list[dict[str, object]]:
    out = io.BytesIO()
    export_run(path, what, "jsonl", out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


# Reading.


async def test_a_reader_sees_what_was_committed_while_the_conductor_writes(tmp_path: Path) -> None:
    directory = new_run(tmp_path, samples=2)
    with LedgerReader(tmp_path) as reader:
        assert reader.summary().state == "unfinished"
        with directory.lock():
            async with Ledger(directory) as ledger:
                await settle_all(ledger, ["one"])
                await ledger.note("worker.lost", "pid 7")
                await ledger.set_total(10)

                summary = reader.summary()
                assert (summary.state, summary.planned, summary.settled, summary.total) == (
                    "running",
                    2,
                    1,
                    10,
                )
                assert summary.events == {"worker.lost": 1}
                await ledger.finish("interrupted", "SIGINT", 3)
        summary = reader.summary()
        assert (summary.state, summary.reason, summary.exit_status) == ("interrupted", "SIGINT", 3)


async def test_a_conductor_that_is_gone_leaves_an_unfinished_run(tmp_path: Path) -> None:
    clock = iter(range(100, 1000, 5))
    ran = iter(range(0, 1000, 5))
    ledger = Ledger(new_run(tmp_path), now=lambda: float(next(clock)), clock=lambda: float(next(ran)))
    async with ledger:
        await settle_all(ledger, ["one"])

    with LedgerReader(tmp_path) as reader:
        summary = reader.summary()
        assert (summary.state, summary.ended, summary.started) == ("unfinished", None, 100.0)
        assert 0 < summary.seconds < 100, "the time until it was last seen"


async def test_rows_tell_what_became_of_each_sample(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path)) as ledger:
        await settle_all(ledger, ["one"])
        [row] = await ledger.plan([planned("two")])
        for number, verdict in enumerate(
            [failed(2, 0, FailureOrigin.MODEL), failed(3, 0, FailureOrigin.MODEL)], 1
        ):
            await ledger.begin_attempt(Attempt(id=verdict.attempt, instance=row, sample=0, number=number))
            await ledger.settle(msgspec.structs.replace(verdict, token=ledger.token))
        await ledger.close_sample(
            Outcome(instance=row, sample=0, attempt=3, kind="model", score=None, where=FailureOrigin.MODEL)
        )

    with LedgerReader(tmp_path) as reader:
        one, two = reader.outcomes()
        assert (one.instance, one.kind, one.attempts, one.usage.input_tokens) == ("one", "passed", 1, 0)
        assert (two.kind, two.where, two.failure, two.attempts, two.attempt) == (
            *("model", FailureOrigin.MODEL, "it broke", 2, 3),
        )
        found = reader.find_instance("two")
        assert found is not None and [a.attempt for a in reader.attempts(found.id)] == [2, 3]
        assert [a.attempt for a in reader.attempts()] == [1, 2, 3]
        assert reader.find_instance("three") is None


async def test_many_outcomes_are_paged_in_order(tmp_path: Path) -> None:
    async with Ledger(new_run(tmp_path, samples=2)) as ledger:
        rows = await ledger.plan([planned(f"i{n}") for n in range(300)])

        async def close(row: int, sample: int) -> None:
            attempt = 2 * row + sample
            await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=sample, number=1))
            await ledger.settle(passed(attempt, ledger.token))
            await ledger.close_sample(
                Outcome(instance=row, sample=sample, attempt=attempt, kind="passed", score=1.0)
            )

        async with asyncio.TaskGroup() as group:
            for row in reversed(rows):
                group.create_task(close(row, 1))
                group.create_task(close(row, 0))

    with LedgerReader(tmp_path) as reader:
        assert [(o.row, o.sample) for o in reader.outcomes()] == [(r, s) for r in rows for s in (0, 1)]


# Audit.


async def test_an_intact_run_passes_its_audit(tmp_path: Path) -> None:
    await recorded_run(tmp_path)

    found = audit_run(tmp_path)

    assert (found.planned, found.settled, found.lost, found.duplicated, found.corrupt) == (1, 1, 0, 0, 0)
    assert found.ok and found.problems == ()
    assert b'"lost":0' in msgspec.json.encode(found), "a zero is printed too"


@pytest.mark.parametrize("state", ["finished", "interrupted"])
async def test_a_sample_without_an_outcome_is_lost_in_a_finished_run_alone(
    tmp_path: Path, state: str
) -> None:
    async with Ledger(new_run(tmp_path, samples=2)) as ledger:
        await settle_all(ledger, ["one"])
        await ledger.plan([planned("two")])
        await ledger.finish(state, "", 0)

    found = audit_run(tmp_path)

    assert (found.planned, found.settled, found.lost + found.unfinished, found.ok) == (4, 1, 3, False)
    assert (found.lost, found.sound) == ((3, False) if state == "finished" else (0, True))
    if state == "finished":
        assert "without an outcome: `two`" in found.problems
    else:
        assert found.problems == () and "not run yet: `two`" in found.notes
        assert any("holdwater resume" in note for note in found.notes)


async def test_a_run_in_progress_is_not_ok_and_lists_its_open_samples(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    with directory.lock():
        async with Ledger(directory) as ledger:
            await ledger.plan([planned("one")])

            found = audit_run(tmp_path)

    assert not found.ok
    assert (found.unfinished, found.problems) == (1, ())
    assert found.notes == ("not run yet: 1 samples; the run is still running", "not run yet: `one`")


async def test_damage_to_any_file_is_found(tmp_path: Path) -> None:
    directory = await recorded_run(tmp_path)
    segment = directory.exchanges / "0" / "1.seg"
    [blob] = [path for path in directory.blobs.rglob("*") if path.is_file()]
    for path in (segment, blob):
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b""):
            path.write_bytes(damaged)
            found = audit_run(tmp_path)
            assert (found.corrupt, found.ok) == (1, False), (path, len(damaged))
        path.write_bytes(whole)
    assert audit_run(tmp_path).ok


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE attempt SET verdict = x'00ff'",
        "UPDATE tally SET value = 7 WHERE key = 'planned'",
        "UPDATE outcome SET attempt = 99",
        "UPDATE attempt SET settled = NULL, verdict = NULL",
    ],
)
async def test_a_ledger_that_was_edited_is_found(tmp_path: Path, statement: str) -> None:
    directory = await recorded_run(tmp_path)
    with sqlite3.connect(directory.database) as connection:
        connection.execute(statement)
    connection.close()

    assert not audit_run(tmp_path).ok
    assert audit_run(tmp_path).corrupt >= 1


async def test_a_ledger_that_cannot_be_read_fails_the_audit(tmp_path: Path) -> None:
    directory = await recorded_run(tmp_path)
    content = bytearray(directory.database.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    directory.database.write_bytes(content)

    found = audit_run(tmp_path)

    assert found.corrupt >= 1 and not found.ok


# Export.


async def test_exchanges_are_exported_with_their_media_a_line_each(tmp_path: Path) -> None:
    await recorded_run(tmp_path)

    first, second = lines(tmp_path, "exchanges")

    assert (first["instance"], first["number"], second["parent"], second["keep"]) == ("=cmd()", 1, 1, 1)
    assert first["append"] == [{"role": "user", "content": IMAGE}]
    used = {"requests": 1, "input_tokens": 5, "cached_tokens": 0, "written_tokens": 0, "output_tokens": 2}
    used["reasoning_tokens"] = 0
    assert first["usage"] == {**used, "cost": None}
    assert (second["head"], second["reply"]) == (None, {"id": "r"})


async def test_rows_are_exported_flat(tmp_path: Path) -> None:
    await recorded_run(tmp_path)

    [outcome] = lines(tmp_path, "outcomes")
    [attempt] = lines(tmp_path, "attempts")

    assert (outcome["instance"], outcome["kind"], outcome["output_tokens"]) == ("=cmd()", "passed", 4)
    assert (attempt["kind"], attempt["passed"], attempt["where"], attempt["exchanges"]) == (
        "passed",
        True,
        None,
        2,
    )


@pytest.mark.parametrize("what", ["outcomes", "attempts"])
async def test_a_spreadsheet_executes_nothing_from_an_export(tmp_path: Path, what: str) -> None:
    await recorded_run(tmp_path)
    out = io.BytesIO()

    export_run(tmp_path, what, "csv", out)

    [row] = csv.DictReader(io.StringIO(out.getvalue().decode()))
    assert row["instance"] == "'=cmd()"
    assert row["kind"] == "passed"


@pytest.mark.parametrize(("what", "form"), [("exchanges", "csv"), ("results", "jsonl"), ("outcomes", "xml")])
async def test_an_export_that_cannot_be_is_refused(tmp_path: Path, what: str, form: str) -> None:
    await recorded_run(tmp_path)

    with pytest.raises(BadInput):
        export_run(tmp_path, what, form, io.BytesIO())


async def test_export_and_audit_hold_one_exchange_at_a_time(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    size = 1 << 20
    async with Ledger(directory) as ledger:
        await ledger.plan([planned("big")])
        for id_ in range(1, 5):
            await ledger.begin_attempt(Attempt(id=id_, instance=1, sample=0, number=id_))
            log = AttemptLog(directory, id_)
            for number in range(1, 11):
                log.append(exchange(number, [b'"%s"' % base64.b64encode(os.urandom(size * 3 // 4))]))
            log.close()
            await ledger.settle(passed(id_, ledger.token, exchanges=10))
        await ledger.close_sample(Outcome(instance=1, sample=0, attempt=1, kind="passed", score=1.0))

    tracemalloc.start()
    with (tmp_path / "out").open("wb") as out:
        export_run(tmp_path, "exchanges", "jsonl", out)
    assert audit_run(tmp_path).ok
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (tmp_path / "out").stat().st_size > 40 * size
    assert peak < 8 * size
