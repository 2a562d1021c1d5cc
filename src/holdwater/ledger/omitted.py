"""What an export has to leave out: exchanges that are not kept. It counts, so that it can be said."""

from __future__ import annotations

from ..core.policy import not_kept
from .reader import Reader


class Omitted:
    """Attempts that were asked for and whose exchanges are not kept."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._count = 0
        self._keep = ""

    def omits(self, attempt: int) -> bool:
        """Whether its exchanges are not kept; counted if so."""
        keep = self._reader.unrecorded((attempt,))
        if keep is None:
            return False
        self._count, self._keep = self._count + 1, keep
        return True

    @property
    def told(self) -> str:
        """In words; empty when there were none."""
        if not self._count:
            return ""
        return f"left out: the exchanges of {self._count} attempts are {not_kept(self._keep)}"
