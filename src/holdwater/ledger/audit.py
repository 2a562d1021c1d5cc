"""The proof: planned = settled, one verdict an attempt, every segment, blob and artifact what was written.

Reads everything once and holds one exchange at a time. It judges and repairs nothing; a torn tail is cut when
the run is resumed, see `recovery.py`. What the rows say against each other is in `cross_check.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import LedgerCorrupt
from ..core.kept_work import kept_files, kept_work
from ..core.records import Outcome, Record, Verdict, Where
from .blobs import Blobs
from .cross_check import SettledColumns, TallySums, check_columns, check_outcome, check_spending
from .directory import RunDirectory
from .exchanges import Spending, decode, read_frames
from .files import check_file
from .journal import journals, read_journal
from .media import references
from .reader import PAGE, Reader

MOST_PROBLEMS = 100  # sentences kept
MOST_CHECKED = 10_000  # hashes of blobs that were looked at lately


class Audit(Record, frozen=True):
    """What `holdwater audit` prints. `ok`: the run is finished, and nothing is lost, double or damaged."""

    planned: int
    settled: int
    lost: int  # samples of a finished run that have no outcome
    duplicated: int
    corrupt: int
    ok: bool
    problems: tuple[str, ...]
    dropped: int = 0  # attempts whose files are not kept, on purpose
    unfinished: int = 0  # samples that have no outcome yet: the run was interrupted, or is running
    notes: tuple[str, ...] = ()  # how an unfinished run goes on, and what is open in it

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong with what is there so far."""
        return not (self.lost or self.duplicated or self.corrupt)


def audit(path: Path | str) -> Audit:
    """Check a run from end to end."""
    directory = RunDirectory.open(path)
    try:
        with Reader(directory) as reader:
            return _Auditor(reader).run()
    except LedgerCorrupt as e:
        return Audit(planned=0, settled=0, lost=0, duplicated=0, corrupt=1, ok=False, problems=(e.message,))


