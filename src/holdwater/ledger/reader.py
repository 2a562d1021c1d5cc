"""Read-only access to a run from any process, while a conductor writes or after the run.

Every query is paged and short, so that a reader never keeps the ledger's write-ahead log from being
truncated. `audit.py` and `export/formats.py` use this module; the conductor reads through `resume_state.py`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..core.control import EVENT_PREFIX, PAUSE_EVENT, UNPAUSE_EVENT, WATCH_EVENT
from ..core.endpoints import EndpointUses
from ..core.errors import BadInput, LedgerCorrupt
from ..core.records import FailureOrigin, ModelUsage, Verdict
from ..core.summary import (
    ControlEvent,
    PassRate,
    RefusedRequests,
    RunGauge,
    RunPause,
    RunSummary,
    compute_pass_rates,
)
from .directory import RunDirectory
from .record_encoding import unpack
from .regrades import explain_refusal, has_regrades, latest_regrade
from .resume_state import decode_verdict
from .rows import (
    CONDUCTED_SECONDS,
    TALLY_QUERY,
    AttemptRow,
    EventRow,
    InstanceRow,
    LedgerCounts,
    OutcomeRow,
    parse_counts,
)
from .schema import check_version, connect, to_ledger_error
from .translations import list_translations

MOST_CONTROLS = 5  # requests to the running run that are shown
MOST_REFUSALS = 3  # refused requests whose messages are shown
PAGE = 256  # small rows in memory at a time; payloads and verdicts are read one at a time


class LedgerReader:
    """Reads a run. Several threads may share it; each call sees all rows committed before it."""

    def __init__(self, run: RunDirectory | Path | str) -> None:
        self.directory = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
        self.config = self.directory.read_config()
        self._mutex = threading.Lock()
        self._connection, self.version = _open_database(self.directory.database)
        self.dropped_clause = self._make_dropped_clause()
        self._regraded = has_regrades(self)

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def summary(self) -> RunSummary:
        """Return the summary of the run; the cost is independent of its size, except for pass@k."""
        config, found = self.config, self.counts()
        query = f"SELECT min(started), {CONDUCTED_SECONDS}, max(seen) FROM conductor"
        started, seconds, seen = self.rows(query)[0]
        query = "SELECT key, value FROM meta WHERE key IN ('total', 'lag', 'open', 'endpoints')"
        meta = dict(self.rows(query))
        state, reason, exit_status, ended = self._state()
        if state == "running" and seen is not None:
            seconds += max(0.0, time.time() - seen)
        return RunSummary(
            run=config.id,
            directory=str(self.directory.path),
            suite=config.suite,
            agent=config.agent,
            model=config.model,
            state=state,
            reason=reason,
            network=config.network,
            replays=config.replays,
            fork=config.fork,
            exit_status=exit_status,
            planned=found.samples(config),
            settled=found.settled,
            total=meta.get("total"),
            outcomes=found.outcomes,
            attempts=found.attempts,
            verdicts=found.verdicts,
            score=found.score,
            pass_at=self.pass_rates(),
            endpoints=_endpoints.decode(meta["endpoints"]).uses if "endpoints" in meta else (),
            usage=found.usage,
            cost=found.usage.cost,
            saved=found.saved,
            started=started or config.created,
            ended=ended,
            seconds=seconds,
            gauge=self.gauge(),
            lag_max=meta.get("lag", 0.0),
            events=found.events,
            open=meta.get("open", b"").decode(),
            regrade=latest_regrade(self),
            refused=self._refused_requests(),
            translated=list_translations(self, found.events),
            paused=self._find_pause() if state == "running" and PAUSE_EVENT in found.events else None,
            control=self._list_control(found.events),
        )

    def counts(self) -> LedgerCounts:
        return parse_counts(self.rows(TALLY_QUERY))

    def pass_rates(self) -> tuple[PassRate, ...]:
        """Return pass@k over the scored samples; empty if instances have one sample."""
        if self.config.samples == 1 or self.config.recipe is not None:
            return ()
        return compute_pass_rates({(n, passed): count for n, passed, count in self.rows(_SCORED)})

    def outcomes(self) -> Iterator[OutcomeRow]:
        """Yield the outcome of each closed sample, in the order of planning."""
        for row in self.paged(_OUTCOMES, (0, -1), slice(1, 3)):
            yield self._make_outcome(row)

    def attempts(self, instance: int | None = None) -> Iterator[AttemptRow]:
        """Yield the attempts at an instance, or all attempts, in the order in which they began."""
        # The plus makes SQLite use the index over instances instead of scanning all attempts.
        every = "a.id > ? ORDER BY a.id"
        where = every if instance is None else "a.instance = ? AND +a.id > ? ORDER BY +a.id"
        given = () if instance is None else (instance,)
        for row in self.paged(f"{_ATTEMPTS} WHERE {where} LIMIT ?", given=given):
            yield self._make_attempt(row)

    def attempt(self, attempt: int) -> AttemptRow | None:
        """Return one attempt."""
        rows = self.rows(f"{_ATTEMPTS} WHERE a.id = ?", (attempt,))
        return self._make_attempt(rows[0]) if rows else None

    def failures(self) -> list[tuple[str, FailureOrigin]]:
        """Return the distinct kinds of outcomes with a failure, each with the failure's origin."""
        rows = self.rows("SELECT DISTINCT kind, place FROM outcome WHERE place IS NOT NULL")
        return [(kind, FailureOrigin(place)) for kind, place in rows]

    def events(self, last: int = 100, attempt: int | None = None) -> list[EventRow]:
        """Return the last events of one attempt or of the run, oldest first."""
        of = "" if attempt is None else "WHERE attempt = ?"
        given = (last,) if attempt is None else (attempt, last)
        rows = self.rows(
            f"SELECT at, kind, message, attempt, token FROM event {of} ORDER BY id DESC LIMIT ?", given
        )
        return [EventRow(*row) for row in reversed(rows)]

    def _refused_requests(self) -> RefusedRequests | None:
        """Return the number and the last messages of refused requests that belong to no attempt, if any."""
        of = "FROM event WHERE attempt IS NULL AND kind = 'gateway.refused'"
        count = self.rows(f"SELECT count(*) {of}")[0][0]
        rows = self.rows(f"SELECT message {of} ORDER BY id DESC LIMIT {MOST_REFUSALS}")
        last = tuple(message for (message,) in reversed(rows))
        return RefusedRequests(events=count, last=last) if count else None

    def _find_pause(self) -> RunPause | None:
        """Return the pause of the present conductor, if it has one."""
        rows = self.rows(
            "SELECT at, message, kind, token = (SELECT max(token) FROM conductor) FROM event"
            " WHERE kind IN (?, ?) ORDER BY id DESC LIMIT 1",
            (PAUSE_EVENT, UNPAUSE_EVENT),
        )
        at, by, kind, present = rows[0]
        return RunPause(since=at, by=by) if present and kind == PAUSE_EVENT else None

    def _list_control(self, counted: Iterable[str]) -> tuple[ControlEvent, ...]:
        """Return the last requests that changed the running run, if any kind is among `counted` events."""
        if not any(kind.startswith(EVENT_PREFIX) for kind in counted):
            return ()
        query = "SELECT at, kind, message FROM event WHERE kind LIKE ? AND kind != ? ORDER BY id DESC LIMIT ?"
        rows = self.rows(query, (f"{EVENT_PREFIX}%", WATCH_EVENT, MOST_CONTROLS))
        return tuple(
            ControlEvent(at=at, verb=kind.removeprefix(EVENT_PREFIX), message=message)
            for at, kind, message in reversed(rows)
        )

    def gauge(self) -> RunGauge | None:
        """Return the latest gauge reading."""
        rows = self.rows("SELECT gauge FROM timeline ORDER BY id DESC LIMIT 1")
        return _gauges.decode(rows[0][0]) if rows else None

    def gauges(self) -> Iterator[RunGauge]:
        """Yield the gauge readings so far; older readings are sparser."""
        for _, content in self.paged("SELECT id, gauge FROM timeline WHERE id > ? ORDER BY id LIMIT ?"):
            yield _gauges.decode(content)

    def find_instance(self, name: str) -> InstanceRow | None:
        rows = self.rows("SELECT id, name, place, digest FROM instance WHERE name = ?", (name,))
        return InstanceRow(*rows[0]) if rows else None

    def instances(self, *, tried: bool = False) -> Iterator[InstanceRow]:
        """Yield all planned instances, or only instances with an attempt."""
        columns = "SELECT id, name, place, digest FROM instance"
        for row in self.paged(f"{columns} WHERE id > ?{_TRIED * tried} ORDER BY id LIMIT ?"):
            yield InstanceRow(*row)

    def count_tried_instances(self) -> int:
        """Return the number of instances that `instances(tried=True)` yields."""
        return int(self.rows(f"SELECT count(*) FROM instance WHERE true{_TRIED}")[0][0])

    def find_round_attempts(self, name: str, sample: int, round_: int) -> tuple[int, ...]:
        """Return the attempts of one round of a sample in order, without regrades."""
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
            return decode_verdict(rows[0][0])
        except Exception as e:  # boundary: damaged bytes can make the decoders raise anything
            raise LedgerCorrupt(f"the verdict of attempt {attempt} cannot be read: {e}") from e

    def acting_attempt(self, attempt: int) -> int:
        """Return the attempt in which the agent acted: an attempt that grades kept work has no exchanges."""
        query = "SELECT regrades FROM attempt WHERE id = ?"
        while (rows := self.rows(query, (attempt,))) and rows[0][0] is not None:
            attempt = rows[0][0]
        return attempt

    def whole_verdict(self, attempt: int) -> Verdict:
        """Return the verdict of an attempt; for kept work, with usage and times of the acting attempt."""
        verdict = self.verdict(attempt) or Verdict(attempt=attempt, token=0)
        acted = self.acting_attempt(attempt)
        acting = self.verdict(acted) if acted != attempt else None
        if acting is None:
            return verdict
        own = {name: getattr(acting, name) for name in _ACTING_FIELDS}
        times = msgspec.structs.replace(acting.times, grading=verdict.times.grading)
        return msgspec.structs.replace(verdict, **own, times=times)

    def find_drop_policy(self, attempt: int) -> str | None:
        """Return the `--keep` rule by which an attempt's files were dropped; None if they are kept."""
        rows = self.rows(f"{self.dropped_clause}SELECT keep FROM dropped WHERE attempt = ?", (attempt,))
        return rows[0][0] if rows else None

    def find_unrecorded_policy(self, attempts: Iterable[int]) -> str | None:
        """Return the `--keep` rule that dropped exchanges of one of the attempts; None if all are kept."""
        query = (
            f"{self.dropped_clause}SELECT keep FROM dropped JOIN attempt ON attempt.id = dropped.attempt"
            " WHERE dropped.attempt = ? AND exchanges > 0"
        )
        return next((row[0] for attempt in attempts for row in self.rows(query, (attempt,))), None)

    def rows(self, query: str, arguments: Any = ()) -> list[tuple[Any, ...]]:
        """Run a query that returns a bounded number of rows. Internal to the packages that read ledgers."""
        try:
            with self._mutex:
                return self._connection.execute(query, arguments).fetchall()
        except sqlite3.Error as e:
            raise LedgerCorrupt(f"the ledger cannot be read: `{self.directory.database}`: {e}") from e

    def paged(
        self,
        query: str,
        after: tuple[int, ...] = (0,),
        columns: slice = slice(1),
        given: tuple[int, ...] = (),
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query with the arguments `given`, the last row's `columns`, and a limit."""
        while page := self.rows(query, (*given, *after, PAGE)):
            yield from page
            after = page[-1][columns]

    def _make_dropped_clause(self) -> str:
        """Return a prefix for queries on `dropped`: in an older ledger, an empty table stands in for it."""
        try:
            found = self.rows("SELECT 1 FROM sqlite_master WHERE name = 'dropped'")
        except LedgerCorrupt:
            self.close()
            raise
        return "" if found else _NONE_DROPPED

    # The state of the run.

    def _state(self) -> tuple[str, str, int | None, float | None]:
        rows = self.rows(
            "SELECT state, reason, exit_status, ended FROM conductor ORDER BY token DESC LIMIT 1"
        )
        if rows and rows[0][3] is not None:
            state, reason, exit_status, ended = rows[0]
            return state, reason, exit_status, ended
        return ("running" if self.directory.find_holder() else "unfinished"), "", None, None

    def _make_outcome(self, row: tuple[Any, ...]) -> OutcomeRow:
        name, id_, sample, kind, score, place, closed, attempt, attempts = row
        verdict = self.whole_verdict(attempt)
        return OutcomeRow(
            instance=name,
            row=id_,
            sample=sample,
            kind=kind,
            score=score,
            where=FailureOrigin(place) if place else None,
            failure=verdict.failure.message if verdict.failure else "",
            attempts=attempts,
            attempt=attempt,
            usage=verdict.usage,
            times=verdict.times,
            closed=closed,
            spent=self._sum_usage(id_, sample) if attempts > 1 else verdict.usage,
            regrade=explain_refusal(self, id_, sample) if self._regraded else "",
        )

    def _sum_usage(self, instance: int, sample: int) -> ModelUsage:
        """Return the usage of all attempts at a sample."""
        query = "SELECT id FROM attempt WHERE instance = ? AND sample = ? AND settled IS NOT NULL"
        total = ModelUsage()
        for (attempt,) in self.rows(query, (instance, sample)):
            verdict = self.verdict(attempt)
            total = total.plus(verdict.usage) if verdict else total
        return total

    def _make_attempt(self, row: tuple[Any, ...]) -> AttemptRow:
        fields = AttemptRow.__struct_fields__[:-2]
        values = dict(zip(fields, row, strict=True))
        values["alone"] = bool(values["alone"])
        return AttemptRow(**values, verdict=self.verdict(row[0]), dropped=self.find_drop_policy(row[0]))


_ACTING_FIELDS = ("usage", "replayed_usage", "exchanges", "peak_memory", "children", "memory")
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
"""


def _open_database(path: Path) -> tuple[sqlite3.Connection, int]:
    """Return a connection and the version of the ledger."""
    if not path.exists():
        raise LedgerCorrupt(f"the ledger is missing: `{path}`")
    connection = connect(path, _choose_mode(path))
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        check_version(version)
        return connection, version
    except sqlite3.Error as e:
        connection.close()
        raise to_ledger_error(path, e) from e
    except BaseException:  # boundary: close the connection, then raise again
        connection.close()
        raise


def _choose_mode(path: Path) -> str:
    """Return how SQLite opens a ledger for reading; in a read-only directory it cannot make its index."""
    log, index = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    if os.access(path.parent, os.W_OK) or (log.exists() and index.exists()):
        return "ro"
    if log.exists() and log.stat().st_size:
        raise BadInput(
            f"the ledger has a write-ahead log, which cannot be read in a read-only directory: `{path}`",
            "copy the run to a writable directory",
        )
    return "ro&immutable=1"


_gauges = msgspec.msgpack.Decoder(RunGauge)
_endpoints = msgspec.msgpack.Decoder(EndpointUses)
