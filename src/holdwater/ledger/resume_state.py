"""The state that a resuming conductor needs: known instances, the progress of open samples, reopened samples.

The functions run in the writer's thread and transaction, a page at a time. `core.policy` decides how a sample
continues, and which closed samples are reopened.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any

import msgspec

from ..core.control import PAUSE_EVENT, UNPAUSE_EVENT
from ..core.failures import CRASHED, POISON, RULES, RetryRule
from ..core.policy import LOSSES_BEFORE_ALONE, ClosedSample, TryCounts, VerdictSummary, rank
from ..core.records import Attempt, FailureOrigin, Record, Verdict
from .record_encoding import unpack

PAGE = 256  # samples in memory at a time
RETRIED = frozenset(where for where, rule in RULES.items() if rule.again is RetryRule.RETRIES)
BLAMELESS = frozenset((FailureOrigin.INTERRUPTED, FailureOrigin.RUN))  # independent of the sample


class SuitePass(IntEnum):
    """The passes of a conductor over its suite: a resume first compares, then plans samples."""

    COMPARE = 0
    PLAN = 1


def pass_number(token: int, during: SuitePass) -> int:
    """Return a number that is larger than the number of every earlier pass of the run."""
    return 2 * token + during


class PlannedInstance(Record, frozen=True):
    """An instance as the suite yielded it; `place` is its source location, for messages."""

    name: str
    digest: bytes
    payload: bytes
    place: str


class KnownInstance(Record, frozen=True):
    """An instance that is already planned."""

    id: int
    name: str
    digest: bytes
    place: str
    closed: int  # samples with an outcome
    last_pass: int  # the number of the last pass that saw it in the suite


class OpenSample(Record, frozen=True):
    """A planned sample without an outcome, with the state needed to continue it."""

    instance: int
    sample: int
    number: int = 0  # attempts so far
    round: int = 1
    retries: int = 0  # infrastructure failures in this round, `last` included
    scale: int = 1
    losses: int = 0
    crashes: int = 0
    outages: int = 0
    first: int = 1  # the round from which `--attempts` counts
    best: VerdictSummary | None = None
    # The last verdict about the sample itself, if neither another attempt nor an outcome has followed it.
    last: VerdictSummary | None = None
    regrades: int | None = None  # the attempt whose kept work the next attempt grades
    # About all samples of its instance.
    open_count: int = 1  # samples without an outcome, this one included
    scored: bool = False  # whether another one has a score

    @property
    def spent(self) -> TryCounts:
        """The counts before `last` was settled: input of `policy.decide`, which determines the next step."""
        counted = self.last is not None and self.last.where in RETRIED
        return TryCounts(round=self.round, retries=self.retries - counted, scale=self.scale, first=self.first)


class OpenSamplePage(Record, frozen=True):
    samples: tuple[OpenSample, ...]
    after: int | None  # the instance after which the next page begins; None at the end


def find_known(connection: sqlite3.Connection, name: str) -> KnownInstance | None:
    row = connection.execute(
        "SELECT id, name, digest, place, (SELECT count(*) FROM outcome WHERE instance = i.id), sighted"
        " FROM instance i WHERE name = ?",
        (name,),
    ).fetchone()
    return None if row is None else KnownInstance(*row)


def next_attempt(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(id), 0) + 1 FROM attempt").fetchone()[0])


def earlier_attempts(connection: sqlite3.Connection, attempt: Attempt) -> tuple[int, ...]:
    """Return the ids of earlier attempts in the same round of the same sample."""
    rows = connection.execute(
        "SELECT id FROM attempt WHERE instance = ? AND sample = ? AND round = ? AND id < ? ORDER BY id",
        (attempt.instance, attempt.sample, attempt.round, attempt.id),
    )
    return tuple(row[0] for row in rows)


def list_unsettled(connection: sqlite3.Connection) -> list[tuple[int, int]]:
    """Return attempts without a verdict, each with its token; never more than ran concurrently."""
    query = "SELECT id, token FROM attempt WHERE settled IS NULL ORDER BY id"
    return connection.execute(query).fetchall()


def find_last_instance(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(id), 0) FROM instance").fetchone()[0])


def read_open_page(connection: sqlite3.Connection, samples: int, after: int, until: int) -> OpenSamplePage:
    """Return the next open samples of the instances in (after, until]."""
    limit = max(1, PAGE // samples)
    instances = [
        row[0]
        for row in connection.execute(
            "SELECT id FROM instance i WHERE id > ? AND id <= ? AND"
            " (SELECT count(*) FROM outcome WHERE instance = i.id AND sample < ?) < ? ORDER BY id LIMIT ?",
            (after, until, samples, samples, limit),
        )
    ]
    found = []
    for instance in instances:
        query = "SELECT sample, score IS NOT NULL FROM outcome WHERE instance = ?"
        closed = dict(connection.execute(query, (instance,)).fetchall())
        left = [read_open_sample(connection, instance, s) for s in range(samples) if s not in closed]
        scored = any(closed.values())
        found += [msgspec.structs.replace(one, open_count=len(left), scored=scored) for one in left]
    return OpenSamplePage(samples=tuple(found), after=instances[-1] if len(instances) == limit else None)


def decode_verdict(packed: bytes) -> Verdict:
    return _verdicts.decode(unpack(packed))


def read_open_sample(connection: sqlite3.Connection, instance: int, sample: int) -> OpenSample:
    rows = connection.execute(
        "SELECT a.id, a.number, a.round, a.scale, a.verdict, a.regrades, coalesce(r.switched, 1)"
        " FROM attempt a JOIN conductor c ON c.token = a.token LEFT JOIN regrade r ON r.id = c.regrade"
        " WHERE a.instance = ? AND a.sample = ? ORDER BY a.number",
        (instance, sample),
    ).fetchall()
    if not rows:
        return OpenSample(instance=instance, sample=sample)
    before, first = find_reopening(connection, instance, sample)
    number = rows[-1][1]
    rows = [row for row in rows if row[-1]]  # grades of an abandoned regrade do not count
    last, _, round_, scale, _, regrades, _ = rows[-1]
    results = [
        (row[1], row[2], VerdictSummary.of(decode_verdict(row[4]))) for row in rows if row[4] is not None
    ]
    blamed = [result for _, _, result in results if not _is_blameless(result)]
    lost = [n for n, _, r in results if r.where is FailureOrigin.WORKER and r.kind != POISON]
    anew = number == before  # no attempt since the sample was reopened
    work = _find_kept_work(results[-1][2] if results else None, regrades)
    work, round_ = (work if first == round_ else None, first) if anew else (work, round_)
    return OpenSample(
        instance=instance,
        sample=sample,
        number=number,
        round=round_,
        retries=sum(1 for n, of, r in results if n > before and of == round_ and r.where in RETRIED),
        scale=scale,
        losses=sum(n > before for n in lost) + min(sum(n <= before for n in lost), LOSSES_BEFORE_ALONE),
        crashes=sum(
            1 for _, _, r in results if r.where is FailureOrigin.WORKER and r.kind in (CRASHED, POISON)
        ),
        outages=sum(1 for n, _, r in results if n > before and r.is_outage),
        first=first,
        best=max(blamed, key=rank, default=None),
        last=blamed[-1] if blamed and blamed[-1].attempt == last and not anew else None,
        regrades=work,
    )


def find_chosen_verdict(connection: sqlite3.Connection, instance: int, sample: int) -> Verdict | None:
    """Return the verdict behind the outcome of a sample, if it has one."""
    row = connection.execute(
        "SELECT a.verdict FROM outcome o JOIN attempt a ON a.id = o.attempt"
        " WHERE o.instance = ? AND o.sample = ?",
        (instance, sample),
    ).fetchone()
    return None if row is None or row[0] is None else decode_verdict(row[0])


def _find_kept_work(last: VerdictSummary | None, regrades: int | None) -> int | None:
    """Return the attempt whose kept work is graded next: named by the last verdict, or `regrades`."""
    if last is not None and (last.work is not None or not _is_blameless(last)):
        return last.work
    return regrades


def _is_blameless(result: VerdictSummary) -> bool:
    return result.where in BLAMELESS or (result.where is FailureOrigin.WORKER and result.kind != POISON)


def closed_samples(connection: sqlite3.Connection) -> Iterator[ClosedSample]:
    """Yield every sample with an outcome, in the order of planning."""
    at = (0, -1)
    while page := connection.execute(_CLOSED, (*at, PAGE)).fetchall():
        yield from map(_make_closed, page)
        at = page[-1][0], page[-1][1]


def closed_rollouts(connection: sqlite3.Connection, order: int) -> list[ClosedSample]:
    """Return the samples of an order that have an outcome."""
    of_order = "(o.instance, o.sample) IN (SELECT instance, sample FROM rollout WHERE orders = ?)"
    return [_make_closed(row) for row in connection.execute(f"{_COLUMNS} WHERE {of_order}", (order,))]


def closed_of_instance(connection: sqlite3.Connection, instance: int) -> list[ClosedSample]:
    """Return the samples of an instance that have an outcome."""
    rows = connection.execute(f"{_COLUMNS} WHERE o.instance = ? ORDER BY o.sample", (instance,))
    return [_make_closed(row) for row in rows]


def read_sample(connection: sqlite3.Connection, instance: int, sample: int) -> OpenSample:
    """Return an open sample; `scored` is about the other samples of its instance."""
    standing = read_open_sample(connection, instance, sample)
    query = "SELECT count(*) FROM outcome WHERE instance = ? AND score IS NOT NULL"
    scored = connection.execute(query, (instance,)).fetchone()[0] > 0
    return msgspec.structs.replace(standing, scored=scored)


def reopen(
    connection: sqlite3.Connection, samples: Iterable[ClosedSample], now: float
) -> Iterator[tuple[str, float | None]]:
    """Reopen closed samples; yield kind and score of each deleted outcome.

    The row of a reopened sample has the attempt and the round from which its retries count anew.
    """
    for closed in samples:
        key = (closed.instance, closed.sample)
        gone = connection.execute(
            "DELETE FROM outcome WHERE instance = ? AND sample = ? RETURNING kind, score", key
        ).fetchone()
        mark_round(connection, key, closed.number, closed.next_round, now)
        yield gone[0], gone[1]


def mark_round(
    connection: sqlite3.Connection, key: tuple[int, int], number: int, round_: int, now: float
) -> None:
    """Write that the tries of a sample count anew after its attempt `number`, in this round."""
    connection.execute(
        "INSERT INTO reopened (instance, sample, number, round, at) VALUES (?, ?, ?, ?, ?)",
        (*key, number, round_, now),
    )


def was_paused(connection: sqlite3.Connection) -> bool:
    """Return whether the last conductor that was paused ended before its pause did."""
    query = "SELECT kind FROM event WHERE kind IN (?, ?) ORDER BY id DESC LIMIT 1"
    row = connection.execute(query, (PAUSE_EVENT, UNPAUSE_EVENT)).fetchone()
    return row is not None and row[0] == PAUSE_EVENT


def find_reopening(connection: sqlite3.Connection, instance: int, sample: int) -> tuple[int, int]:
    """Return the attempts of a sample before it was last reopened, and its first round since; else (0, 1)."""
    row = connection.execute(
        "SELECT number, round FROM reopened WHERE instance = ? AND sample = ? ORDER BY number DESC LIMIT 1",
        (instance, sample),
    ).fetchone()
    return (0, 1) if row is None else (row[0], row[1])


def _make_closed(row: tuple[Any, ...]) -> ClosedSample:
    instance, sample, name, kind, place, failure, number, round_ = row
    where = FailureOrigin(place) if place else None
    return ClosedSample(instance, sample, name, kind, where, failure or "", number, round_)


_COLUMNS = """
    SELECT o.instance, o.sample, i.name, o.kind, o.place, a.failure,
        (SELECT max(number) FROM attempt WHERE instance = o.instance AND sample = o.sample),
        (SELECT max(round) FROM attempt WHERE instance = o.instance AND sample = o.sample)
    FROM outcome o JOIN instance i ON i.id = o.instance JOIN attempt a ON a.id = o.attempt
"""
_CLOSED = f"{_COLUMNS} WHERE (o.instance, o.sample) > (?, ?) ORDER BY o.instance, o.sample LIMIT ?"
_verdicts = msgspec.msgpack.Decoder(Verdict)
