"""Reads samples for exports to other programs: the outcome, the attempt behind it, and the instance.

One sample is in memory at a time. Conversations are in `conversation/trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..conversation.trajectory import ExchangeTree
from ..core.errors import LedgerCorrupt
from ..core.records import Instance, ModelUsage, Verdict
from ..ledger.attempt_files import patch_path
from ..ledger.directory import RunDirectory
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, OutcomeRow
from .omissions import ExportOmissions

SCORED = ("passed", "failed")


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
