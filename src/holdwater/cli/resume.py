"""`holdwater resume`: go on with a run that was stopped, interrupted or killed."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from .console import Console
from .flags import Flag, find_run


def _instead(what: str) -> Parameter:
    return Parameter(help=f"The run's budget of {what}, in place of its own", show_default=False)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Budgets:
    """A run that its budget stopped goes on with a larger one."""

    run_requests: Annotated[int | None, _instead("model calls")] = None
    run_tokens: Annotated[int | None, _instead("tokens")] = None
    run_cost: Annotated[float | None, _instead("cost, in US dollars")] = None
    run_time: Annotated[float | None, _instead("seconds")] = None
    disk: Annotated[str | None, _instead("disk, such as `80GiB`")] = None


def resume(
    run: str | None = None,
    /,
    *,
    budgets: Budgets = Budgets(),  # noqa: B008 - frozen
    accept_changes: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
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
    given = dataclasses.asdict(budgets)
    return conducted(
        lambda around: api.aresume(path, accept_changes=accept_changes, around=around, **given),
        json=json,
        quiet=quiet,
    )
