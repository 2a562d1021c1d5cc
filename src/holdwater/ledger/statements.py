"""The statements that write to the ledger; they run in the writer's thread and transaction.

Each operation either fails before it changes anything or updates the tally together with the rows.
`writer.py` manages the transactions, `resume_state.py` reads the state that an earlier conductor left.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..core.config import KeepRule
from ..core.errors import BadInput, DuplicateInstance, LedgerFailed
from ..core.masking import clean_text
from ..core.policy import ClosedSample, keeps
from ..core.records import Attempt, ModelUsage, Outcome, Verdict
from ..core.summary import RunGauge
from . import orders, regrades, resume_state
from .attempt_files import drop_sample
from .instance_tags import replace_tags, write_tags
from .orders import OrderRow
from .record_encoding import encode_record, pack, unpack
from .resume_state import KnownInstance, PlannedInstance, SuitePass, decode_verdict, find_known, pass_number
from .rows import CONDUCTED_SECONDS, RAN_PREFIX, SettledColumns, SettledFigures, bound_usage, finite_score
from .schema import connect, migrate, to_ledger_error

LONGEST_TIMELINE = 20_000  # rows; above it, every second row is deleted
SEEN_EVERY = 1.0  # seconds between updates of `conductor.seen`


class LedgerStatements:
    """The open database, its current transaction and its tally."""

    def __init__(
        self,
        path: Path,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is the wall clock that dates rows; `clock` is monotonic and measures the run time."""
        self.path = path
        self.token = 0
        self.regrade: int | None = None  # if set, new outcomes are stored separately from the old ones
        self._now = now
        self._clock = clock
        self._began = clock()
        self._tally: dict[str, float] = {}  # changes in this transaction; bound: the keys of a tally
        self._seen = self._began - SEEN_EVERY
        self._gauges = 0

    def open(self) -> None:
        """Open the database, migrate its tables and fence every earlier conductor."""
        if not self.path.exists():
            raise LedgerFailed(f"the ledger is missing: `{self.path}`")
        self.connection = connect(self.path, "rw")
        try:
            migrate(self.connection)
            now = self._now()
            self.token = (
                self.connection.execute(
                    "INSERT INTO conductor (token, started, seen)"
                    " VALUES ((SELECT coalesce(max(token), 0) + 1 FROM conductor), ?, ?)",
                    (now, now),
                ).lastrowid
                or 0
            )
            self._gauges = self.connection.execute("SELECT count(*) FROM timeline").fetchone()[0]
        except BaseException as e:  # boundary: close the connection, then raise again
            self.connection.close()
            if isinstance(e, sqlite3.Error):
                raise to_ledger_error(self.path, e) from e
            raise

    def close(self) -> None:
        self.connection.close()

    # Transactions.

    def begin(self) -> None:
        self._tally.clear()
        self.connection.execute("BEGIN IMMEDIATE")
        if self.connection.execute("SELECT max(token) FROM conductor").fetchone()[0] != self.token:
            raise LedgerFailed("another conductor has taken the run over")

    def commit(self) -> None:
        if self._tally:
            self.connection.executemany(
                "INSERT INTO tally VALUES (?, ?)"
                " ON CONFLICT (key) DO UPDATE SET value = value + excluded.value",
                self._tally.items(),
            )
            if self._clock() - self._seen >= SEEN_EVERY:
                self._mark_alive()
        self.connection.execute("COMMIT")

    def _mark_alive(self) -> None:
        """Write when this conductor was last alive, and its run time independent of the wall clock."""
        self._seen = self._clock()
        self.connection.execute("UPDATE conductor SET seen = ? WHERE token = ?", (self._now(), self.token))
        self.remember(f"{RAN_PREFIX}{self.token}", self._seen - self._began)

    def rollback(self) -> None:
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # the failure that caused the rollback is reported; SQLite rolls back on the next open

    # Instances.

    def plan(self, items: Sequence[PlannedInstance]) -> list[int]:
        """Write the new instances; return their rows.

        An id that this pass has seen before raises `DuplicateInstance`; new instances before it stay written.
        """
        rows: list[int] = []
        try:
            for item in items:
                if self.mark_seen([item], SuitePass.PLAN) == [None]:
                    seen = pass_number(self.token, SuitePass.PLAN)
                    content = (item.name, item.digest, pack(item.payload), clean_text(item.place))
                    cursor = self.connection.execute(
                        "INSERT INTO instance (name, digest, payload, place, planned, sighted)"
                        " VALUES (?, ?, ?, ?, ?, ?)",
                        (*content, self.token, seen),
                    )
                    rows.append(cursor.lastrowid or 0)
                    write_tags(self.connection, rows[-1], item.payload)
                    self._count("planned")
        except DuplicateInstance as error:
            raise DuplicateInstance(error.message, rows) from None
        return rows

    def mark_seen(self, items: Sequence[PlannedInstance], during: SuitePass) -> list[KnownInstance | None]:
        """Mark known instances as seen in this pass; return the known instance of each item, or None.

        A second item with the same id in a pass is a duplicate: the comparing pass skips it, planning raises
        `DuplicateInstance`.
        """
        seen = pass_number(self.token, during)
        entries: list[KnownInstance | None] = []
        for item in items:
            entry = find_known(self.connection, item.name)
            if entry is not None and entry.last_pass == seen:
                if during is SuitePass.PLAN:
                    places = f"first in {entry.place}, again in {item.place}"
                    raise DuplicateInstance(f"duplicate id `{item.name}`: {places}")
                entry = None
            if entry is not None:
                self.connection.execute(
                    "UPDATE instance SET sighted = ?, place = ? WHERE id = ?",
                    (seen, clean_text(item.place), entry.id),
                )
            entries.append(entry)
        return entries

    def find_missing(self, limit: int = 100) -> list[str]:
        """Return the first ids that are planned and that this conductor has not seen in the suite."""
        rows = self.connection.execute(
            "SELECT name FROM instance WHERE sighted < ? ORDER BY id LIMIT ?",
            (pass_number(self.token, SuitePass.COMPARE), limit),
        )
        return [name for (name,) in rows]

    def replace_instance(self, item: PlannedInstance) -> int:
        """Replace a planned instance by its current version in the suite; return its row. Outcomes stay."""
        row = self.connection.execute(
            "UPDATE instance SET digest = ?, payload = ?, place = ? WHERE name = ? RETURNING id",
            (item.digest, pack(item.payload), clean_text(item.place), item.name),
        ).fetchone()
        if row is None:
            raise BadInput(f"no such instance: `{item.name}`")
        replace_tags(self.connection, row[0], item.payload)
        return int(row[0])

    def payload(self, instance: int) -> bytes:
        row = self.connection.execute("SELECT payload FROM instance WHERE id = ?", (instance,)).fetchone()
        if row is None:
            raise BadInput(f"no such instance: {instance}")
        return unpack(row[0])

    # Orders.

    def place_order(self, row: OrderRow, size: int) -> OrderRow:
        """Write an order and its rollouts, or return the order that has its key.

        Raise `KeyTaken` if the key is used by a different request.
        """
        placed = orders.place_order(self.connection, row, size)
        if not placed.known:
            self._count("ordered", size)
        return placed

    def add_member(self, order: int, instance: int, member: int) -> int:
        """Add a rollout to an order; return its sample."""
        self._count("ordered")
        return orders.add_member(self.connection, order, instance, member)

    def mark_delivered(self, order: int, keep: KeepRule = KeepRule.ALL) -> None:
        """Write that a client has received the result; drop the attempts that `keep` does not keep."""
        orders.mark_delivered(self.connection, order, self._now())
        for instance, sample, kind in orders.list_outcomes(self.connection, order):
            if not keeps(keep, kind):
                drop_sample(self.connection, (instance, sample), keep, self._now())

    # Attempts.

    def begin_attempt(self, attempt: Attempt) -> None:
        """Write an attempt before it starts."""
        self.connection.execute(
            "INSERT INTO attempt"
            " (id, instance, sample, number, round, scale, alone, regrades, token, started)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(attempt.id, attempt.instance, attempt.sample, attempt.number, attempt.round),
                *(attempt.scale, attempt.alone, attempt.regrades, self.token, self._now()),
            ),
        )
        self._count("attempts")

    def verdict(self, attempt: int) -> Verdict:
        """Return the verdict of an earlier attempt."""
        row = self.connection.execute("SELECT verdict FROM attempt WHERE id = ?", (attempt,)).fetchone()
        if row is None or row[0] is None:
            raise LedgerFailed(f"attempt {attempt} has no verdict")
        return decode_verdict(row[0])

    def settle(self, verdict: Verdict) -> bool:
        """Write a verdict; return False if the attempt has one already or has another fencing token."""
        columns, figures = SettledColumns.of(verdict), SettledFigures.of(verdict)
        failure = clean_text(verdict.failure.kind) if verdict.failure else None
        content = pack(encode_record(verdict))
        cursor = self.connection.execute(
            "UPDATE attempt SET settled = ?, kind = ?, place = ?, passed = ?, score = ?, exchanges = ?,"
            " failure = ?, verdict = ?, input_tokens = ?, output_tokens = ?, nanodollars = ?, seconds = ?,"
            " peak_memory = ?, message = ?, answer = ?, version = ?"
            " WHERE id = ? AND token = ? AND settled IS NULL",
            (self._now(), *columns, failure, content, *figures, verdict.attempt, verdict.token),
        )
        if cursor.rowcount != 1:
            return False
        self._count(f"verdict:{columns.kind}")
        self._count_usage("usage", verdict.usage)
        self._count_usage("saved", verdict.replayed_usage)
        return True

    def close_sample(self, outcome: Outcome, keep: KeepRule = KeepRule.ALL) -> None:
        """Write the outcome of a sample, replacing an earlier one; drop its attempts if `keep` says so.

        In a regrade, the outcome is stored separately.
        """
        if self.regrade is not None:
            before = resume_state.find_chosen_verdict(self.connection, outcome.instance, outcome.sample)
            regraded = self.verdict(outcome.attempt)
            regrades.put_grade(self.connection, self.regrade, outcome, regraded, before)
            return
        key = (outcome.instance, outcome.sample)
        old = self.connection.execute(
            "SELECT kind, score FROM outcome WHERE instance = ? AND sample = ?", key
        ).fetchone()
        score = finite_score(outcome.score)
        self.connection.execute(
            "INSERT OR REPLACE INTO outcome (instance, sample, attempt, kind, score, place, closed)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*key, outcome.attempt, outcome.kind, score, outcome.where and outcome.where.value, self._now()),
        )
        if old is not None:
            self._count_outcome(old[0], old[1], -1)
        self._count_outcome(outcome.kind, score, 1)
        if not keeps(keep, outcome.kind):
            drop_sample(self.connection, key, keep, self._now())

    def reopen(self, chosen: Callable[[ClosedSample], bool]) -> int:
        """Reopen the closed samples for which `chosen` is true; return their number.

        `chosen` runs in the writer's thread.
        """
        return self.reopen_samples(filter(chosen, resume_state.closed_samples(self.connection)))

    def reopen_abandoned(self, order: int) -> int:
        """Reopen the rollouts that were cancelled because the client had disconnected; return the number."""
        rollouts = resume_state.closed_rollouts(self.connection, order)
        count = self.reopen_samples(closed for closed in rollouts if closed.abandoned)
        if count:
            orders.withdraw_delivery(self.connection, order)
        return count

    def reopen_samples(self, samples: Iterable[ClosedSample]) -> int:
        """Reopen these closed samples; return their number."""
        count = 0
        for kind, score in resume_state.reopen(self.connection, samples, self._now()):
            self._count_outcome(kind, score, -1)
            count += 1
        return count

    # Regrades.

    def begin_regrade(self, grader: str, only: tuple[str, ...], continues: int | None = None) -> int:
        """Begin a regrade or continue `continues`; return its id.

        Until `switch_outcomes`, new outcomes are stored separately and the old ones stay in effect.
        """
        begun = continues or regrades.begin_regrade(self.connection, grader, only, self._now())
        self.connection.execute("UPDATE conductor SET regrade = ? WHERE token = ?", (begun, self.token))
        self.regrade = begun
        return begun

    def refuse_regrade(self, instance: int, sample: int, why: str) -> None:
        """Write that a sample is not regraded: its outcome stays."""
        assert self.regrade is not None, "no regrade has begun"
        regrades.keep_outcome(self.connection, self.regrade, (instance, sample), why, None)

    def switch_outcomes(self, keep: KeepRule = KeepRule.ALL) -> None:
        """End the regrade: replace all old outcomes by the new ones at once."""
        assert self.regrade is not None, "no regrade has begun"
        ended, self.regrade = self.regrade, None
        for outcome in regrades.new_outcomes(self.connection, ended):
            self.close_sample(outcome, keep)
        regrades.end_regrade(self.connection, ended, self._now())

    # The run.

    def note(self, kind: str, message: str = "", attempt: int | None = None) -> None:
        """Write an event."""
        self.connection.execute(
            "INSERT INTO event (at, token, kind, message, attempt) VALUES (?, ?, ?, ?, ?)",
            (self._now(), self.token, kind, clean_text(message), attempt),
        )
        self._count(f"event:{kind}")

    def add_gauge(self, gauge: RunGauge) -> None:
        """Write a gauge reading; `show` displays the latest one."""
        self.connection.execute("INSERT INTO timeline (gauge) VALUES (?)", (encode_record(gauge),))
        # The maximum is kept outside the timeline, because the timeline is thinned out.
        self.connection.execute(
            "INSERT INTO meta VALUES ('lag', ?) ON CONFLICT DO UPDATE SET value = max(value, excluded.value)",
            (gauge.lag,),
        )
        self._mark_alive()
        self._gauges += 1
        if self._gauges > LONGEST_TIMELINE:  # delete every second reading: older ones become sparser
            self.connection.execute(
                "DELETE FROM timeline WHERE id IN (SELECT id FROM"
                " (SELECT id, row_number() OVER (ORDER BY id DESC) AS back FROM timeline) WHERE back % 2 = 0)"
            )
            self._gauges = self.connection.execute("SELECT count(*) FROM timeline").fetchone()[0]

    def set_total(self, total: int | None) -> None:
        """Write the total number of samples, if the suite declares it."""
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES ('total', ?)", (total,))

    def remember(self, name: str, value: bytes | float) -> None:
        """Store a small value for the next conductor."""
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def recall(self, name: str) -> bytes | None:
        row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def earlier_seconds(self) -> float:
        """Return the seconds that earlier conductors ran."""
        query = f"SELECT {CONDUCTED_SECONDS} FROM conductor WHERE token < ?"
        return float(self.connection.execute(query, (self.token,)).fetchone()[0])

    def finish(self, state: str, reason: str, exit_status: int) -> None:
        """Write how this conductor ended the run: `finished`, `interrupted` or `stopped`."""
        self._mark_alive()
        now = self._now()
        regraded = self.connection.execute(
            "SELECT regrade IS NOT NULL FROM conductor WHERE token = ?", (self.token,)
        ).fetchone()[0]
        if regraded and state == "finished":
            before = regrades.find_state_before(self.connection, self.token)
            state, reason, exit_status = before or (state, reason, exit_status)
        self.connection.execute(
            "UPDATE conductor SET ended = ?, seen = ?, state = ?, reason = ?, exit_status = ?"
            " WHERE token = ?",
            (now, now, state, clean_text(reason), exit_status, self.token),
        )

    # The tally is written once per transaction, so that counting costs almost nothing.

    def _count(self, key: str, by: float = 1) -> None:
        self._tally[key] = self._tally.get(key, 0) + by

    def _count_usage(self, what: str, usage: ModelUsage) -> None:
        counted = bound_usage(usage)
        for field in counted.__struct_fields__:
            if amount := getattr(counted, field):
                self._count(f"{what}:{field}", amount)

    def _count_outcome(self, kind: str, score: float | None, by: int) -> None:
        self._count(f"outcome:{kind}", by)
        if score is not None:
            self._count("scored", by)
            self._count("score", by * score)
