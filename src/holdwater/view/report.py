"""Renders the report of a run: the outcomes of instances, the totals, and suggested commands.

`holdwater run` prints it at the end, and `holdwater show` prints it too. The outcomes to show are selected in
one pass and a fixed amount of memory. `instance_report.py` reports one instance.
"""

from __future__ import annotations

import heapq
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..core.endpoints import EndpointState, EndpointUse
from ..core.records import Record
from ..core.summary import PassRate, RegradeState, RunGauge, RunSummary
from ..ledger.reader import LedgerReader
from ..ledger.rows import OutcomeRow
from .branches import render_fork
from .formatting import (
    cost,
    count,
    duration,
    format_count,
    line,
    make_facts,
    make_table,
    memory_over_time,
    name_run,
    outcome_count,
    outcome_name,
    render_commands,
    render_state,
    saved_usage,
    style_of,
    summarize_limits,
    tally,
    tokens,
)
from .live_display import render_control, render_running, render_waiting

SCORED = ("passed", "failed")
INSTANCE, WHAT = "instance", "what happened"
COLUMNS = (INSTANCE, "outcome", "score", "tries", "time", "tokens", WHAT)
WIDE_COLUMNS = ("tokens", WHAT)  # left out on terminals narrower than WIDE
WIDE = 76
MOST_RATES = 8  # rows of pass@k
MOST_ROWS = 40
MOST_SLOWEST = 3
MOST_KINDS = 20
MOST_LOOKED_AT = 100_000  # outcomes; keeps a page fast for a run with millions
NOTABLE_LAG = 0.1  # seconds of event-loop lag that may have delayed a call

RankedRow = tuple[float, int, OutcomeRow]  # the number breaks ties, so rows are never compared


def render_report(summary: RunSummary, reader: LedgerReader) -> RenderableType:
    """Render the report of a run, finished or not."""
    seen = make_overview(reader.outcomes(), summary)
    rows: list[RenderableType] = [OutcomeTable(seen, reader), Text()] if seen.rows else []
    return Group(
        render_state(name_run(summary), summary.state, summary.reason, paused=summary.paused is not None),
        *rows,
        totals(summary, seen, list(reader.gauges())),
        *failures(seen, summary),
        *((Text(), render_fork(reader)) if summary.fork is not None else ()),
        Text(),
        render_commands(suggest_commands(summary, seen)),
    )


class OutcomeTable:
    """The outcomes of instances; a narrow terminal shows fewer columns."""

    def __init__(self, seen: OutcomeOverview, reader: LedgerReader) -> None:
        self._hidden = seen.hidden
        self._rows = [cells(row, reader) for row in seen.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [name for name in COLUMNS if options.max_width >= WIDE or name not in WIDE_COLUMNS]
        table = make_table()
        for name in names:
            if name in (INSTANCE, WHAT):  # these columns shrink
                table.add_column(name, max_width=40 if name == INSTANCE else None)
            else:
                table.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[name] for name in names))
        if self._hidden:
            table.add_row(Text(f"... and {self._hidden} more", "dim"))
        yield table


def cells(row: OutcomeRow, reader: LedgerReader) -> dict[str, Text]:
    used = row.usage.input_tokens + row.usage.output_tokens
    return {
        INSTANCE: Text(row_name(row, reader.config.samples > 1), no_wrap=True, overflow="ellipsis"),
        "outcome": Text(outcome_name(row.kind), style_of(row.kind)),
        "score": Text("" if row.score is None else f"{row.score:.2f}"),
        "tries": Text(str(row.attempts)),
        "time": Text(duration(total_seconds(row))),
        "tokens": Text(count(used) if used else ""),
        WHAT: Text(line(explain_outcome(row, reader)), "dim", no_wrap=True, overflow="ellipsis"),
    }


def row_name(row: OutcomeRow, samples: bool) -> str:
    return f"{line(row.instance)} #{row.sample}" if samples else line(row.instance)


def explain_outcome(row: OutcomeRow, reader: LedgerReader) -> str:
    """Return the failure, or the last line of a failed grade's detail, where tests print a summary."""
    if row.regrade or row.failure or row.kind == "passed":
        return row.regrade or row.failure
    verdict = reader.verdict(row.attempt)
    detail = verdict.grade.detail.strip() if verdict and verdict.grade else ""
    return detail.rpartition("\n")[2]


