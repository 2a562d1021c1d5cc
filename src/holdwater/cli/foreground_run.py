"""Runs work for `run`, `resume`, `regrade` and `check`: claimed console, live display, closing page."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..api.process import CommandSignals
from ..core.endpoints import list_endpoint_keys
from .console import CommandConsole

if TYPE_CHECKING:
    from ..api.reading import RunDirectory
    from ..api.runs import RunSetup
    from ..core.summary import RunSummary
    from ..view.live_display import LiveDisplay


def run_in_foreground(setup: RunSetup, *, json: bool, quiet: bool, view: bool = False) -> int:
    """Conduct the run with the live display and the closing page; return the exit status."""
    return close_run(watch_run(setup, quiet=quiet, view=view), json=json, quiet=quiet)


def watch_run(setup: RunSetup, *, quiet: bool, view: bool = False) -> RunSummary:
    """Conduct the run with the live display, without a closing page; `view` serves it to a browser too."""
    from ..api.process import complete, take_variables
    from ..api.runs import start

    take_variables(list_endpoint_keys(setup.config.base_url))
    console = CommandConsole.current or CommandConsole.claim()
    displays: list[LiveDisplay] = []
    views = ExitStack()

    def begin_display(directory: RunDirectory) -> None:
        if view:
            from ..api.viewing import open_view

            console.say(f"view: {views.enter_context(open_view(directory.path))}")
        console.divert(directory.logs / "console.log")
        if not quiet:
            displays.append(_start_display(directory, console))

    def say(line: str) -> None:
        console.say(line.rstrip("\n"))

    try:
        return complete(start(setup, say=say, signals=CommandSignals.current, begun=begin_display))
    finally:
        views.close()
        for display in displays:
            display.stop()
            if display.failed:
                console.say(f"note: the live display ended early: {display.failed}")


def close_run(summary: RunSummary, *, json: bool, quiet: bool) -> int:
    """Print the closing page to stderr and the data to stdout; return the exit status."""
    from ..api.reading import LedgerReader, report_run
    from .show import page_of

    console = CommandConsole.current or CommandConsole.claim()
    with LedgerReader(summary.directory) as reader:
        if not quiet:
            console.print(page_of(reader, summary))
        if json:
            console.write_json(report_run(reader, summary))
    sys.stdout.flush()
    console.flush()
    return exit_past_threads(summary.exit_status or 0)


def exit_past_threads(status: int) -> int:
    """Return `status`, or exit at once if agents left threads that would keep this process alive."""
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):
        os._exit(status)
    return status


def _start_display(directory: RunDirectory, console: CommandConsole) -> LiveDisplay:
    from ..api.reading import LedgerReader
    from ..view.live_display import LiveDisplay

    display = LiveDisplay(lambda: LedgerReader(directory), console.say, console.terminal)
    display.start()
    return display
