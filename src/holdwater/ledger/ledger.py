"""The ledger as the conductor sees it: the only writer of a run's truth.

Every call is awaited until its transaction is committed and synced; calls made together share one. The thread
is in `writer.py`, the statements in `book.py`; whoever only wants to look uses `reader.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType

import msgspec

from ..core.config import Keep
from ..core.errors import LedgerCorrupt
from ..core.records import Attempt, Outcome, Verdict, Where
from ..core.reopening import ClosedSample
from ..core.summary import Gauge
from . import orders, retention, schema, standing
from .book import Book, Planned
from .directory import RunDirectory
from .exchanges import spending
from .journal import Journal
from .orders import Closed, OrderRow
from .reopening import closed_rollouts
from .standing import Known, Standing, SuitePass
from .tally import CONDUCTED, TALLY, Counts, counts
from .writer import Writer

__all__ = ["Counts", "Known", "Ledger", "Planned", "Standing", "SuitePass"]


class Ledger:
    """Open it with `async with`; hold the directory's lock around that."""

    def __init__(
        self,
        directory: RunDirectory,
        now: Callable[[], float] = time.time,
        relieve: Callable[[int], bool] = lambda tries: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`relieve` is asked, in the writer's thread, whether a commit without room is tried once more.

        `now` dates rows and may be set by anyone; `clock` measures how long this conductor runs.
        """
        self.directory = directory
        self._relieve = relieve
        self._book = Book(directory.database, now, clock)

    @staticmethod
    def create(directory: RunDirectory) -> None:
        """A new, empty ledger in a directory that is being created."""
        schema.create(directory.database)

    async def __aenter__(self) -> Ledger:
        self._writer = Writer(self._book, self._relieve)
        await self._writer.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._writer.stop()

    @property
    def token(self) -> int:
        """This conductor's number: the fencing token of every attempt that it begins."""
        return self._book.token

    # What the conductor writes.

    async def plan(self, items: Sequence[Planned]) -> list[int]:
        """Write the instances that are new; their rows.

        An id that this pass has seen before raises `DuplicateInstance`; the new ones before it stay.
        """
        return await self._writer.do(self._book.plan, items)

    async def begin(self, attempt: Attempt) -> None:
        """Write an attempt, before it starts."""
        await self._writer.do(self._book.begin_attempt, attempt)

    async def settle(self, verdict: Verdict) -> bool:
        """Commit a verdict; False when the attempt has one already or its token is not the verdict's."""
        return await self._writer.do(self._settle, verdict)

    async def forget_journal(self, worker: int) -> None:
        """The worker is gone: once all that was settled before is committed, nobody needs its journal."""
        await self._writer.do(lambda: None)
        Journal(self.directory, worker, self.token).remove()

    async def close_sample(self, outcome: Outcome, keep: Keep = Keep.ALL) -> None:
        """Write what became of a sample, also in the place of what was written before; with it, what goes."""
        await self._writer.do(self._book.close_sample, outcome, keep)

    async def reopen(self, chosen: Callable[[ClosedSample], bool]) -> int:
        """Open closed samples again, all or none; how many. `chosen` is asked in the writer's thread."""
        return await self._writer.do(self._book.reopen, chosen)

    @property
    def regrade(self) -> int | None:
        """The regrade that this conductor is at; None: it runs agents."""
        return self._book.regrade

    async def begin_regrade(self, grader: str, only: tuple[str, ...], continues: int | None = None) -> int:
        """From now on outcomes are written beside the old ones, until `switch_outcomes`; the regrade."""
        return await self._writer.do(self._book.begin_regrade, grader, only, continues)

    async def refuse_regrade(self, instance: int, sample: int, why: str) -> None:
        """Write that a sample is not graded again: its outcome stays."""
        await self._writer.do(self._book.refuse_regrade, (instance, sample), why)

    async def switch_outcomes(self, keep: Keep = Keep.ALL) -> None:
        """The regrade is complete: its outcomes take the place of the old ones, in one transaction."""
        await self._writer.do(self._book.switch_outcomes, keep)

    async def going(self, limit: int) -> list[tuple[int, str]]:
        """Attempts that were dropped and whose files may still be there, each with its instance's name."""
        return await self._writer.do(self._going, limit)

    async def gone(self, freed: Mapping[int, int]) -> None:
        """Write that the files of attempts are gone, and the bytes that each freed."""
        await self._writer.do(self._gone, freed)

    async def note(self, kind: str, message: str = "", attempt: int | None = None) -> None:
        """Write down that something happened."""
        await self._writer.do(self._book.note, kind, message, attempt)

    async def gauge(self, gauge: Gauge) -> None:
        """Write a reading; the latest one is what `show` shows."""
        await self._writer.do(self._book.gauge, gauge)

    async def expect(self, total: int | None) -> None:
        """Write how many samples there will be in the end, where the suite can tell."""
        await self._writer.do(self._book.expect, total)

    async def remember(self, name: str, value: bytes) -> None:
        """Write something small that the next conductor needs."""
        await self._writer.do(self._book.remember, name, value)

    async def recalled(self, name: str) -> bytes | None:
        return await self._writer.do(self._book.recalled, name)

    async def finish(self, state: str, reason: str, exit_status: int) -> None:
        """Write how this conductor ended the run: `finished`, `interrupted` or `stopped`."""
        await self._writer.do(self._book.finish, state, reason, exit_status)

    # What a resume compares with the suite.

    async def known(self, name: str) -> Known | None:
        return await self._writer.do(self._known, name)

    async def sight(self, items: Sequence[Planned], during: SuitePass) -> list[Known | None]:
        """The known instance of each item, marked as seen in this pass; planning refuses a second one."""
        return await self._writer.do(self._book.sight, items, during)

    async def missing(self, limit: int = 100) -> list[str]:
        """The first ids that were planned before and that this conductor has not seen in the suite."""
        return await self._writer.do(self._missing, limit)

    async def replace(self, name: str, digest: bytes, payload: bytes, place: str) -> int:
        """Put a changed instance in the place of what was planned; its row. Outcomes stay."""
        item = Planned(name=name, digest=digest, payload=payload, place=place)
        return await self._writer.do(self._book.replace, item)

    # What a resume continues.

    async def payload(self, instance: int) -> bytes:
        return await self._writer.do(self._book.payload, instance)

    async def verdict(self, attempt: int) -> Verdict:
        """How an earlier attempt ended."""
        return await self._writer.do(self._book.verdict, attempt)

    async def earlier(self, attempt: Attempt) -> tuple[int, ...]:
        """The attempts before this one that tried the same: the same round of the same sample."""
        return await self._writer.do(self._earlier, attempt)

    async def next_attempt(self) -> int:
        return await self._writer.do(self._next_attempt)

    async def unsettled(self) -> list[tuple[int, int]]:
        """The attempts without a verdict, each with its token; never more than ran at once."""
        return await self._writer.do(self._unsettled)

    async def open_samples(self, samples: int) -> AsyncIterator[Standing]:
        """Each sample of 0..samples-1 without an outcome, of the instances planned so far; paged."""
        until = await self._writer.do(standing.last_instance, self._book.connection)
        after: int | None = 0
        while after is not None:
            page = await self._writer.do(standing.open_page, self._book.connection, samples, after, until)
            for found in page.standings:
                yield found
            after = page.after

    # What clients of a server ordered.

    async def place(self, row: OrderRow, size: int) -> OrderRow:
        """Write an order and its rollouts, or find what has its key; `KeyTaken` if it asks otherwise."""
        return await self._writer.do(self._book.place, row, size)

    async def add_member(self, order: int, instance: int, member: int) -> int:
        """One more rollout of an order; its sample."""
        return await self._writer.do(self._book.add_member, order, instance, member)

    async def is_abandoned(self, order: int) -> bool:
        """Whether a rollout of it was cancelled because its client was gone."""
        rollouts = await self._writer.do(lambda: closed_rollouts(self._book.connection, order))
        return any(closed.abandoned for closed in rollouts)

    async def renew(self, order: int) -> None:
        """Open those rollouts again."""
        await self._writer.do(self._book.renew, order)

    async def order(self, key: str) -> OrderRow | None:
        return await self._writer.do(lambda: orders.find(self._book.connection, key))

    async def open_orders(self) -> AsyncIterator[OrderRow]:
        """Those that an earlier conductor left open; paged."""
        after = 0
        while page := await self._writer.do(orders.open_orders, self._book.connection, after):
            for row in page:
                yield row
            after = page[-1].id

    async def standings(self, row: OrderRow) -> list[Standing]:
        """The rollouts of an order that are not over, and what each has used up."""
        return await self._writer.do(lambda: orders.standings(self._book.connection, row))

    async def closed(self, order: int) -> list[Closed]:
        """The rollouts of an order that are over."""
        return await self._writer.do(lambda: orders.closed(self._book.connection, order))

    async def deliver(self, order: int, keep: Keep = Keep.ALL) -> None:
        """Write that a client has the result; with it, what goes."""
        await self._writer.do(self._book.deliver, order, keep)

    async def earlier_seconds(self) -> float:
        """The time that the conductors before this one spent."""
        return await self._writer.do(self._earlier_seconds)

    async def counts(self) -> Counts:
        return await self._writer.do(self._counts)

    # In the writer's thread.

    def _settle(self, verdict: Verdict) -> bool:
        """Over an attempt that can no longer say what it used, its exchanges do."""
        lost = verdict.failure is not None and verdict.failure.where is Where.WORKER
        if lost and not verdict.exchanges:
            try:
                spent = spending(self.directory, verdict.attempt)
            except LedgerCorrupt as e:
                self._book.note("segment.damaged", e.message, verdict.attempt)
            else:
                verdict = msgspec.structs.replace(verdict, **msgspec.structs.asdict(spent))
        return self._book.settle(verdict)

    def _going(self, limit: int) -> list[tuple[int, str]]:
        return retention.going(self._book.connection, limit)

    def _gone(self, freed: Mapping[int, int]) -> None:
        retention.gone(self._book.connection, freed)

    def _earlier(self, attempt: Attempt) -> tuple[int, ...]:
        rows = self._book.connection.execute(
            "SELECT id FROM attempt WHERE instance = ? AND sample = ? AND round = ? AND id < ? ORDER BY id",
            (attempt.instance, attempt.sample, attempt.round, attempt.id),
        )
        return tuple(row[0] for row in rows)

    def _earlier_seconds(self) -> float:
        row = self._book.connection.execute(
            f"SELECT {CONDUCTED} FROM conductor WHERE token < ?", (self.token,)
        ).fetchone()
        return float(row[0])

    def _known(self, name: str) -> Known | None:
        return standing.known(self._book.connection, name)

    def _missing(self, limit: int) -> list[str]:
        return standing.missing(self._book.connection, self.token, limit)

    def _counts(self) -> Counts:
        return counts(self._book.connection.execute(TALLY).fetchall())

    def _next_attempt(self) -> int:
        row = self._book.connection.execute("SELECT coalesce(max(id), 0) + 1 FROM attempt").fetchone()
        return int(row[0])

    def _unsettled(self) -> list[tuple[int, int]]:
        return self._book.connection.execute(
            "SELECT id, token FROM attempt WHERE settled IS NULL ORDER BY id"
        ).fetchall()
