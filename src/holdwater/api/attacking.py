"""Tests a suite with an agent that does no work and cheats, and reports which tricks pass.

Each trick is a real run, and a run of `nop` is the control: if an instance passes without any work, the suite
is at fault and no trick is blamed. The tricks are in `agent/attack.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from ..agent.attack import TRICKS
from ..core.authoring import Suite
from ..core.records import Record
from ..ledger.reader import LedgerReader
from ..ledger.rows import OutcomeRow
from ..run.setup.options import RunOptions
from . import PreparedRun, prepare, start
from .checking import InstanceFault, require_finished
from .run_hooks import wait

CONTROL = "nop"
AGENTS = (CONTROL, *(f"attack:{trick.name}" for trick in TRICKS))
DEFAULT_LIMIT = 5  # number of instances to attack if none are selected


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
            require_finished(await start(one, {}))
        return summarize_attack(prepared)


def prepare_attack(suite: Suite | str, out: str | Path, options: RunOptions) -> tuple[PreparedRun, ...]:
    """Prepare the runs, the control first, each in its own directory below `out`."""
    chosen: RunOptions = {**options, "attempts": 1, "retries": options.get("retries") or 0}
    if not options.get("only") and options.get("limit") is None:
        chosen["limit"] = DEFAULT_LIMIT
    return tuple(prepare(suite, agent, Path(out, agent.replace(":", "-")), chosen) for agent in AGENTS)


def summarize_attack(prepared: Sequence[PreparedRun]) -> Attacked:
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


def _read_outcomes(one: PreparedRun) -> list[OutcomeRow]:
    with LedgerReader(one.path) as reader:
        return list(reader.outcomes())
