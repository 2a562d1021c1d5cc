"""Event-loop lag: measured while it happens, on whatever loop, and kept with its maximum for a whole run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.in_process_run import numbered, play, suite
from tests.ledger_runs import new_run
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.summary import RunGauge
from holdwater.ledger import statements
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader
from holdwater.rollout.process_health import TICK, LoopLag
from holdwater.view.live_display import draw
from holdwater.view.report import render_report

STALL = 0.3


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_stall_is_measured_but_for_a_tick_and_forgotten_when_taken(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def measure() -> None:
        with LoopLag() as lag:
            await asyncio.sleep(3 * TICK)
            time.sleep(STALL)
            await asyncio.sleep(3 * TICK)

            assert STALL - TICK - 0.01 < lag.take() < STALL + stretch(1.0)
            assert lag.take() < STALL - TICK

    run(measure())


async def test_what_a_tick_does_itself_is_lag_too() -> None:
    stalls = iter([STALL])

    with LoopLag(lambda busy: time.sleep(next(stalls, 0.0))) as lag:
        await asyncio.sleep(3 * TICK)

        assert lag.take() > STALL - TICK - 0.01


async def test_a_tick_reports_how_busy_the_loop_was() -> None:
    told: list[float] = []

    with LoopLag(told.append):
        await asyncio.sleep(4 * TICK)
        idle = len(told)
        until = time.thread_time() + 4 * TICK
        while time.thread_time() < until:
            pass
        await asyncio.sleep(2 * TICK)

    assert min(told[:idle]) < 0.2
    assert max(told[idle:]) > 2 * min(told[:idle])


async def test_the_maximum_outlives_its_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "LONGEST_TIMELINE", 10)
    directory = new_run(tmp_path)
    for longest in (0.7, 0.02):  # a conductor each: it is the run's, not theirs
        async with Ledger(directory) as ledger:
            for n in range(30):
                await ledger.add_gauge(RunGauge(at=float(n), lag=longest if n == 1 else 0.0))

    with LedgerReader(directory) as reader:
        assert max(gauge.lag for gauge in reader.gauges()) < 0.7
        assert reader.summary().lag_max == 0.7


def test_a_stall_of_the_conductor_is_in_its_summary_and_report(tmp_path: Path) -> None:
    async def stalls(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        await asyncio.sleep(0.2)
        time.sleep(2 * STALL)
        await asyncio.sleep(1.2)  # into the next reading

    found = play(tmp_path / "run", suite(instances=numbered(1)), stalls)

    assert found.lag_max > STALL
    with LedgerReader(tmp_path / "run") as reader:
        page = draw(render_report(found, reader), 100)
    assert f"{found.lag_max:.2f} s, the longest delay of an event loop" in page
