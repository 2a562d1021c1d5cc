"""`holdwater version`: which one this is."""

from __future__ import annotations

from ..version import __version__
from .console import Console
from .flags import Flag


def version(*, json: Flag = False) -> int:
    """Print the version of holdwater.

    For example: `holdwater version --json`

    Parameters
    ----------
    json
        Print one JSON document, with the version of Python too.
    """
    import platform

    if json:
        Console().data({"holdwater": __version__, "python": platform.python_version()})
    else:
        Console().page(__version__)
    return 0
