"""Tests a suite: with its own oracle, with an agent that does nothing, and with an agent that cheats.

Each test is a real run, and the results are read from its ledger. For tricks, a run of `nop` is the control:
if an instance passes without any work, the suite is at fault and no trick is blamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from ..agent.attack import TRICKS
from ..core.authoring import Suite
from ..core.errors import HoldwaterError, RunInterrupted, RunStopped
from ..core.records import Record, Verdict
from ..core.summary import RunSummary
from ..ledger.reader import LedgerReader
from ..ledger.rows import OutcomeRow
from ..run.setup.config import default_directory
from ..run.setup.options import RunOptions
from ..suite.loader import load as load_suite
from .process import wait
from .runs import RunSetup, prepare, start

AGENTS = ("oracle", "nop")
LONGEST_REASON = 500  # characters of a grade's detail
ATTACKERS = ("nop", *(f"attack:{trick.name}" for trick in TRICKS))  # the control first
DEFAULT_LIMIT = 5  # number of instances to attack if none are selected


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


class TrickOutcome(Record, frozen=True, omit_defaults=False):
    """The result of one trick."""

    name: str
    says: str
    passed: tuple[str, ...] = ()  # the instances that the trick passed
    held: int = 0  # number of instances that the trick did not pass
    ungraded: int = 0  # how many of these have no grade


class Attacked(Record, frozen=True, omit_defaults=False):
    """The findings of `attack`."""

    suite: str
    instances: int  # number of attacked instances
    tricks: tuple[TrickOutcome, ...]
    nop_passed: tuple[str, ...] = ()  # instances that pass without any work, which show nothing about tricks
    untried: tuple[InstanceFault, ...] = ()  # instances without a result

    @property
    def ok(self) -> bool:
        """Whether no trick passed and there were instances to attack."""
        return not any(trick.passed for trick in self.tricks) and (self.instances > 0 or not self.untried)


def check(suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[RunOptions]) -> Checked:
    """Run `oracle` and `nop` on every instance; return the ones that the oracle fails or `nop` passes."""
    return wait(acheck(suite, out=out, **options))


async def acheck(
    suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[RunOptions]
) -> Checked:
    """The async twin of `check`."""
    prepared = prepare_check(suite, out, options)
    for one in prepared:
        require_finished(await start(one))
    return summarize_check(prepared)


def prepare_check(suite: Suite | str, out: str | Path | None, options: RunOptions) -> tuple[RunSetup, ...]:
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


def summarize_check(prepared: Sequence[RunSetup]) -> Checked:
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


def attack(suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[RunOptions]) -> Attacked:
    """Run every trick of the adversarial agent on the suite's instances; return which ones passed.

    By default it attacks the first five instances; `only` and `limit` select others. The runs are kept only
    if `out` is given.
    """
    return wait(aattack(suite, out=out, **options))


async def aattack(
    suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[RunOptions]
) -> Attacked:
    """The async twin of `attack`."""
    with TemporaryDirectory(prefix="holdwater-attack-") as place:
        prepared = prepare_attack(suite, out or place, options)
        for one in prepared:
            require_finished(await start(one))
        return summarize_attack(prepared)


def prepare_attack(suite: Suite | str, out: str | Path, options: RunOptions) -> tuple[RunSetup, ...]:
    """Prepare the runs, the control first, each in its own directory below `out`."""
    chosen: RunOptions = {**options, "attempts": 1, "retries": options.get("retries") or 0}
    if not options.get("only") and options.get("limit") is None:
        chosen["limit"] = DEFAULT_LIMIT
    return tuple(prepare(suite, agent, Path(out, agent.replace(":", "-")), chosen) for agent in ATTACKERS)


def summarize_attack(prepared: Sequence[RunSetup]) -> Attacked:
    """Combine the results of the runs."""
    control, *others = (_read_outcomes(one) for one in prepared)
    untried = tuple(
        InstanceFault(row.instance, f"{row.kind}: {row.failure}")
        for row in control
        if row.kind not in ("passed", "failed")
    )
    judged = {row.instance for row in control if row.kind == "failed"}
    return Attacked(
        suite=prepared[0].suite.name,
        instances=len(judged),
        tricks=tuple(
            TrickOutcome(
                name=trick.name,
                says=trick.says,
                passed=tuple(row.instance for row in rows if row.instance in judged and row.kind == "passed"),
                held=sum(row.instance in judged and row.kind != "passed" for row in rows),
                ungraded=sum(row.instance in judged and row.kind not in ("passed", "failed") for row in rows),
            )
            for trick, rows in zip(TRICKS, others, strict=True)
        ),
        nop_passed=tuple(row.instance for row in control if row.kind == "passed"),
        untried=untried,
    )


def _read_outcomes(one: RunSetup) -> list[OutcomeRow]:
    with LedgerReader(one.path) as reader:
        return list(reader.outcomes())
