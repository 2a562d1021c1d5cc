"""A suite held against its own oracle and against nobody at all: what is wrong with its instances.

Two real runs, one with each agent; what became of them is read from their ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from ..core.authoring import Suite
from ..core.errors import HoldwaterError, Interrupted, RunStopped
from ..core.records import Record, Verdict
from ..core.summary import Summary
from ..ledger.reader import OutcomeRow, Reader
from ..run.config import default_directory
from ..run.options import Options
from ..suite.load import load as load_suite
from . import Prepared, prepare, start
from .around import wait

AGENTS = ("oracle", "nop")
LONGEST_REASON = 500  # characters of a grade's own words


class Fault(Record, frozen=True):
    """What is wrong with an instance."""

    id: str
    why: str


class Checked(Record, frozen=True):
    """What `check` found."""

    suite: str
    instances: int
    good: int  # the oracle passes, and nop does not
    oracle_failed: tuple[Fault, ...] = ()
    nop_passed: tuple[Fault, ...] = ()
    infrastructure: tuple[Fault, ...] = ()  # nothing can be said of these
    runs: tuple[str, ...] = ()  # the directories of both runs

    @property
    def ok(self) -> bool:
        return self.good == self.instances


def check(suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[Options]) -> Checked:
    """Run `oracle` and `nop` on every instance; those where the one does not pass, or the other does."""
    return wait(acheck(suite, out=out, **options))


async def acheck(suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[Options]) -> Checked:
    """`check`, for code that has an event loop."""
    prepared = prepare_check(suite, out, options)
    for one in prepared:
        finished(await start(one, {}))
    return checked(prepared)


def prepare_check(suite: Suite | str, out: str | Path | None, options: Options) -> tuple[Prepared, ...]:
    """Both runs, in directories of their own below `out`."""
    found = load_suite(suite) if isinstance(suite, str) else suite
    place = Path(out) if out is not None else default_directory(f"{found.name}-check")
    options = {**options, "attempts": options.get("attempts") or 1}
    return tuple(prepare(suite, agent, place / agent, options) for agent in AGENTS)


def finished(summary: Summary) -> Summary:
    """The summary of a run that came to its end; an error of those that did not."""
    stopped: type[HoldwaterError] | None = {3: Interrupted, 4: RunStopped}.get(summary.exit_status or 0)
    if stopped is not None:
        raise stopped(summary.reason, f"`holdwater show {summary.directory}` says more")
    return summary


def checked(prepared: Sequence[Prepared]) -> Checked:
    """What both runs say together."""
    faults: dict[str, list[Fault]] = {"oracle_failed": [], "nop_passed": [], "infrastructure": []}
    instances = 0
    for agent, one in zip(AGENTS, prepared, strict=True):
        with Reader(one.path) as reader:
            instances = max(instances, reader.counts().planned)
            for kind, fault in _faults(reader, agent):
                faults[kind].append(fault)
    bad = {fault.id for found in faults.values() for fault in found}
    return Checked(
        suite=prepared[0].suite.name,
        instances=instances,
        good=instances - len(bad),
        runs=tuple(str(one.path) for one in prepared),
        **{kind: tuple(found) for kind, found in faults.items()},
    )


def _faults(reader: Reader, agent: str) -> Iterator[tuple[str, Fault]]:
    wrong, kind = ("failed", "oracle_failed") if agent == "oracle" else ("passed", "nop_passed")
    for row in reader.outcomes():
        verdict = reader.verdict(row.attempt) or Verdict(attempt=row.attempt, token=0)
        if row.kind not in ("passed", "failed"):
            yield "infrastructure", Fault(row.instance, f"{agent}: {row.kind}: {row.failure}")
        elif row.kind == wrong:
            yield kind, Fault(row.instance, _why(row, verdict))


def _why(row: OutcomeRow, verdict: Verdict) -> str:
    detail = verdict.grade.detail.strip() if verdict.grade else ""
    said = row.failure or detail[-LONGEST_REASON:]
    return said or f"score {row.score or 0.0:g}"
