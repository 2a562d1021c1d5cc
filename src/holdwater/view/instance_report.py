"""Reports one instance of a run: its attempts one by one, with their results and files.

`report.py` reports the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from ..core.fork_origin import ForkOrigin
from ..core.policy import explain_not_kept
from ..core.records import AttemptFailure, Grade, ModelUsage, Record, Verdict
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, EventRow, InstanceRow
from .formatting import (
    block,
    cost,
    duration,
    format_count,
    line,
    make_facts,
    outcome_name,
    saved_usage,
    size,
    style_of,
    tokens,
)

MOST_ATTEMPTS = 200  # on a page
MOST_EVENTS = 100  # of an attempt
LONGEST_DETAIL = 4000  # characters
NEW_LINE = "\n"


class InstanceReport(Record, frozen=True):
    """The data that `show RUN INSTANCE --json` prints."""

    instance: str
    place: str
    attempts: tuple[AttemptReport, ...]
    more: int = 0  # number of attempts that are not listed
    cost: float | None = None  # cost of all attempts in US dollars; None: unknown
    samples: int = 1  # samples of the instance
    fork: ForkOrigin | None = None  # the attempt that each attempt repeated up to a turn


class AttemptReport(Record, frozen=True):
    """One attempt and its files."""

    attempt: AttemptRow
    files: tuple[str, ...]
    cost: float | None = None  # in US dollars; None: unknown
    events: tuple[EventRow, ...] = ()  # the last MOST_EVENTS events


def make_report(reader: LedgerReader, instance: InstanceRow) -> InstanceReport:
    """Return the last MOST_ATTEMPTS attempts of an instance."""
    chapters: list[AttemptReport] = []
    more, spent, samples = 0, ModelUsage(), reader.config.samples
    for row in reader.attempts(instance.id):
        used = row.verdict.usage if row.verdict else ModelUsage()
        spent = spent.plus(used)
        samples = max(samples, row.sample + 1)
        left = tuple(str(path) for path in find_files(reader, row))
        events = tuple(reader.events(MOST_EVENTS, row.attempt))
        chapters.append(AttemptReport(attempt=row, files=left, cost=used.cost, events=events))
        if len(chapters) > MOST_ATTEMPTS:
            chapters.pop(0)
            more += 1
    return InstanceReport(
        instance=instance.name,
        place=instance.place,
        attempts=tuple(chapters),
        more=more,
        cost=spent.cost,
        samples=samples,
        fork=reader.config.fork,
    )


def find_files(reader: LedgerReader, row: AttemptRow) -> Iterator[Path]:
    """Yield the files of an attempt: logs and salvaged work. Their names begin with the attempt's number."""
    for folder in (reader.directory.logs, reader.directory.artifacts):
        yield from sorted(folder.glob(f"{row.attempt:06d}[-.]*"))


def render_instance(told: InstanceReport) -> RenderableType:
    parts: list[RenderableType] = [Text(line(told.instance), "bold").append(f"  {line(told.place)}", "dim")]
    if told.fork is not None:
        parts.append(Text(f"repeats {line(told.fork.place)}", "dim"))
    if told.more:
        parts.append(Text(f"... {told.more} earlier attempts are not shown", "dim"))
    if not told.attempts:
        parts.append(Text("no attempt has been made yet", "dim"))
    for chapter in told.attempts:
        parts += [Text(), render_attempt(chapter, samples=told.samples > 1)]
    return Group(*parts)


def render_attempt(chapter: AttemptReport, *, samples: bool) -> RenderableType:
    row, verdict = chapter.attempt, chapter.attempt.verdict
    facts = make_facts(8, overflow="fold")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.started))
    facts.add_row("began", f"{began}{peculiarities(row)}")
    if verdict:
        for name, value in verdict_facts(verdict):
            facts.add_row(name, value)
    for event in chapter.events:
        facts.add_row("event", Text(f"{line(event.kind)}: {line(event.message, LONGEST_DETAIL)}", "yellow"))
    if row.dropped is not None:
        facts.add_row("files", Text(explain_not_kept(row.dropped), "yellow"))
    for path in chapter.files:
        facts.add_row("file", Text(line(path)))
    return Group(render_title(row, samples=samples), facts)


