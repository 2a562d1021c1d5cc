"""`holdwater version`: prints the installed version."""

from __future__ import annotations

from ..version import __version__
from .console import CommandConsole
from .flags import Flag


def version(*, json: Flag = False) -> int:
    """Print the version of holdwater.

    For example: `holdwater version --json`

    Parameters
    ----------
    json
        Print one JSON document, which also has the version of Python.
    """
    import platform

    if json:
        CommandConsole().write_json({"holdwater": __version__, "python": platform.python_version()})
    else:
        CommandConsole().write_page(__version__)
    return 0
