"""kill -9, a full disk and a conductor that is gone: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.ledger_runs import SOURCE, exchange, new_run, passed, planned, settle_all

from holdwater.core.errors import LedgerFailed, RunFailed
from holdwater.core.records import Attempt, FailureOrigin, ModelUsage
from holdwater.core.summary import RunGauge
from holdwater.ledger.audit import audit_run
from holdwater.ledger.blobs import BlobStore
from holdwater.ledger.exchanges import AttemptLog, read_exchanges
from holdwater.ledger.journal import Journal, RecoveryResult, list_journals, recover
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader

CONDUCTOR = """
import asyncio, itertools, os, sys
from pathlib import Path
from holdwater.core.records import Attempt, Outcome
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger
from tests.ledger_runs import passed, planned

async def main():
    directory = RunDirectory.open(sys.argv[1])
    with directory.lock():
        async with Ledger(directory) as ledger:
            numbers = itertools.count(await ledger.next_attempt())
            async def work():
                for number in numbers:
                    [row] = await ledger.plan([planned(f"i{ledger.token}-{number}")])
                    await ledger.begin_attempt(Attempt(id=number, instance=row, sample=0, number=1))
                    assert await ledger.settle(passed(number, ledger.token))
                    os.write(1, b"%d\\n" % number)
                    await ledger.close_sample(
                        Outcome(instance=row, sample=0, attempt=number, kind="passed", score=1.0))
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(work())
asyncio.run(main())
"""


def test_every_acknowledged_verdict_survives_kill_9(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parents[2]}"}
    acknowledged: set[int] = set()
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CONDUCTOR, str(tmp_path)], stdout=subprocess.PIPE, env=environment
        )
        with child:
            assert child.stdout is not None
            for _ in range(random.randrange(1, 400)):
                acknowledged.add(int(child.stdout.readline()))
            child.kill()
            acknowledged |= {int(line) for line in child.stdout.read().splitlines()}

    with LedgerReader(directory) as reader:
        settled = {row.attempt for row in reader.attempts() if row.verdict is not None}
        tallied = reader.counts()
    assert acknowledged and acknowledged <= settled
    assert tallied.verdicts == {"passed": len(settled)}, "the tally is in step with the rows"
    found = audit_run(tmp_path)
    assert (found.duplicated, found.corrupt) == (0, 0)


async def test_what_a_gone_conductor_left_is_settled(tmp_path: Path) -> None:
    # given three attempts: committed, journalled but not committed, and cut short after two exchanges
    directory = new_run(tmp_path)
    async with Ledger(directory) as gone:
        await gone.plan([planned("a"), planned("b"), planned("c")])
        for id_ in (1, 2, 3):
            await gone.begin_attempt(Attempt(id=id_, instance=id_, sample=0, number=1))
        journal = Journal(directory, worker=0, token=gone.token)
        for id_ in (1, 2):
            journal.append(passed(id_, gone.token))
        await gone.settle(passed(1, gone.token))
        log = AttemptLog(directory, 3)
        log.append(exchange(1))
        log.append(exchange(2))
        os.truncate(log.path, log.path.stat().st_size - 1)
        journal.close()

    async with Ledger(directory) as ledger:
        found = await recover(ledger, directory)

        assert found == RecoveryResult(verdicts=1, interrupted=1)
        assert await ledger.list_unsettled() == []
        assert (await ledger.counts()).verdicts == {"passed": 2, "interrupted": 1}
        assert (await ledger.counts()).usage == ModelUsage(requests=1, input_tokens=5, output_tokens=2)
        assert list_journals(directory) == []
        assert await recover(ledger, directory) == RecoveryResult()
    with LedgerReader(directory) as reader:
        verdict = reader.verdict(3)
    assert verdict is not None and verdict.failure is not None
    assert (verdict.failure.where, verdict.exchanges) == (FailureOrigin.INTERRUPTED, 1)


async def test_a_damaged_segment_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as gone:
        await gone.plan([planned("a")])
        await gone.begin_attempt(Attempt(id=1, instance=1, sample=0, number=1))
        log = AttemptLog(directory, 1)
        for number in (1, 2):
            log.append(exchange(number))
    content = bytearray(log.path.read_bytes())
    content[20] ^= 1
    log.path.write_bytes(content)

    async with Ledger(directory) as ledger:
        assert await recover(ledger, directory) == RecoveryResult(interrupted=1)
        assert (await ledger.counts()).events == {"segment.damaged": 1}


@pytest.mark.parametrize("step", [86_400.0, -86_400.0])
async def test_a_clock_that_is_set_changes_no_spent_time(tmp_path: Path, step: float) -> None:
    # given a conductor that runs for 40 s, in whose middle the wall clock is set
    directory = new_run(tmp_path)
    wall, ran = [1000.0], [0.0]
    async with Ledger(directory, now=lambda: wall[0], clock=lambda: ran[0]) as gone:
        for seconds, jump in ((20.0, step), (20.0, 0.0)):
            wall[0] += seconds + jump
            ran[0] += seconds
            await gone.add_gauge(RunGauge(at=wall[0]))

    async with Ledger(directory, now=lambda: wall[0]) as ledger:
        assert await ledger.earlier_seconds() == 40.0
    with LedgerReader(directory) as reader:
        assert 40.0 <= reader.summary().seconds < 100.0


# A disk that is full.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False)
    if mounted.returncode != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("a file system that can be filled is needed: mounting a tmpfs failed")
        pytest.skip("cannot mount a tmpfs: needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """Take all space but `leave` bytes."""
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    filler = place / "filler"
    filler.write_bytes(bytes(free - leave))
    return filler


async def test_a_full_disk_fails_the_ledger_for_good_and_loses_nothing(small_disk: Path) -> None:
    directory = new_run(small_disk / "run")
    acknowledged = []
    async with Ledger(directory) as ledger:
        await settle_all(ledger, ["first"])
        filler = fill(small_disk, leave=64 << 10)
        with pytest.raises(LedgerFailed, match="full") as stopped:
            for number in range(2, 1000):
                [row] = await ledger.plan([planned(f"i{number}", os.urandom(3000))])
                await ledger.begin_attempt(Attempt(id=number, instance=row, sample=0, number=1))
                await ledger.settle(passed(number, ledger.token))
                acknowledged.append(number)
        assert "make space" in stopped.value.hint
        filler.unlink()
        with pytest.raises(LedgerFailed):
            await ledger.add_gauge(RunGauge(at=1.0))

    # when space is made the run goes on, with every acknowledged verdict
    async with Ledger(directory) as ledger:
        await recover(ledger, directory)
        with LedgerReader(directory) as reader:
            settled = {a.attempt for a in reader.attempts() if a.verdict and a.verdict.failure is None}
        assert acknowledged and settled == {1, *acknowledged}
        await settle_all(ledger, ["after"])


async def test_a_full_disk_leaves_whole_exchanges_and_no_half_blob(small_disk: Path) -> None:
    directory = new_run(small_disk / "run")
    log = AttemptLog(directory, 1)
    filler = fill(small_disk, leave=48 << 10)
    message = b'"%s"' % os.urandom(10_000).hex().encode()

    with closing(log):
        with pytest.raises(RunFailed, match="No space") as stopped:
            for number in range(1, 1000):
                log.append(exchange(number, [message]))
        with pytest.raises(RunFailed):
            log.blob(os.urandom(60_000))
        kept = log.count
        filler.unlink()
        log.append(exchange(kept + 1))

    assert stopped.value.kind == "disk"
    assert kept > 0
    assert [e.number for e in read_exchanges(directory, 1)] == list(range(1, kept + 2))
    assert [path for path in directory.blobs.rglob("*") if path.is_file()] == []


def test_a_run_whose_creation_met_a_full_disk_can_be_created_again(small_disk: Path) -> None:
    filler = fill(small_disk, leave=32 << 10)
    with pytest.raises(LedgerFailed):
        new_run(small_disk / "run")
    filler.unlink()

    assert new_run(small_disk / "run").read_config().id == "run-1"


async def test_a_run_on_a_read_only_disk_can_be_audited(small_disk: Path) -> None:
    async with Ledger(new_run(small_disk / "run")) as ledger:
        await settle_all(ledger, ["one"])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    assert audit_run(small_disk / "run").ok


def test_what_a_killed_writer_left_beside_the_blobs_is_swept(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    name = blobs.put(b"kept")
    (tmp_path / "new" / "123-4").write_bytes(b"half")

    assert blobs.sweep() == 1
    assert blobs.get(name) == b"kept"
