"""A run as others see it: read-only, while a conductor writes or long after, from any process.

Everything is paged and short: a reader never holds the ledger's write-ahead log open. `audit.py` and
`export.py` stand on this; the conductor's own reads are in `standing.py`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.pass_rates import PassRate, pass_rates
from ..core.records import Record, Times, Usage, Verdict, Where
from ..core.summary import Gauge, Summary
from .compression import unpack
from .directory import RunDirectory
from .refusals import unowned_refusals
from .regrades import has_regrades, latest_regrade, refusal
from .schema import check_version, connect, failed
from .standing import verdict_of
from .tally import CONDUCTED, TALLY, Counts, counts

PAGE = 256  # small rows in memory at a time; payloads and verdicts are read one by one


class InstanceRow(Record, frozen=True):
    id: int
    name: str
    place: str
    digest: bytes


class OutcomeRow(Record, frozen=True):
    """What became of a sample; usage and times are of the attempt that was chosen, `spent` is of all.

    Where the chosen attempt graded kept work, they are of the attempt in which the agent acted.
    """

    instance: str
    row: int  # the instance's row
    sample: int
    kind: str
    score: float | None
    where: Where | None
    failure: str  # its message
    attempts: int
    attempt: int  # the chosen one
    usage: Usage
    times: Times
    closed: float
    spent: Usage = Usage()
    regrade: str = ""  # `not regraded: ` and why, where the last regrade left it as it was


class AttemptRow(Record, frozen=True):
    """An attempt, and its verdict once it is settled."""

    attempt: int
    instance: str
    row: int
    sample: int
    number: int
    round: int
    scale: int
    alone: bool
    regrades: int | None
    token: int
    started: float
    settled: float | None
    kind: str | None
    verdict: Verdict | None
    dropped: str | None = None  # its files are not kept: the `--keep` that says so


class EventRow(Record, frozen=True):
    at: float
    kind: str
    message: str
    attempt: int | None
    token: int


class Reader:
    """Usable from several threads; each call sees what was committed before it."""

    def __init__(self, run: RunDirectory | Path | str) -> None:
        self.directory = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
        self.config = self.directory.read_config()
        self._mutex = threading.Lock()
        self._connection = _open(self.directory.database)
        self.with_dropped = self._with_dropped()
        self._regraded = has_regrades(self)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def summary(self) -> Summary:
        """The run in a page; costs the same at any size, but for pass@k of several samples."""
        found, conductors = self.counts(), self._conductors()
        config = self.config
        meta = dict(self.rows("SELECT key, value FROM meta WHERE key IN ('total', 'lag', 'open')"))
        state, reason, exit_status, ended = self._state()
        return Summary(
            run=config.id,
            directory=str(self.directory.path),
            suite=config.suite,
            agent=config.agent,
            model=config.model,
            state=state,
            reason=reason,
            network=config.network,
            replays=config.replays,
            exit_status=exit_status,
            planned=found.samples(config),
            settled=found.settled,
            total=meta.get("total"),
            outcomes=found.outcomes,
            attempts=found.attempts,
            verdicts=found.verdicts,
            score=found.score,
            pass_at=self.pass_rates(),
            usage=found.usage,
            cost=found.usage.cost,
            saved=found.saved,
            started=conductors[0] or config.created,
            ended=ended,
            seconds=conductors[1] + (self._since_seen() if state == "running" else 0.0),
            gauge=self.gauge(),
            lag_max=meta.get("lag", 0.0),
            events=found.events,
            open=meta.get("open", b"").decode(),
            regrade=latest_regrade(self),
            refused=unowned_refusals(self),
        )

    def counts(self) -> Counts:
        return counts(self.rows(TALLY))

    def pass_rates(self) -> tuple[PassRate, ...]:
        """pass@k over the scored samples; none where an instance has one sample."""
        if self.config.samples == 1 or self.config.recipe is not None:
            return ()
        return pass_rates({(n, passed): count for n, passed, count in self.rows(_SCORED)})

    def outcomes(self) -> Iterator[OutcomeRow]:
        """What became of each sample, in the order of planning."""
        at = (0, -1)
        while page := self.rows(_OUTCOMES, (*at, PAGE)):
            for row in page:
                yield self._outcome(row)
            at = page[-1][1], page[-1][2]

    def attempts(self, instance: int | None = None) -> Iterator[AttemptRow]:
        """The attempts at an instance, or all there are, in the order in which they began."""
        at = 0
        query = _ATTEMPTS if instance is None else _ATTEMPTS_AT
        while page := self.rows(query, {"after": at, "instance": instance, "limit": PAGE}):
            for row in page:
                yield self._attempt(row)
            at = page[-1][0]

    def failures(self) -> list[tuple[str, Where]]:
        """The kinds of outcomes that have a failure behind them, each with its place, once."""
        rows = self.rows("SELECT DISTINCT kind, place FROM outcome WHERE place IS NOT NULL")
        return [(kind, Where(place)) for kind, place in rows]

    def events(self, last: int = 100, attempt: int | None = None) -> list[EventRow]:
        """The last things that happened, to one attempt or to all, the oldest first."""
        of = "" if attempt is None else "WHERE attempt = ?"
        given = (last,) if attempt is None else (attempt, last)
        rows = self.rows(
            f"SELECT at, kind, message, attempt, token FROM event {of} ORDER BY id DESC LIMIT ?", given
        )
        return [
            EventRow(at=at, kind=kind, message=message, attempt=attempt, token=token)
            for at, kind, message, attempt, token in reversed(rows)
        ]

    def gauge(self) -> Gauge | None:
        """The latest reading."""
        rows = self.rows("SELECT gauge FROM timeline ORDER BY id DESC LIMIT 1")
        return _gauges.decode(rows[0][0]) if rows else None

    def gauges(self) -> Iterator[Gauge]:
        """The readings of the run so far; the older, the sparser."""
        at = 0
        while page := self.rows(
            "SELECT id, gauge FROM timeline WHERE id > ? ORDER BY id LIMIT ?", (at, PAGE)
        ):
            for _, content in page:
                yield _gauges.decode(content)
            at = page[-1][0]

    def find(self, name: str) -> InstanceRow | None:
        rows = self.rows("SELECT id, name, place, digest FROM instance WHERE name = ?", (name,))
        return _instance(rows[0]) if rows else None

    def instances(self, *, tried: bool = False) -> Iterator[InstanceRow]:
        """All that were planned, or those of which an attempt was begun."""
        at = 0
        query = (
            f"SELECT id, name, place, digest FROM instance WHERE id > ?{_TRIED * tried} ORDER BY id LIMIT ?"
        )
        while page := self.rows(query, (at, PAGE)):
            yield from map(_instance, page)
            at = page[-1][0]

    def tried_instances(self) -> int:
        """How many `instances(tried=True)` gives."""
        return int(self.rows(f"SELECT count(*) FROM instance WHERE true{_TRIED}")[0][0])

    def tried(self, name: str, sample: int, round_: int) -> tuple[int, ...]:
        """The attempts of one round at a sample, regrades left out, in their order."""
        query = (
            "SELECT a.id FROM attempt a JOIN instance i ON i.id = a.instance WHERE i.name = ?"
            " AND a.sample = ? AND a.round = ? AND a.regrades IS NULL ORDER BY a.id"
        )
        return tuple(row[0] for row in self.rows(query, (name, sample, round_)))

    def payload(self, instance: int) -> bytes:
        rows = self.rows("SELECT payload FROM instance WHERE id = ?", (instance,))
        if not rows:
            raise LedgerCorrupt(f"the ledger has no instance {instance}")
        return unpack(rows[0][0])

    def verdict(self, attempt: int) -> Verdict | None:
        rows = self.rows("SELECT verdict FROM attempt WHERE id = ?", (attempt,))
        if not rows or rows[0][0] is None:
            return None
        try:
            return verdict_of(rows[0][0])
        except Exception as e:  # boundary: whatever the bytes on disk make of the decoders
            raise LedgerCorrupt(f"the verdict of attempt {attempt} cannot be read: {e}") from e

    def acting_attempt(self, attempt: int) -> int:
        """The attempt in which the agent acted: one that grades kept work has no exchanges of its own."""
        query = "SELECT regrades FROM attempt WHERE id = ?"
        while (rows := self.rows(query, (attempt,))) and rows[0][0] is not None:
            attempt = rows[0][0]
        return attempt

    def whole_verdict(self, attempt: int) -> Verdict:
        """The verdict of an attempt; over kept work, with what the agent used and took when it acted."""
        verdict = self.verdict(attempt) or Verdict(attempt=attempt, token=0)
        acted = self.acting_attempt(attempt)
        acting = self.verdict(acted) if acted != attempt else None
        if acting is None:
            return verdict
        own = {name: getattr(acting, name) for name in _OF_ACTING}
        times = msgspec.structs.replace(acting.times, grading=verdict.times.grading)
        return msgspec.structs.replace(verdict, **own, times=times)

    def dropped(self, attempt: int) -> str | None:
        """The `--keep` by which the files of an attempt are not kept; None: they are."""
        rows = self.rows(f"{self.with_dropped}SELECT keep FROM dropped WHERE attempt = ?", (attempt,))
        return rows[0][0] if rows else None

    def unrecorded(self, attempts: Iterable[int]) -> str | None:
        """The `--keep` by which the exchanges that one of these had are not kept; None: all are there."""
        query = (
            f"{self.with_dropped}SELECT keep FROM dropped JOIN attempt ON attempt.id = dropped.attempt"
            " WHERE dropped.attempt = ? AND exchanges > 0"
        )
        return next((row[0] for attempt in attempts for row in self.rows(query, (attempt,))), None)

    def rows(self, query: str, arguments: Any = ()) -> list[tuple[Any, ...]]:
        """A bounded number of rows; for the modules of this room."""
        try:
            with self._mutex:
                return self._connection.execute(query, arguments).fetchall()
        except sqlite3.Error as e:
            raise LedgerCorrupt(f"the ledger cannot be read: `{self.directory.database}`: {e}") from e

    def _with_dropped(self) -> str:
        """What stands before a query on `dropped`: an older ledger has no such table and is read as it is."""
        try:
            found = self.rows("SELECT 1 FROM sqlite_master WHERE name = 'dropped'")
        except LedgerCorrupt:
            self.close()
            raise
        return "" if found else _NONE_DROPPED

    # How the run stands.

    def _state(self) -> tuple[str, str, int | None, float | None]:
        rows = self.rows(
            "SELECT state, reason, exit_status, ended FROM conductor ORDER BY token DESC LIMIT 1"
        )
        if rows and rows[0][3] is not None:
            state, reason, exit_status, ended = rows[0]
            return state, reason, exit_status, ended
        return ("running" if self.directory.holder() else "unfinished"), "", None, None

    def _conductors(self) -> tuple[float | None, float]:
        """When the first began, and the seconds that all of them spent."""
        row = self.rows(f"SELECT min(started), {CONDUCTED} FROM conductor")[0]
        return row[0], row[1]

    def _since_seen(self) -> float:
        seen: float | None = self.rows("SELECT max(seen) FROM conductor")[0][0]
        return 0.0 if seen is None else max(0.0, time.time() - seen)  # None: created, not conducted yet

    def _outcome(self, row: tuple[Any, ...]) -> OutcomeRow:
        name, id_, sample, kind, score, place, closed, attempt, attempts = row
        verdict = self.whole_verdict(attempt)
        return OutcomeRow(
            instance=name,
            row=id_,
            sample=sample,
            kind=kind,
            score=score,
            where=Where(place) if place else None,
            failure=verdict.failure.message if verdict.failure else "",
            attempts=attempts,
            attempt=attempt,
            usage=verdict.usage,
            times=verdict.times,
            closed=closed,
            spent=self._spent(id_, sample) if attempts > 1 else verdict.usage,
            regrade=refusal(self, id_, sample) if self._regraded else "",
        )

    def _spent(self, instance: int, sample: int) -> Usage:
        """What all attempts at a sample used."""
        query = "SELECT id FROM attempt WHERE instance = ? AND sample = ? AND settled IS NOT NULL"
        total = Usage()
        for (attempt,) in self.rows(query, (instance, sample)):
            verdict = self.verdict(attempt)
            total = total.plus(verdict.usage) if verdict else total
        return total

    def _attempt(self, row: tuple[Any, ...]) -> AttemptRow:
        fields = AttemptRow.__struct_fields__[:-2]
        values = dict(zip(fields, row, strict=True))
        values["alone"] = bool(values["alone"])
        return AttemptRow(**values, verdict=self.verdict(row[0]), dropped=self.dropped(row[0]))


_OF_ACTING = ("usage", "saved", "exchanges", "peak_memory", "children")
_NONE_DROPPED = "WITH dropped (attempt, at, keep, bytes) AS (SELECT 0, 0, '', 0 WHERE false) "
_TRIED = " AND EXISTS (SELECT 1 FROM attempt WHERE attempt.instance = instance.id)"
_SCORED = """
    SELECT n, passed, count(*) FROM (
        SELECT count(*) AS n, sum(kind = 'passed') AS passed
        FROM outcome WHERE kind IN ('passed', 'failed') GROUP BY instance
    ) GROUP BY n, passed
