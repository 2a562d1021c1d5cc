"""`holdwater regrade`: grade a run's work again without running the agent."""

from __future__ import annotations

from .console import Console
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

    What each chosen attempt left is put into a fresh sandbox and graded as the suite grades now. Outcomes
    change together, when all of it is graded; `holdwater resume` goes on with a regrade that was
    interrupted. What cannot be put back whole stays as it is, and its row says `not regraded`.
    For example: `holdwater regrade runs/mine --only 'add-*'`.

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    only
        Only instances whose id matches this pattern; may be repeated.
    trust
        Import the code that another user's run names.
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
        lambda around: api.aregrade(path, only=tuple(only or ()), around=around, trust=trust),
        json=json,
        quiet=quiet,
    )
