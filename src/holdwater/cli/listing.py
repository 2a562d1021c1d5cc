"""Renders the page of `holdwater suites` and `holdwater agents`: names, descriptions and sources."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..plugin import PluginEntry


def render_listing(known: Iterable[PluginEntry], also: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.formatting import line

    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    rows.add_column(style="dim")
    for one in known:
        rows.add_row(line(one.name, 60), Text(line(one.description)), line(one.source or "holdwater", 60))
    return Group(rows, Text(f"\n{also}", "dim"))
