"""`holdwater resume`: go on with a run that was stopped, interrupted or killed."""

from __future__ import annotations

from .console import Console
from .flags import Flag, find_run


def resume(
    run: str | None = None, /, *, accept_changes: Flag = False, json: Flag = False, quiet: Flag = False
) -> int:
    """Go on with a run that was stopped or killed.

    What is settled stays settled; an attempt that had finished is not run again.
    For example: `holdwater resume runs/mine`.

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    accept_changes
        Resume although instances of the suite changed or vanished.
    json
        Print the run's summary as one JSON document on stdout.
    quiet
        No display and no closing page.
    """
    Console.claim()
    from .. import api
    from .conduct import conducted

    path = find_run(run)
    return conducted(
        lambda around: api.aresume(path, accept_changes=accept_changes, around=around), json=json, quiet=quiet
    )
