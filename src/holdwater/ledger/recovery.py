"""After a conductor is gone: its workers' last verdicts are committed, what else was running is interrupted.

Run by whoever opens the ledger of an earlier conductor, before anything is started. No worker of the earlier
conductor may be left.
"""

from __future__ import annotations

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.failures import interrupted
from ..core.records import Record, Verdict
from .blobs import Blobs
from .directory import RunDirectory
from .exchanges import Spending, spending
from .journal import journals, read_journal
from .ledger import Ledger

GONE = "the conductor was gone"


class Recovered(Record, frozen=True):
    """What was found: verdicts that only a journal had, and attempts that were cut short."""

    verdicts: int = 0
    interrupted: int = 0


async def recover(ledger: Ledger, directory: RunDirectory) -> Recovered:
    """Settle everything that an earlier conductor left unsettled."""
    verdicts = cut = 0
    damages: list[str] = []  # bound: the records of the journals
    for path in journals(directory):
        for verdict in read_journal(path, damages.append):
            verdicts += await ledger.settle(verdict)
    for damage in damages:
        await ledger.note("journal.damaged", damage)
    for attempt, token in await ledger.unsettled():
        spent = await _spending(ledger, directory, attempt)
        cut += await ledger.settle(
            Verdict(
                attempt=attempt,
                token=token,
                failure=interrupted(GONE),
                **msgspec.structs.asdict(spent),
            )
        )
    for path in journals(directory):
        path.unlink()
    Blobs(directory.blobs).sweep()
    return Recovered(verdicts=verdicts, interrupted=cut)


async def _spending(ledger: Ledger, directory: RunDirectory, attempt: int) -> Spending:
    """A damaged segment is written down and does not keep the run from going on."""
    try:
        return spending(directory, attempt)
    except LedgerCorrupt as e:
        await ledger.note("segment.damaged", e.message, attempt)
        return Spending()
