"""`holdwater audit`: proves from the files on disk that nothing is missing. It changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import CommandConsole
from .flags import Flag, find_run

if TYPE_CHECKING:
    from rich.text import Text

    from ..ledger.audit import AuditReport

MOST_SHOWN = 50


def audit(run: str | None = None, /, *, json: Flag = False) -> int:
    """Prove that nothing is missing from a run.

    The audit checks that every planned sample has one outcome that follows from its verdict, that every
    attempt has one verdict, that every exchange and artifact is unchanged, and that all totals are correct.
    The exit status is 0 if so, 3 if that holds so far and the run is not finished, and 1 otherwise.

    For example: `holdwater audit latest --json`

    Parameters
    ----------
    run
        The run's directory; `latest` (the default) is the newest in `runs/`.
    json
        Print one JSON document.
    """
    from ..ledger.audit import audit_run as examine

    found = examine(find_run(run))
    if json:
        CommandConsole().write_json(found)
    else:
        CommandConsole().write_page(render_audit(found))
    return 0 if found.ok else 3 if found.sound else 1


def render_audit(found: AuditReport) -> Text:
    from rich.text import Text

    from ..view.formatting import line

    unfinished = f"unfinished {found.unfinished}, " if found.unfinished else ""
    text = Text(
        f"planned {found.planned}, settled {found.settled}, {unfinished}lost {found.lost}, "
        f"duplicated {found.duplicated}, corrupt {found.corrupt}: "
    )
    if found.sound:
        text.append("holds water" if found.ok else "holds water so far", "green" if found.ok else "yellow")
    else:
        text.append("does not hold water", "red")
    if found.dropped:
        text.append(f"\ndropped on purpose: the files of {found.dropped} attempts", "dim")
    for note in found.notes[:MOST_SHOWN]:
        text.append(f"\n{line(note)}", "dim")
    for problem in found.problems[:MOST_SHOWN]:
        text.append(f"\nproblem: {line(problem)}")
    if len(found.problems) > MOST_SHOWN:
        text.append(f"\n... and {len(found.problems) - MOST_SHOWN} more")
    return text