class _Auditor:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        summary = reader.summary()
        self.state, self.total = summary.state, summary.total
        self.running = self.state == "running"
        self.blobs = Blobs(reader.directory.blobs)
        self.checked: OrderedDict[str, None] = OrderedDict()  # bound: MOST_CHECKED
        self.problems: list[str] = []  # bound: MOST_PROBLEMS
        self.notes: list[str] = []  # bound: MOST_PROBLEMS
        self.sums = TallySums()
        self.corrupt = 0
        self.dropped = 0

    def run(self) -> Audit:
        self._database()
        planned, settled = self._samples()
        duplicated = self._duplicated()
        self._outcomes()
        self._attempts()
        self._journals()
        self._tally()
        missing = planned - settled
        lost = missing if self.state == "finished" else 0
        self._missing(missing)
        awaited = self._awaited(planned)
        return Audit(
            planned=planned,
            settled=settled,
            lost=lost,
            duplicated=duplicated,
            corrupt=self.corrupt,
            ok=not (missing or awaited or duplicated or self.corrupt or self.running),
            problems=tuple(self.problems),
            dropped=self.dropped,
            unfinished=missing - lost + awaited,
            notes=tuple(self.notes),
        )

    # What SQLite can say.

    def _database(self) -> None:
        for (finding,) in self.reader.rows(f"PRAGMA integrity_check({MOST_PROBLEMS})"):
            if finding != "ok":
                self._damage(f"the ledger is damaged: {finding}")
        for row in self.reader.rows(f"SELECT * FROM pragma_foreign_key_check LIMIT {MOST_PROBLEMS}"):
            self._damage(f"row {row[1]} of `{row[0]}` refers to a missing row of `{row[2]}`")

    def _samples(self) -> tuple[int, int]:
        samples = self.reader.config.samples
        if self.reader.config.serving is not None:
            return self._ordered()
        query = (
            "SELECT (SELECT count(*) FROM instance), (SELECT count(*) FROM outcome),"
            " (SELECT count(*) FROM outcome WHERE sample < ?),"
            " (SELECT coalesce(sum(value), 0) FROM tally WHERE key = 'planned'),"
            " (SELECT coalesce(sum(value), 0) FROM tally WHERE key LIKE 'outcome:%')"
        )
        instances, outcomes, settled, planned, closed = self.reader.rows(query, (samples,))[0]
        if (instances, outcomes) != (planned, closed):
            self._damage(
                f"the tally says {planned} instances and {closed} outcomes,"
                f" there are {instances} and {outcomes}"
            )
        return instances * samples, settled

    def _ordered(self) -> tuple[int, int]:
        """Of a server: the rollouts that were ordered are what there is to settle."""
        query = (
            "SELECT (SELECT count(*) FROM rollout),"
            " (SELECT count(*) FROM rollout JOIN outcome USING (instance, sample)),"
            " (SELECT count(*) FROM outcome),"
            " (SELECT coalesce(sum(value), 0) FROM tally WHERE key = 'ordered')"
        )
        ordered, settled, outcomes, counted = self.reader.rows(query)[0]
        if (ordered, settled) != (counted, outcomes):
            self._damage(
                f"the tally says {counted} rollouts, there are {ordered}; {outcomes - settled} outcomes"
                " belong to none"
            )
        return ordered, settled

    def _duplicated(self) -> int:
        outcomes = "SELECT 1 FROM outcome GROUP BY instance, sample HAVING count(*) > 1"
        attempts = "SELECT 1 FROM attempt GROUP BY instance, sample, number HAVING count(*) > 1"
        count: int = self.reader.rows(
            f"SELECT (SELECT count(*) FROM ({outcomes})) + (SELECT count(*) FROM ({attempts}))"
        )[0][0]
        if count:
            self._say(f"settled more than once: {count}")
        return count

    def _outcomes(self) -> None:
        at = (0, -1)
        while page := self.reader.rows(_OUTCOMES, (*at, PAGE)):
            for instance, sample, name, attempt, kind, score, place, settled in page:
                if not settled:
                    self._damage(
                        f"the outcome of `{name}` sample {sample} rests on attempt {attempt},"
                        " which has no verdict"
                    )
                    continue
                where = Where(place) if place else None
                outcome = Outcome(
                    instance=instance, sample=sample, attempt=attempt, kind=kind, score=score, where=where
                )
                self._outcome(outcome, name)
            at = page[-1][0], page[-1][1]

    def _outcome(self, outcome: Outcome, name: str) -> None:
        try:
            verdict = self.reader.verdict(outcome.attempt)
        except LedgerCorrupt:
            return  # told with its attempt
        for sentence in check_outcome(outcome, name, verdict) if verdict is not None else ():
            self._damage(sentence)

    def _tally(self) -> None:
        """Counts that do not move any more are those of the rows."""
        if not self.running:
            for sentence in self.sums.check(self.reader.counts()):
                self._damage(sentence)

    def _missing(self, missing: int) -> None:
        """Samples without an outcome: lost where the run is finished, and else only not run yet."""
        if not missing:
            return
        serves = self.reader.config.serving is not None
        named = [name for (name,) in (self._open_orders() if serves else self._open_instances())]
        if self.state == "finished":
            self._say(f"samples without an outcome in a finished run: {missing}")
            for name in named:
                self._say(f"without an outcome: `{name}`")
            return
        how = "the same `holdwater serve`" if serves else f"`holdwater resume {self.reader.directory.path}`"
        goes_on = "the run is still running" if self.running else f"{how} goes on"
        self.notes = [f"not run yet: {missing} samples; {goes_on}", *(f"not run yet: `{n}`" for n in named)]

    def _awaited(self, planned: int) -> int:
        """Samples that the suite declares by its `size` and has not yielded."""
        if self.total is None or self.state == "finished" or planned >= self.total:
            return 0
        self.notes.append(f"not planned yet: the suite declares {self.total} samples and yielded {planned}")
        return self.total - planned

    def _open_instances(self) -> list[tuple[str]]:
        samples = self.reader.config.samples
        return self.reader.rows(
            "SELECT name FROM instance i WHERE"
            " (SELECT count(*) FROM outcome WHERE instance = i.id AND sample < ?) < ?"
            f" ORDER BY id LIMIT {MOST_PROBLEMS}",
            (samples, samples),
        )

    def _open_orders(self) -> list[tuple[str]]:
        return self.reader.rows(
            "SELECT DISTINCT s.key FROM rollout r JOIN orders s ON s.id = r.orders"
            " LEFT JOIN outcome o ON o.instance = r.instance AND o.sample = r.sample"
            f" WHERE o.sample IS NULL LIMIT {MOST_PROBLEMS}"
        )

    # What the files can say.

    def _attempts(self) -> None:
        after = 0
        query = "SELECT id, settled IS NOT NULL FROM attempt WHERE id > ? ORDER BY id LIMIT ?"
        while page := self.reader.rows(query, (after, PAGE)):
            for attempt, settled in page:
                if settled or not self.running:
                    self._attempt(attempt)
            after = page[-1][0]

    def _attempt(self, attempt: int) -> None:
        try:
            verdict = self.reader.verdict(attempt)
        except LedgerCorrupt as e:
            self._damage(e.message)
            return
        if verdict is not None:
            self._verdict(attempt, verdict)
        if self._is_dropped(attempt):
            return
        findings = list(self._findings(attempt, verdict))  # bound: an attempt's blobs, while all are missing
        if findings and self._is_dropped(attempt):
            return  # it was dropped while it was looked at
        for sentence in findings:
            self._damage(sentence)

    def _verdict(self, attempt: int, verdict: Verdict) -> None:
        """What the ledger's own rows say of a verdict."""
        self.sums.add(verdict)
        if verdict.attempt != attempt:
            self._damage(f"attempt {attempt} has the verdict of attempt {verdict.attempt}")
        row = self.reader.rows(
            "SELECT kind, place, passed, score, exchanges FROM attempt WHERE id = ?", (attempt,)
        )[0]
        for sentence in check_columns(SettledColumns(*row), verdict):
            self._damage(sentence)

    def _is_dropped(self, attempt: int) -> bool:
        """Whether the files are not kept on purpose: then what is missing is no damage."""
        dropped = self.reader.dropped(attempt) is not None
        self.dropped += dropped
        return dropped

    def _findings(self, attempt: int, verdict: Verdict | None) -> Iterator[str]:
        found = Spending()
        try:
            for content in read_frames(self.reader.directory, attempt):
                found = found.plus(decode(content, attempt))
                for name in references(content):
                    yield from self._blob(name)
        except (LedgerCorrupt, FileNotFoundError) as e:
            yield str(e)
            return
        if verdict is None:
            return  # cut short: an open sample, or a finished one whose conductor has not come back
        yield from check_spending(found, verdict)
        kept = kept_work(verdict)
        for file in kept_files(kept) if kept is not None and kept.attempt == attempt else ():
            if wrong := check_file(self.reader.directory.artifacts / file.name, file):
                yield f"the kept work of attempt {attempt} is damaged: {wrong}"

    def _journals(self) -> None:
        """Verdicts that are not committed yet; a journal goes when all of its verdicts are."""
        for path in journals(self.reader.directory):
            for _ in read_journal(path, self._damage):
                pass

    def _blob(self, name: str) -> Iterator[str]:
        if name in self.checked:
            self.checked.move_to_end(name)
            return
        self.checked[name] = None
        if len(self.checked) > MOST_CHECKED:
            self.checked.popitem(last=False)
        try:
            self.blobs.get(name)
        except LedgerCorrupt as e:
            yield e.message

    def _damage(self, sentence: str) -> None:
        self.corrupt += 1
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(sentence)


_OUTCOMES = """
    SELECT o.instance, o.sample, i.name, o.attempt, o.kind, o.score, o.place, a.settled IS NOT NULL
    FROM outcome o JOIN instance i ON i.id = o.instance
    LEFT JOIN attempt a ON a.id = o.attempt AND a.instance = o.instance AND a.sample = o.sample
    WHERE (o.instance, o.sample) > (?, ?) ORDER BY o.instance, o.sample LIMIT ?
"""
