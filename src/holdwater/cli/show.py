"""`holdwater show`: a run in a page, or one instance's attempts. Reads the ledger; the run may be running."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console
from .flags import Flag, find_run

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..core.summary import Summary
    from ..ledger.images import BuildReport
    from ..ledger.reader import InstanceRow, Reader

LOOK_EVERY = 0.5  # seconds


def show(
    run: str | None = None, instance: str | None = None, /, *, json: Flag = False, watch: Flag = False
) -> int:
    """Show what became of a run, or of one instance.

    For example: `holdwater show latest`, or `holdwater show runs/mine add-1` for the attempts at one
    instance with their failures, grades and files.

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    instance
        The id of an instance of the run.
    json
        Print one JSON document.
    watch
        Follow a run that is running until it ends.
    """
    from ..ledger.reader import Reader

    console = Console()
    directory = find_run(run)
    with Reader(directory) as reader:
        if watch:
            follow(reader, directory, console)
        if instance is None:
            show_run(reader, console, json)
        else:
            show_instance(reader, find_instance(reader, instance), console, json)
    return 0


def show_run(reader: Reader, console: Console, json: bool) -> None:
    summary = reader.summary()
    if json:
        console.data(data_of(reader, summary))
    else:
        console.page(page_of(reader, summary))


def data_of(reader: Reader, summary: Summary) -> Summary | BuildReport:
    """What `--json` prints of a run: of a build of images, its own report."""
    if reader.config.recipe is None:
        return summary
    from ..ledger.images import report

    return report(reader, summary)


def page_of(reader: Reader, summary: Summary) -> RenderableType:
    if reader.config.recipe is None:
        from ..view.report import render_report

        return render_report(summary, reader)
    from ..view.images import render_build

    return render_build(reader, summary)


def show_instance(reader: Reader, instance: InstanceRow, console: Console, json: bool) -> None:
    from ..view.story import render_story, story

    told = story(reader, instance)
    if json:
        console.data(told)
    else:
        console.page(render_story(told))


def find_instance(reader: Reader, name: str) -> InstanceRow:
    from difflib import get_close_matches
    from itertools import islice

    from ..core.errors import BadInput

    found = reader.find(name)
    if found:
        return found
    names = [row.name for row in islice(reader.instances(), 1000)]
    near = get_close_matches(name, names, n=1)
    hint = (
        f"did you mean `{near[0]}`?" if near else f"the run has, for example, `{names[0]}`" if names else ""
    )
    raise BadInput(f"no such instance in the run: `{name[:200]}`", hint)


def follow(reader: Reader, directory: Path, console: Console) -> None:
    """Show the live display until the run is over or the user has seen enough."""
    from ..ledger.reader import Reader
    from ..view.terminal import Display

    display = Display(lambda: Reader(directory), console.say, console.terminal)
    display.start()
    try:
        while reader.summary().state == "running" and display.failed is None:
            time.sleep(LOOK_EVERY)
    except KeyboardInterrupt:
        pass  # the end of watching, not of the run
    finally:
        display.stop()
        console.flush()
