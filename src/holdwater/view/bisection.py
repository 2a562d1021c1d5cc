"""Renders a search for the turn at which an attempt was lost: its plan, each probe, and the result."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..core.bisection import BisectReport, SearchCost, TurnProbe, count_branches
from .formatting import cost, format_count, line, make_table, render_commands, style_of, tokens


def render_plan(most: SearchCost, turns: Sequence[int]) -> str:
    """Return the most that the search may cost, before it starts."""
    expense = f"{tokens(most.usage)}, cost {cost(most.usage)}" if most.usage.requests else "no call"
    return f"search over {format_count(len(turns), 'turn')}: at most {most.probes} forks, {expense}"


def render_probe(probe: TurnProbe) -> str:
    unscored = f", {probe.unscored} without a score" if probe.unscored else ""
    return f"turn {probe.turn}: {count_branches(probe)} pass{unscored}"


def render_bisection(report: BisectReport) -> RenderableType:
    table = make_table()
    for name in ("turn", "passed", "of", "not scored", "tokens"):
        table.add_column(name, justify="right")
    for probe in report.probes:
        row = (probe.turn, probe.passed, probe.scored, probe.unscored or "", tokens(probe.usage))
        table.add_row(*map(str, row), style=style_of("passed" if probe.passes else "failed"))
    spent = Text(f"spent: {tokens(report.usage)}, cost {cost(report.usage)}", "dim")
    shown = next((probe for probe in report.probes if probe.turn == report.turn), report.probes[0])
    commands = render_commands([f"holdwater show {line(shown.directory)}"])
    return Group(Text(report.statement, "bold"), Text(), table, spent, Text(), commands)
