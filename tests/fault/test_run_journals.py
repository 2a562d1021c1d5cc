"""A verdict in a worker's journal counts, whatever dies before its report and whatever damages the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.command_runner import Scene, lines
from tests.host_harness import hosting, suite
from tests.ledger_runs import new_run, passed, planned

from holdwater.core.records import Attempt, AttemptFailure, FailureOrigin, Verdict
from holdwater.ledger.audit import audit_run
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.journal import Journal, RecoveryResult, recover
from holdwater.ledger.ledger import Ledger
from holdwater.rollout.worker_protocol import WorkerBroken

SUITE = """
import os
import signal
from pathlib import Path

import holdwater as hw
from holdwater.ledger.journal import Journal

HERE = Path(HERE)
sync = Journal.sync


def die_before_the_report(self):
    sync(self)
    try:
        (HERE / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


Journal.sync = die_before_the_report


def instances():
    for n in range(3):
        yield hw.Instance(id=f"i{n}")


async def solve(instance, sandbox, model):
    fd = os.open(HERE / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{instance.id}\\n".encode())
    os.close(fd)


async def grade(instance, sandbox, answer):
    return True


suite = hw.Suite(name="journals", instances=instances, grade=grade)
"""


def test_a_verdict_counts_whose_worker_died_before_its_report(scene: Scene) -> None:
    scene.suite(SUITE, HERE=str(scene.place))

    command = scene.run(*scene.agent(), "--concurrency", "1", "--workers", "1")

    assert command.wait(90) == 0, command
    assert command.document()["outcomes"] == {"passed": 3}
    assert command.document()["events"] == {"worker.lost": 1}
    assert sorted(lines(scene.place / "trace")) == ["i0\n", "i1\n", "i2\n"], "an agent ran twice"
    assert {row["kind"] for row in scene.export("attempts")} == {"passed"}
    scene.assert_whole(3)


async def test_a_verdict_whose_journal_cannot_be_synced_is_not_reported(tmp_path: Path) -> None:
    async def act(instance: object, sandbox: object, model: object) -> None:
        return

    async with hosting(tmp_path, suite(), act, policy=None) as hosted:
        # given a file that takes every write and refuses every fsync
        (tmp_path / "run" / "exchanges" / "worker-7-1.journal").symlink_to(os.devnull)

        hosted.start()

        broken = await hosted.until(WorkerBroken, lambda said: True)
    assert "worker-7-1.journal" in broken.message
    assert hosted.settled() == set()


async def damaged(place: Path, count: int, bad: int) -> RunDirectory:
    """A dead conductor's run of `count` journaled attempts; a bit of verdict `bad` is flipped."""
    directory = new_run(place)
    async with Ledger(directory) as gone:
        await gone.plan([planned(f"i{n}") for n in range(count)])
        journal = Journal(directory, worker=1, token=gone.token)
        for number in range(1, count + 1):
            await gone.begin_attempt(Attempt(id=number, instance=number, sample=0, number=1))
            at = journal.path.stat().st_size if journal.path.exists() else 0
            journal.append(passed(number, gone.token))
            if number == bad:
                flipped = at + 20
        journal.close()
    content = bytearray(journal.path.read_bytes())
    content[flipped] ^= 1
    journal.path.write_bytes(content)
    return directory


@pytest.mark.parametrize("bad", [1, 2, 3])
async def test_the_good_records_of_a_damaged_journal_count(tmp_path: Path, bad: int) -> None:
    directory = await damaged(tmp_path, 3, bad)
    before = audit_run(tmp_path)
    assert before.corrupt == 1
    assert any("worker-1-1.journal" in problem and "damaged" in problem for problem in before.problems)

    async with Ledger(directory) as ledger:
        assert await recover(ledger, directory) == RecoveryResult(verdicts=2, interrupted=1)
        assert (await ledger.counts()).verdicts == {"passed": 2, "interrupted": 1}
        assert (await ledger.counts()).events == {"journal.damaged": 1}
    assert audit_run(tmp_path).corrupt == 0, "every attempt has a verdict, and the bad one runs again"


async def test_a_torn_tail_of_a_journal_is_no_damage(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    journal = Journal(directory, worker=1, token=1)
    failure = AttemptFailure(where=FailureOrigin.AGENT, kind="error", message="m" * 500)
    for number in (1, 2):
        journal.append(Verdict(attempt=number, token=1, failure=failure))
    journal.close()
    for cut in range(1, 60):
        os.truncate(journal.path, journal.path.stat().st_size - 1)
        assert audit_run(tmp_path).corrupt == 0, f"{cut} bytes are missing"
