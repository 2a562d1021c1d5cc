"""The samples of a regrade: every closed one, with the attempt whose work is graded again.

Nothing is pulled from the suite; the instances come from the ledger.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from ..core.errors import HoldwaterError
from ..core.plan import Opened
from ..ledger.directory import RunDirectory
from ..ledger.reader import OutcomeRow, Reader


class RegradeFeed:
    """A `Feed` over what is closed."""

    error: HoldwaterError | None = None

    def __init__(self, directory: RunDirectory, only: tuple[str, ...]) -> None:
        self._reader = Reader(directory)
        self._only = only
        self._rows = self._chosen()

    async def take(self, count: int) -> list[Opened]:
        return [opened for _, opened in zip(range(count), self._rows, strict=False)]

    def close(self) -> None:
        self._reader.close()

    def _chosen(self) -> Iterator[Opened]:
        for row in self._reader.outcomes():
            if not self._only or any(fnmatch.fnmatchcase(row.instance, pattern) for pattern in self._only):
                yield Opened(
                    instance=row.row, sample=row.sample, number=self._last(row), regrades=row.attempt
                )

    def _last(self, row: OutcomeRow) -> int:
        """How many attempts the sample has had: the next one's number is one more."""
        numbers = (a.number for a in self._reader.attempts(row.row) if a.sample == row.sample)
        return max(numbers, default=0)
