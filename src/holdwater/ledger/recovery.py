"""Recovers a run whose conductor ended: commits the verdicts in journals, interrupts all other open attempts.

A conductor that opens the ledger of an earlier one runs this before it starts anything. No worker of the
earlier conductor may still be running.
"""

from __future__ import annotations

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.failures import make_interrupt_failure
from ..core.records import Record, Verdict
from .blobs import BlobStore
from .directory import RunDirectory
from .exchanges import AttemptSpending, sum_spending
from .journal import list_journals, read_journal
from .ledger import Ledger

CONDUCTOR_GONE = "the conductor ended before the attempt did"


class RecoveryResult(Record, frozen=True):
    """Counts of verdicts that were found only in a journal, and of interrupted attempts."""

    verdicts: int = 0
    interrupted: int = 0


async def recover(ledger: Ledger, directory: RunDirectory) -> RecoveryResult:
    """Settle every attempt that an earlier conductor left unsettled."""
    verdicts = cut = 0
    damages: list[str] = []  # bound: the records of the journals
    for path in list_journals(directory):
        for verdict in read_journal(path, damages.append):
            verdicts += await ledger.settle(verdict)
    for damage in damages:
        await ledger.note("journal.damaged", damage)
    for attempt, token in await ledger.list_unsettled():
        spent = await _read_spending(ledger, directory, attempt)
        cut += await ledger.settle(
            Verdict(
                attempt=attempt,
                token=token,
                failure=make_interrupt_failure(CONDUCTOR_GONE),
                **msgspec.structs.asdict(spent),
            )
        )
    for path in list_journals(directory):
        path.unlink()
    BlobStore(directory.blobs).sweep()
    return RecoveryResult(verdicts=verdicts, interrupted=cut)


async def _read_spending(ledger: Ledger, directory: RunDirectory, attempt: int) -> AttemptSpending:
    """Return the spending of an attempt; note a damaged segment as an event, so that the run can continue."""
    try:
        return sum_spending(directory, attempt)
    except LedgerCorrupt as e:
        await ledger.note("segment.damaged", e.message, attempt)
        return AttemptSpending()
