"""Verifies a run: planned = settled, one verdict per attempt, and intact segments, blobs and artifacts.

It reads everything once, holds one exchange at a time and repairs nothing; a torn tail is cut when the run is
resumed, see `journal.py`. Each check yields a sentence for every contradiction that it finds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import LedgerCorrupt
from ..core.policy import VerdictSummary, find_kept_work, list_kept_files, outcome_kind, verdict_kind
from ..core.records import NO_USAGE, FailureOrigin, ModelUsage, Outcome, Record, Verdict
from .attempt_files import check_file
from .blobs import BlobStore, find_references
from .directory import RunDirectory
from .exchanges import AttemptSpending, decode_exchange, read_frames
from .journal import list_journals, read_journal
from .reader import LedgerReader
from .rows import LedgerCounts, SettledColumns, bound_usage, finite_score

MOST_PROBLEMS = 100  # sentences kept
SCORED = ("passed", "failed")
MOST_CHECKED = 10_000  # hashes of recently checked blobs


class AuditReport(Record, frozen=True):
    """The output of `holdwater audit`. `ok`: the run is finished; nothing is lost, duplicated or damaged."""

    planned: int
    settled: int
    lost: int  # samples without an outcome in a finished run
    duplicated: int
    corrupt: int
    ok: bool
    problems: tuple[str, ...]
    dropped: int = 0  # attempts whose files were dropped by `--keep`
    unfinished: int = 0  # samples without an outcome in a run that was interrupted or is running
    notes: tuple[str, ...] = ()  # how to continue an unfinished run, and its open samples

    @property
    def sound(self) -> bool:
        """Whether nothing recorded so far is lost, duplicated or damaged."""
        return not (self.lost or self.duplicated or self.corrupt)


def audit_run(path: Path | str) -> AuditReport:
    """Check all rows and files of a run."""
    directory = RunDirectory.open(path)
    try:
        with LedgerReader(directory) as reader:
            return _RunAuditor(reader).run()
    except LedgerCorrupt as e:
        return AuditReport(
            planned=0, settled=0, lost=0, duplicated=0, corrupt=1, ok=False, problems=(e.message,)
        )


class _RunAuditor:
    def __init__(self, reader: LedgerReader) -> None:
        self.reader = reader
        summary = reader.summary()
        self.state, self.total = summary.state, summary.total
        self.running = self.state == "running"
        self.blobs = BlobStore(reader.directory.blobs)
        self.checked: OrderedDict[str, None] = OrderedDict()  # bound: MOST_CHECKED
        self.problems: list[str] = []  # bound: MOST_PROBLEMS
        self.notes: list[str] = []  # bound: MOST_PROBLEMS
        self.sums = TallySums()
        self.corrupt = 0
        self.dropped = 0

    def run(self) -> AuditReport:
        self._check_database()
        planned, settled = self._count_samples()
        duplicated = self._count_duplicated()
        self._check_outcomes()
        self._check_attempts()
        self._check_journals()
        self._check_tally()
        missing = planned - settled
        lost = missing if self.state == "finished" else 0
        self._report_missing(missing)
        awaited = self._count_awaited(planned)
        return AuditReport(
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

    # Checks of the database.

    def _check_database(self) -> None:
        for (finding,) in self.reader.rows(f"PRAGMA integrity_check({MOST_PROBLEMS})"):
            if finding != "ok":
                self._report_damage(f"the ledger is damaged: {finding}")
        for row in self.reader.rows(f"SELECT * FROM pragma_foreign_key_check LIMIT {MOST_PROBLEMS}"):
            self._report_damage(f"row {row[1]} of `{row[0]}` refers to a missing row of `{row[2]}`")

    def _count_samples(self) -> tuple[int, int]:
        samples = self.reader.config.samples
        if self.reader.config.serving is not None:
            return self._count_ordered()
        query = (
            "SELECT (SELECT count(*) FROM instance), (SELECT count(*) FROM outcome),"
            " (SELECT count(*) FROM outcome WHERE sample < ?),"
            " (SELECT coalesce(sum(value), 0) FROM tally WHERE key = 'planned'),"
            " (SELECT coalesce(sum(value), 0) FROM tally WHERE key LIKE 'outcome:%')"
        )
        instances, outcomes, settled, planned, closed = self.reader.rows(query, (samples,))[0]
        if (instances, outcomes) != (planned, closed):
            self._report_damage(
                f"the tally says {planned} instances and {closed} outcomes,"
                f" there are {instances} and {outcomes}"
            )
        return instances * samples, settled

    def _count_ordered(self) -> tuple[int, int]:
        """Return the ordered and settled rollouts of a server: they are the samples to settle."""
        query = (
            "SELECT (SELECT count(*) FROM rollout),"
            " (SELECT count(*) FROM rollout JOIN outcome USING (instance, sample)),"
            " (SELECT count(*) FROM outcome),"
            " (SELECT coalesce(sum(value), 0) FROM tally WHERE key = 'ordered')"
        )
        ordered, settled, outcomes, counted = self.reader.rows(query)[0]
        if (ordered, settled) != (counted, outcomes):
            self._report_damage(
                f"the tally says {counted} rollouts, there are {ordered}; {outcomes - settled} outcomes"
                " belong to none"
            )
        return ordered, settled

    def _count_duplicated(self) -> int:
        outcomes = "SELECT 1 FROM outcome GROUP BY instance, sample HAVING count(*) > 1"
        attempts = "SELECT 1 FROM attempt GROUP BY instance, sample, number HAVING count(*) > 1"
        count: int = self.reader.rows(
            f"SELECT (SELECT count(*) FROM ({outcomes})) + (SELECT count(*) FROM ({attempts}))"
        )[0][0]
        if count:
            self._add_problem(f"settled more than once: {count}")
        return count

    def _check_outcomes(self) -> None:
        rows = self.reader.paged(_OUTCOMES, (0, -1), slice(2))
        for instance, sample, name, attempt, kind, score, place, settled in rows:
            if not settled:
                which = f"`{name}` sample {sample} rests on attempt {attempt}"
                self._report_damage(f"the outcome of {which}, which has no verdict")
                continue
            try:
                verdict = self.reader.verdict(attempt)
            except LedgerCorrupt:
                continue  # `_check_attempt` reports it
            where = FailureOrigin(place) if place else None
            outcome = Outcome(
                instance=instance, sample=sample, attempt=attempt, kind=kind, score=score, where=where
            )
            for sentence in check_outcome(outcome, name, verdict) if verdict is not None else ():
                self._report_damage(sentence)

    def _check_tally(self) -> None:
        """Check the tally against the rows, unless the run is still changing both."""
        if not self.running:
            for sentence in self.sums.check(self.reader.counts()):
                self._report_damage(sentence)

    def _report_missing(self, missing: int) -> None:
        """Report samples without an outcome: in a finished run as lost, otherwise as not run yet."""
        if not missing:
            return
        serves = self.reader.config.serving is not None
        named = [name for (name,) in (self._open_orders() if serves else self._open_instances())]
        if self.state == "finished":
            self._add_problem(f"samples without an outcome in a finished run: {missing}")
            for name in named:
                self._add_problem(f"without an outcome: `{name}`")
            return
        how = "the same `holdwater serve`" if serves else f"`holdwater resume {self.reader.directory.path}`"
        goes_on = "the run is still running" if self.running else f"{how} continues"
        self.notes = [f"not run yet: {missing} samples; {goes_on}", *(f"not run yet: `{n}`" for n in named)]

    def _count_awaited(self, planned: int) -> int:
        """Return the number of samples that the suite declares by its `size` and has not yielded."""
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

    # Checks of the files.

    def _check_attempts(self) -> None:
        query = "SELECT id, settled IS NOT NULL FROM attempt WHERE id > ? ORDER BY id LIMIT ?"
        for attempt, settled in self.reader.paged(query):
            if settled or not self.running:
                self._check_attempt(attempt)

    def _check_attempt(self, attempt: int) -> None:
        try:
            verdict = self.reader.verdict(attempt)
        except LedgerCorrupt as e:
            self._report_damage(e.message)
            return
        if verdict is not None:
            self._check_verdict(attempt, verdict)
        if self._is_dropped(attempt):
            return
        findings = list(self._find_damage(attempt, verdict))  # bound: the blobs of one attempt
        if findings and self._is_dropped(attempt):
            return  # it was dropped during the check
        for sentence in findings:
            self._report_damage(sentence)

    def _check_verdict(self, attempt: int, verdict: Verdict) -> None:
        """Check a verdict against the ledger's rows."""
        self.sums.add(verdict)
        if verdict.attempt != attempt:
            self._report_damage(f"attempt {attempt} has the verdict of attempt {verdict.attempt}")
        row = self.reader.rows(
            "SELECT kind, place, passed, score, exchanges FROM attempt WHERE id = ?", (attempt,)
        )[0]
        for sentence in check_columns(SettledColumns(*row), verdict):
            self._report_damage(sentence)

    def _is_dropped(self, attempt: int) -> bool:
        """Return whether the files of an attempt were dropped: then a missing file is no damage."""
        dropped = self.reader.find_drop_policy(attempt) is not None
        self.dropped += dropped
        return dropped

    def _find_damage(self, attempt: int, verdict: Verdict | None) -> Iterator[str]:
        found = AttemptSpending()
        try:
            for content in read_frames(self.reader.directory, attempt):
                found = found.plus(decode_exchange(content, attempt))
                for name in find_references(content):
                    yield from self._check_blob(name)
        except (LedgerCorrupt, FileNotFoundError) as e:
            yield str(e)
            return
        if verdict is None:
            return  # interrupted: no conductor has settled the attempt yet
        yield from check_spending(found, verdict)
        kept = find_kept_work(verdict)
        for file in list_kept_files(kept) if kept is not None and kept.attempt == attempt else ():
            if wrong := check_file(self.reader.directory.artifacts / file.name, file):
                yield f"the kept work of attempt {attempt} is damaged: {wrong}"

    def _check_journals(self) -> None:
        """Check journals, which hold verdicts that may not be committed yet."""
        for path in list_journals(self.reader.directory):
            for _ in read_journal(path, self._report_damage):
                pass

    def _check_blob(self, name: str) -> Iterator[str]:
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

    def _report_damage(self, sentence: str) -> None:
        self.corrupt += 1
        self._add_problem(sentence)

    def _add_problem(self, sentence: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(sentence)


def check_outcome(outcome: Outcome, name: str, verdict: Verdict) -> Iterator[str]:
    """Check that an outcome follows from its verdict."""
    result = VerdictSummary.of(verdict)
    kinds = {outcome_kind(result, spent=spent) for spent in (False, True)}
    score = finite_score(result.score or 0.0) if outcome.kind in SCORED else None
    if outcome.kind in kinds and outcome.where == result.where and outcome.score == score:
        return
    said = f"{outcome.kind}, score {outcome.score}"
    follows = " or ".join(sorted(kinds))
    yield (
        f"the outcome of `{name}` sample {outcome.sample} is {said};"
        f" the verdict of attempt {verdict.attempt} is {follows}, score {result.score}"
    )


def check_columns(columns: SettledColumns, verdict: Verdict) -> Iterator[str]:
    """Check that the columns of an attempt match its verdict."""
    for name, found, due in zip(SettledColumns._fields, columns, SettledColumns.of(verdict), strict=True):
        if found != due:
            yield f"attempt {verdict.attempt} has `{name}` {found}, its verdict says {due}"


def check_spending(found: AttemptSpending, verdict: Verdict) -> Iterator[str]:
    """Check that exchanges and usage of a verdict match the recorded exchanges of its attempt."""
    attempt = verdict.attempt
    if found.exchanges == verdict.exchanges:
        for what, recorded, told in (
            ("usage", found.usage, verdict.usage),
            ("saved", found.replayed_usage, verdict.replayed_usage),
        ):
            if recorded != told:
                yield f"attempt {attempt}: {what} by verdict {_render(told)}, by record {_render(recorded)}"
    # A verdict that a conductor wrote for a lost attempt may count fewer exchanges.
    elif found.exchanges < verdict.exchanges or verdict.failure is None:
        yield f"attempt {attempt} has {found.exchanges} exchanges, its verdict says {verdict.exchanges}"


class TallySums:
    """Sums all verdicts, to compare them with the tally."""

    def __init__(self) -> None:
        self._usage = NO_USAGE
        self._saved = NO_USAGE
        self._kinds: dict[str, int] = {}  # bound: the kinds of verdicts

    def add(self, verdict: Verdict) -> None:
        kind = verdict_kind(verdict.failure, verdict.grade.passed if verdict.grade else None)
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        self._usage = self._usage.plus(bound_usage(verdict.usage))
        self._saved = self._saved.plus(bound_usage(verdict.replayed_usage))

    def check(self, counts: LedgerCounts) -> Iterator[str]:
        for what, tallied, told in (
            ("usage", counts.usage, self._usage),
            ("saved", counts.saved, self._saved),
        ):
            if tallied != told:
                yield f"the tally says {what} {_render(tallied)}, all verdicts together {_render(told)}"
        if counts.verdicts != self._kinds:
            yield f"the tally says {counts.verdicts} verdicts, there are {self._kinds}"


def _render(usage: ModelUsage) -> str:
    fields = ((name, getattr(usage, name)) for name in usage.__struct_fields__)
    return ", ".join(f"{name} {amount}" for name, amount in fields if amount) or "nothing"


_OUTCOMES = """
    SELECT o.instance, o.sample, i.name, o.attempt, o.kind, o.score, o.place, a.settled IS NOT NULL
    FROM outcome o JOIN instance i ON i.id = o.instance
    LEFT JOIN attempt a ON a.id = o.attempt AND a.instance = o.instance AND a.sample = o.sample
    WHERE (o.instance, o.sample) > (?, ?) ORDER BY o.instance, o.sample LIMIT ?
"""
