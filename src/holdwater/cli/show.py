"""`holdwater show`: shows a run, or one instance's attempts. It reads the ledger, also of a running run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from .console import CommandConsole
from .flags import Flag, find_run

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..core.summary import RunSummary
    from ..ledger.images import BuildReport
    from ..ledger.reader import LedgerReader
    from ..ledger.rows import InstanceRow

LOOK_EVERY = 0.5  # seconds


def show(
    run: str | None = None, instance: str | None = None, /, *, json: Flag = False, watch: Flag = False
) -> int:
    """Show the results of a run, or of one instance.

    For example: `holdwater show latest`, or `holdwater show runs/mine add-1` for the attempts at one
    instance with their failures, grades and files.

    Parameters
    ----------
    run
        The run's directory; `latest` (the default) is the newest in `runs/`.
    instance
        The id of an instance of the run.
    json
        Print one JSON document.
    watch
        Follow a running run until it ends.
    """
    from ..ledger.reader import LedgerReader

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
    summary = reader.summary()
    if json:
        console.write_json(data_of(reader, summary))
    else:
        console.write_page(page_of(reader, summary))


def data_of(reader: LedgerReader, summary: RunSummary) -> RunSummary | BuildReport:
    """Return the data that `--json` prints: a run's summary, or the report of an image build."""
    if reader.config.recipe is None:
        return summary
    from ..ledger.images import report_build

    return report_build(reader, summary)


def page_of(reader: LedgerReader, summary: RunSummary) -> RenderableType:
    if reader.config.recipe is None:
        from ..view.report import render_report

        return render_report(summary, reader)
    from ..view.images import render_build

    return render_build(reader, summary)


def show_instance(reader: LedgerReader, instance: InstanceRow, console: CommandConsole, json: bool) -> None:
    from ..view.instance_report import make_report, render_instance

    told = make_report(reader, instance)
    if json:
        console.write_json(told)
    else:
        console.write_page(render_instance(told))


def find_instance(reader: LedgerReader, name: str) -> InstanceRow:
    from difflib import get_close_matches
    from itertools import islice

    from ..core.errors import BadInput

    found = reader.find_instance(name)
    if found:
        return found
    names = [row.name for row in islice(reader.instances(), 1000)]
    near = get_close_matches(name, names, n=1)
    hint = (
        f"did you mean `{near[0]}`?" if near else f"the run has, for example, `{names[0]}`" if names else ""
    )
    raise BadInput(f"no such instance in the run: `{name[:200]}`", hint)


def follow(reader: LedgerReader, directory: Path, console: CommandConsole) -> None:
    """Show the live display until the run is over or the user presses Ctrl-C."""
    from ..ledger.reader import LedgerReader
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
