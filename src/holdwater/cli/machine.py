"""`holdwater suites`, `agents`, `doctor` and `version`: print the facts of this machine, and its limits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..version import __version__
from .console import CommandConsole
from .flags import Flag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..api.machine import DoctorFinding, PluginEntry


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
    CommandConsole().write_result(
        {"suites": known}, lambda: render_listing(known, f"also: {OTHER_SUITES}"), json=json
    )
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
    CommandConsole().write_result(
        {"agents": known}, lambda: render_listing(known, f"also: {OTHER_AGENTS}"), json=json
    )
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

    CommandConsole().write_result(
        {"holdwater": __version__, "python": platform.python_version()}, lambda: __version__, json=json
    )
    return 0


def doctor(
    *, scratch: Annotated[Path | None, Parameter(show_default=False)] = None, json: Flag = False
) -> int:
    """Check this machine and report what limits a run, for example without root or bubblewrap.

    Each feature is tested, and nothing is changed. The exit status is always 0.

    For example: `holdwater doctor`

    Parameters
    ----------
    scratch
        Check this directory too: the `--scratch` of a run.
    json
        Print one JSON document.
    """
    from ..api.machine import examine_machine

    found = examine_machine(scratch)
    CommandConsole().write_result(
        {"findings": found, "notes": sum(1 for finding in found if finding.note)},
        lambda: render_findings(found),
        json=json,
    )
    return 0


def render_findings(found: list[DoctorFinding]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.formatting import line

    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True, style="bold")
    rows.add_column()
    for finding in found:
        rows.add_row(finding.what, Text(line(finding.value), "yellow" if finding.note else "green"))
        if finding.note:
            rows.add_row("", Text(line(finding.note, 1000), "dim"))
    notes = sum(1 for finding in found if finding.note)
    verdict = (
        "everything is available"
        if not notes
        else f"{notes} of {len(found)} could be better; all of it is optional"
    )
    return Group(rows, Text(f"\n{verdict}"))
