"""The conductor's interface to the ledger: the only writer of a run.

Every call returns after its transaction is committed and synced; concurrent calls share a transaction. The
thread is in `writer.py`, the statements in `statements.py`; read-only access is in `reader.py`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.records import FailureOrigin, Verdict
from . import attempt_files, orders, resume_state, rows, schema
from .directory import RunDirectory
from .exchanges import sum_spending
from .journal import Journal
from .orders import OrderRow
from .resume_state import KnownInstance, OpenSample, PlannedInstance, SuitePass
from .rows import LedgerCounts
from .statements import LedgerStatements
from .writer import LedgerWriter

__all__ = ["KnownInstance", "Ledger", "LedgerCounts", "OpenSample", "PlannedInstance", "SuitePass"]

P = ParamSpec("P")
T = TypeVar("T")


def _commit(
    work: Callable[Concatenate[LedgerStatements, P], T],
) -> Callable[Concatenate[Ledger, P], Coroutine[Any, Any, T]]:
    """Make a method that runs a statement in the next transaction and returns after the commit."""

    @wraps(work)
    async def method(self: Ledger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writer.do(work, self._statements, *args, **kwargs)

    return method


def _query(
    work: Callable[Concatenate[sqlite3.Connection, P], T],
) -> Callable[Concatenate[Ledger, P], Coroutine[Any, Any, T]]:
    """Make a method that runs a function on the writer's connection, in the next transaction."""

    @wraps(work)
    async def method(self: Ledger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writer.do(work, self._statements.connection, *args, **kwargs)

    return method


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

    async def __aexit__(self, *error: object) -> None:
        await self._writer.stop()

    @property
    def token(self) -> int:
        """The number of this conductor: the fencing token of every attempt that it begins."""
        return self._statements.token

    @property
    def regrade(self) -> int | None:
        """The regrade in progress; None if this conductor runs agents."""
        return self._statements.regrade

    # Instances, and their comparison with the suite on resume.

    plan = _commit(LedgerStatements.plan)
    find_known = _query(resume_state.find_known)
    mark_seen = _commit(LedgerStatements.mark_seen)
    find_missing = _commit(LedgerStatements.find_missing)
    replace_instance = _commit(LedgerStatements.replace_instance)
    payload = _commit(LedgerStatements.payload)

    # Attempts and samples.

    next_attempt = _query(resume_state.next_attempt)
    begin_attempt = _commit(LedgerStatements.begin_attempt)
    verdict = _commit(LedgerStatements.verdict)
    earlier_attempts = _query(resume_state.earlier_attempts)
    list_unsettled = _query(resume_state.list_unsettled)
    close_sample = _commit(LedgerStatements.close_sample)
    reopen = _commit(LedgerStatements.reopen)
    reopen_samples = _commit(LedgerStatements.reopen_samples)
    mark_round = _query(resume_state.mark_round)
    list_closed = _query(resume_state.closed_of_instance)
    read_sample = _query(resume_state.read_sample)

    async def settle(self, verdict: Verdict) -> bool:
        """Commit a verdict; return False if the attempt has one already or has another fencing token.

        The usage of an attempt on a lost worker is summed from its exchanges.
        """
        return await self._writer.do(self._settle, verdict)

    def _settle(self, verdict: Verdict) -> bool:
        lost = verdict.failure is not None and verdict.failure.where is FailureOrigin.WORKER
        if lost and not verdict.exchanges:
            try:
                spent = sum_spending(self.directory, verdict.attempt)
            except LedgerCorrupt as e:
                self._statements.note("segment.damaged", e.message, verdict.attempt)
            else:
                verdict = msgspec.structs.replace(verdict, **msgspec.structs.asdict(spent))
        return self._statements.settle(verdict)

    async def forget_journal(self, worker: int) -> None:
        """Remove the journal of a worker that has ended, once all verdicts settled before are committed."""
        await self._writer.do(lambda: None)
        Journal(self.directory, worker, self.token).remove()

    async def open_samples(self, samples: int) -> AsyncIterator[OpenSample]:
        """Yield each sample in 0..samples-1 without an outcome, of the instances planned so far; paged."""
        connection = self._statements.connection
        until = await self._writer.do(resume_state.find_last_instance, connection)
        after: int | None = 0
        while after is not None:
            page = await self._writer.do(resume_state.read_open_page, connection, samples, after, until)
            for found in page.samples:
                yield found
            after = page.after

    # Regrades, and files that are dropped.

    begin_regrade = _commit(LedgerStatements.begin_regrade)
    refuse_regrade = _commit(LedgerStatements.refuse_regrade)
    switch_outcomes = _commit(LedgerStatements.switch_outcomes)
    pending_deletions = _query(attempt_files.pending_deletions)
    record_deleted = _query(attempt_files.record_deleted)

    # Orders from clients of a server.

    place_order = _commit(LedgerStatements.place_order)
    add_member = _commit(LedgerStatements.add_member)
    find_order = _query(orders.find_order)
    list_open_rollouts = _query(orders.list_open)
    list_closed_rollouts = _query(orders.list_closed)
    reopen_abandoned = _commit(LedgerStatements.reopen_abandoned)
    mark_delivered = _commit(LedgerStatements.mark_delivered)

    async def is_abandoned(self, order: int) -> bool:
        """Return whether a rollout of the order was cancelled because its client had disconnected."""
        rollouts = await self._writer.do(resume_state.closed_rollouts, self._statements.connection, order)
        return any(closed.abandoned for closed in rollouts)

    async def open_orders(self) -> AsyncIterator[OrderRow]:
        """Yield the orders that an earlier conductor left open; paged."""
        after = 0
        while page := await self._writer.do(orders.open_orders, self._statements.connection, after):
            for row in page:
                yield row
            after = page[-1].id

    # The run.

    was_paused = _query(resume_state.was_paused)
    note = _commit(LedgerStatements.note)
    add_gauge = _commit(LedgerStatements.add_gauge)
    set_total = _commit(LedgerStatements.set_total)
    remember = _commit(LedgerStatements.remember)
    recall = _commit(LedgerStatements.recall)
    counts = _query(rows.read_counts)
    earlier_seconds = _commit(LedgerStatements.earlier_seconds)
    finish = _commit(LedgerStatements.finish)
