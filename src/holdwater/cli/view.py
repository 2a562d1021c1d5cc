"""`holdwater view`: shows runs in a browser, or writes their pages to files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..core.errors import BadInput
from .console import CommandConsole, make_progress_printer
from .flags import Flag


def _option(text: str) -> Parameter:
    return Parameter(help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ExportFlags:
    """Where the pages are written, and which."""

    export: Annotated[
        Path | None, _option("Write the pages to this new directory instead of serving them")
    ] = None
    instance: Annotated[
        str | None, _option("With `--export FILE`: write this instance of one run as one HTML file")
    ] = None
    only: Annotated[
        list[str] | None,
        _option("With `--export`: only pages of instances whose id matches this pattern; may be repeated"),
    ] = None
    failed: Annotated[bool, _option("With `--export`: only pages of samples that did not pass")] = False
    force: Annotated[bool, _option("With `--export`: replace an earlier export")] = False

    def list_given(self) -> list[str]:
        """Return the flags that were given in addition to `--export`."""
        names = [field.name for field in dataclasses.fields(self) if getattr(self, field.name)]
        return [f"--{name}" for name in names if name != "export"]


def view(
    *directories: str,
    listen: str = "127.0.0.1:0",
    allow_host: Annotated[list[str] | None, Parameter(negative=())] = None,
    read_only: Flag = False,
    files: ExportFlags = ExportFlags(),  # noqa: B008 - frozen
    json: Flag = False,
) -> int:
    """Show runs in a browser: outcomes, instances, transcripts, memory and disk over time.

    The view only reads; its buttons send requests to running runs of the same user. It shows runs in any
    state, and ends with Ctrl-C. With `--export` it writes its pages as files that need no server.

    For example: `holdwater view`, `holdwater view runs/mine --listen 127.0.0.1:8401`, or
    `holdwater view runs/mine --export pages/`.

    Parameters
    ----------
    directories
        Directories of runs, or directories with runs in them (default: `runs/`).
    listen
        The address to listen on; port 0 takes a free one.
    allow_host
        Another host name under which browsers reach the view; may be repeated.
    read_only
        Show no buttons that control a running run, and refuse their requests.
    json
        Print `{"url": ..., "token": ...}` as one line on stdout as soon as the view serves; with `--export`
        print what was written.
    """
    from ..api.viewing import serve_view

    if files.export is not None:
        return write_export(directories, files.export, files, json=json)
    if files.list_given():
        raise BadInput(f"`{files.list_given()[0]}` needs `--export`", "for example `--export pages/`")
    console = CommandConsole()

    def announce(address: str, token: str) -> None:
        if json:
            console.write_line({"url": address, "token": token})
        else:
            console.say(f"{address}/?token={token}")
            console.flush()

    try:
        serve_view(directories, announce, listen=listen, hosts=allow_host or (), read_only=read_only)
    except KeyboardInterrupt:
        pass  # the user closes the view
    return 0


def write_export(directories: Sequence[str], out: Path, files: ExportFlags, *, json: bool) -> int:
    """Write the pages to a directory or a file; print what was written."""
    from ..api.viewing import ExportSelection, export_instance_view, export_view

    console = CommandConsole()
    tell = make_progress_printer(console)
    if files.instance is None:
        wanted = ExportSelection(only=tuple(files.only or ()), failed=files.failed)
        report = export_view(directories, out, tell, wanted=wanted, force=files.force)
    elif files.list_given() == ["--instance"]:
        report = export_instance_view(directories, files.instance, out, tell)
    else:
        raise BadInput(f"`--instance` writes one file: leave out `{files.list_given()[1]}`")
    for problem in report.problems:
        console.say(f"note: {problem}")
    if json:
        console.write_line(report)
    else:
        size = f"{report.bytes / 2**20:,.1f} MiB"
        console.say(f"{report.pages:,} pages and {report.files:,} files, {size}: {report.path}")
    console.flush()
    return 0
