"""Numbers and strangers' text as people read them. Pure; the pages are in `terminal.py` and `report.py`."""

from __future__ import annotations

import re

from rich.text import Text

from ..core.prices import dollars
from ..core.records import GiB, MiB, Usage

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STYLES = {"passed": "green", "failed": "red", "interrupted": "dim", "unsettled": "dim"}


def style_of(kind: str) -> str:
    """The colour of an outcome; what has none of its own is an infrastructure failure."""
    return STYLES.get(kind, "yellow")


def called(kind: str) -> str:
    """An outcome's name: `passed`, `failed`, `model error`."""
    return kind if kind in STYLES else f"{kind} error"


def tallied(kind: str, number: int) -> str:
    """`9 passed`, `1 model error`, `2 model errors`."""
    plural = "" if kind in STYLES or number == 1 else "s"
    return f"{number} {called(kind)}{plural}"


def spec(name: str) -> str:
    """A suite or an agent, without the directory that it lies in: `suite.py:suite`."""
    return line(name.rpartition("/")[2] if name.startswith("/") else name, 40)


def line(text: str, most: int = 300) -> str:
    """`text` on one line, with nothing in it that steers a terminal."""
    flat = " ".join(COLOURS.sub("", text[: 4 * most]).split())
    safe = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in flat)
    return safe if len(safe) <= most else safe[: most - 1] + "…"


def block(text: str, indent: str = "") -> str:
    """`text` on lines of its own, indented, with nothing in it that steers a terminal."""
    rows = COLOURS.sub("", text).rstrip("\n").expandtabs(4).split("\n")
    return "\n".join((indent + _printable(row)).rstrip() for row in rows)


def _printable(row: str) -> str:
    if row.isprintable():
        return row
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in row.rstrip("\r"))


def format_count(number: int, noun: str) -> str:
    """`1 instance`, `12 instances`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(count: int) -> str:
    """Bytes: `640 MiB`, `1.2 GiB`."""
    if count < MiB:
        return f"{count / 1024:.0f} KiB"
    if count < GiB:
        return f"{count / MiB:.0f} MiB"
    return f"{count / GiB:.1f} GiB"


def count(number: int) -> str:
    """How many: `940`, `12.3k`, `4.5M`."""
    if number < 1000:
        return str(number)
    if number < 999_950:
        return f"{number / 1000:.1f}k"
    return f"{number / 1_000_000:.1f}M"


def duration(seconds: float) -> str:
    """`0.4s`, `42s`, `3m 05s`, `2h 07m`, `3d 04h`."""
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


def tokens(usage: Usage) -> str:
    """What the model calls used, in a phrase."""
    return f"{in_and_out(usage)}, {tallied_calls(usage.requests)}"


def in_and_out(usage: Usage) -> str:
    """`1,200 in (300 cached), 46 out (20 reasoning)`."""
    cached = f" ({count(usage.cached_tokens)} cached)" if usage.cached_tokens else ""
    reasoning = f" ({count(usage.reasoning_tokens)} reasoning)" if usage.reasoning_tokens else ""
    return f"{count(usage.input_tokens)} in{cached}, {count(usage.output_tokens)} out{reasoning}"


def cost(usage: Usage) -> str:
    """What the model calls cost, and of how many of them that is not known."""
    unknown = usage.requests - usage.priced
    if unknown <= 0:
        return dollars(usage.nanodollars)
    if not usage.nanodollars:
        return "unknown: the model has no price" if not usage.priced else "unknown"
    return f"{dollars(usage.nanodollars)}, and that of {tallied_calls(unknown)} unknown"


def saved(usage: Usage) -> str:
    """What was answered from the record and not paid for again."""
    worth = f", {dollars(usage.nanodollars)}" if usage.nanodollars else ""
    return f"{tokens(usage)} answered from the record{worth}"


def tallied_calls(number: int) -> str:
    return "1 call" if number == 1 else f"{count(number)} calls"


def tally(counts: dict[str, int]) -> Text:
    """Outcomes by kind in their colours: passed, failed, then what went wrong most often."""
    first = {"passed": 0, "failed": 1}
    order = sorted(counts, key=lambda kind: (first.get(kind, 2), -counts[kind], kind))
    parts = [Text(tallied(kind, counts[kind]), style_of(kind)) for kind in order if counts[kind]]
    return Text(", ").join(parts) if parts else Text("none yet", "dim")
