"""`holdwater suites`: lists the suites that have a name. Any other suite is given by its path."""

from __future__ import annotations

from .console import CommandConsole
from .flags import Flag
from .listing import render_listing


def suites(*, json: Flag = False) -> int:
    """List the known suites.

    Other suites are given by path: `path.py:name`, `module:name` or `file.jsonl`. Installed packages add
    names with the entry point group `holdwater.suites`.

    For example: `holdwater suites --json`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..suite import loader

    known = loader.list_suites()
    if json:
        CommandConsole().write_json({"suites": known})
    else:
        CommandConsole().write_page(render_listing(known, f"also: {loader.OTHER_SPECS}"))
    return 0