"""
_OUTCOMES = """
    SELECT i.name, o.instance, o.sample, o.kind, o.score, o.place, o.closed, o.attempt,
        (SELECT count(*) FROM attempt a WHERE a.instance = o.instance AND a.sample = o.sample)
    FROM outcome o JOIN instance i ON i.id = o.instance
    WHERE (o.instance, o.sample) > (?, ?) ORDER BY o.instance, o.sample LIMIT ?
"""
_ATTEMPTS = """
    SELECT a.id, i.name, a.instance, a.sample, a.number, a.round, a.scale, a.alone, a.regrades, a.token,
        a.started, a.settled, a.kind
    FROM attempt a JOIN instance i ON i.id = a.instance
    WHERE a.id > :after ORDER BY a.id LIMIT :limit
"""
# by the index over instances: the plus keeps SQLite from walking through all attempts in the order of ids
_ATTEMPTS_AT = _ATTEMPTS.replace("a.id > :after", "a.instance = :instance AND +a.id > :after").replace(
    "BY a.id", "BY +a.id"
)


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise LedgerCorrupt(f"the ledger is gone: `{path}`")
    log = path.with_name(path.name + "-wal")
    archived = not log.exists() and not os.access(path.parent, os.W_OK)  # SQLite cannot make its index there
    connection = connect(path, "ro&immutable=1" if archived else "ro")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        check_version(version)
        return connection
    except sqlite3.Error as e:
        connection.close()
        raise failed(path, e) from e
    except BaseException:  # boundary: given back, then raised again
        connection.close()
        raise


def _instance(row: tuple[Any, ...]) -> InstanceRow:
    id_, name, place, digest = row
    return InstanceRow(id=id_, name=name, place=place, digest=digest)


_gauges = msgspec.msgpack.Decoder(Gauge)
