"""What exports for other programs have a row of: each outcome, the attempt behind it, and what was asked.

One is in memory at a time. What an attempt said is in `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.records import Instance, Usage, Verdict
from .files import patch_path
from .omitted import Omitted
from .reader import AttemptRow, OutcomeRow, Reader
from .trajectory import Tree, talked

SCORED = ("passed", "failed")


class Chosen(NamedTuple):
    outcome: OutcomeRow
    row: AttemptRow
    verdict: Verdict
    instance: Instance
    payload: bytes  # the instance, as it was planned
    usage: Usage  # of the attempt that had the exchanges

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
        verdict = row.verdict or Verdict(attempt=row.attempt, token=row.token)
        acted = verdict if row.regrades is None else reader.verdict(talked(reader, row.attempt)) or verdict
        yield Chosen(outcome, row, verdict, _instances.decode(payload), payload, acted.usage)


def first_samples(reader: Reader, omitted: Omitted) -> Iterator[Chosen]:
    """The same where a format has one row for an instance: other samples are counted as left out."""
    for one in chosen(reader):
        if one.outcome.sample == 0:
            yield one
        else:
            omitted.samples += 1


def conversation(reader: Reader, attempt: int, omitted: Omitted) -> Tree | None:
    """The exchanges behind an attempt; None where it had none, or they are not kept."""
    attempt = talked(reader, attempt)
    if omitted.omits(attempt):
        return None
    tree = Tree(reader.directory, attempt)
    return tree if tree.has_trajectory else None


def patch_of(reader: Reader, attempt: int) -> str | None:
    """The attempt's work as a patch; None where there is none, or it is not kept."""
    try:
        content = patch_path(reader.directory, attempt).read_bytes()
    except FileNotFoundError:
        return None
    return content.decode(errors="replace")  # what is not UTF-8 has no place in JSON


_instances = msgspec.msgpack.Decoder(Instance)
