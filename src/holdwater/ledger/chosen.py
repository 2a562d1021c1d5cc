"""What exports for other programs have a row of: each outcome, the attempt behind it, and what was asked.

One is in memory at a time. What an attempt said is in `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.records import Instance, Usage, Verdict
from .directory import RunDirectory
from .files import patch_path
from .omitted import Omitted
from .reader import AttemptRow, OutcomeRow, Reader
from .trajectory import Tree

SCORED = ("passed", "failed")


class Chosen(NamedTuple):
    outcome: OutcomeRow
    row: AttemptRow
    verdict: Verdict
    instance: Instance
    payload: bytes  # the instance, as it was planned

    @property
    def usage(self) -> Usage:
        return self.verdict.usage

    @property
    def scored(self) -> bool:
        return self.outcome.kind in SCORED


def chosen(reader: Reader) -> Iterator[Chosen]:
    """Every closed sample, in the order of planning."""
    for outcome in reader.outcomes():
        row = next((row for row in reader.attempts(outcome.row) if row.attempt == outcome.attempt), None)
        if row is None:
            raise LedgerCorrupt(f"the ledger has no attempt {outcome.attempt}")
        payload = reader.payload(outcome.row)
        verdict = reader.whole_verdict(row.attempt)
        yield Chosen(outcome, row, verdict, _instances.decode(payload), payload)


def first_samples(reader: Reader, omitted: Omitted) -> Iterator[Chosen]:
    """The same where a format has one row for an instance: other samples are counted as left out."""
    for one in chosen(reader):
        if one.outcome.sample == 0:
            yield one
        else:
            omitted.samples += 1


def conversation(reader: Reader, attempt: int, omitted: Omitted) -> Tree | None:
    """The exchanges behind an attempt; None where it had none, or they are not kept."""
    attempt = reader.acting_attempt(attempt)
    if omitted.omits(attempt):
        return None
    tree = Tree(reader.directory, attempt)
    return tree if tree.has_trajectory else None


def patch_of(reader: Reader, verdict: Verdict) -> str | None:
    """The work behind a verdict as a patch; None where there is none, or it is not kept."""
    try:
        content = patch_file(reader.directory, verdict).read_bytes()
    except FileNotFoundError:
        return None
    return content.decode(errors="replace")  # what is not UTF-8 has no place in JSON


def patch_file(directory: RunDirectory, verdict: Verdict) -> Path:
    """The patch behind a verdict: over kept work, the attempt that did the work has it."""
    kept = verdict.kept.patch if verdict.kept is not None else None
    return patch_path(directory, verdict.attempt) if kept is None else directory.artifacts / kept.name


_instances = msgspec.msgpack.Decoder(Instance)
