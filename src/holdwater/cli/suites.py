"""`holdwater suites`: what can be run by name. Any other suite is named by its file."""

from __future__ import annotations

from .console import Console
from .flags import Flag
from .listing import table


def suites(*, json: Flag = False) -> int:
    """List the suites that are known here.

    Others are named by their place: `path.py:name`, `module:name` or `file.jsonl`. Installed packages add
    names by the entry point group `holdwater.suites`.

    For example: `holdwater suites --json`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..suite import load

    known = load.known()
    if json:
        Console().data({"suites": known})
    else:
        Console().page(table(known, f"also: {load.OTHERS}"))
    return 0
