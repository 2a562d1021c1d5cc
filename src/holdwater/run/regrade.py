"""The samples of a regrade: every closed one, with the attempt whose work is graded again.

Nothing is pulled from the suite; the instances come from the ledger.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from ..core.errors import BadInput, HoldwaterError
from ..core.events import Opened
from ..core.policy import not_kept
from ..ledger.directory import RunDirectory
from ..ledger.ledger import Ledger
from ..ledger.reader import OutcomeRow, Reader


class RegradeFeed:
    """A `Feed` over what is closed. A sample whose work is not kept stays as it is, and that is an event."""

    error: HoldwaterError | None = None

    def __init__(self, directory: RunDirectory, only: tuple[str, ...], ledger: Ledger) -> None:
        self._reader = Reader(directory)
        self._only = only
        self._ledger = ledger
        self._unkept = 0
        self._rows = self._chosen()

    async def take(self, count: int) -> list[Opened]:
        taken = [opened for _, opened in zip(range(count), self._rows, strict=False)]
        if not taken and self._unkept:
            unkept, self._unkept = self._unkept, 0
            await self._ledger.note("regrade.skipped", f"the work of {unkept} samples is not kept")
        return taken

    def close(self) -> None:
        self._reader.close()

    def _chosen(self) -> Iterator[Opened]:
        for row in chosen(self._reader, self._only):
            if unkept(self._reader, row) is not None:
                self._unkept += 1
                continue
            yield Opened(instance=row.row, sample=row.sample, number=self._last(row), regrades=row.attempt)

    def _last(self, row: OutcomeRow) -> int:
        """How many attempts the sample has had: the next one's number is one more."""
        numbers = (a.number for a in self._reader.attempts(row.row) if a.sample == row.sample)
        return max(numbers, default=0)


def check_kept(directory: RunDirectory, only: tuple[str, ...]) -> None:
    """Refuse a regrade for which nothing is left, before it is written down as a conductor's work."""
    with Reader(directory) as reader:
        keep: str | None = None
        for row in chosen(reader, only):
            keep = unkept(reader, row)
            if keep is None:
                return
    if keep is not None:
        raise BadInput(f"there is nothing to grade: what the attempts left is {not_kept(keep)}")


def chosen(reader: Reader, only: tuple[str, ...]) -> Iterator[OutcomeRow]:
    for row in reader.outcomes():
        if not only or any(fnmatch.fnmatchcase(row.instance, pattern) for pattern in only):
            yield row


def unkept(reader: Reader, row: OutcomeRow) -> str | None:
    """The `--keep` by which the work behind an outcome is not kept; None: it is, or there was none."""
    keep = reader.dropped(row.attempt)
    verdict = reader.verdict(row.attempt) if keep is not None else None
    return keep if verdict is not None and verdict.salvage is not None else None
