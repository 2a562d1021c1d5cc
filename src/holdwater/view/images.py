"""Renders the pages of a build: the plan, the results, the audit. Reads the ledger and its arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.image import FailedForecast, ImageOutcome, ImagesAudit, ImagesPlan
from ..core.summary import RunSummary
from ..image.docker.daemon import DaemonLeftover
from ..ledger.images import FAILED, BuildReport, ImageRow, read_images
from ..ledger.images import report_build as report_of
from ..ledger.reader import LedgerReader
from .formatting import duration, line, make_facts, make_table, render_commands, render_state, size

MOST_ROWS = 20
STYLES = {"made": "green", "present": "cyan", "failed": "red"}


def render_plan(plan: ImagesPlan) -> RenderableType:
    table = _table("image", "base", "would be", "tag", "up", "down")
    for one in plan.images[:MOST_ROWS]:
        if isinstance(one, FailedForecast):
            word = Text("unknown" if one.again else "impossible", "red")
            table.add_row(_name(one.name), _name(one.base), word, line(one.failure), "", "")
            continue
        how = "present" if one.how is ImageOutcome.PRESENT else "made"
        tag = one.reference.rpartition(":")[2][:12]
        table.add_row(
            _name(one.name),
            _name(one.base),
            Text(how, STYLES[how]),
            tag,
            _size(one.upload),
            _size(one.download),
        )
    if len(plan.images) > MOST_ROWS:
        table.add_row(Text(f"... and {len(plan.images) - MOST_ROWS} more", "dim"))
    facts = make_facts()
    if plan.revision:
        facts.add_row("commit", line(plan.revision))
    facts.add_row("engine", f"{plan.engine}: {plan.why}")
    facts.add_row(
        "layer", f"{size(plan.layer_bytes)}: {', '.join(plan.layers)[:26]}" if plan.layers else "none"
    )
    bad = "".join(
        f", {number} {word}"
        for number, word in ((plan.impossible, "impossible"), (plan.unknown, "unknown"))
        if number
    )
    facts.add_row("images", f"{plan.total}: {plan.make} would be made, {plan.present} exist{bad}")
    if plan.make_bases:
        facts.add_row("bases", f"{plan.make_bases} with the `before` lines would be made first")
    facts.add_row("traffic", f"{size(plan.upload)} up, {size(plan.download)} down")
    disk = (
        f"{size(plan.disk)} at most for one image, {size(plan.disk_free)} are free" if plan.disk else "none"
    )
    facts.add_row("disk", disk)
    return Group(table, Text(), facts)


def render_build(reader: LedgerReader, summary: RunSummary) -> RenderableType:
    """Render the results of a build; with too many images, problems come first."""
    report = report_of(reader, summary)
    settled = report.made + report.present + report.failed
    rows = list(islice(_problems_first(reader) if settled > MOST_ROWS else read_images(reader), MOST_ROWS))
    hidden = settled - len(rows)
    table = _table("image", "outcome", "tries", "time", "up", "down", "reference or failure")
    for row in rows:
        made = row.made
        table.add_row(
            _name(row.name),
            Text(row.outcome, STYLES[row.outcome]),
            str(row.attempts),
            duration(row.seconds),
            _size(made.uploaded if made else 0),
            _size(made.downloaded if made else 0),
            Text(
                line(row.failure or (made.reference if made else "")),
                "dim",
                overflow="ellipsis",
                no_wrap=True,
            ),
        )
    if hidden:
        table.add_row(Text(f"... and {hidden} more", "dim"))
    title = render_state(f"{line(report.recipe)} · {report.engine}", report.state, report.reason)
    rest: list[RenderableType] = [table, Text()] if rows else []
    return Group(title, *rest, _totals(report), Text(), _next_commands(report))


def render_audit(found: ImagesAudit) -> Text:
    text = Text(f"planned {found.planned}, settled {found.settled}, checked {found.checked}: ")
    text.append("holds water" if found.ok else "does not hold water", "green" if found.ok else "red")
    for problem in found.problems[:MOST_ROWS]:
        text.append(f"\nproblem: {line(problem)}")
    if len(found.problems) > MOST_ROWS:
        text.append(f"\n... and {len(found.problems) - MOST_ROWS} more")
    return text


def render_left(found: Sequence[DaemonLeftover], *, done: bool) -> RenderableType:
    """Render the data of holdwater on a docker daemon."""
    table = _table("kind", "size", "name")
    for one in found[:MOST_ROWS]:
        table.add_row(one.kind, _size(one.size), _name(one.name))
    if len(found) > MOST_ROWS:
        table.add_row(Text(f"... and {len(found) - MOST_ROWS} more", "dim"))
    end = "removed" if done else "`--yes` removes them"
    return (
        Group(table, Text(), f"{len(found)} items of holdwater on the daemon; {end}")
        if found
        else Text("nothing")
    )


def _problems_first(reader: LedgerReader) -> Iterator[ImageRow]:
    yield from (row for row in read_images(reader) if row.outcome == FAILED)
    yield from (row for row in read_images(reader) if row.outcome != FAILED)


def _totals(report: BuildReport) -> Table:
    facts = make_facts()
    settled = report.made + report.present + report.failed
    counts = Text(f"{settled} of {report.planned if report.total is None else report.total}: ")
    said = [(report.made, "made"), (report.present, "present"), (report.failed, "failed")]
    for number, word in [(number, word) for number, word in said if number]:
        counts.append(f"{number} {word}  ", STYLES[word])
    facts.add_row("images", counts)
    facts.add_row(
        "traffic", f"{size(report.uploaded)} up, {size(report.downloaded)} down, {report.mounted} mounted"
    )
    limit = f" of {size(report.disk_limit)}" if report.disk_limit else ""
    facts.add_row("disk", f"{size(report.peak_disk)}{limit} at most" if report.peak_disk else "none used")
    slowest = ", ".join(f"{line(one.name, 40)} {duration(one.seconds)}" for one in report.slowest[:3])
    facts.add_row("time", duration(report.seconds) + (f"; slowest: {slowest}" if slowest else ""))
    if report.events:
        facts.add_row(
            "events", ", ".join(f"{n} {line(kind, 40)}" for kind, n in sorted(report.events.items()))
        )
    facts.add_row("logs", Text(f"{line(report.directory)}/logs", overflow="fold"))
    return facts


def _next_commands(report: BuildReport) -> Table:
    directory = shlex.quote(report.directory)
    said = [] if report.state in ("finished", "running") else [f"holdwater resume {directory}"]
    if report.failures:
        said.append(f"holdwater images show {directory} {shlex.quote(report.failures[0].name)}")
    said.append(f"holdwater images audit {directory}")
    return render_commands(said)


def _table(*names: str) -> Table:
    table = make_table()
    for name in names:
        table.add_column(name, justify="right" if name in ("up", "down", "tries", "time") else "left")
    return table


def _name(text: str) -> Text:
    return Text(line(text, 60), no_wrap=True, overflow="ellipsis")


def _size(count: int) -> str:
    return size(count) if count else ""
