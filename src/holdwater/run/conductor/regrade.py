"""The samples of a regrade: every closed sample whose kept work can be graded, with the attempt that did it.

Instances come from the ledger, not from the suite. New grades are written beside the outcomes and replace
them at the end (`ledger/regrades.py`), so that a regrade can be resumed like a run.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec
from blake3 import blake3

from ...core.authoring import Suite
from ...core.errors import BadInput, HoldwaterError
from ...core.events import GroupMembership, SampleOpened
from ...core.groups import GroupTerms
from ...core.policy import explain_not_kept, find_kept_work, list_kept_files, refuse_grading
from ...core.records import Record, Verdict
from ...core.summary import RegradeState
from ...ledger.directory import RunDirectory
from ...ledger.ledger import Ledger
from ...ledger.reader import LedgerReader
from ...ledger.regrades import SHORT_GROUP, is_graded, latest_regrade
from ...ledger.rows import OutcomeRow

DIGEST = 12  # characters


class RegradeRequest(Record, frozen=True):
    """A new regrade, or the continuation of an open one."""

    grader: str
    only: tuple[str, ...] = ()  # patterns of instance ids
    continues: int | None = None  # the id of the open regrade to continue; None for a new one


class RegradeFeed:
    """A `SampleFeed` over closed samples. A sample that cannot be graded keeps its outcome, with a reason."""

    error: HoldwaterError | None = None

    def __init__(self, ledger: Ledger, only: tuple[str, ...], *, grouped: bool = False) -> None:
        """`grouped`: the samples of an instance are scored together."""
        assert ledger.regrade is not None, "no regrade has begun"
        self._ledger = ledger
        self._regrade = ledger.regrade
        self._reader = LedgerReader(ledger.directory)
        self._grouped = grouped
        # The samples that are graded together; bound: the samples of one instance at a time.
        self._groups = (
            list(rows)
            for _, rows in groupby(
                select_outcomes(self._reader, only), lambda row: (row.row, 0 if grouped else row.sample)
            )
        )

    async def take(self, count: int) -> list[SampleOpened]:
        opened: list[SampleOpened] = []
        while len(opened) < count and (rows := next(self._groups, None)) is not None:
            if not all(is_graded(self._reader, self._regrade, row.row, row.sample) for row in rows):
                opened += await self._open_samples(rows)
        return opened

    async def _open_samples(self, rows: list[OutcomeRow]) -> list[SampleOpened]:
        """Open the samples whose work can be graded. A group is graded as a whole, or not at all."""
        works = [find_work_verdict(self._reader, row) for row in rows]
        refusals = [explain_unkept(self._reader, work) or refuse_grading(work) for work in works]
        short = self._grouped and any(
            why and row.score is not None for row, why in zip(rows, refusals, strict=True)
        )
        opened: list[SampleOpened] = []
        for row, work, why in zip(rows, works, refusals, strict=True):
            if why or short:
                await self._ledger.refuse_regrade(row.row, row.sample, why or SHORT_GROUP)
                continue
            number = max(a.number for a in self._reader.attempts(row.row) if a.sample == row.sample)
            opened.append(
                SampleOpened(instance=row.row, sample=row.sample, number=number, regrades=work.attempt)
            )
        if not self._grouped:
            return opened
        # All or none: a member whose work turns out to be altered leaves the outcomes of all.
        terms = GroupTerms(least=len(opened))
        group = GroupMembership(group=rows[0].row, size=len(opened), terms=terms)
        return [msgspec.structs.replace(event, group=group) for event in opened]

    def close(self) -> None:
        self._reader.close()


def request_regrade(directory: RunDirectory, suite: Suite, only: tuple[str, ...]) -> RegradeRequest:
    """Return the request for a new regrade; raise BadInput if there is nothing to grade."""
    with LedgerReader(directory) as reader:
        why, row = "", None
        for row in select_outcomes(reader, only):
            why = explain_unkept(reader, find_work_verdict(reader, row))
            if not why:
                break
    if only and row is None:
        patterns = ", ".join(f"`{pattern}`" for pattern in only)
        raise BadInput(
            f"no instance with an outcome matches `--only`: {patterns}", "`holdwater show` lists them"
        )
    if why:
        raise BadInput(f"there is nothing to grade: the work of the attempts is {why}")
    return RegradeRequest(grader=describe_grader(suite), only=only)


def find_open_regrade(directory: RunDirectory) -> RegradeState | None:
    """Return the interrupted regrade, or None."""
    with LedgerReader(directory) as reader:
        found = latest_regrade(reader)
    return found if found is not None and found.ended is None else None


def continue_regrade(found: RegradeState, suite: Suite) -> RegradeRequest:
    """Return the request to continue an interrupted regrade; raise BadInput if the grader has changed."""
    grader = describe_grader(suite)
    if grader != found.grader:
        raise BadInput(
            f"the grader has changed since the regrade began: `{grader}`, it was `{found.grader}`",
            "`holdwater regrade` grades all of it again",
        )
    return RegradeRequest(grader=grader, only=found.only, continues=found.id)


def describe_grader(suite: Suite) -> str:
    """Return the suite's name, with a digest of the file that defines its grade function."""
    grade = suite.grade
    while isinstance(grade, functools.partial):
        grade = grade.func
    try:
        source = Path(inspect.getsourcefile(inspect.unwrap(grade)) or "").read_bytes() if grade else b""
    except (OSError, TypeError):  # its source cannot be read
        return suite.name
    return f"{suite.name} {blake3(source).hexdigest()[:DIGEST]}"


def select_outcomes(reader: LedgerReader, only: tuple[str, ...]) -> Iterator[OutcomeRow]:
    for row in reader.outcomes():
        if not only or any(fnmatch.fnmatchcase(row.instance, pattern) for pattern in only):
            yield row


def find_work_verdict(reader: LedgerReader, row: OutcomeRow) -> Verdict:
    """Return the verdict of the attempt that did a sample's work: the chosen, or else the last that acted."""
    acted = reader.verdict(reader.acting_attempt(row.attempt))
    if acted is not None and find_kept_work(acted) is not None:
        return acted
    others = (
        attempt.verdict
        for attempt in reader.attempts(row.row)
        if attempt.sample == row.sample and attempt.regrades is None and attempt.verdict is not None
    )
    gradable = [verdict for verdict in others if not refuse_grading(verdict)]
    return gradable[-1] if gradable else acted or Verdict(attempt=row.attempt, token=0)


def explain_unkept(reader: LedgerReader, verdict: Verdict) -> str:
    """Return why the work was dropped on purpose; empty if it was not, or if there was none."""
    keep = reader.find_drop_policy(verdict.attempt)
    return explain_not_kept(keep) if keep is not None and list_kept_files(find_kept_work(verdict)) else ""
