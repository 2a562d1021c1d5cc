"""What the tests of runs inside this process share: a small suite, a run with faults, a look at its ledger.

Runs through the command are played by `command_runner.py`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api import runs as api
from holdwater.core.summary import RunSummary
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.rows import AttemptRow, EventRow, OutcomeRow
from holdwater.rollout.periodic_task import PeriodicTask
from holdwater.testing.faults import StageFault
from holdwater.testing.leaks import count_objects

COUNT = 6
QUICK: dict[str, Any] = {
    "workers": 0,
    "concurrency": COUNT,
    "backoff": 0.01,
    "timeout": 10.0,
    "salvaging": 1.0,
    "closing": 0.5,
    "patience": 1.0,
}


def names(count: int = COUNT) -> list[str]:
    return [f"i{n}" for n in range(count)]


def numbered(count: int = COUNT) -> Callable[[], Iterator[hw.Instance]]:
    """Instances with a file and a set-up command, so that every stage of an attempt is reached."""

    def instances() -> Iterator[hw.Instance]:
        for name in names(count):
            yield hw.Instance(id=name, files={"given.txt": name}, setup="echo ready > setup.txt")

    return instances


async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
    await sandbox.write("made.txt", instance.id)
    return instance.id


async def grade(instance: hw.Instance, sandbox: hw.Sandbox, answer: str | None) -> bool:
    """It passes by the work that was left, whatever was answered."""
    try:
        return (await sandbox.read("made.txt")).decode() == instance.id
    except FileNotFoundError:
        return False


def suite(**parts: Any) -> hw.Suite:
    return hw.Suite(**{"name": "numbered", "instances": numbered(), "grade": grade, **parts})


def play(
    out: Path,
    suite: hw.Suite,
    agent: Any = solve,
    *,
    fault: StageFault | None = None,
    observers: Sequence[Callable[[hw.Verdict], None]] = (),
    duties: Sequence[PeriodicTask] = (),
    **options: Any,
) -> RunSummary:
    """Run in this process, quickly; what the fault holds up is let go at the end."""
    prepared = api.prepare(suite, agent, out, {**QUICK, **options})  # type: ignore[typeddict-item]
    enclose = fault.enclose if fault is not None else None

    async def conduct() -> RunSummary:
        try:
            return await api.start(prepared, observers=observers, periodic_tasks=duties, enclose=enclose)
        finally:
            if fault is not None:
                fault.release()
                await left_behind_is_gone()

    return asyncio.run(conduct())


async def left_behind_is_gone(seconds: float = 5.0) -> None:
    """Give what a run left behind the time to end on its loop, now that nothing holds it up."""
    until = time.monotonic() + stretch(seconds)
    while (
        gc.collect() >= 0
        and "holdwater.rollout.attempt_state.AttemptState" in count_objects()
        and time.monotonic() < until
    ):
        await asyncio.sleep(0.05)


def outcomes(out: Path) -> dict[str, OutcomeRow]:
    with LedgerReader(out) as reader:
        return {row.instance: row for row in reader.outcomes()}


def kinds(out: Path) -> dict[str, str]:
    return {name: row.kind for name, row in outcomes(out).items()}


def attempts(out: Path, instance: str | None = None) -> list[AttemptRow]:
    with LedgerReader(out) as reader:
        return [row for row in reader.attempts() if instance is None or row.instance == instance]


def events(out: Path, kind: str) -> list[EventRow]:
    with LedgerReader(out) as reader:
        return [row for row in reader.events(10_000) if row.kind == kind]


def all_passed(count: int = COUNT) -> dict[str, str]:
    return dict.fromkeys(names(count), "passed")


def failed(out: Path) -> list[AttemptRow]:
    """The attempts that ended with a failure."""
    return [row for row in attempts(out) if row.verdict is not None and row.verdict.failure is not None]


def whole(out: Path) -> None:
    """Every instance is settled, once."""
    found = hw.audit(out)
    assert found.ok, found
