"""Prints the figures of a benchmark: as a table for people, or as one JSON document. It asserts nothing."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One figure. `target` is its expected value; `met` is None without a target."""

    what: str
    value: float | str
    unit: str = ""
    target: str = ""
    met: bool | None = None
    who: str = "holdwater"


class Document(msgspec.Struct, frozen=True):
    rows: list[Row]
    machine: str
    date: str


def options(about: str) -> argparse.Namespace:
    return parser(about).parse_args()


def parser(about: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of every benchmark."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "-q", "--quick", action="store_true", help="a tenth of the work or less, under a minute"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--peers", action="store_true", help="the same work on peers that PyPI has")
    parser.add_argument("--rows", help="only these, for example `1,4`")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    return parser


def at_most(what: str, value: float, most: float, unit: str) -> Row:
    return Row(what, round(value, 2), unit, f"<= {most:g}", value <= most)


def say(line: str) -> None:
    """Print progress to stderr: stdout is for data."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def show(rows: Sequence[Row], *, json: bool) -> None:
    if json:
        document = Document(list(rows), machine(), time.strftime("%Y-%m-%d"))
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    print(f"\n{machine()}, {time.strftime('%Y-%m-%d')}\n")
    cells = [("who", "what", "value", "unit", "target", "met")]
    cells += [(row.who, row.what, _text(row.value), row.unit, row.target, _met(row)) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}, Python {platform.python_version()}"
    )


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.2f}".rstrip("0").rstrip(".")


def _met(row: Row) -> str:
    return "" if row.met is None else "yes" if row.met else "no"
