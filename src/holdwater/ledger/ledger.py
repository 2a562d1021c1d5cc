"""The conductor's interface to the ledger: the only writer of a run.

Every call returns after its transaction is committed and synced; concurrent calls share a transaction. The
thread is in `writer.py`, the statements in `statements.py`; read-only access is in `reader.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from ..core.config import KeepRule
from ..core.errors import LedgerCorrupt
from ..core.policy import ClosedSample
from ..core.records import Attempt, FailureOrigin, Outcome, Verdict
from ..core.summary import RunGauge
from . import orders, resume_state, schema
from .attempt_files import pending_deletions, record_deleted
from .directory import RunDirectory
from .exchanges import sum_spending
from .journal import Journal
from .orders import ClosedRollout, OrderRow
from .resume_state import KnownInstance, OpenSample, SuitePass
from .rows import CONDUCTED_SECONDS, TALLY_QUERY, LedgerCounts, parse_counts
from .statements import LedgerStatements, PlannedInstance
from .writer import LedgerWriter

__all__ = ["KnownInstance", "Ledger", "LedgerCounts", "OpenSample", "PlannedInstance", "SuitePass"]

T = TypeVar("T")


class Ledger:
    """The open ledger of a run. Enter it with `async with`, while you hold the lock of the directory."""

    def __init__(
        self,
        directory: RunDirectory,
        now: Callable[[], float] = time.time,
        relieve: Callable[[int], bool] = lambda tries: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`relieve` runs in the writer's thread on a full disk; True means that the commit is retried.

        `now` is the wall clock that dates rows, and it may jump; `clock` is monotonic and measures how long
        this conductor runs.
        """
        self.directory = directory
        self._relieve = relieve
        self._statements = LedgerStatements(directory.database, now, clock)

    @staticmethod
    def create(directory: RunDirectory) -> None:
        """Create an empty ledger in a directory that is being created."""
        schema.create_database(directory.database)

    async def __aenter__(self) -> Ledger:
        self._writer = LedgerWriter(self._statements, self._relieve)
        await self._writer.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._writer.stop()

    @property
    def token(self) -> int:
        """The number of this conductor: the fencing token of every attempt that it begins."""
        return self._statements.token

    # Writes of the conductor.

    async def plan(self, items: Sequence[PlannedInstance]) -> list[int]:
        """Write the new instances; return their rows.

        An id that this pass has seen before raises `DuplicateInstance`; new instances before it stay written.
        """
        return await self._writer.do(self._statements.plan, items)

    async def begin_attempt(self, attempt: Attempt) -> None:
        """Write an attempt before it starts."""
        await self._writer.do(self._statements.begin_attempt, attempt)

    async def settle(self, verdict: Verdict) -> bool:
        """Commit a verdict; return False if the attempt has one already or has another fencing token."""
        return await self._writer.do(self._settle, verdict)

    async def forget_journal(self, worker: int) -> None:
        """Remove the journal of a worker that has ended, once all verdicts settled before are committed."""
        await self._writer.do(lambda: None)
        Journal(self.directory, worker, self.token).remove()

    async def close_sample(self, outcome: Outcome, keep: KeepRule = KeepRule.ALL) -> None:
        """Write the outcome of a sample, replacing an earlier one; drop its attempts if `keep` says so."""
        await self._writer.do(self._statements.close_sample, outcome, keep)

    async def reopen(self, chosen: Callable[[ClosedSample], bool]) -> int:
        """Reopen the closed samples for which `chosen` is true, all or none; return their number.

        `chosen` runs in the writer's thread.
        """
        return await self._writer.do(self._statements.reopen, chosen)

    @property
    def regrade(self) -> int | None:
        """The regrade in progress; None if this conductor runs agents."""
        return self._statements.regrade

    async def begin_regrade(self, grader: str, only: tuple[str, ...], continues: int | None = None) -> int:
        """Begin or continue a regrade; return its id.

        Until `switch_outcomes`, new outcomes are stored separately and the old ones stay in effect.
        """
        return await self._writer.do(self._statements.begin_regrade, grader, only, continues)

    async def refuse_regrade(self, instance: int, sample: int, why: str) -> None:
        """Write that a sample is not regraded: its outcome stays."""
        await self._writer.do(self._statements.refuse_regrade, (instance, sample), why)

    async def switch_outcomes(self, keep: KeepRule = KeepRule.ALL) -> None:
        """End the regrade: replace the old outcomes by the new ones in one transaction."""
        await self._writer.do(self._statements.switch_outcomes, keep)

    async def pending_deletions(self, limit: int) -> list[tuple[int, str]]:
        """Return dropped attempts whose files may still exist, each with the name of its instance."""
        return await self._query(pending_deletions, limit)

    async def record_deleted(self, freed: Mapping[int, int]) -> None:
        """Write that the files of attempts are deleted, and the bytes that each freed."""
        await self._query(record_deleted, freed)

    async def note(self, kind: str, message: str = "", attempt: int | None = None) -> None:
        """Write an event."""
        await self._writer.do(self._statements.note, kind, message, attempt)

    async def add_gauge(self, gauge: RunGauge) -> None:
        """Write a gauge reading; `show` displays the latest one."""
        await self._writer.do(self._statements.add_gauge, gauge)

    async def set_total(self, total: int | None) -> None:
        """Write the total number of samples, if the suite declares it."""
        await self._writer.do(self._statements.set_total, total)

    async def remember(self, name: str, value: bytes) -> None:
        """Store a small value for the next conductor."""
        await self._writer.do(self._statements.remember, name, value)

    async def recall(self, name: str) -> bytes | None:
        return await self._writer.do(self._statements.recall, name)

    async def finish(self, state: str, reason: str, exit_status: int) -> None:
        """Write how this conductor ended the run: `finished`, `interrupted` or `stopped`."""
        await self._writer.do(self._statements.finish, state, reason, exit_status)

    # Comparison with the suite on resume.

    async def find_known(self, name: str) -> KnownInstance | None:
        return await self._query(resume_state.find_known, name)

    async def mark_seen(
        self, items: Sequence[PlannedInstance], during: SuitePass
    ) -> list[KnownInstance | None]:
        """Mark known instances as seen in this pass; return the known instance of each item, or None.

        While planning, a second item with the same id raises `DuplicateInstance`.
        """
        return await self._writer.do(self._statements.mark_seen, items, during)

    async def find_missing(self, limit: int = 100) -> list[str]:
        """Return the first ids that are planned and that this conductor has not seen in the suite."""
        return await self._query(resume_state.find_missing, self.token, limit)

    async def replace_instance(self, name: str, digest: bytes, payload: bytes, place: str) -> int:
        """Replace a planned instance by its changed version; return its row. Outcomes stay."""
        item = PlannedInstance(name=name, digest=digest, payload=payload, place=place)
        return await self._writer.do(self._statements.replace_instance, item)

    # State that a resume continues from.

    async def payload(self, instance: int) -> bytes:
        return await self._writer.do(self._statements.payload, instance)

    async def verdict(self, attempt: int) -> Verdict:
        """Return the verdict of an earlier attempt."""
        return await self._writer.do(self._statements.verdict, attempt)

    async def earlier_attempts(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the ids of earlier attempts in the same round of the same sample."""
        return await self._writer.do(self._earlier_attempts, attempt)

    async def next_attempt(self) -> int:
        return await self._writer.do(self._next_attempt)

    async def list_unsettled(self) -> list[tuple[int, int]]:
        """Return attempts without a verdict, each with its token; never more than ran concurrently."""
        return await self._writer.do(self._list_unsettled)

    async def open_samples(self, samples: int) -> AsyncIterator[OpenSample]:
        """Yield each sample in 0..samples-1 without an outcome, of the instances planned so far; paged."""
        until = await self._query(resume_state.find_last_instance)
        after: int | None = 0
        while after is not None:
            page = await self._query(resume_state.read_open_page, samples, after, until)
            for found in page.samples:
                yield found
            after = page.after

    # Orders from clients of a server.

    async def place_order(self, row: OrderRow, size: int) -> OrderRow:
        """Write an order and its rollouts, or return the order that has its key.

        Raise `KeyTaken` if the key is used by a different request.
        """
        return await self._writer.do(self._statements.place_order, row, size)

    async def add_member(self, order: int, instance: int, member: int) -> int:
        """Add a rollout to an order; return its sample."""
        return await self._writer.do(self._statements.add_member, order, instance, member)

    async def is_abandoned(self, order: int) -> bool:
        """Return whether a rollout of the order was cancelled because its client had disconnected."""
        rollouts = await self._query(resume_state.closed_rollouts, order)
        return any(closed.abandoned for closed in rollouts)

    async def reopen_abandoned(self, order: int) -> None:
        """Reopen the rollouts that were cancelled because their client had disconnected."""
        await self._writer.do(self._statements.reopen_abandoned, order)

    async def find_order(self, key: str) -> OrderRow | None:
        return await self._query(orders.find_order, key)

    async def open_orders(self) -> AsyncIterator[OrderRow]:
        """Yield the orders that an earlier conductor left open; paged."""
        after = 0
        while page := await self._query(orders.open_orders, after):
            for row in page:
                yield row
            after = page[-1].id

    async def list_open_rollouts(self, row: OrderRow) -> list[OpenSample]:
        """Return the unfinished rollouts of an order, each with its attempts and retries so far."""
        return await self._query(orders.list_open, row)

    async def list_closed_rollouts(self, order: int) -> list[ClosedRollout]:
        """Return the finished rollouts of an order."""
        return await self._query(orders.list_closed, order)

    async def mark_delivered(self, order: int, keep: KeepRule = KeepRule.ALL) -> None:
        """Write that a client has received the result; drop the attempts that `keep` does not keep."""
        await self._writer.do(self._statements.mark_delivered, order, keep)

    async def earlier_seconds(self) -> float:
        """Return the seconds that earlier conductors ran."""
        return await self._writer.do(self._earlier_seconds)

    async def counts(self) -> LedgerCounts:
        return await self._writer.do(self._counts)

    async def _query(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function of another module on the writer's connection, in the next transaction."""
        return await self._writer.do(work, self._statements.connection, *args)

    # The methods below run in the writer's thread.

    def _settle(self, verdict: Verdict) -> bool:
        """Settle a verdict; the usage of an attempt on a lost worker is summed from its exchanges."""
        lost = verdict.failure is not None and verdict.failure.where is FailureOrigin.WORKER
        if lost and not verdict.exchanges:
            try:
                spent = sum_spending(self.directory, verdict.attempt)
            except LedgerCorrupt as e:
                self._statements.note("segment.damaged", e.message, verdict.attempt)
            else:
                verdict = msgspec.structs.replace(verdict, **msgspec.structs.asdict(spent))
        return self._statements.settle(verdict)

    def _earlier_attempts(self, attempt: Attempt) -> tuple[int, ...]:
        rows = self._statements.connection.execute(
            "SELECT id FROM attempt WHERE instance = ? AND sample = ? AND round = ? AND id < ? ORDER BY id",
            (attempt.instance, attempt.sample, attempt.round, attempt.id),
        )
        return tuple(row[0] for row in rows)

    def _earlier_seconds(self) -> float:
        row = self._statements.connection.execute(
            f"SELECT {CONDUCTED_SECONDS} FROM conductor WHERE token < ?", (self.token,)
        ).fetchone()
        return float(row[0])

    def _counts(self) -> LedgerCounts:
        return parse_counts(self._statements.connection.execute(TALLY_QUERY).fetchall())

    def _next_attempt(self) -> int:
        row = self._statements.connection.execute("SELECT coalesce(max(id), 0) + 1 FROM attempt").fetchone()
        return int(row[0])

    def _list_unsettled(self) -> list[tuple[int, int]]:
        return self._statements.connection.execute(
            "SELECT id, token FROM attempt WHERE settled IS NULL ORDER BY id"
        ).fetchall()
