"""Formats numbers, charts and untrusted text for people. Pure functions; the other modules have the pages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich import box
from rich.console import OverflowMethod
from rich.table import Table
from rich.text import Text

from ..core.prices import format_dollars
from ..core.records import GiB, MiB, ModelUsage
from ..core.summary import RunGauge, RunSummary

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # bars
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STYLES = {"passed": "green", "failed": "red", "interrupted": "dim", "cancelled": "dim", "unsettled": "dim"}


def style_of(kind: str) -> str:
    """Return the colour of an outcome; a kind without its own colour is an infrastructure failure."""
    return STYLES.get(kind, "yellow")


def outcome_name(kind: str) -> str:
    """Return an outcome's name: `passed`, `failed`, `model error`."""
    return kind if kind in STYLES else f"{kind} error"


def outcome_count(kind: str, number: int) -> str:
    """Return `9 passed`, `1 model error`, `2 model errors`."""
    plural = "" if kind in STYLES or number == 1 else "s"
    return f"{number} {outcome_name(kind)}{plural}"


def short_spec(name: str) -> str:
    """Return a suite or an agent without its directory: `suite.py:suite`."""
    return line(name.rpartition("/")[2] if name.startswith("/") else name, 40)


def name_run(summary: RunSummary) -> str:
    """Return suite, agent and model of a run."""
    return " · ".join(short_spec(part) for part in (summary.suite, summary.agent, summary.model) if part)


def line(text: str, most: int = 300) -> str:
    """Return `text` on one line, without terminal control characters."""
    flat = " ".join(COLOURS.sub("", text[: 4 * most]).split())
    safe = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in flat)
    return safe if len(safe) <= most else safe[: most - 1] + "…"


def block(text: str, indent: str = "") -> str:
    """Return `text` on its own lines, indented, without terminal control characters."""
    rows = COLOURS.sub("", text).rstrip("\n").expandtabs(4).split("\n")
    return "\n".join((indent + _printable(row)).rstrip() for row in rows)


def _printable(row: str) -> str:
    if row.isprintable():
        return row
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in row.rstrip("\r"))


def format_count(number: int, noun: str) -> str:
    """Return `1 instance`, `12 instances`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(count: int) -> str:
    """Format bytes: `640 MiB`, `1.2 GiB`."""
    if count < MiB:
        return f"{count / 1024:.0f} KiB"
    if count < GiB:
        return f"{count / MiB:.0f} MiB"
    return f"{count / GiB:.1f} GiB"


def count(number: int) -> str:
    """Format a number: `940`, `12.3k`, `4.5M`."""
    if number < 1000:
        return str(number)
    if number < 999_950:
        return f"{number / 1000:.1f}k"
    return f"{number / 1_000_000:.1f}M"


def duration(seconds: float) -> str:
    """Format seconds: `0.4s`, `42s`, `3m 05s`, `2h 07m`, `3d 04h`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def tokens(usage: ModelUsage) -> str:
    """Return the tokens and the number of model calls in one phrase."""
    return f"{token_counts(usage)}, {call_count(usage.requests)}"


def token_counts(usage: ModelUsage) -> str:
    """Return `1,200 in (300 cached), 46 out (20 reasoning)`."""
    cached = f" ({count(usage.cached_tokens)} cached)" if usage.cached_tokens else ""
    reasoning = f" ({count(usage.reasoning_tokens)} reasoning)" if usage.reasoning_tokens else ""
    return f"{count(usage.input_tokens)} in{cached}, {count(usage.output_tokens)} out{reasoning}"


def cost(usage: ModelUsage) -> str:
    """Return the cost of the model calls, and the number of calls whose cost is unknown."""
    unknown = usage.requests - usage.priced
    if unknown <= 0:
        return format_dollars(usage.nanodollars)
    if not usage.nanodollars:
        return "unknown: the model has no price" if not usage.priced else "unknown"
    return f"{format_dollars(usage.nanodollars)}, and that of {call_count(unknown)} unknown"


def saved_usage(usage: ModelUsage) -> str:
    """Return the usage that was answered from the record and not paid for again."""
    worth = f", {format_dollars(usage.nanodollars)}" if usage.nanodollars else ""
    return f"{tokens(usage)} answered from the record{worth}"


def call_count(number: int) -> str:
    return "1 call" if number == 1 else f"{count(number)} calls"


def tally(counts: dict[str, int]) -> Text:
    """Return the outcomes by kind in their colours: passed, failed, then the other kinds by frequency."""
    first = {"passed": 0, "failed": 1}
    order = sorted(counts, key=lambda kind: (first.get(kind, 2), -counts[kind], kind))
    parts = [Text(outcome_count(kind, counts[kind]), style_of(kind)) for kind in order if counts[kind]]
    return Text(", ").join(parts) if parts else Text("none yet", "dim")


def memory_over_time(gauges: Sequence[RunGauge], width: int = WIDTH) -> str:
    """Return `▁▃▅▇▅▂ at most 318 MiB of 512 MiB`: each bar is the maximum of its part of the run."""
    if not gauges:
        return ""
    highest = max(gauges, key=lambda gauge: gauge.memory)
    limit = max(highest.memory_limit, highest.memory)
    chart = bars([gauge.memory for gauge in gauges], limit, width)
    return f"{chart} at most {size(highest.memory)} of {size(limit)}"


def bars(values: Sequence[float], most: float, width: int = WIDTH) -> str:
    """Return one bar for each of at most `width` equal parts of `values`; `most` is a full bar."""
    count = min(width, len(values))
    edges = [len(values) * number // count for number in range(count + 1)] if count else []
    highest = [max(values[a:b]) for a, b in pairwise(edges)]
    last = len(BARS) - 1
    return "".join(BARS[min(last, int(value / most * last + 0.5)) if most else 0] for value in highest)


def summarize_limits(gauges: Iterable[RunGauge]) -> str:
    """Return the share of time of each limit: `memory 62 %, slots 30 %, nothing left to do 8 %`."""
    counts = Counter(gauge.binds for gauge in gauges if gauge.binds)
    total = counts.total()
    return ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in counts.most_common())


def make_facts(least: int = 0, overflow: OverflowMethod = "ellipsis") -> Table:
    """Return a table for facts: a name of at least `least` columns, and a value."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True, min_width=least)
    facts.add_column(overflow=overflow)
    return facts


def make_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")


def render_state(name: str, state: str, reason: str, *, paused: bool = False) -> Text:
    """Return the name of a run, its state and the reason for it."""
    styles = {"finished": "green", "running": "cyan"}
    title = Text(f"{name}  ", "bold").append(state, styles.get(state, "yellow"))
    if paused:
        title.append(", paused", "yellow")
    return title.append(f": {line(reason)}", "yellow") if reason else title


def render_commands(commands: Iterable[str]) -> Table:
    """Render the suggested next commands."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, command in enumerate(commands):
        table.add_row("" if number else "next:", Text(command, "cyan"))
    return table
