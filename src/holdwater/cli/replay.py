"""`holdwater replay`: runs a recorded run again with its recorded replies, without a model."""

from __future__ import annotations

from pathlib import Path

from .console import CommandConsole
from .flags import Flag, Patterns, find_run


def replay(
    run: str | None = None,
    /,
    *,
    out: Path | None = None,
    only: Patterns = None,
    trust: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Run the attempts of a run again, with its recorded replies and without a model.

    The replay gets a new run directory. If an agent makes a model call that is not recorded, its attempt ends
    with the verdict `model` (`unrecorded`). For example: `holdwater replay runs/mine --only 'add-*'`.

    Parameters
    ----------
    run
        The recorded run's directory; `latest` (the default) is the newest in `runs/`.
    out
        The new run's directory (default: `runs/<time>-<suite>-replay`).
    only
        Only instances whose id matches this pattern; may be repeated.
    trust
        Import the code that a run of another user names.
    json
        Print the new run's summary as one JSON document on stdout.
    quiet
        Show no live display and no closing page.
    """
    CommandConsole.claim()
    from .. import api
    from .foreground_run import run_in_foreground

    path = find_run(run)
    return run_in_foreground(
        lambda around: api.areplay(path, out=out, only=tuple(only or ()), around=around, trust=trust),
        json=json,
        quiet=quiet,
    )
