"""`holdwater regrade`: grades a run's work again without running the agent."""

from __future__ import annotations

from .console import CommandConsole
from .flags import Flag, Patterns, find_run


def regrade(
    run: str | None = None,
    /,
    *,
    only: Patterns = None,
    trust: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Grade a run's work again without running the agent.

    The work of each chosen attempt is put into a new sandbox and graded with the suite's current grading.
    All outcomes change together, when all of them are graded; `holdwater resume` continues an interrupted
    regrade. Work that cannot be restored completely keeps its grade, and its row says `not regraded`.
    For example: `holdwater regrade runs/mine --only 'add-*'`.

    Parameters
    ----------
    run
        The run's directory; `latest` (the default) is the newest in `runs/`.
    only
        Only instances whose id matches this pattern; may be repeated.
    trust
        Import the code that a run of another user names.
    json
        Print the run's summary as one JSON document on stdout.
    quiet
        Show no live display and no closing page.
    """
    CommandConsole.claim()
    from .. import api
    from .foreground_run import run_in_foreground

    path = find_run(run)
    return run_in_foreground(
        lambda around: api.aregrade(path, only=tuple(only or ()), around=around, trust=trust),
        json=json,
        quiet=quiet,
    )
