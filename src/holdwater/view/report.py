"""The closing table of a run: what became of each instance, the totals, and what to type next.

`holdwater run` prints it at its end and `holdwater show` begins with it; one instance is in `story.py`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..core.pass_rates import PassRate
from ..core.summary import Gauge, RegradeState, Summary
from ..ledger.reader import OutcomeRow, Reader
from .figures import (
    called,
    cost,
    count,
    duration,
    format_count,
    line,
    saved,
    spec,
    style_of,
    tallied,
    tally,
    tokens,
)
from .survey import Survey, seconds, survey
from .terminal import running, waiting
from .timeline import memory_over_time, what_bound

SCORED = ("passed", "failed")
INSTANCE, WHAT = "instance", "what happened"
COLUMNS = (INSTANCE, "outcome", "score", "tries", "time", "tokens", WHAT)
ROOMY = ("tokens", WHAT)  # left out below WIDE columns
WIDE = 76
MOST_RATES = 8  # rows of pass@k
LATE = 0.1  # seconds of lag of an event loop: a call that came meanwhile may have felt it


def render_report(summary: Summary, reader: Reader) -> RenderableType:
    """The report of a run, finished or not."""
    seen = survey(reader.outcomes(), summary)
    rows: list[RenderableType] = [OutcomeTable(seen, reader), Text()] if seen.rows else []
    return Group(
        heading(summary),
        *rows,
        totals(summary, seen, list(reader.gauges())),
        *failures(seen, summary),
        Text(),
        commands(summary, seen),
    )


def heading(summary: Summary) -> Text:
    named = " · ".join(spec(part) for part in (summary.suite, summary.agent, summary.model) if part)
    styles = {"finished": "green", "running": "cyan"}
    title = Text(named, "bold").append("  ").append(summary.state, styles.get(summary.state, "yellow"))
    if summary.reason:
        title.append(f": {line(summary.reason)}", "yellow")
    return title


class OutcomeTable:
    """What became of each instance; on a narrow terminal without the columns that need room."""

    def __init__(self, seen: Survey, reader: Reader) -> None:
        self._hidden = seen.hidden
        self._rows = [cells(row, reader) for row in seen.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [name for name in COLUMNS if options.max_width >= WIDE or name not in ROOMY]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
        for name in names:
            if name in (INSTANCE, WHAT):  # the columns that give way
                table.add_column(name, max_width=40 if name == INSTANCE else None)
            else:
                table.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[name] for name in names))
        if self._hidden:
            table.add_row(Text(f"... and {self._hidden} more", "dim"))
        yield table


def cells(row: OutcomeRow, reader: Reader) -> dict[str, Text]:
    used = row.usage.input_tokens + row.usage.output_tokens
    return {
        INSTANCE: Text(named(row, reader.config.samples > 1), no_wrap=True, overflow="ellipsis"),
        "outcome": Text(called(row.kind), style_of(row.kind)),
        "score": Text("" if row.score is None else f"{row.score:.2f}"),
        "tries": Text(str(row.attempts)),
        "time": Text(duration(seconds(row))),
        "tokens": Text(count(used) if used else ""),
        WHAT: Text(line(what_happened(row, reader)), "dim", no_wrap=True, overflow="ellipsis"),
    }


def named(row: OutcomeRow, samples: bool) -> str:
    return f"{line(row.instance)} #{row.sample}" if samples else line(row.instance)


def what_happened(row: OutcomeRow, reader: Reader) -> str:
    """The failure, or the last line of what the grade says of work that did not pass: tests sum up there."""
    if row.regrade or row.failure or row.kind == "passed":
        return row.regrade or row.failure
    verdict = reader.verdict(row.attempt)
    detail = verdict.grade.detail.strip() if verdict and verdict.grade else ""
    return detail.rpartition("\n")[2]


def totals(summary: Summary, seen: Survey, gauges: Sequence[Gauge]) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    planned = summary.planned if summary.total is None else summary.total
    facts.add_row("settled", Text(f"{summary.settled} of {planned}: ").append_text(tally(summary.outcomes)))
    if summary.score is not None:
        scored = sum(summary.outcomes.get(kind, 0) for kind in SCORED)
        facts.add_row("score", Text(f"{summary.score:.3f}, the mean over {scored} scored"))
    for rate in chosen_rates(summary.pass_at):
        facts.add_row(f"pass@{rate.k}", Text(pass_rate(rate)))
    if summary.regrade is not None:
        facts.add_row(*grader(summary.regrade, summary.settled))
    facts.add_row("attempts", Text(str(summary.attempts)))
    if summary.usage.requests:
        facts.add_row("tokens", Text(tokens(summary.usage)))
        facts.add_row("cost", Text(cost(summary.usage)))
    if summary.saved.requests:
        facts.add_row("saved", Text(saved(summary.saved)))
    slowest = ", ".join(f"{line(row.instance, 40)} {duration(seconds(row))}" for row in seen.slowest)
    facts.add_row("time", Text(duration(summary.seconds) + (f"; slowest: {slowest}" if slowest else "")))
    if summary.state == "running" and summary.gauge is not None:
        facts.add_row("running", running(summary.gauge))
        facts.add_row("waiting", waiting(summary.gauge))
    if gauges:
        facts.add_row("memory", Text(memory_over_time(gauges)))
        facts.add_row("limited by", Text(what_bound(gauges) or "nothing"))
    if summary.lag_max > LATE:
        facts.add_row("lag", Text(f"{summary.lag_max:.2f} s, the longest that an event loop was late"))
    if summary.events:
        events = ", ".join(f"{number} {line(kind, 40)}" for kind, number in sorted(summary.events.items()))
        facts.add_row("events", Text(events))
    for told in summary.refused.last if summary.refused is not None else ():
        facts.add_row("refused", Text(f"{line(told, 300)} (of no attempt)", "yellow"))
    if summary.replays is not None:
        facts.add_row("replays", Text(line(summary.replays), overflow="fold"))
    facts.add_row("logs", Text(f"{line(summary.directory)}/logs", overflow="fold"))
    return facts


def chosen_rates(rates: Sequence[PassRate]) -> list[PassRate]:
    """All, or of many the powers of two and the last: `--json` and `export --what pass-at-k` have all."""
    if len(rates) <= MOST_RATES:
        return list(rates)
    return [rate for rate in rates if rate.k.bit_count() == 1 or rate is rates[-1]]


def pass_rate(rate: PassRate) -> str:
    over = format_count(rate.instances, "instance")
    return f"{rate.value:.3f}, 95 % interval {rate.low:.3f} to {rate.high:.3f} over {over}"


def grader(regrade: RegradeState, settled: int) -> tuple[str, Text]:
    """Whose grades the outcomes are; of a regrade that is open, that they are not its own yet."""
    over = regrade.graded + regrade.refused
    if regrade.ended is None:
        of = "" if regrade.only else f" of {settled}"
        told = (
            f"{over}{of} samples are graded by {line(regrade.grader)}; the outcomes are still those of before"
        )
        return "regrade", Text(told, "yellow")
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(regrade.ended))
    some = f", for {line(', '.join(regrade.only))}" if regrade.only else ""
    kept = f"; {regrade.refused} of {over} samples not regraded" if regrade.refused else ""
    return "grader", Text(f"{line(regrade.grader)}, since {since}{some}{kept}")


def failures(seen: Survey, summary: Summary) -> list[RenderableType]:
    """Infrastructure failures by kind, each with the first message: what kept instances from a score."""
    kinds = [kind for kind in summary.outcomes if kind not in SCORED and summary.outcomes[kind]]
    if not kinds:
        return []
    table = Table.grid(padding=(0, 2, 0, 0))
    for kind in sorted(kinds, key=lambda kind: -summary.outcomes[kind]):
        first = seen.first.get(kind)
        example = Text(f"{line(first.instance, 40)}: {line(first.failure)}") if first else Text()
        table.add_row(Text(tallied(kind, summary.outcomes[kind]), style_of(kind)), example)
    return [Text("\nnot scored", "bold"), table]


def commands(summary: Summary, seen: Survey) -> Table:
    """What is worth typing next."""
    directory = shlex.quote(summary.directory)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, command in enumerate(worth_typing(summary, seen, directory)):
        table.add_row("next:" if number == 0 else "", Text(command, "cyan"))
    return table


def worth_typing(summary: Summary, seen: Survey, directory: str) -> list[str]:
    said = []
    if summary.state not in ("finished", "running"):
        said.append(f"holdwater resume {directory}")
    elif summary.exit_status == 1:
        said.append(f"holdwater resume {directory} --retry infrastructure")
    if summary.state == "running":
        said.append(f"holdwater show {directory} --watch")
    problem = next((row for kind, row in sorted(seen.first.items()) if kind != "passed"), None)
    if problem is not None:
        said.append(f"holdwater show {directory} {shlex.quote(problem.instance)}")
    said.append(f"holdwater export {directory} --format csv --out outcomes.csv")
    said.append(f"holdwater audit {directory}")
    return said
