"""Reads samples for exports to other programs, and counts what an export leaves out.

One sample is in memory at a time. Conversations are in `conversation/trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..conversation.trajectory import ExchangeTree
from ..core.errors import LedgerCorrupt
from ..core.policy import explain_not_kept
from ..core.records import Instance, ModelUsage, Verdict
from ..ledger.attempt_files import patch_path
from ..ledger.directory import RunDirectory
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, OutcomeRow

LEFT_OUT = "left out: "
SCORED = ("passed", "failed")


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


class ExportedSample(NamedTuple):
    outcome: OutcomeRow
    row: AttemptRow
    verdict: Verdict
    instance: Instance
    payload: bytes  # the encoded instance, as it was planned

    @property
    def usage(self) -> ModelUsage:
        return self.verdict.usage

    @property
    def scored(self) -> bool:
        return self.outcome.kind in SCORED


def read_samples(reader: LedgerReader) -> Iterator[ExportedSample]:
    """Yield every closed sample, in the order of planning."""
    for outcome in reader.outcomes():
        row = next((row for row in reader.attempts(outcome.row) if row.attempt == outcome.attempt), None)
        if row is None:
            raise LedgerCorrupt(f"the ledger has no attempt {outcome.attempt}")
        payload = reader.payload(outcome.row)
        verdict = reader.whole_verdict(row.attempt)
        yield ExportedSample(outcome, row, verdict, _instances.decode(payload), payload)


def read_first_samples(reader: LedgerReader, omitted: ExportOmissions) -> Iterator[ExportedSample]:
    """Yield the first sample of each instance, for formats with one row per instance; count the others."""
    for one in read_samples(reader):
        if one.outcome.sample == 0:
            yield one
        else:
            omitted.samples += 1


def find_conversation(reader: LedgerReader, attempt: int, omitted: ExportOmissions) -> ExchangeTree | None:
    """Return the exchanges behind an attempt; None if it has no conversation or it is not kept."""
    attempt = reader.acting_attempt(attempt)
    if omitted.omits(attempt):
        return None
    tree = ExchangeTree(reader.directory, attempt)
    return tree if tree.has_trajectory else None


def read_patch(reader: LedgerReader, verdict: Verdict) -> str | None:
    """Return the work behind a verdict as a patch; None if there is none or it is not kept."""
    try:
        content = patch_file(reader.directory, verdict).read_bytes()
    except FileNotFoundError:
        return None
    return content.decode(errors="replace")  # JSON cannot hold bytes that are not UTF-8


def patch_file(directory: RunDirectory, verdict: Verdict) -> Path:
    """Return the path of the patch behind a verdict; for kept work, the patch of the acting attempt."""
    kept = verdict.kept.patch if verdict.kept is not None else None
    return patch_path(directory, verdict.attempt) if kept is None else directory.artifacts / kept.name


_instances = msgspec.msgpack.Decoder(Instance)
