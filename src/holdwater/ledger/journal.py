"""The journal of a worker: verdicts that it writes before it reports them, in case it or its conductor dies.

A journal is a segment of verdicts, `exchanges/worker-<token>-<worker>.journal`. `run/fleet/process.py`
reads the journal of a dead worker. A conductor that opens the ledger of an earlier one calls `recover` before
it starts anything; no worker of the earlier conductor may still be running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.failures import make_interrupt_failure
from ..core.records import Record, Verdict
from . import segment
from .blobs import BlobStore
from .directory import RunDirectory
from .exchanges import AttemptSpending, sum_spending
from .record_encoding import encode_record
from .segment import Segment

if TYPE_CHECKING:
    from .ledger import Ledger

CONDUCTOR_GONE = "the conductor ended before the attempt did"


class Journal:
    """The verdicts of one worker, in the order in which its attempts ended."""

    def __init__(self, directory: RunDirectory, worker: int, token: int) -> None:
        self.path = journal_path(directory, worker, token)
        self._segment: Segment | None = None

    def append(self, verdict: Verdict) -> None:
        """Write a verdict so that it survives kill -9."""
        if self._segment is None:
            self._segment = Segment.open(self.path)
        self._segment.append(encode_record(verdict))

    def sync(self) -> None:
        """Make all verdicts so far survive power loss. Blocks on the disk."""
        if self._segment is not None:
            self._segment.sync()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()

    def remove(self) -> None:
        """Remove the journal. All its verdicts must be committed."""
        self.close()
        self.path.unlink(missing_ok=True)


def journal_path(directory: RunDirectory, worker: int, token: int) -> Path:
    return directory.exchanges / f"worker-{token}-{worker}.journal"


def list_journals(directory: RunDirectory) -> list[Path]:
    return sorted(directory.exchanges.glob("worker-*.journal"))


def read_journal(path: Path, on_damage: Callable[[str], None]) -> Iterator[Verdict]:
    """Yield every valid verdict, committed or not; `on_damage` receives a sentence for each bad record."""

    def report(at: int) -> None:
        on_damage(f"the journal `{path}` is damaged at byte {at}")

    try:
        for content in segment.read_records(path, report):
            try:
                yield _decoder.decode(content)
            except msgspec.MsgspecError as e:
                on_damage(f"the journal `{path}` holds an invalid verdict: {e}")
    except FileNotFoundError:
        return  # the worker has written no verdict, or all its verdicts are committed


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


_decoder = msgspec.msgpack.Decoder(Verdict)
