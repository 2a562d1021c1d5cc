"""The proof: planned = settled, one verdict an attempt, every segment and blob what was written.

Reads everything once and holds one exchange at a time. It judges and repairs nothing; a torn tail is cut when
the run is resumed, see `recovery.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import LedgerCorrupt
from ..core.records import Record, Verdict
from .blobs import Blobs
from .directory import RunDirectory
from .exchanges import decode, read_frames
from .journal import journals, read_journal
from .media import references
from .reader import PAGE, Reader

MOST_PROBLEMS = 100  # sentences kept
MOST_CHECKED = 10_000  # hashes of blobs that were looked at lately


class Audit(Record, frozen=True):
    """What `holdwater audit` prints. `lost` counts samples without an outcome, open ones too."""

    planned: int
    settled: int
    lost: int
    duplicated: int
    corrupt: int
    ok: bool
    problems: tuple[str, ...]
    dropped: int = 0  # attempts whose files are not kept, on purpose


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
        self.running = reader.summary().state == "running"
        self.blobs = Blobs(reader.directory.blobs)
        self.checked: OrderedDict[str, None] = OrderedDict()  # bound: MOST_CHECKED
        self.problems: list[str] = []  # bound: MOST_PROBLEMS
        self.corrupt = 0
        self.dropped = 0

    def run(self) -> Audit:
        self._database()
        planned, settled = self._samples()
        duplicated = self._duplicated()
        self._outcomes()
        self._attempts()
        self._journals()
        lost = planned - settled
        self._lost(lost)
        return Audit(
            planned=planned,
            settled=settled,
            lost=lost,
            duplicated=duplicated,
            corrupt=self.corrupt,
            ok=not (lost or duplicated or self.corrupt or self.running),
            problems=tuple(self.problems),
            dropped=self.dropped,
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
        rows = self.reader.rows(
            "SELECT i.name, o.sample, o.attempt FROM outcome o JOIN instance i ON i.id = o.instance"
            " LEFT JOIN attempt a ON a.id = o.attempt AND a.instance = o.instance AND a.sample = o.sample"
            f" WHERE a.settled IS NULL LIMIT {MOST_PROBLEMS}"
        )
        for name, sample, attempt in rows:
            self._damage(
                f"the outcome of `{name}` sample {sample} rests on attempt {attempt}, which has no verdict"
            )

    def _lost(self, lost: int) -> None:
        if not lost:
            return
        if self.running:
            self._say(f"the run is still running, open samples: {lost}")
            return
        serves = self.reader.config.serving is not None
        how = "the same `holdwater serve`" if serves else f"`holdwater resume {self.reader.directory.path}`"
        self._say(f"samples without an outcome: {lost}; {how} continues")
        for (name,) in self._open_orders() if serves else self._open_instances():
            self._say(f"without an outcome: `{name}`")

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
        if verdict is not None and verdict.attempt != attempt:
            self._damage(f"attempt {attempt} has the verdict of attempt {verdict.attempt}")
        if self._is_dropped(attempt):
            return
        findings = list(self._findings(attempt, verdict))  # bound: an attempt's blobs, while all are missing
        if findings and self._is_dropped(attempt):
            return  # it was dropped while it was looked at
        for sentence in findings:
            self._damage(sentence)

    def _is_dropped(self, attempt: int) -> bool:
        """Whether the files are not kept on purpose: then what is missing is no damage."""
        dropped = self.reader.dropped(attempt) is not None
        self.dropped += dropped
        return dropped

    def _findings(self, attempt: int, verdict: Verdict | None) -> Iterator[str]:
        found = 0
        try:
            for content in read_frames(self.reader.directory, attempt):
                decode(content, attempt)
                for name in references(content):
                    yield from self._blob(name)
                found += 1
        except (LedgerCorrupt, FileNotFoundError) as e:
            yield str(e)
            return
        if verdict is None:
            return  # cut short: an open sample, or a finished one whose conductor has not come back
        # a verdict over an attempt that could no longer speak for itself may know of fewer exchanges
        if found < verdict.exchanges or (found > verdict.exchanges and verdict.failure is None):
            yield f"attempt {attempt} has {found} exchanges, its verdict says {verdict.exchanges}"

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
