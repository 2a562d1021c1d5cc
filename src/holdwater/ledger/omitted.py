"""What an export has to leave out: exchanges that are not kept, samples without a place. It counts them."""

from __future__ import annotations

from ..core.policy import not_kept
from .reader import Reader

LEFT_OUT = "left out: "


class Omitted:
    """Attempts that were asked for and whose exchanges are not kept."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._count = 0
        self._keep = ""
        self.samples = 0  # beyond the first, where a format has one row for an instance
        self.patchless = 0  # instances of which predictions have no line
        self.patches = ""  # what `export_swebench.py` says of those that it leaves out

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
        words = []
        if self._count:
            words.append(f"the exchanges of {self._count} attempts are {not_kept(self._keep)}")
        if self.samples:
            words.append(f"{self.samples} samples beyond the first of their instance")
        if self.patchless:
            words.append(f"instances without a patch: {self.patchless}")
        if self.patches:
            words.append(self.patches.removeprefix(LEFT_OUT))
        return LEFT_OUT + "; ".join(words) if words else ""
