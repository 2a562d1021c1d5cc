"""Tests a suite with its own oracle and with an agent that does nothing, and reports faulty instances.

It makes two real runs, one with each agent, and reads the results from their ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from ..core.authoring import Suite
from ..core.errors import HoldwaterError, RunInterrupted, RunStopped
from ..core.records import Record, Verdict
from ..core.summary import RunSummary
from ..ledger.reader import LedgerReader
from ..ledger.rows import OutcomeRow
from ..run.setup.config import default_directory
from ..run.setup.options import RunOptions
from ..suite.loader import load as load_suite
from . import PreparedRun, prepare, start
from .run_hooks import wait

AGENTS = ("oracle", "nop")
LONGEST_REASON = 500  # characters of a grade's detail


class InstanceFault(Record, frozen=True):
    """A faulty instance and the reason."""

    id: str
    why: str


class Checked(Record, frozen=True):
    """The findings of `check`."""

    suite: str
    instances: int
    good: int  # instances that the oracle passes and `nop` does not
    oracle_failed: tuple[InstanceFault, ...] = ()
    nop_passed: tuple[InstanceFault, ...] = ()
    infrastructure: tuple[InstanceFault, ...] = ()  # instances without a result
    runs: tuple[str, ...] = ()  # the directories of both runs

    @property
    def ok(self) -> bool:
        return self.good == self.instances


def check(suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[RunOptions]) -> Checked:
    """Run `oracle` and `nop` on every instance; return the ones that the oracle fails or `nop` passes."""
    return wait(acheck(suite, out=out, **options))


async def acheck(
    suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[RunOptions]
) -> Checked:
    """The async twin of `check`."""
    prepared = prepare_check(suite, out, options)
    for one in prepared:
        require_finished(await start(one, {}))
    return summarize_check(prepared)


def prepare_check(suite: Suite | str, out: str | Path | None, options: RunOptions) -> tuple[PreparedRun, ...]:
    """Prepare both runs, each in its own directory below `out`."""
    found = load_suite(suite) if isinstance(suite, str) else suite
    place = Path(out) if out is not None else default_directory(f"{found.name}-check")
    options = {**options, "attempts": options.get("attempts") or 1}
    return tuple(prepare(suite, agent, place / agent, options) for agent in AGENTS)


def require_finished(summary: RunSummary) -> RunSummary:
    """Return the summary of a finished run; raise an error if the run did not finish."""
    stopped: type[HoldwaterError] | None = {3: RunInterrupted, 4: RunStopped}.get(summary.exit_status or 0)
    if stopped is not None:
        raise stopped(summary.reason, f"`holdwater show {summary.directory}` shows details")
    return summary


def summarize_check(prepared: Sequence[PreparedRun]) -> Checked:
    """Combine the results of both runs."""
    faults: dict[str, list[InstanceFault]] = {"oracle_failed": [], "nop_passed": [], "infrastructure": []}
    instances = 0
    for agent, one in zip(AGENTS, prepared, strict=True):
        with LedgerReader(one.path) as reader:
            instances = max(instances, reader.counts().planned)
            for kind, fault in _find_faults(reader, agent):
                faults[kind].append(fault)
    bad = {fault.id for found in faults.values() for fault in found}
    return Checked(
        suite=prepared[0].suite.name,
        instances=instances,
        good=instances - len(bad),
        runs=tuple(str(one.path) for one in prepared),
        **{kind: tuple(found) for kind, found in faults.items()},
    )


def _find_faults(reader: LedgerReader, agent: str) -> Iterator[tuple[str, InstanceFault]]:
    wrong, kind = ("failed", "oracle_failed") if agent == "oracle" else ("passed", "nop_passed")
    for row in reader.outcomes():
        verdict = reader.verdict(row.attempt) or Verdict(attempt=row.attempt, token=0)
        if row.kind not in ("passed", "failed"):
            yield "infrastructure", InstanceFault(row.instance, f"{agent}: {row.kind}: {row.failure}")
        elif row.kind == wrong:
            yield kind, InstanceFault(row.instance, _explain_fault(row, verdict))


def _explain_fault(row: OutcomeRow, verdict: Verdict) -> str:
    detail = verdict.grade.detail.strip() if verdict.grade else ""
    said = row.failure or detail[-LONGEST_REASON:]
    return said or f"score {row.score or 0.0:g}"
