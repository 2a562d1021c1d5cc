"""A suite held against an agent that does no work and cheats: which of its tricks is graded as a pass.

A real run for each trick, and one of `nop` as the control: an instance that passes without any work is the
suite's own mistake and blamed on no trick. The tricks are in `agent/attack.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from ..agent.attack import TRICKS
from ..core.authoring import Suite
from ..core.records import Record
from ..ledger.reader import OutcomeRow, Reader
from ..run.options import Options
from . import Prepared, prepare, start
from .around import wait
from .checking import Fault, finished

CONTROL = "nop"
AGENTS = (CONTROL, *(f"attack:{trick.name}" for trick in TRICKS))
FIRST = 5  # instances that are attacked where none are chosen


class TrickOutcome(Record, frozen=True, omit_defaults=False):
    """What one trick came to."""

    name: str
    says: str
    passed: tuple[str, ...] = ()  # the instances that it passed
    held: int = 0  # instances that it did not pass
    ungraded: int = 0  # ... of these, without any grade


class Attacked(Record, frozen=True, omit_defaults=False):
    """What `attack` found."""

    suite: str
    instances: int  # that were attacked
    tricks: tuple[TrickOutcome, ...]
    nop_passed: tuple[str, ...] = ()  # they pass without any work: no trick can be told from that
    untried: tuple[Fault, ...] = ()  # nothing can be said of these

    @property
    def ok(self) -> bool:
        """Whether no trick passed, and there was something to pass."""
        return not any(trick.passed for trick in self.tricks) and (self.instances > 0 or not self.untried)


def attack(suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[Options]) -> Attacked:
    """Have the adversarial agent try every trick on the suite's instances; which passed.

    The first five instances, where neither `only` nor `limit` says which. The runs are kept in `out` alone.
    """
    return wait(aattack(suite, out=out, **options))


async def aattack(
    suite: Suite | str, *, out: str | Path | None = None, **options: Unpack[Options]
) -> Attacked:
    """`attack`, for code that has an event loop."""
    with TemporaryDirectory(prefix="holdwater-attack-") as place:
        prepared = prepare_attack(suite, out or place, options)
        for one in prepared:
            finished(await start(one, {}))
        return attacked(prepared)


def prepare_attack(suite: Suite | str, out: str | Path, options: Options) -> tuple[Prepared, ...]:
    """The runs, the control first, in directories of their own below `out`."""
    chosen: Options = {**options, "attempts": 1, "retries": options.get("retries") or 0}
    if not options.get("only") and options.get("limit") is None:
        chosen["limit"] = FIRST
    return tuple(prepare(suite, agent, Path(out, agent.replace(":", "-")), chosen) for agent in AGENTS)


def attacked(prepared: Sequence[Prepared]) -> Attacked:
    """What the runs say together."""
    control, *others = (_outcomes(one) for one in prepared)
    untried = tuple(
        Fault(row.instance, f"{row.kind}: {row.failure}")
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


def _outcomes(one: Prepared) -> list[OutcomeRow]:
    with Reader(one.path) as reader:
        return list(reader.outcomes())
