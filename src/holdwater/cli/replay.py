"""`holdwater replay`: run a run again with its recorded replies, without a model."""

from __future__ import annotations

from pathlib import Path

from .console import Console
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
    """Run what a run has tried once more, with its recorded replies and without a model.

    A new run directory is made. Where an agent asks what is not in the record, its attempt ends with the
    verdict `model` (`unrecorded`). For example: `holdwater replay runs/mine --only 'add-*'`.

    Parameters
    ----------
    run
        The recorded run's directory; `latest`, or nothing, is the newest in `runs/`.
    out
        The new run's directory; `runs/<time>-<suite>-replay` otherwise.
    only
        Only instances whose id matches this pattern; may be repeated.
    trust
        Import the code that another user's run names.
    json
        Print the new run's summary as one JSON document on stdout.
    quiet
        No display and no closing page.
    """
    Console.claim()
    from .. import api
    from .conduct import conducted

    path = find_run(run)
    return conducted(
        lambda around: api.areplay(path, out=out, only=tuple(only or ()), around=around, trust=trust),
        json=json,
        quiet=quiet,
    )
