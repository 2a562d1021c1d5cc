"""The samples of a regrade: every closed one whose kept work can be graded, with the attempt that did it.

Nothing is pulled from the suite; the instances come from the ledger. The new grades are written beside the
outcomes and take their place at the end (`ledger/regrades.py`), so that a regrade is resumed like a run.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from ..core.authoring import Suite
from ..core.errors import BadInput, HoldwaterError
from ..core.events import Opened
from ..core.kept_work import kept_files, kept_work, refuse_grading
from ..core.policy import not_kept
from ..core.records import Record, Verdict
from ..core.summary import RegradeState
from ..ledger.directory import RunDirectory
from ..ledger.ledger import Ledger
from ..ledger.reader import OutcomeRow, Reader
from ..ledger.regrades import is_graded, latest_regrade

DIGEST = 12  # characters


class RegradeRequest(Record, frozen=True):
    """A regrade that is asked for, or one that goes on."""

    grader: str
    only: tuple[str, ...] = ()  # patterns of instance ids
    continues: int | None = None  # the open regrade that goes on; None: a new one


class RegradeFeed:
    """A `Feed` over what is closed. A sample that cannot be graded again keeps its outcome and says why."""

    error: HoldwaterError | None = None

    def __init__(self, ledger: Ledger, only: tuple[str, ...]) -> None:
        assert ledger.regrade is not None, "no regrade has begun"
        self._ledger = ledger
        self._regrade = ledger.regrade
        self._reader = Reader(ledger.directory)
        self._rows = chosen(self._reader, only)

    async def take(self, count: int) -> list[Opened]:
        opened: list[Opened] = []
        while len(opened) < count and (row := next(self._rows, None)) is not None:
            if is_graded(self._reader, self._regrade, row.row, row.sample):
                continue
            verdict = worked(self._reader, row)
            if why := unkept(self._reader, verdict) or refuse_grading(verdict):
                await self._ledger.refuse_regrade(row.row, row.sample, why)
                continue
            number = max(a.number for a in self._reader.attempts(row.row) if a.sample == row.sample)
            opened.append(
                Opened(instance=row.row, sample=row.sample, number=number, regrades=verdict.attempt)
            )
        return opened

    def close(self) -> None:
        self._reader.close()


def ask_regrade(directory: RunDirectory, suite: Suite, only: tuple[str, ...]) -> RegradeRequest:
    """A new regrade; refused when nothing is left that it could grade."""
    with Reader(directory) as reader:
        why = ""
        for row in chosen(reader, only):
            why = unkept(reader, worked(reader, row))
            if not why:
                break
    if why:
        raise BadInput(f"there is nothing to grade: what the attempts left is {why}")
    return RegradeRequest(grader=describe_grader(suite), only=only)


def open_regrade(directory: RunDirectory) -> RegradeState | None:
    """The regrade that was interrupted; None: there is none."""
    with Reader(directory) as reader:
        found = latest_regrade(reader)
    return found if found is not None and found.ended is None else None


def continue_regrade(found: RegradeState, suite: Suite) -> RegradeRequest:
    """Go on with a regrade that was interrupted; another grader cannot."""
    grader = describe_grader(suite)
    if grader != found.grader:
        raise BadInput(
            f"the grader has changed since the regrade began: `{grader}`, it was `{found.grader}`",
            "`holdwater regrade` grades all of it again",
        )
    return RegradeRequest(grader=grader, only=found.only, continues=found.id)


def describe_grader(suite: Suite) -> str:
    """The suite's name, with a digest of the file that has its grade function."""
    grade = suite.grade
    while isinstance(grade, functools.partial):
        grade = grade.func
    try:
        source = Path(inspect.getsourcefile(inspect.unwrap(grade)) or "").read_bytes() if grade else b""
    except (OSError, TypeError):  # it has no source that could be read
        return suite.name
    return f"{suite.name} {blake3(source).hexdigest()[:DIGEST]}"


def chosen(reader: Reader, only: tuple[str, ...]) -> Iterator[OutcomeRow]:
    for row in reader.outcomes():
        if not only or any(fnmatch.fnmatchcase(row.instance, pattern) for pattern in only):
            yield row


def worked(reader: Reader, row: OutcomeRow) -> Verdict:
    """The verdict of the attempt that did a sample's work: the chosen one, or else the last that acted."""
    acted = reader.verdict(reader.acting_attempt(row.attempt))
    if acted is not None and kept_work(acted) is not None:
        return acted
    others = (
        attempt.verdict
        for attempt in reader.attempts(row.row)
        if attempt.sample == row.sample and attempt.regrades is None and attempt.verdict is not None
    )
    gradable = [verdict for verdict in others if not refuse_grading(verdict)]
    return gradable[-1] if gradable else acted or Verdict(attempt=row.attempt, token=0)


def unkept(reader: Reader, verdict: Verdict) -> str:
    """How it is said that the work was dropped on purpose; empty: it was not, or there was none."""
    keep = reader.dropped(verdict.attempt)
    return not_kept(keep) if keep is not None and kept_files(kept_work(verdict)) else ""