def totals(summary: RunSummary, seen: OutcomeOverview, gauges: Sequence[RunGauge]) -> Table:
    facts = make_facts()
    planned = summary.planned if summary.total is None else summary.total
    facts.add_row("settled", Text(f"{summary.settled} of {planned}: ").append_text(tally(summary.outcomes)))
    if summary.score is not None:
        scored = sum(summary.outcomes.get(kind, 0) for kind in SCORED)
        facts.add_row("score", Text(f"{summary.score:.3f}, the mean over {scored} scored"))
    for rate in choose_rates(summary.pass_at):
        facts.add_row(f"pass@{rate.k}", Text(pass_rate(rate)))
    if summary.regrade is not None:
        facts.add_row(*grader(summary.regrade, summary.settled))
    facts.add_row("attempts", Text(str(summary.attempts)))
    if summary.usage.requests:
        facts.add_row("tokens", Text(tokens(summary.usage)))
        facts.add_row("cost", Text(cost(summary.usage)))
    for use in summary.endpoints:
        facts.add_row("server", render_endpoint(use))
    if summary.saved.requests:
        facts.add_row("saved", Text(saved_usage(summary.saved)))
    slowest = ", ".join(f"{line(row.instance, 40)} {duration(total_seconds(row))}" for row in seen.slowest)
    facts.add_row("time", Text(duration(summary.seconds) + (f"; slowest: {slowest}" if slowest else "")))
    if summary.state == "running" and summary.gauge is not None:
        facts.add_row("running", render_running(summary.gauge))
        facts.add_row("waiting", render_waiting(summary.gauge))
    if gauges:
        facts.add_row("memory", Text(memory_over_time(gauges)))
        facts.add_row("limited by", Text(summarize_limits(gauges) or "nothing"))
    if summary.lag_max > NOTABLE_LAG:
        facts.add_row("lag", Text(f"{summary.lag_max:.2f} s, the longest delay of an event loop"))
    for name, text in list_events(summary):
        facts.add_row(name, text)
    for name, origin in list_origins(summary):
        facts.add_row(name, Text(line(origin), overflow="fold"))
    facts.add_row("logs", Text(f"{line(summary.directory)}/logs", overflow="fold"))
    return facts


def render_endpoint(use: EndpointUse) -> Text:
    """Return the calls of one of the model's servers, and its state."""
    text = Text(f"{line(use.url, 80)}: {use.requests} calls, {use.failures} failed, ")
    text.append(str(use.state), "" if use.state is EndpointState.OK else "yellow")
    return text.append(f": {line(use.error, 120)}" if use.error else "")


