"""`holdwater doctor`: what this machine gives a run, and what is weaker for it. Changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console
from .flags import Flag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..sandbox.probe import Finding

FEW_FILES = 4096  # open files: below this, hundreds of attempts at once can run out
LITTLE_DISK = 1 << 30


def doctor(*, json: Flag = False) -> int:
    """Say what this machine gives, and what is weaker without root or bubblewrap.

    It tries each thing and changes nothing. The exit status is 0 whatever it finds.

    For example: `holdwater doctor`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    found = examine()
    if json:
        Console().data({"findings": found, "notes": sum(1 for finding in found if finding.note)})
    else:
        Console().page(page(found))
    return 0


def examine() -> list[Finding]:
    from ..sandbox import probe

    return [on_python(), on_cpu(), on_memory(), on_disk(), on_files(), *probe.findings()]


def on_python() -> Finding:
    import platform

    from ..sandbox.probe import Finding
    from ..version import __version__

    value = (
        f"{platform.python_version()} on {platform.system()} {platform.release()}, holdwater {__version__}"
    )
    return Finding(what="python", value=value)


def on_cpu() -> Finding:
    import os

    from ..sandbox.probe import Finding

    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable}" if usable == present else f"{usable} of {present}"
    return Finding(what="cpu", value=value)


def on_memory() -> Finding:
    from ..governor.meter import Meter
    from ..sandbox.probe import Finding
    from ..view.figures import size

    limit = Meter(Path.cwd()).limit()
    return Finding(what="memory", value=f"{size(limit.bytes)}, by {limit.source}")


def on_disk() -> Finding:
    import shutil

    from ..sandbox.probe import Finding
    from ..view.figures import size

    here = shutil.disk_usage(Path.cwd())
    note = "a run here will soon stop for want of space. hint: give `--out` a directory with more"
    value = f"{size(here.free)} free of {size(here.total)} here"
    return Finding(what="disk", value=value, note=note if here.free < LITTLE_DISK else "")


def on_files() -> Finding:
    import resource

    from ..sandbox.probe import Finding

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    note = (
        f"attempts at once are limited by it. hint: `ulimit -n {FEW_FILES}`" if 0 <= soft < FEW_FILES else ""
    )
    return Finding(what="open files", value=f"{soft}, at most {hard}", note=note)


def page(found: list[Finding]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.figures import line

    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True, style="bold")
    rows.add_column()
    for finding in found:
        rows.add_row(finding.what, Text(line(finding.value), "yellow" if finding.note else "green"))
        if finding.note:
            rows.add_row("", Text(line(finding.note, 1000), "dim"))
    notes = sum(1 for finding in found if finding.note)
    verdict = (
        "everything is there"
        if not notes
        else f"{notes} of {len(found)} could be better; all of it is optional"
    )
    return Group(rows, Text(f"\n{verdict}"))