def render_title(row: AttemptRow, *, samples: bool) -> Text:
    sample = f" of sample {row.sample}" if samples else ""
    kind = row.kind or "not settled"
    text = Text(f"attempt {row.number}{sample}: ").append(
        outcome_name(kind) if row.kind else kind, style_of(kind)
    )
    return text.append(f"  (id {row.attempt})", "dim")


def peculiarities(row: AttemptRow) -> str:
    """Return the differences of this attempt from a first one."""
    said = [f"round {row.round}"] if row.round > 1 else []
    said += [f"{row.scale} times the resources"] if row.scale > 1 else []
    said += ["alone in its worker"] if row.alone else []
    said += [f"grades the work of attempt id {row.regrades} again"] if row.regrades else []
    return ", " + ", ".join(said) if said else ""


def verdict_facts(verdict: Verdict) -> Iterator[tuple[str, Text]]:
    if verdict.failure:
        yield from failure_facts(verdict.failure)
    if verdict.grade:
        yield from grade_facts(verdict.grade)
    if verdict.answer:
        yield "answer", Text(line(verdict.answer, LONGEST_DETAIL))
    if verdict.kept and verdict.kept.answer:
        yield "answer", Text(f"{size(verdict.kept.answer.bytes)} in `{verdict.kept.answer.name}`")
    times = verdict.times
    waited = f" ({duration(times.waited)} of it for a rate limit)" if times.waited else ""
    yield (
        "time",
        Text(
            f"{duration(times.setup)} set-up, {duration(times.acting)} acting{waited},"
            f" {duration(times.grading)} grading"
        ),
    )
    if verdict.usage.requests:
        yield "tokens", Text(tokens(verdict.usage))
        yield "cost", Text(cost(verdict.usage))
    if verdict.replayed_usage.requests:
        yield "saved", Text(saved_usage(verdict.replayed_usage))
    if verdict.peak_memory:
        yield "memory", Text(f"{size(verdict.peak_memory)} at its peak")
    if verdict.salvage:
        kept = verdict.salvage
        yield "salvaged", Text(f"{format_count(kept.files, 'changed file')}, {size(kept.bytes)}")


def failure_facts(failure: AttemptFailure) -> Iterator[tuple[str, Text]]:
    phase = f", in phase {failure.phase.value}" if failure.phase else ""
    yield "failure", Text(f"{failure.where.value}: {line(failure.kind, 40)}{phase}", "yellow")
    yield "message", Text(block(first_part(failure.message)))
    if failure.hint:
        yield "hint", Text(line(failure.hint, LONGEST_DETAIL))


def grade_facts(grade: Grade) -> Iterator[tuple[str, Text]]:
    passed = Text("passed", "green") if grade.passed else Text("failed", "red")
    metrics = "".join(f", {line(name, 40)} {value:g}" for name, value in grade.metrics.items())
    yield "grade", passed.append(f", score {grade.score:g}{metrics}", "default")
    if grade.detail:
        yield "detail", Text(block(last_part(grade.detail)))


def first_part(text: str) -> str:
    """Return the beginning of a long text, up to the end of a line if possible."""
    if len(text) <= LONGEST_DETAIL:
        return text
    cut = text[:LONGEST_DETAIL]
    return f"{cut[: cut.rfind(NEW_LINE) + 1] or cut}…"


def last_part(text: str) -> str:
    """Return the end of a long text, where tests print a summary, from the start of a line if possible."""
    if len(text) <= LONGEST_DETAIL:
        return text
    cut = text[-LONGEST_DETAIL:]
    return f"…\n{cut[cut.find(NEW_LINE) + 1 :] or cut}"
