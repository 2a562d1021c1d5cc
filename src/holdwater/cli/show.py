"""`holdwater show` and `holdwater audit`: show a run or one instance, and prove that nothing is missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from .console import CommandConsole
from .flags import Flag, LatestRun

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ..api.reading import AuditReport, InstanceRow, LedgerReader
    from ..core.summary import RunSummary

LOOK_EVERY = 0.5  # seconds
MOST_SHOWN = 50  # problems, and notes, of an audit


def show(
    run: LatestRun = None, instance: str | None = None, /, *, json: Flag = False, watch: Flag = False
) -> int:
    """Show the results of a run, or of one instance.

    For example: `holdwater show latest`, or `holdwater show runs/mine add-1` for the attempts at one
    instance with their failures, grades and files.

    Parameters
    ----------
    instance
        The id of an instance of the run.
    json
        Print one JSON document.
    watch
        Follow a running run until it ends.
    """
    from ..api.reading import LedgerReader, find_instance, find_run

    console = CommandConsole()
    directory = find_run(run)
    with LedgerReader(directory) as reader:
        if watch:
            follow(reader, directory, console)
        if instance is None:
            show_run(reader, console, json)
        else:
            show_instance(reader, find_instance(reader, instance), console, json)
    return 0


def show_run(reader: LedgerReader, console: CommandConsole, json: bool) -> None:
    from ..api.reading import report_run

    summary = reader.summary()
    if json:
        console.write_json(report_run(reader, summary))
    else:
        console.write_page(page_of(reader, summary))


def page_of(reader: LedgerReader, summary: RunSummary) -> RenderableType:
    if reader.config.recipe is None:
        from ..view.report import render_report

        return render_report(summary, reader)
    from ..view.images import render_build

    return render_build(reader, summary)


def show_instance(reader: LedgerReader, instance: InstanceRow, console: CommandConsole, json: bool) -> None:
    from ..view.instance_report import make_report, render_instance

    told = make_report(reader, instance)
    console.write_result(told, lambda: render_instance(told), json=json)


def follow(reader: LedgerReader, directory: Path, console: CommandConsole) -> None:
    """Show the live display until the run is over or the user presses Ctrl-C."""
    from ..api.reading import LedgerReader
    from ..view.live_display import LiveDisplay

    display = LiveDisplay(lambda: LedgerReader(directory), console.say, console.terminal)
    display.start()
    try:
        while reader.summary().state == "running" and display.failed is None:
            time.sleep(LOOK_EVERY)
    except KeyboardInterrupt:
        pass  # ends the display, not the run
    finally:
        display.stop()
        console.flush()


def audit(run: LatestRun = None, /, *, json: Flag = False) -> int:
    """Prove that nothing is missing from a run.

    The audit checks that every planned sample has one outcome that follows from its verdict, that every
    attempt has one verdict, that every exchange and artifact is unchanged, and that all totals are correct.
    The exit status is 0 if so, 3 if that holds so far and the run is not finished, and 1 otherwise.

    For example: `holdwater audit latest --json`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..api import reading

    found = reading.audit(reading.find_run(run))
    CommandConsole().write_result(found, lambda: render_audit(found), json=json)
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
