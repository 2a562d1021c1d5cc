"""`holdwater agents`: who can act by name. Any other agent is named by its place."""

from __future__ import annotations

from .console import Console
from .flags import Flag
from .listing import table


def agents(*, json: Flag = False) -> int:
    """List the agents that are known here.

    Others are named by their place, `path.py:name` or `module:name`, or are programs. Installed packages add
    names by the entry point group `holdwater.agents`.

    For example: `holdwater agents --json`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..agent import load

    known = load.known()
    if json:
        Console().data({"agents": known})
    else:
        Console().page(table(known, f"also: {load.OTHERS}"))
    return 0
