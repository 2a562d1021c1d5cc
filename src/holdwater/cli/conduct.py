"""What `run`, `resume`, `regrade` and `check` share: a claimed console, the display, the closing page."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ..run.signals import Signals
from .console import Console

if TYPE_CHECKING:
    from ..api import Around
    from ..core.summary import Summary
    from ..ledger.directory import RunDirectory
    from ..view.terminal import Display


def conducted(work: Callable[[Around], Coroutine[Any, Any, Summary]], *, json: bool, quiet: bool) -> int:
    """Do `work` in front of the user; the exit status."""
    console = Console.current or Console.claim()
    summary = watched(work, quiet=quiet)
    _close(summary, console, json=json, quiet=quiet)
    console.flush()
    return leave(summary.exit_status or 0)


def watched(work: Callable[[Around], Coroutine[Any, Any, Summary]], *, quiet: bool) -> Summary:
    """Do `work` with the live display, without a word at its end."""
    from ..api import complete

    console = Console.current or Console.claim()
    displays: list[Display] = []

    def begun(directory: RunDirectory) -> None:
        console.divert(directory.logs / "console.log")
        if not quiet:
            displays.append(_display(directory, console))

    around: Around = {
        "say": lambda line: console.say(line.rstrip("\n")),
        "signals": Signals.current,
        "begun": begun,
    }
    try:
        return complete(work(around))
    finally:
        for display in displays:
            display.stop()
            if display.failed:
                console.say(f"note: the live display ended early: {display.failed}")


def leave(status: int) -> int:
    """Threads that agents left behind in this process would keep it from exiting: nothing waits for them."""
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):
        os._exit(status)
    return status


def _display(directory: RunDirectory, console: Console) -> Display:
    from ..ledger.reader import Reader
    from ..view.terminal import Display

    display = Display(lambda: Reader(directory), console.say, console.terminal)
    display.start()
    return display


def _close(summary: Summary, console: Console, *, json: bool, quiet: bool) -> None:
    """The closing page on stderr, the data on stdout."""
    from ..ledger.reader import Reader
    from .show import data_of, page_of

    with Reader(summary.directory) as reader:
        if not quiet:
            console.print(page_of(reader, summary))
        if json:
            console.data(data_of(reader, summary))
    sys.stdout.flush()
