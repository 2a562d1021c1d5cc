"""The list of runs, and runs that were pruned: many runs at once, and pages that say what is not kept."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked_command import run_forked
from tests.ledger_runs import settle_all
from tests.recorded_conversations import recorded
from tests.viewed_runs import run_async
from tests.wait_bounds import stretch

from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger
from holdwater.viewer.page import PageRequest
from holdwater.viewer.routes import show_page
from holdwater.viewer.run_pool import RunPool

RUNS = 500
QUICK = 2.0  # seconds for all of them on a quiet machine


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    run_async(recorded(tmp_path / "first", chat=True))
    run_async(settle_more(tmp_path / "first"))
    yield tmp_path / "first"


def show(pool: RunPool, route: str, **parts: str) -> tuple[int, str]:
    page = show_page(route, PageRequest(pool, parts, {}))
    return page.status, page.body.decode()


def test_many_runs_are_listed_and_ended_ones_are_kept(run: Path, tmp_path: Path) -> None:
    for number in range(RUNS):
        copy = tmp_path / f"runs/{number:03d}"
        copy.mkdir(parents=True)
        shutil.copy(run / "run.json", copy)
        os.link(run / "ledger.db", copy / "ledger.db")
    shutil.copytree(run, tmp_path / "runs/changed")
    pool = RunPool([tmp_path / "runs"], tmp_path)

    begun = time.monotonic()
    status, page = show(pool, "/")
    first = time.monotonic() - begun

    assert status == 200 and page.count("1 of 1") == len(pool.summaries) == RUNS + 1
    assert first < stretch(QUICK)
    run_async(settle_more(tmp_path / "runs/changed", "second", "third"))
    shutil.rmtree(tmp_path / "runs/007")
    status, page = show(pool, "/")
    assert status == 200 and page.count("1 of 1") == RUNS - 1 and page.count("3 of 3") == 1
    assert len(pool.summaries) == RUNS  # all of them have ended


async def settle_more(path: Path, *names: str) -> None:
    """A conductor that settles further instances and ends its run."""
    async with Ledger(RunDirectory.open(path)) as ledger:
        await settle_all(ledger, names)
        await ledger.finish("finished", "", 0)


def test_pages_of_a_pruned_run_say_what_is_not_kept(run: Path, tmp_path: Path) -> None:
    pruned = run_forked("prune", str(run), "--keep", "none", "--compress", "--unfinished", "--yes")
    assert pruned.returncode == 0, pruned.stderr
    shutil.copytree(run, tmp_path / "copied")
    pool = RunPool([run, tmp_path / "copied"], tmp_path)

    for found in pool.list_runs():
        status, page = show(pool, "/runs/{run}/instances/{instance}", run=found.id, instance="chat")
        assert status == 200 and "its files are not kept: --keep none" in page
        status, page = show(pool, "/runs/{run}/attempts/{attempt}/transcript", run=found.id, attempt="1")
        assert status == 404 and "the exchanges of the attempt are not kept" in page
