"""`holdwater view`: shows runs in a browser."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from .console import CommandConsole
from .flags import Flag


def view(
    *directories: str,
    listen: str = "127.0.0.1:0",
    allow_host: Annotated[list[str] | None, Parameter(negative=())] = None,
    json: Flag = False,
) -> int:
    """Show runs in a browser: outcomes, instances, transcripts, memory and disk over time.

    The view only reads. It shows running, finished, killed and copied runs, and ends with Ctrl-C.

    For example: `holdwater view`, or `holdwater view runs/mine --listen 127.0.0.1:8401`.

    Parameters
    ----------
    directories
        Directories of runs, or directories with runs in them (default: `runs/`).
    listen
        The address to listen on; port 0 takes a free one.
    allow_host
        Another host name under which browsers reach the view; may be repeated.
    json
        Print `{"url": ..., "token": ...}` as one line on stdout as soon as the view serves.
    """
    from ..api.viewing import serve_view

    console = CommandConsole()

    def announce(address: str, token: str) -> None:
        if json:
            console.write_line({"url": address, "token": token})
        else:
            console.say(f"{address}/?token={token}")
            console.flush()

    try:
        serve_view(directories, announce, listen=listen, hosts=allow_host or ())
    except KeyboardInterrupt:
        pass  # the user closes the view
    return 0
