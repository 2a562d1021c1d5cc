"""What a conductor finds when it opens a run again: what it knows, and how each open sample stands.

Reads only, on the writer's connection and a page at a time. What follows from a standing is decided in core.
"""

from __future__ import annotations

import sqlite3
from enum import IntEnum

import msgspec

from ..core.failures import CRASHED, POISON, RULES, Again
from ..core.policy import LOSSES_BEFORE_ALONE, Result, Spent, rank
from ..core.records import Record, Verdict, Where
from .compression import unpack
from .reopening import reopened_at

PAGE = 256  # standings in memory at a time
RETRIED = frozenset(where for where, rule in RULES.items() if rule.again is Again.RETRIES)
BLAMELESS = frozenset((Where.INTERRUPTED, Where.RUN))  # they say nothing about the sample


class SuitePass(IntEnum):
    """The passes that a conductor makes over its suite: a resume compares first, then samples are planned."""

    COMPARE = 0
    PLAN = 1


def pass_number(token: int, during: SuitePass) -> int:
    """A number that is larger than that of every earlier pass of the run."""
    return 2 * token + during


class Known(Record, frozen=True):
    """An instance that was planned before."""

    id: int
    name: str
    digest: bytes
    place: str
    closed: int  # samples with an outcome
    sighted: int  # the pass that last saw it in the suite


class Standing(Record, frozen=True):
    """A planned sample without an outcome, and what is needed to continue it."""

    instance: int
    sample: int
    number: int = 0  # attempts so far
    round: int = 1
    retries: int = 0  # infrastructure failures in this round, `last` included
    scale: int = 1
    losses: int = 0
    crashes: int = 0
    first: int = 1  # the round from which `--attempts` counts
    best: Result | None = None
    last: Result | None = (
        None  # a verdict with blame that nothing has followed on yet: another try, or the close
    )
    regrades: int | None = None  # the attempt whose kept work the next try grades

    @property
    def spent(self) -> Spent:
        """What had been used up when `last` was settled: with it, `policy.decide` says what follows."""
        counted = self.last is not None and self.last.where in RETRIED
        return Spent(round=self.round, retries=self.retries - counted, scale=self.scale, first=self.first)


class OpenPage(Record, frozen=True):
    standings: tuple[Standing, ...]
    after: int | None  # the instance to go on behind; None at the end


def known(connection: sqlite3.Connection, name: str) -> Known | None:
    row = connection.execute(
        "SELECT id, name, digest, place, (SELECT count(*) FROM outcome WHERE instance = i.id), sighted"
        " FROM instance i WHERE name = ?",
        (name,),
    ).fetchone()
    if row is None:
        return None
    id_, name, digest, place, closed, sighted = row
    return Known(id=id_, name=name, digest=digest, place=place, closed=closed, sighted=sighted)


def missing(connection: sqlite3.Connection, token: int, limit: int) -> list[str]:
    """Names that were planned before and that this conductor has not seen in the suite."""
    rows = connection.execute(
        "SELECT name FROM instance WHERE sighted < ? ORDER BY id LIMIT ?",
        (pass_number(token, SuitePass.COMPARE), limit),
    ).fetchall()
    return [name for (name,) in rows]


def last_instance(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(id), 0) FROM instance").fetchone()[0])


def open_page(connection: sqlite3.Connection, samples: int, after: int, until: int) -> OpenPage:
    """The next open samples of the instances in (after, until]."""
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
        closed = {
            s for (s,) in connection.execute("SELECT sample FROM outcome WHERE instance = ?", (instance,))
        }
        found += [standing(connection, instance, s) for s in range(samples) if s not in closed]
    return OpenPage(standings=tuple(found), after=instances[-1] if len(instances) == limit else None)


def verdict_of(packed: bytes) -> Verdict:
    return _verdicts.decode(unpack(packed))


def standing(connection: sqlite3.Connection, instance: int, sample: int) -> Standing:
    rows = connection.execute(
        "SELECT a.id, a.number, a.round, a.scale, a.verdict, a.regrades, coalesce(r.switched, 1)"
        " FROM attempt a JOIN conductor c ON c.token = a.token LEFT JOIN regrade r ON r.id = c.regrade"
        " WHERE a.instance = ? AND a.sample = ? ORDER BY a.number",
        (instance, sample),
    ).fetchall()
    if not rows:
        return Standing(instance=instance, sample=sample)
    before, first = reopened_at(connection, instance, sample)
    number = rows[-1][1]
    rows = [row for row in rows if row[-1]]  # the grades of a regrade that was given up count for nothing
    last, _, round_, scale, _, regrades, _ = rows[-1]
    results = [(row[1], row[2], Result.of(verdict_of(row[4]))) for row in rows if row[4] is not None]
    blamed = [result for _, _, result in results if not _blameless(result)]
    lost = [n for n, _, r in results if r.where is Where.WORKER and r.kind != POISON]
    anew = number == before  # nothing was tried since the sample was opened again
    work = _work_left(results[-1][2] if results else None, regrades)
    work, round_ = (work if first == round_ else None, first) if anew else (work, round_)
    return Standing(
        instance=instance,
        sample=sample,
        number=number,
        round=round_,
        retries=sum(1 for n, of, r in results if n > before and of == round_ and r.where in RETRIED),
        scale=scale,
        losses=sum(n > before for n in lost) + min(sum(n <= before for n in lost), LOSSES_BEFORE_ALONE),
        crashes=sum(1 for _, _, r in results if r.where is Where.WORKER and r.kind in (CRASHED, POISON)),
        first=first,
        best=max(blamed, key=rank, default=None),
        last=blamed[-1] if blamed and blamed[-1].attempt == last and not anew else None,
        regrades=work,
    )


def _work_left(last: Result | None, regrades: int | None) -> int | None:
    """The attempt whose kept work is to be graded next, by the last verdict and what that one graded."""
    if last is not None and (last.work is not None or not _blameless(last)):
        return last.work
    return regrades


def _blameless(result: Result) -> bool:
    return result.where in BLAMELESS or (result.where is Where.WORKER and result.kind != POISON)


_verdicts = msgspec.msgpack.Decoder(Verdict)
