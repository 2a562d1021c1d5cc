"""Runs work for `run`, `resume`, `regrade` and `check`: claimed console, live display, closing page."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ..api.process import CommandSignals
from .console import CommandConsole

if TYPE_CHECKING:
    from ..api.run_hooks import RunDirectory, RunHooks
    from ..core.summary import RunSummary
    from ..view.live_display import LiveDisplay


def run_in_foreground(
    work: Callable[[RunHooks], Coroutine[Any, Any, RunSummary]], *, json: bool, quiet: bool
) -> int:
    """Run `work` with the live display and the closing page; return the exit status."""
    console = CommandConsole.current or CommandConsole.claim()
    summary = watch_run(work, quiet=quiet)
    _print_closing(summary, console, json=json, quiet=quiet)
    console.flush()
    return exit_past_threads(summary.exit_status or 0)


def watch_run(work: Callable[[RunHooks], Coroutine[Any, Any, RunSummary]], *, quiet: bool) -> RunSummary:
    """Run `work` with the live display, without a closing page."""
    from ..api.run_hooks import complete

    console = CommandConsole.current or CommandConsole.claim()
    displays: list[LiveDisplay] = []

    def begin_display(directory: RunDirectory) -> None:
        console.divert(directory.logs / "console.log")
        if not quiet:
            displays.append(_start_display(directory, console))

    around: RunHooks = {
        "say": lambda line: console.say(line.rstrip("\n")),
        "signals": CommandSignals.current,
        "begun": begin_display,
    }
    try:
        return complete(work(around))
    finally:
        for display in displays:
            display.stop()
            if display.failed:
                console.say(f"note: the live display ended early: {display.failed}")


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


def _print_closing(summary: RunSummary, console: CommandConsole, *, json: bool, quiet: bool) -> None:
    """Print the closing page to stderr and the data to stdout."""
    from ..api.reading import LedgerReader, report_run
    from .show import page_of

    with LedgerReader(summary.directory) as reader:
        if not quiet:
            console.print(page_of(reader, summary))
        if json:
            console.write_json(report_run(reader, summary))
    sys.stdout.flush()
