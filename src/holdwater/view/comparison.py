"""Renders a comparison of runs: their figures side by side, and for each further run what changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.comparison import ComparisonReport, PairedDifference, RunComparison, RunFigures
from .branches import render_branches
from .formatting import (
    cost,
    duration,
    format_count,
    line,
    make_facts,
    make_table,
    render_commands,
    short_spec,
    style_of,
    tally,
    token_counts,
)

MOST_NAMES = 12
MOST_TAGS = 30
MOST_RATES = 4


def render_comparison(report: ComparisonReport) -> RenderableType:
    parts: list[RenderableType] = [render_figures(report.runs)]
    for comparison in (report, *report.others):
        parts += [Text(), *render_difference(comparison)]
    for tree in report.branches:
        parts += [Text(), render_branches(tree)]
    return Group(*parts, Text(), render_commands(suggest_commands(report)))


def render_figures(runs: Sequence[RunFigures]) -> Table:
    table = make_table()
    table.add_column("")
    for run in runs:
        table.add_column(line(run.run, 60), overflow="fold")
    rows: dict[str, list[Text]] = {
        "agent": [
            Text(" · ".join(short_spec(part) for part in (run.agent, run.model) if part)) for run in runs
        ],
        "state": [Text(run.state) for run in runs],
        "outcomes": [tally(run.outcomes) for run in runs],
    }
    for k in choose_rates(runs):
        rows[f"pass@{k}"] = [render_rate(run, k) for run in runs]
    if any(run.score is not None for run in runs):
        rows["score"] = [Text("" if run.score is None else f"{run.score:.3f}") for run in runs]
    if any(run.usage.requests for run in runs):
        rows["tokens"] = [Text(token_counts(run.usage)) for run in runs]
        rows["cost"] = [Text(cost(run.usage)) for run in runs]
    rows["time"] = [Text(duration(run.seconds)) for run in runs]
    for name, cells in rows.items():
        table.add_row(Text(name, "dim"), *cells)
    return table


def choose_rates(runs: Sequence[RunFigures]) -> list[int]:
    """Return pass@1 and the largest k that all runs have, with powers of two between them."""
    shared = min((len(run.pass_at) for run in runs), default=0)
    wanted = [k for k in range(1, shared + 1) if k.bit_count() == 1 or k == shared]
    return wanted if len(wanted) <= MOST_RATES else [*wanted[: MOST_RATES - 1], shared]


def render_rate(run: RunFigures, k: int) -> Text:
    rate = run.pass_at[k - 1]
    return Text(f"{rate.value:.3f} ({rate.low:.3f} to {rate.high:.3f}; {rate.method})")


def render_difference(comparison: RunComparison) -> Iterable[RenderableType]:
    names = f"{line(comparison.run, 60)} against {line(comparison.baseline, 60)}"
    yield Text(f"{names}: {format_count(comparison.instances, 'instance')} compared", "bold")
    if comparison.difference is not None and comparison.interval is not None and comparison.p is not None:
        shares = PairedDifference(
            difference=comparison.difference,
            interval=comparison.interval,
            p=comparison.p,
            method=comparison.method,
        )
        yield render_facts(comparison, shares)
    yield render_matrix(comparison)
    if comparison.tags:
        yield render_tags(comparison)


def render_facts(comparison: RunComparison, shares: PairedDifference) -> Table:
    facts = make_facts()
    facts.add_row("passed", render_paired(shares))
    if comparison.score is not None:
        facts.add_row("score", render_paired(comparison.score))
    if comparison.more_samples:
        more = format_count(comparison.more_samples, "more sample")
        facts.add_row("to see 3 points", Text(f"{more} of each instance in each run", "dim"))
    for name, listed in list_groups(comparison).items():
        if listed:
            facts.add_row(name, render_names(listed, style_of("passed") if name == "fixed" else ""))
    return facts


def list_groups(comparison: RunComparison) -> dict[str, tuple[str, ...]]:
    return {
        "fixed": comparison.fixed,
        "broken": comparison.broken,
        "not scored": comparison.unscored,
        "content changed": comparison.changed,
        "missing": comparison.missing,
        "added": comparison.added,
    }


def render_paired(paired: PairedDifference) -> Text:
    low, high = paired.interval
    text = Text(f"{paired.difference:+.3f}", "bold")
    return text.append(
        f", 95 % interval {low:+.3f} to {high:+.3f}, p = {paired.p:.2g} ({paired.method})", "not bold"
    )


def render_names(names: Sequence[str], style: str) -> Text:
    more = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (
        Text(f"{len(names)}: ")
        .append(", ".join(line(name, 60) for name in names[:MOST_NAMES]), style)
        .append(more)
    )


def render_matrix(comparison: RunComparison) -> Table:
    """Return the number of instances by their results: a row for the baseline's, a column for the other's."""
    table = make_table()
    table.add_column("baseline")
    results = list(comparison.matrix)
    for result in results:
        table.add_column(f"then {result}", justify="right")
    for result in results:
        row = comparison.matrix[result]
        table.add_row(Text(result, style_of(result)), *(Text(str(row[other])) for other in results))
    return table


def render_tags(comparison: RunComparison) -> Table:
    table = make_table()
    for name in ("tag", "instances", "baseline", "other", "difference"):
        table.add_column(name, justify="left" if name == "tag" else "right")
    for row in comparison.tags[:MOST_TAGS]:
        low, high = row.interval
        table.add_row(
            Text(line(row.tag, 60)),
            Text(str(row.instances)),
            Text(f"{row.baseline:.3f}"),
            Text(f"{row.other:.3f}"),
            Text(f"{row.difference:+.3f} ({low:+.3f} to {high:+.3f})"),
        )
    if len(comparison.tags) > MOST_TAGS:
        table.add_row(Text(f"... and {len(comparison.tags) - MOST_TAGS} more", "dim"))
    return table


def suggest_commands(report: ComparisonReport) -> list[str]:
    changed = (*report.broken, *report.fixed)
    if not changed:
        return [f"holdwater show {shlex.quote(report.run)}"]
    name = shlex.quote(changed[0])
    return [f"holdwater transcript {shlex.quote(path)} {name}" for path in (report.baseline, report.run)]
