"""`holdwater audit`: proves from what is on disk that nothing is missing. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import Console
from .flags import Flag, find_run

if TYPE_CHECKING:
    from rich.text import Text

    from ..ledger.audit import Audit

MOST_SHOWN = 50


def audit(run: str | None = None, /, *, json: Flag = False) -> int:
    """Prove that nothing is missing from a run.

    Every planned sample has one outcome that follows from its verdict, every attempt one verdict; every
    exchange and every artifact is as it was written, and the tallies are their sums. The exit status is
    0 if so, 3 if that holds so far and the run is not finished, and 1 otherwise.

    For example: `holdwater audit latest --json`

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    json
        Print one JSON document.
    """
    from ..ledger.audit import audit as examine

    found = examine(find_run(run))
    if json:
        Console().data(found)
    else:
        Console().page(page(found))
    return 0 if found.ok else 3 if found.sound else 1


def page(found: Audit) -> Text:
    from rich.text import Text

    from ..view.figures import line

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
        text.append(f"\nnot kept, on purpose: the files of {found.dropped} attempts", "dim")
    for note in found.notes[:MOST_SHOWN]:
        text.append(f"\n{line(note)}", "dim")
    for problem in found.problems[:MOST_SHOWN]:
        text.append(f"\nproblem: {line(problem)}")
    if len(found.problems) > MOST_SHOWN:
        text.append(f"\n... and {len(found.problems) - MOST_SHOWN} more")
    return text
