"""`holdwater suites`, `agents` and `version`: lists the names that are known, and prints the version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..version import __version__
from .console import CommandConsole
from .flags import Flag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..api.machine import PluginEntry


def suites(*, json: Flag = False) -> int:
    """List the known suites.

    Other suites are given by path: `path.py:name`, `module:name` or `file.jsonl`. Installed packages add
    names with the entry point group `holdwater.suites`.

    For example: `holdwater suites --json`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..api.machine import OTHER_SUITES, list_suites

    known = list_suites()
    if json:
        CommandConsole().write_json({"suites": known})
    else:
        CommandConsole().write_page(render_listing(known, f"also: {OTHER_SUITES}"))
    return 0


def agents(*, json: Flag = False) -> int:
    """List the known agents.

    Other agents are given by path, `path.py:name` or `module:name`, or as a program. Installed packages add
    names with the entry point group `holdwater.agents`.

    For example: `holdwater agents --json`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..api.machine import OTHER_AGENTS, list_agents

    known = list_agents()
    if json:
        CommandConsole().write_json({"agents": known})
    else:
        CommandConsole().write_page(render_listing(known, f"also: {OTHER_AGENTS}"))
    return 0


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


def version(*, json: Flag = False) -> int:
    """Print the version of holdwater.

    For example: `holdwater version --json`

    Parameters
    ----------
    json
        Print one JSON document, which also has the version of Python.
    """
    import platform

    if json:
        CommandConsole().write_json({"holdwater": __version__, "python": platform.python_version()})
    else:
        CommandConsole().write_page(__version__)
    return 0
