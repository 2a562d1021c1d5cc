"""One instance of a run: its attempts one by one, how each ended and where its files are.

The run as a whole is in `report.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.policy import not_kept
from ..core.records import Failure, Grade, Record, Usage, Verdict
from ..ledger.reader import AttemptRow, EventRow, InstanceRow, Reader
from .figures import block, called, cost, duration, format_count, line, saved, size, style_of, tokens

MOST_ATTEMPTS = 200  # on a page
MOST_EVENTS = 100  # of an attempt
LONGEST_DETAIL = 4000  # characters
NEW_LINE = "\n"


class Story(Record, frozen=True):
    """What `show RUN INSTANCE --json` prints."""

    instance: str
    place: str
    attempts: tuple[Chapter, ...]
    more: int = 0  # attempts that are not listed
    cost: float | None = None  # of all attempts, in US dollars; None: unknown
    samples: int = 1  # of the instance


class Chapter(Record, frozen=True):
    """One attempt, with the files that it left."""

    attempt: AttemptRow
    files: tuple[str, ...]
    cost: float | None = None  # in US dollars; None: unknown
    events: tuple[EventRow, ...] = ()  # the last MOST_EVENTS of them


def story(reader: Reader, instance: InstanceRow) -> Story:
    """The attempts at an instance, the last MOST_ATTEMPTS of them."""
    chapters: list[Chapter] = []
    more, spent, samples = 0, Usage(), reader.config.samples
    for row in reader.attempts(instance.id):
        used = row.verdict.usage if row.verdict else Usage()
        spent = spent.plus(used)
        samples = max(samples, row.sample + 1)
        left = tuple(str(path) for path in files(reader, row))
        events = tuple(reader.events(MOST_EVENTS, row.attempt))
        chapters.append(Chapter(attempt=row, files=left, cost=used.cost, events=events))
        if len(chapters) > MOST_ATTEMPTS:
            chapters.pop(0)
            more += 1
    return Story(
        instance=instance.name,
        place=instance.place,
        attempts=tuple(chapters),
        more=more,
        cost=spent.cost,
        samples=samples,
    )


def files(reader: Reader, row: AttemptRow) -> Iterator[Path]:
    """What an attempt left on disk: logs, salvaged work. Names begin with the attempt's number."""
    for folder in (reader.directory.logs, reader.directory.artifacts):
        yield from sorted(folder.glob(f"{row.attempt:06d}[-.]*"))


def render_story(told: Story) -> RenderableType:
    parts: list[RenderableType] = [Text(line(told.instance), "bold").append(f"  {line(told.place)}", "dim")]
    if told.more:
        parts.append(Text(f"... {told.more} earlier attempts are not shown", "dim"))
    if not told.attempts:
        parts.append(Text("no attempt has been made yet", "dim"))
    for chapter in told.attempts:
        parts += [Text(), render_chapter(chapter, samples=told.samples > 1)]
    return Group(*parts)


def render_chapter(chapter: Chapter, *, samples: bool) -> RenderableType:
    row, verdict = chapter.attempt, chapter.attempt.verdict
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True, min_width=8)
    facts.add_column(overflow="fold")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.started))
    facts.add_row("began", f"{began}{peculiarities(row)}")
    if verdict:
        for name, value in verdict_facts(verdict):
            facts.add_row(name, value)
    for event in chapter.events:
        facts.add_row("event", Text(f"{line(event.kind)}: {line(event.message, LONGEST_DETAIL)}", "yellow"))
    if row.dropped is not None:
        facts.add_row("files", Text(not_kept(row.dropped), "yellow"))
    for path in chapter.files:
        facts.add_row("file", Text(line(path)))
    return Group(title(row, samples=samples), facts)


def title(row: AttemptRow, *, samples: bool) -> Text:
    sample = f" of sample {row.sample}" if samples else ""
    kind = row.kind or "not settled"
    text = Text(f"attempt {row.number}{sample}: ").append(called(kind) if row.kind else kind, style_of(kind))
    return text.append(f"  (id {row.attempt})", "dim")


def peculiarities(row: AttemptRow) -> str:
    """What sets this attempt apart from a first one."""
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
    if verdict.saved.requests:
        yield "saved", Text(saved(verdict.saved))
    if verdict.peak_memory:
        yield "memory", Text(f"{size(verdict.peak_memory)} at its peak")
    if verdict.salvage:
        kept = verdict.salvage
        yield "salvaged", Text(f"{format_count(kept.files, 'changed file')}, {size(kept.bytes)}")


def failure_facts(failure: Failure) -> Iterator[tuple[str, Text]]:
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
    """The beginning of a long text, up to the end of a line where one is near."""
    if len(text) <= LONGEST_DETAIL:
        return text
    cut = text[:LONGEST_DETAIL]
    return f"{cut[: cut.rfind(NEW_LINE) + 1] or cut}…"


def last_part(text: str) -> str:
    """The end of a long text, from the beginning of a line where one is near: tests sum up there."""
    if len(text) <= LONGEST_DETAIL:
        return text
    cut = text[-LONGEST_DETAIL:]
    return f"…\n{cut[cut.find(NEW_LINE) + 1 :] or cut}"
