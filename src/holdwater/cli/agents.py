"""`holdwater agents`: lists the agents that have a name. Any other agent is given by its path."""

from __future__ import annotations

from .console import CommandConsole
from .flags import Flag
from .listing import render_listing


def agents(*, json: Flag = False) -> int:
    """List the known agents.

    Other agents are given by path, `path.py:name` or `module:name`, or as a program. Installed packages add
    names with the entry point group `holdwater.agents`.

    For example: `holdwater agents --json`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from ..agent import loader

    known = loader.list_agents()
    if json:
        CommandConsole().write_json({"agents": known})
    else:
        CommandConsole().write_page(render_listing(known, f"also: {loader.OTHER_SPECS}"))
    return 0
