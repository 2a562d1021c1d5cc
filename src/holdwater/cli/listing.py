"""The page of `holdwater suites` and `holdwater agents`: names, what they are, where they come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..plugin import Known


def table(known: Iterable[Known], also: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.figures import line

    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    rows.add_column(style="dim")
    for one in known:
        rows.add_row(line(one.name, 60), Text(line(one.description)), line(one.source or "holdwater", 60))
    return Group(rows, Text(f"\n{also}", "dim"))
