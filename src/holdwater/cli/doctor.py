"""`holdwater doctor`: reports what this machine offers a run, and what limits it. It changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import CommandConsole
from .flags import Flag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..api.machine import DoctorFinding


def doctor(*, json: Flag = False) -> int:
    """Check this machine and report what limits a run, for example without root or bubblewrap.

    Each feature is tested, and nothing is changed. The exit status is always 0.

    For example: `holdwater doctor`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..api.machine import examine_machine

    found = examine_machine()
    if json:
        CommandConsole().write_json({"findings": found, "notes": sum(1 for finding in found if finding.note)})
    else:
        CommandConsole().write_page(render_findings(found))
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
