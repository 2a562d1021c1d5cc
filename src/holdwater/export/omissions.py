"""Counts what an export leaves out: exchanges that are not kept, and samples that a format cannot hold."""

from __future__ import annotations

from ..core.policy import explain_not_kept
from ..ledger.reader import LedgerReader

LEFT_OUT = "left out: "


class ExportOmissions:
    """Counts attempts, samples and patches that an export leaves out."""

    def __init__(self, reader: LedgerReader) -> None:
        self._reader = reader
        self._count = 0
        self._keep = ""
        self.samples = 0  # samples after the first, in a format with one row per instance
        self.patchless = 0  # instances without a line in the predictions
        self.patches = ""  # the message of `swebench.py` about omitted patches

    def omits(self, attempt: int) -> bool:
        """Return whether the exchanges of an attempt are not kept, and count it if so."""
        keep = self._reader.find_unrecorded_policy((attempt,))
        if keep is None:
            return False
        self._count, self._keep = self._count + 1, keep
        return True

    @property
    def description(self) -> str:
        """The omissions as a sentence; empty if there are none."""
        words = []
        if self._count:
            words.append(f"the exchanges of {self._count} attempts are {explain_not_kept(self._keep)}")
        if self.samples:
            words.append(f"{self.samples} samples beyond the first of their instance")
        if self.patchless:
            words.append(f"instances without a patch: {self.patchless}")
        if self.patches:
            words.append(self.patches.removeprefix(LEFT_OUT))
        return LEFT_OUT + "; ".join(words) if words else ""