def list_origins(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield the run whose record a run gives again."""
    if summary.replays is not None:
        yield "replays", summary.replays
    if summary.fork is not None:
        yield "repeats", summary.fork.place


def list_events(summary: RunSummary) -> Iterator[tuple[str, Text]]:
    """Yield the events of a run by kind, the requests to it, and requests that a gateway refused."""
    if summary.events:
        events = ", ".join(f"{number} {line(kind, 40)}" for kind, number in sorted(summary.events.items()))
        yield "events", Text(events)
    for sentence in summary.translated:
        yield "translated", Text(line(sentence, 300))
    yield from render_control(summary, len(summary.control))
    for told in summary.refused.last if summary.refused is not None else ():
        yield "refused", Text(f"{line(told, 300)} (not part of an attempt)", "yellow")


def choose_rates(rates: Sequence[PassRate]) -> list[PassRate]:
    """Return all rates, or if there are many, powers of two and the last. `--json` and `export` list all."""
    if len(rates) <= MOST_RATES:
        return list(rates)
    return [rate for rate in rates if rate.k.bit_count() == 1 or rate is rates[-1]]


def pass_rate(rate: PassRate) -> str:
    over = format_count(rate.instances, "instance")
    return f"{rate.value:.3f}, 95 % interval {rate.low:.3f} to {rate.high:.3f} over {over} ({rate.method})"


def grader(regrade: RegradeState, settled: int) -> tuple[str, Text]:
    """Return the grader of the outcomes; for an open regrade, note that its grades do not apply yet."""
    over = regrade.graded + regrade.refused
    if regrade.ended is None:
        of = "" if regrade.only else f" of {settled}"
        told = (
            f"{over}{of} samples are graded by {line(regrade.grader)}; "
            "the outcomes are still the previous ones"
        )
        return "regrade", Text(told, "yellow")
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(regrade.ended))
    some = f", for {line(', '.join(regrade.only))}" if regrade.only else ""
    kept = f"; {regrade.refused} of {over} samples not regraded" if regrade.refused else ""
    return "grader", Text(f"{line(regrade.grader)}, since {since}{some}{kept}")


def failures(seen: OutcomeOverview, summary: RunSummary) -> list[RenderableType]:
    """List infrastructure failures by kind with their first message: they prevented a score."""
    kinds = [kind for kind in summary.outcomes if kind not in SCORED and summary.outcomes[kind]]
    if not kinds:
        return []
    table = Table.grid(padding=(0, 2, 0, 0))
    for kind in sorted(kinds, key=lambda kind: -summary.outcomes[kind]):
        first = seen.first.get(kind)
        example = Text(f"{line(first.instance, 40)}: {line(first.failure)}") if first else Text()
        table.add_row(Text(outcome_count(kind, summary.outcomes[kind]), style_of(kind)), example)
    return [Text("\nnot scored", "bold"), table]


def suggest_commands(summary: RunSummary, seen: OutcomeOverview) -> list[str]:
    directory = shlex.quote(summary.directory)
    said = []
    if summary.state not in ("finished", "running"):
        said.append(f"holdwater resume {directory}")
    elif summary.exit_status == 1:
        said.append(f"holdwater resume {directory} --retry infrastructure")
    if summary.paused is not None:
        said.append(f"holdwater unpause {directory}")
    if summary.state == "running":
        said.append(f"holdwater top {directory}")
    problem = next((row for kind, row in sorted(seen.first.items()) if kind != "passed"), None)
    if problem is not None:
        said.append(f"holdwater show {directory} {shlex.quote(problem.instance)}")
    said.append(f"holdwater export {directory} --format csv --out outcomes.csv")
    said.append(f"holdwater audit {directory}")
    return said


class OutcomeOverview(Record, frozen=True):
    """The outcomes that a page shows."""

    rows: tuple[OutcomeRow, ...]  # in the order of planning; problems first if there are too many
    hidden: int
    first: dict[str, OutcomeRow]  # kind -> its first outcome
    slowest: tuple[OutcomeRow, ...]


def make_overview(outcomes: Iterable[OutcomeRow], summary: RunSummary) -> OutcomeOverview:
    urgent: list[RankedRow] = []  # a heap of at most MOST_ROWS; the next row to drop is on top
    slowest: list[RankedRow] = []  # a heap of at most MOST_SLOWEST
    first: dict[str, OutcomeRow] = {}  # at most MOST_KINDS
    for number, row in enumerate(islice(outcomes, MOST_LOOKED_AT)):
        push_bounded(urgent, (urgency(row), -number, row), MOST_ROWS)
        push_bounded(slowest, (total_seconds(row), -number, row), MOST_SLOWEST)
        if len(first) < MOST_KINDS:
            first.setdefault(row.kind, row)
    hidden = max(0, summary.settled - len(urgent))
    order = sorted(urgent, reverse=True) if hidden else sorted(urgent, key=lambda ranked: -ranked[1])
    return OutcomeOverview(
        rows=tuple(row for _, _, row in order),
        hidden=hidden,
        first=first,
        slowest=tuple(row for _, _, row in sorted(slowest, reverse=True)),
    )


def push_bounded(heap: list[RankedRow], item: RankedRow, most: int) -> None:
    """Add `item`; drop the smallest item if there are more than `most`."""
    if len(heap) < most:
        heapq.heappush(heap, item)
    else:
        heapq.heappushpop(heap, item)


def urgency(row: OutcomeRow) -> int:
    """Rank infrastructure failures before failed samples, and failed samples before passed ones."""
    return {"passed": 0, "failed": 1}.get(row.kind, 2)


def total_seconds(row: OutcomeRow) -> float:
    return row.times.setup + row.times.acting + row.times.grading
